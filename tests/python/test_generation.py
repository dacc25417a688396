"""Generation token by token in the session: the same tokens as feeding each and drawing from its logits.

Everything runs on the CPU, where a step is computed when it is asked for, and on a GPU, where steps run ahead
of what was read and draw where the model is.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dyno
import numpy as np
import pytest
from dyno import _core
from dyno._generate import Sampling, uniforms
from dyno.diagnostics import Diagnostics
from dyno.errors import DynoError, PlanError
from dyno.testing import tiny_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

GPUS = [d for d in _core.devices() if d["kind"] == "cuda" and not _core.device_problem(d)]
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not GPUS, reason=f"no GPU: {_core.no_cuda_reason()}")]
TINY = sorted((Path(__file__).resolve().parents[1] / "data" / "tiny").glob("*-tiny.gguf"))
PROMPT = [1, 7, 3, 11, 5]
CTX = 128
WARM = {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.02}

on_every_device = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda:0", marks=ON_GPU)], ids=["cpu", "cuda"]
)
by_model = pytest.mark.parametrize("model", TINY, ids=lambda path: path.stem)


def opened(model: Path, device: str, **settings: Any) -> dyno.Engine:
    return dyno.Engine(model, device=device, profile=None, **{"ctx": CTX, "ubatch": 64, **settings})


@pytest.fixture
def engine(request: pytest.FixtureRequest, device: str) -> Iterator[dyno.Engine]:
    with opened(TINY[0], device, sequences=3) as engine:
        yield engine


def rows(engine: dyno.Engine, token: int, slot: int = 0) -> NDArray[np.float32]:
    logits: NDArray[np.float32] = engine.logits([token], reset=False, rows="last", slot=slot)[-1]
    return logits


def one_by_one(
    engine: dyno.Engine, token: int, uniform: NDArray[np.float32], slot: int = 0, **settings: float
) -> list[int]:
    """Tokens drawn on the CPU from logits that came to the host."""
    chosen = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **settings}
    out = []
    for u in uniform:
        token = int(_core.sample(rows(engine, token, slot), *chosen.values(), float(u)))
        out.append(token)
    return out


def start(engine: dyno.Engine, slot: int = 0, prompt: list[int] = PROMPT) -> int:
    """Reads a prompt; its last token is the first to be fed."""
    engine.logits(prompt[:-1], rows="none", slot=slot)
    return prompt[-1]


def generation(engine: dyno.Engine, token: int, slot: int = 0, **settings: float) -> Any:
    return engine._session.generation(token, slot=slot, **settings)


def draws(count: int, seed: int = 0) -> NDArray[np.float32]:
    return uniforms(np.random.default_rng(seed), count)


@on_every_device
@by_model
def test_the_same_tokens_as_one_by_one(model: Path, device: str) -> None:
    with opened(model, device) as engine:
        for settings in ({}, WARM, {"temperature": 1.5}, {"temperature": 0.7, "top_p": 0.8}):
            u = draws(24)
            want = one_by_one(engine, start(engine), u, **settings)
            found = generation(engine, start(engine), **settings)
            found.queue(u)
            assert [found.next() for _ in u] == want, settings
            assert engine.position() == len(PROMPT) - 1 + len(u)
            assert (found.queued, found.token) == (0, want[-1])


@on_every_device
def test_a_large_vocabulary(tmp_path: Path, device: str) -> None:
    """What a draw leaves in the workspace is larger there than that of any product of so small a model."""
    model = tiny_model(tmp_path / "m.gguf", n_vocab=151_936, n_layers=1, n_ctx=CTX, vocabulary=False)
    with opened(model, device) as engine:
        for settings in ({}, WARM, {"temperature": 1.5}, {"temperature": 1.0, "top_p": 0.95, "min_p": 0.01}):
            u = draws(6)
            want = one_by_one(engine, start(engine), u, **settings)
            found = generation(engine, start(engine), **settings)
            found.queue(u)
            assert [found.next() for _ in u] == want, settings


@pytest.mark.gpu
@pytest.mark.skipif(not GPUS, reason=f"no GPU: {_core.no_cuda_reason()}")
@by_model
@pytest.mark.parametrize(
    "settings",
    [{"cuda_graphs": False}, {"fusion": False, "graph_concurrency": True}, {"mla_mode": "expanded"}],
    ids=["without graphs", "general list", "expanded"],
)
def test_the_same_tokens_whatever_is_launched(model: Path, settings: dict[str, Any]) -> None:
    with opened(model, "cuda:0") as engine:
        if not set(settings) <= set(engine.settings):
            pytest.skip("not a setting of this model")
        engine.set(**settings)
        u = draws(24)
        want = one_by_one(engine, start(engine), u, **WARM)
        found = generation(engine, start(engine), **WARM)
        found.queue(u)
        assert [found.next() for _ in u] == want


@on_every_device
@by_model
@pytest.mark.parametrize("length", [2, 63, 64, 65, 66, 100])
def test_the_first_draw_is_from_the_last_row_of_a_prompt(model: Path, device: str, length: int) -> None:
    """Prompts of several u-batches, the last of them down to a single token."""
    with opened(model, device, sequences=2) as engine:
        prompt = np.random.default_rng(length).integers(
            0, engine.model["n_vocab"], size=length, dtype=np.int32
        )
        u = draws(12)
        for settings in ({}, WARM, {"temperature": 1.5}):
            chosen = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **settings}
            last = engine.logits(prompt, rows="last")[-1]
            first = int(_core.sample(last, *chosen.values(), float(u[0])))
            want = [first, *one_by_one(engine, first, u[1:], **settings)]
            engine.logits([9, 3], slot=1)
            engine.reset(0)
            found = engine._session.generation(prompt, **settings)
            found.queue(u)
            assert found.token == prompt[-1]
            assert found.next() == want[0]
            assert (engine.position(), engine.position(1), found.token) == (length, 2, want[0])
            assert [found.next() for _ in u[1:]] == want[1:], settings
            assert engine.position() == length + len(u) - 1


@on_every_device
def test_a_prompt_behind_what_a_sequence_holds(engine: dyno.Engine) -> None:
    more = np.array([2, 9, 4, 8], np.int32)
    u = draws(20)
    start(engine)
    first = int(engine.logits(more, reset=False, rows="last")[-1].argmax())
    want = [first, *one_by_one(engine, first, u[1:])]
    start(engine)
    found = engine._session.generation(more)
    # A token that is given is fed behind the prompt, whatever was drawn there.
    found.queue(u)
    assert [found.next() for _ in u] == want
    start(engine)
    given = engine._session.generation(more)
    given.queue(np.zeros(2, np.float32), np.array([7, -1], np.int32))
    assert (given.next(), given.token) == (first, 7)
    engine.logits([3, 1], slot=1)  # ends what ran ahead
    assert engine.position() == len(PROMPT) - 1 + len(more)
    second = given.next()
    start(engine)
    engine.logits([*more, 7], reset=False, rows="none")
    engine.rewind(engine.position() - 1)
    assert second == int(rows(engine, 7).argmax())


@on_every_device
def test_a_prompt_to_the_end_of_the_context(engine: dyno.Engine) -> None:
    prompt = np.random.default_rng(1).integers(0, engine.model["n_vocab"], size=CTX + 1, dtype=np.int32)
    want = int(engine.logits(prompt[:-1], rows="last")[-1].argmax())
    engine.reset()
    whole = engine._session.generation(prompt[:-1])
    whole.queue(np.zeros(3, np.float32))
    assert whole.next() == want
    assert engine.position() == CTX
    with pytest.raises(PlanError, match=f"holds {CTX}"):
        whole.next()
    engine.logits(PROMPT, rows="none")
    long = engine._session.generation(prompt)
    long.queue(np.zeros(1, np.float32))
    with pytest.raises(PlanError, match=f"would reach {len(PROMPT) + CTX + 1}"):
        long.next()
    assert (engine.position(), long.queued) == (len(PROMPT), 1)


@pytest.mark.gpu
@pytest.mark.skipif(not GPUS, reason=f"no GPU: {_core.no_cuda_reason()}")
def test_a_profile_chooses_how_tokens_are_drawn() -> None:
    with opened(TINY[0], "cuda:0") as engine:
        (op,) = [op for op in engine.describe_ops(1) if op["family"] == "sample"]
        family, desc = _core.ops.parse_key(op["key"], op["rows"])
        u = draws(24)
        want = one_by_one(engine, start(engine), u, **WARM)
        device = {key: value for key, value in GPUS[0].items() if key != "ordinal"}
        candidates = _core.ops.candidates(family, desc, device)
        assert op["config"] in candidates
        for config in candidates:
            engine._session.set_kernels([(op["key"], "m1", dict(config), "test")])
            assert [row["status"] for row in engine.kernel_report()] == ["applied"]
            (chosen,) = [op for op in engine.describe_ops(1) if op["family"] == "sample"]
            assert (chosen["config"], chosen["reason"]) == (config, "profile: test")
            found = generation(engine, start(engine), **WARM)
            found.queue(u)
            assert [found.next() for _ in u] == want, config


@on_every_device
@pytest.mark.parametrize("sizes", [(1,) * 70, (3, 1, 64, 2, 30), (65, 35), (100,)])
def test_draws_come_in_any_portions(engine: dyno.Engine, sizes: tuple[int, ...]) -> None:
    u = draws(sum(sizes))
    want = one_by_one(engine, start(engine), u, **WARM)
    found = generation(engine, start(engine), **WARM)
    got = []
    for block in np.split(u, np.cumsum(sizes)[:-1]):
        found.queue(block)
        got += [found.next() for _ in block]
    assert got == want
    # Queued before the last ones are made, as Engine.generate does.
    found = generation(engine, start(engine), **WARM)
    blocks = iter(np.split(u, np.cumsum(sizes)[:-1]))
    got = []
    for _ in u:
        while found.queued < 5 and (block := next(blocks, None)) is not None:
            found.queue(block)
        got.append(found.next())
    assert got == want


@on_every_device
def test_forced_tokens_are_fed_and_draws_returned(engine: dyno.Engine) -> None:
    tokens = np.random.default_rng(4).integers(0, engine.model["n_vocab"], size=90, dtype=np.int32)
    start(engine)
    want = [int(rows(engine, int(token)).argmax()) for token in tokens]
    after = rows(engine, 9)
    start(engine)
    assert engine.diagnostics.greedy_after(tokens).tolist() == want
    assert engine.position() == len(PROMPT) - 1 + len(tokens)
    assert np.array_equal(rows(engine, 9), after)
    # Some forced, some not: what was drawn is fed where nothing is forced.
    found = generation(engine, start(engine))
    found.queue(np.zeros(3, np.float32), np.array([5, -1, 8], np.int32))
    fed = [PROMPT[-1], 5]
    assert found.next() == want_after(engine, fed[:1])
    start(engine)
    first = [found.next() for _ in range(2)]
    assert len(first) == 2
    assert found.token == 8


def want_after(engine: dyno.Engine, fed: list[int]) -> int:
    """The most probable token behind the prompt and `fed`; the sequence is as before."""
    position = engine.position()
    best = int(engine.logits([*PROMPT[:-1], *fed], slot=2, rows="last")[-1].argmax())
    assert engine.position() == position
    return best


@on_every_device
@pytest.mark.parametrize("taken", [1, 2, 7])
def test_what_ran_ahead_leaves_no_trace(engine: dyno.Engine, taken: int) -> None:
    u = draws(40)
    want = one_by_one(engine, start(engine), u[:taken])
    after = [rows(engine, token) for token in (4, 2, 9)]
    found = generation(engine, start(engine))
    found.queue(u)
    assert [found.next() for _ in range(taken)] == want
    assert engine.position() == len(PROMPT) - 1 + taken
    for token, logits in zip((4, 2, 9), after, strict=True):
        assert np.array_equal(rows(engine, token), logits)


@on_every_device
def test_other_sequences_are_untouched(engine: dyno.Engine) -> None:
    other = [2, 4, 6, 8]
    start(engine, 0)
    start(engine, 2, other)
    want = [rows(engine, token, 2) for token in (8, 3)]
    first = [rows(engine, token, 0) for token in (5, 3)]
    start(engine, 0)
    start(engine, 2, other)
    found = generation(engine, start(engine, 1), slot=1)
    found.queue(draws(50))
    for _ in range(30):
        found.next()
    assert [engine.position(slot) for slot in range(3)] == [len(PROMPT) - 1, len(PROMPT) - 1 + 30, 3]
    for token, logits in zip((8, 3), want, strict=True):
        assert np.array_equal(rows(engine, token, 2), logits)
    for token, logits in zip((5, 3), first, strict=True):
        assert np.array_equal(rows(engine, token, 0), logits)


@on_every_device
def test_generations_take_turns_and_other_calls_come_between(engine: dyno.Engine) -> None:
    prompts = {0: PROMPT, 1: [2, 4, 6, 8]}
    u = {slot: draws(30, slot) for slot in prompts}
    want = {s: one_by_one(engine, start(engine, s, p), u[s], slot=s, **WARM) for s, p in prompts.items()}
    running = {s: generation(engine, start(engine, s, p), slot=s, **WARM) for s, p in prompts.items()}
    for slot, one in running.items():
        one.queue(u[slot])
    got: dict[int, list[int]] = {slot: [] for slot in prompts}
    for step in range(30):
        for slot, one in running.items():
            got[slot].append(one.next())
            if step % 3 == 0:
                engine.logits([3, 1, 4], slot=2)
            if step == 10:
                engine.set(ubatch=32)
            if step == 20 and "cuda_graphs" in engine.settings:
                engine.set(cuda_graphs=False)
    assert got == want


@on_every_device
def test_rewinding_and_resetting_between_tokens(engine: dyno.Engine) -> None:
    """The generation goes on behind what the sequence then holds, with the token it drew last."""
    found = generation(engine, start(engine))
    found.queue(draws(60))
    tokens = [found.next() for _ in range(6)]
    engine.rewind(len(PROMPT))
    again = found.next()
    assert engine.position() == len(PROMPT) + 1
    engine.logits(PROMPT, rows="none")
    assert again == int(rows(engine, tokens[-1]).argmax())
    engine.reset()
    last = found.next()
    assert engine.position() == 1
    assert last == int(engine.logits([again], rows="last", slot=1)[-1].argmax())
    engine.set_context(ctx=64, sequences=1)
    token = found.next()
    assert engine.position() == 1
    assert token == int(engine.logits([last], rows="last")[-1].argmax())


@on_every_device
def test_a_full_context_ends_it(engine: dyno.Engine) -> None:
    room = CTX - len(PROMPT) + 1
    u = draws(room + 10)
    want = one_by_one(engine, start(engine), u[:room])
    found = generation(engine, start(engine))
    found.queue(u)
    assert [found.next() for _ in range(room)] == want
    for _ in range(2):
        with pytest.raises(PlanError, match=f"holds {CTX}"):
            found.next()
    assert engine.position() == CTX
    assert found.queued == 10
    start(engine)
    assert isinstance(found.next(), int)


@on_every_device
def test_what_cannot_be(engine: dyno.Engine) -> None:
    n_vocab = engine.model["n_vocab"]
    for wrong, message in (
        ({"token": n_vocab}, f"token {n_vocab}"),
        ({"token": -1}, "token -1"),
        ({"slot": 3}, "sequence 3 does not exist"),
        ({"temperature": -1.0}, "temperature is -1"),
        ({"top_k": -2}, "top_k -2"),
        ({"top_p": 1.5}, "top_p 1.5"),
        ({"min_p": 2.0}, "min_p 2"),
        ({"token": np.array([], np.int32)}, "needs at least one token to feed"),
        ({"token": np.array([0, 1, n_vocab], np.int32)}, f"token {n_vocab} at index 2"),
    ):
        with pytest.raises(PlanError, match=message):
            engine._session.generation(wrong.pop("token", 1), **wrong)
    found = generation(engine, start(engine))
    with pytest.raises(PlanError, match="no draw is queued"):
        found.next()
    zeros = np.zeros(2, np.float32)
    for uniform, forced, message in (
        (np.array([0.5, 1.0], np.float32), None, "uniform 1 "),
        (zeros, np.array([0, n_vocab], np.int32), f"to feed is {n_vocab}"),
        (zeros, np.array([-2, 0], np.int32), "to feed is -2"),
        (zeros, np.array([0], np.int32), "1 tokens in forced for 2 draws"),
    ):
        with pytest.raises(PlanError, match=message):
            found.queue(uniform, forced)
    assert found.queued == 0
    found.queue(zeros)
    found.next()
    engine.close()
    with pytest.raises(DynoError, match="closed"):
        found.next()


@on_every_device
def test_text_is_the_same_as_from_logits_on_the_host(
    trained_model: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with dyno.Engine(trained_model, device=device, profile=None, ctx=160) as engine:
        prompt = "def read_file(path):"
        asked: tuple[dict[str, Any], ...] = (
            {"max_tokens": 40},
            {"max_tokens": 40, "temperature": 0.8, "seed": 5},
            {"max_tokens": 90, "temperature": 1.2, "seed": 6, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
            {"temperature": 0.5, "seed": 7, "stop": ["\n\n"]},
            {"max_tokens": 1},
            {"max_tokens": 0},
            {},  # to the end of the text or of the context
        )
        with monkeypatch.context() as patch:
            patch.setattr(Diagnostics, "draws_on_device", True)
            patch.delattr(dyno.Engine, "_decode")  # no logits are asked for
            found = [("".join(engine.generate(prompt, **a)), engine.position()) for a in asked]
        monkeypatch.setattr(Diagnostics, "draws_on_device", False)
        want = [("".join(engine.generate(prompt, **a)), engine.position()) for a in asked]
        assert found == want


@on_every_device
def test_a_text_that_nobody_reads_to_its_end(trained_model: Path, device: str) -> None:
    with dyno.Engine(trained_model, device=device, profile=None, ctx=160) as engine:
        prompt = engine.tokenize("def read_file(path):")
        whole = "".join(engine.generate(prompt, max_tokens=30))
        text = engine.generate(prompt, max_tokens=30)
        begun = [next(text) for _ in range(4)]
        assert whole.startswith("".join(begun))
        text.close()
        held = engine.position()
        after = engine.logits([5], reset=False, rows="last")
        assert engine.position() == held + 1
        for piece in engine.generate(prompt, max_tokens=30):
            begun.append(piece)
            if engine.position() == held:
                break
        assert np.array_equal(engine.logits([5], reset=False, rows="last"), after)
        suspended = engine.generate(prompt, max_tokens=30)
        next(suspended)
        with pytest.raises(PlanError, match="no slot is free"):  # it owns the only one
            next(engine.generate(prompt, max_tokens=30))
        engine.close()
        with pytest.raises(PlanError, match="closed"):
            next(suspended)
    with pytest.raises(PlanError, match="temperature"):
        Sampling(temperature=-1)


def test_closing_under_other_threads_is_an_error_for_them() -> None:
    engine = opened(TINY[0], "cpu")
    session = engine._session
    generation = session.generation(3, temperature=0.8, top_k=5)
    generation.queue(np.full(CTX - 2, 0.5, np.float32))
    said: list[str] = []

    def until_closed(look: Callable[[], object]) -> None:
        while True:
            try:
                look()
            except DynoError as error:
                if "no draw is queued" in str(error):  # all tokens were drawn before the engine closed
                    continue
                said.append(str(error))
                return

    looks = (generation.next, lambda: session.position(0), lambda: generation.token)
    threads = [threading.Thread(target=until_closed, args=(look,)) for look in looks]
    for thread in threads:
        thread.start()
    session.close()
    for thread in threads:
        thread.join(300)
    assert not any(thread.is_alive() for thread in threads)
    assert [text for text in said if "the session is closed" in text] == said
    assert len(said) == len(looks)


@pytest.mark.gpu
@pytest.mark.skipif(not GPUS, reason=f"no GPU: {_core.no_cuda_reason()}")
def test_the_draw_is_among_the_times_of_a_token() -> None:
    with opened(TINY[0], "cuda:0") as engine:
        u = draws(12)
        want = one_by_one(engine, start(engine), u, **WARM)
        found = generation(engine, start(engine), **WARM)
        found.queue(u)
        got = [found.next() for _ in u[:6]]
        times = engine.diagnostics.time_ops([3], slot=0)
        assert {row["key"]: row["count"] for row in times} == {
            op["key"]: op["count"] for op in engine.describe_ops(1)
        }
        assert all(row["seconds"] > 0 for row in times)
        assert "sample" not in {row["family"] for row in engine.diagnostics.time_ops([1, 2, 3])}
        engine.rewind(len(PROMPT) - 1 + 6)
        assert got + [found.next() for _ in u[6:]] == want


@pytest.mark.gpu
@pytest.mark.skipif(not GPUS, reason=f"no GPU: {_core.no_cuda_reason()}")
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_capture_that_fails_is_tried_again(failing: int, caplog: pytest.LogCaptureFixture) -> None:
    """At the second use, then whenever there were as many more; bits do not change, the reason is told."""
    if _core.build_info()["switches"].get("GGML_CUDA_USE_GRAPHS") != "ON":
        pytest.skip("a build without CUDA graphs")
    due = 2 << failing  # the use that succeeds
    u = draws(due + 4)
    with opened(TINY[0], "cuda:0", cuda_graphs=True) as engine:
        assert engine.diagnostics.captures() == []
        want = one_by_one(engine, start(engine), u, **WARM)
        engine.set(ubatch=32)  # forgets graphs
        engine._session.fail_next_captures(failing)
        found = generation(engine, start(engine), **WARM)
        got = []
        seen: dict[int, tuple[bool, int]] = {}
        for i, _ in enumerate(u):
            found.queue(u[i : i + 1])  # no step runs ahead, so that uses can be counted
            got.append(found.next())
            (row,) = [row for row in engine.diagnostics.captures() if row["work"] == "draw"]
            seen[i + 1] = (row["captured"], row["failures"])
            assert (row["reason"] != "") == (row["failures"] > 0 and not row["captured"])
            if row["reason"]:
                assert "failed on purpose" in row["reason"]
                assert row["next_attempt"] == 2 << row["failures"]
        assert got == want
        assert seen[due - 1] == (False, failing)
        assert all(seen[use] == (True, failing) for use in range(due, len(u) + 1))
        assert engine._session.capture_failures == failing
        # Decoding by itself has the same policy, and the engine says what happened.
        engine.set(ubatch=64)
        engine._session.fail_next_captures(failing)
        caplog.clear()
        assert one_by_one(engine, start(engine), u, **WARM) == want
        (row,) = [
            row for row in engine.diagnostics.captures() if (row["work"], row["tokens"]) == ("decode", 1)
        ]
        assert (row["captured"], row["failures"], row["uses"]) == (True, failing, due)
        told = [r.message for r in caplog.records if "without a CUDA graph" in r.message]
        assert len(told) == failing
        assert all("failed on purpose" in message for message in told)


def test_a_failed_capture_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Session:
        """The real one, with graphs that it can't have here."""

        capture_failures = 0
        rows: tuple[dict[str, Any], ...] = ()

        def __init__(self, session: Any) -> None:
            self._session = session

        def __getattr__(self, name: str) -> Any:
            return getattr(self._session, name)

        def captures(self) -> list[dict[str, Any]]:
            return list(self.rows)

    with opened(TINY[0], "cpu") as engine:
        assert engine.diagnostics.captures() == []
        assert engine._session.capture_failures == 0
        session = Session(engine._session)
        monkeypatch.setattr(engine, "_session", session)
        decode = {"work": "decode", "tokens": 3, "reason": "", "next_attempt": None}
        session.rows = ({"work": "draw", "tokens": 1, "reason": "no memory", "next_attempt": 4}, decode)
        engine.logits([1, 2])
        assert caplog.messages == []
        session.capture_failures = 1
        engine.diagnostics.greedy_after([1, 2])
        engine.logits([1, 2])
        said = "drawing runs without a CUDA graph, which is slower: no memory; the next attempt is at use 4"
        assert caplog.messages == [said]
        session.capture_failures = 2
        session.rows = ({**decode, "reason": "worse", "next_attempt": 8},)
        engine.logits([1, 2])
        assert caplog.messages[1:] == [
            "decoding 3 tokens at a time runs without a CUDA graph, which is slower: worse; "
            "the next attempt is at use 8"
        ]
