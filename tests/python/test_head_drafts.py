"""The model's own head as drafter: texts and distributions stay, and rejected drafts leave no trace."""

from __future__ import annotations

import logging
import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
from dyno import Engine, OutOfMemoryError, PlanError, Sampling, Scheduler, UnsupportedError
from dyno._draft_head import DraftHead
from dyno._drafts import Drafter, Judge
from dyno._requests import Handling
from dyno.scheduler import Speculation

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

EXACT: dict[str, Any] = {"sequences": 3, "ctx": 160, "threads": 1, "numerics": "exact"}
PROMPTS = [[7, 8, 9, 7, 8, 9, 7, 8], list(range(40, 75)), [3], [200, 100] * 12, [250, 3, 3, 3, 8]]
OUTPUTS = ("attn_output.weight", "ffn_down.weight", "ssm_out.weight")
ON = Handling(ignore_end=True)


class Always(Judge):
    """Never pauses, so that a test does not depend on speeds."""

    def wants(self, texts: int) -> bool:
        return True

    def stepped(self, *_: object, **__: object) -> None:
        return None


def agreeing(source: Path, target: Path, share: float) -> Path:
    """A copy of a model whose layers add less to the residual stream, so that its head agrees more often.

    With share 0 a token's logits depend on that token alone, in the model and in the head alike.
    """
    shutil.copyfile(source, target)
    target.chmod(0o600)
    reader = gguf.GGUFReader(target, "r+")
    for tensor in reader.tensors:
        if tensor.name.endswith(OUTPUTS):
            tensor.data[:] = (tensor.data * share).astype(tensor.data.dtype)
        elif tensor.name.endswith("eh_proj.weight"):  # the embedding's half comes first
            width = tensor.data.shape[0]
            tensor.data[:] = np.eye(width, 2 * width, dtype=tensor.data.dtype)
        elif tensor.name.endswith(("output_norm.weight", "shared_head_norm.weight", "enorm.weight")):
            tensor.data[:] = 1.0
    reader.data.flush()
    return target


def numbers(seed: int, count: int) -> list[int]:
    return [int(each) for each in np.random.default_rng(seed).integers(1, 250, count)]


@pytest.fixture(scope="module", params=[None, 0.0, 0.15], ids=["random", "agreeing", "often"])
def engine(
    request: pytest.FixtureRequest, tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory, device: str
) -> Iterator[Engine]:
    path = tiny_dir / "qwen35-tiny.gguf"  # it has recurrent state
    if request.param is not None:
        path = agreeing(path, tmp_path_factory.mktemp("model") / "m.gguf", request.param)
    with Engine(path, device=device, profile=None, **EXACT) as opened:
        yield opened


def drafting(engine: Engine, **options: Any) -> Scheduler:
    scheduler = Scheduler(engine, speculation=Speculation(**{"head": True, **options}))
    assert scheduler._drafting is not None
    scheduler._drafting.judge = Always()
    return scheduler


def texts(scheduler: Scheduler, options: dict[str, Any], count: int = 50) -> list[list[int]]:
    def one(prompt: list[int]) -> list[int]:
        return [each.token for each in scheduler.drawn(prompt, Sampling(**options), count, handling=ON)]

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(one, PROMPTS))


@pytest.mark.parametrize("most", [1, 4])
@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {"temperature": 1.1, "seed": 5}, {"repeat_penalty": 1.2}]
)
def test_texts_are_unchanged(
    engine: Engine, most: int, options: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    with Scheduler(engine) as scheduler:
        alone = texts(scheduler, options)
    with drafting(engine, most=most, min_p=0.0) as scheduler:
        assert texts(scheduler, options) == alone
        assert texts(scheduler, options) == alone  # in sequences that held other texts
        counts = scheduler.drafts
    assert counts.tokens >= counts.drafts > 20
    assert counts.accepted == sum(counts.accepted_at)
    kind = request.node.callspec.params["engine"]
    if kind == 0.0 and options == {"temperature": 0.0}:
        assert counts.accepted == counts.tokens  # further tokens too
        assert len(counts.accepted_at) == most
    if kind == 0.15 and options == {"temperature": 0.0}:
        assert 0 < counts.accepted < counts.tokens
    if kind is None:
        assert counts.accepted < counts.tokens / 2


def test_a_model_with_recurrent_state_takes_wrong_drafts_from_its_ngrams(
    tiny_dir: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that were taken back are fed again beside drafts; every number of accepted tokens comes up."""
    options = {"temperature": 0.9, "seed": 4}
    engine = Engine(tiny_dir / "qwen35-tiny.gguf", device=device, profile=None, **EXACT)
    with engine, Scheduler(engine) as scheduler:
        alone = texts(scheduler, options)
    know = {tuple(text[i : i + 4]): text[i + 4] for text in alone for i in range(len(text) - 4)}

    def often_right(_: Drafter, tail: tuple[int, ...]) -> int:
        right = know.get(tail, sum(tail) % 300)
        return right if sum(tail) % 3 else (right + 1) % 300

    monkeypatch.setattr(Drafter, "_likely", often_right)
    engine = Engine(tiny_dir / "qwen35-tiny.gguf", device=device, profile=None, **EXACT)
    with engine, drafting(engine, head=False, most=5, min_p=0.0) as scheduler:
        assert texts(scheduler, options) == alone
        counts = scheduler.drafts
        # The tokens that are computed again are no tokens of prompts.
        assert scheduler.totals()["prompt_tokens"] == sum(map(len, PROMPTS))
    assert len(counts.accepted_at) == 5
    assert counts.accepted_at[0] > counts.accepted_at[2] > 0


def test_each_accepted_token_saves_a_step(tiny_dir: Path, tmp_path: Path, device: str) -> None:
    path = agreeing(tiny_dir / "qwen35-tiny.gguf", tmp_path / "m.gguf", 0.0)
    with Engine(path, device=device, profile=None, **EXACT) as engine:
        with drafting(engine, most=4, min_p=0.0) as scheduler:
            assert len(list(scheduler.drawn([5, 6], Sampling(), 40, handling=ON))) == 40
            assert scheduler.totals()["steps"] == 40 - scheduler.drafts.accepted
            assert scheduler.drafts.accepted >= 30
        assert not engine._open().has_draft_head  # it was loaded for the scheduler
        with drafting(engine, most=4, min_p=1.0) as scheduler:  # never so certain
            list(scheduler.drawn([5, 6], Sampling(), 10, handling=ON))
            assert scheduler.drafts.drafts == 0
        engine.load_draft_head()
        with drafting(engine, most=2, min_p=0.0) as scheduler:
            list(scheduler.drawn([5, 6], Sampling(), 10, handling=ON))
            assert scheduler.drafts.drafts > 0
        assert engine._open().has_draft_head


@pytest.mark.parametrize("together", [False, True])
def test_drafts_have_room_where_the_cache_is_full(tiny_dir: Path, together: bool, device: str) -> None:
    settings = {**EXACT, "cache_tokens": EXACT["ctx"]}
    prompts = [numbers(seed, 40 if together else 100) for seed in range(3 - together)]
    with Engine(tiny_dir / "qwen35-tiny.gguf", device=device, profile=None, **settings) as engine:

        def one(prompt: list[int]) -> list[int]:
            # Two at a time come to the limit, and one of them waits again.
            count = 80 if together else 38
            return [each.token for each in scheduler.drawn(prompt, Sampling(), count, handling=ON)]

        with Scheduler(engine) as scheduler:
            alone = [one(prompt) for prompt in prompts]
        with drafting(engine, most=8, min_p=0.0) as scheduler, ThreadPoolExecutor(1 + together) as pool:
            assert list(pool.map(one, prompts)) == alone
            assert scheduler.drafts.drafts > 20
            assert scheduler.failure is None


def test_a_draft_that_fails_is_none_and_fails_no_text(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Scheduler(engine) as scheduler:
        alone = texts(scheduler, {})

    def fail(*_: object) -> None:
        raise OutOfMemoryError("made to fail")

    monkeypatch.setattr(DraftHead, "draft", fail)
    with caplog.at_level(logging.WARNING, "dyno.scheduler"), drafting(engine) as scheduler:
        assert texts(scheduler, {}) == alone
        assert (scheduler.drafts.drafts, scheduler.failure) == (0, None)
    (line,) = [r.message for r in caplog.records if r.name == "dyno.scheduler"]
    assert line == "a draft failed; pausing speculation for 512 steps: made to fail"


def test_a_prompt_is_read_in_parts_that_a_step_has_room_for(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = numbers(5, 110)
    with Scheduler(engine) as scheduler:
        alone = [each.token for each in scheduler.drawn(prompt, Sampling(), 40, handling=ON)]
    lacking = []
    draft = DraftHead.draft

    def watched(head: DraftHead, *arguments: Any) -> list[list[int]]:
        lacking.append(engine._open().draft_lacks(0))
        return draft(head, *arguments)

    monkeypatch.setattr(DraftHead, "draft", watched)
    with drafting(engine, min_p=0.0) as scheduler:
        scheduler._room = 40
        assert [each.token for each in scheduler.drawn(prompt, Sampling(), 40, handling=ON)] == alone
        assert scheduler.drafts.drafts > 3
    assert lacking[:3] == [109, 70, 31]
    assert max(lacking[3:]) <= 9


def test_an_ended_text_is_reused_although_its_last_draft_was_rejected(engine: Engine) -> None:
    with Scheduler(engine) as scheduler:
        alone = [each.token for each in scheduler.drawn([5, 6, 7], Sampling(), 30, handling=ON)]
        longer = [5, 6, 7, *alone, 9, 9]
        after = [each.token for each in scheduler.drawn(longer, Sampling(), 9, handling=ON)]
    with drafting(engine, most=6, min_p=0.0) as scheduler:
        assert [each.token for each in scheduler.drawn([5, 6, 7], Sampling(), 30, handling=ON)] == alone
        first, *rest = scheduler.drawn(longer, Sampling(), 9, handling=ON)
        assert [first.token, *(each.token for each in rest)] == after
        assert first.cached >= 25


def test_sequences_that_the_head_does_not_know_have_no_drafts(engine: Engine) -> None:
    """A sequence that an embedding has filled: its rows never reached the head."""
    prompt = list(range(20, 50))
    with drafting(engine, most=4, min_p=0.0) as scheduler:
        engine.embed([prompt])
        got = [each.token for each in scheduler.drawn([*prompt, 7], Sampling(), 12, handling=ON)]
    with Scheduler(engine) as scheduler:
        assert got == [each.token for each in scheduler.drawn([*prompt, 7], Sampling(), 12, handling=ON)]


def most_probable(logits: NDArray[np.float32], count: int) -> dict[int, float]:
    """Probabilities of the tokens that may be drawn, in float64."""
    scores = logits.astype(np.float64)
    kept = np.argsort(-scores)[:count]
    weights = np.exp(scores[kept] - scores[kept].max())
    return dict(zip(map(int, kept), weights / weights.sum(), strict=True))


@pytest.mark.parametrize("engine", [0.15], indirect=True, ids=["often"])
def test_the_distribution_of_texts_is_unchanged(engine: Engine) -> None:
    """Pairs of tokens, the second checked against a draft: a chi-square test of fixed seeds."""
    stats = pytest.importorskip("scipy.stats")  # not everywhere where the tests of a GPU run

    prompt, kept, count = [5, 6, 7], 4, 2000
    expected: dict[tuple[int, int], float] = {}
    for first, p in most_probable(engine.logits(prompt)[-1], kept).items():
        for second, q in most_probable(engine.logits([*prompt, first])[-1], kept).items():
            expected[first, second] = p * q

    def pair(seed: int) -> tuple[int, int]:
        sampling = Sampling(temperature=1.0, top_k=kept, top_p=1.0, min_p=0.0, seed=seed)
        first, second, _ = scheduler.drawn(prompt, sampling, 3, handling=ON)
        return first.token, second.token

    # One text at a time: a step that reads the prompt of another one has no drafts.
    with drafting(engine, min_p=0.0) as scheduler:
        counts = Counter(map(pair, range(count)))
        assert scheduler.drafts.drafts == count
        assert 0 < scheduler.drafts.accepted < scheduler.drafts.tokens
    assert set(counts) <= set(expected)
    observed = np.array([counts[each] for each in expected])
    wanted = count * np.array(list(expected.values()))
    assert wanted.min() > 5
    assert stats.chisquare(observed, wanted).pvalue > 0.001


def test_heads_of_a_folder(models_dir: Path, device: str) -> None:
    """Models without recurrent state too, which forget rejected tokens where they stand."""
    checked = []
    for path in sorted((models_dir / "tiny").glob("*-tiny.gguf")):
        with np.load(path.with_suffix(".golden.npz")) as golden:
            if "mtp_logits_long" not in golden:
                continue
        with Engine(path, device=device, profile=None, **EXACT) as engine:
            with Scheduler(engine) as scheduler:
                alone = texts(scheduler, {"temperature": 0.8, "seed": 3})
            with drafting(engine, most=3, min_p=0.0) as scheduler:
                assert texts(scheduler, {"temperature": 0.8, "seed": 3}) == alone, path.name
                assert scheduler.drafts.drafts > 20
        checked.append(path.name)
    assert checked


def test_models_without_a_head_say_so(tiny_dir: Path) -> None:
    with Engine(tiny_dir / "llama-tiny.gguf", device="cpu", profile=None, spec="mtp", **EXACT) as engine:
        with pytest.raises(
            UnsupportedError, match="a head that drafts tokens is not supported for architecture llama"
        ):
            Scheduler(engine)
        with Scheduler(engine, speculation=Speculation()):  # nothing is left of the refused one
            pass
    with Engine(tiny_dir / "qwen35-tiny.gguf", device="cpu", profile=None, spec="mtp", **EXACT) as engine:
        with pytest.raises(PlanError, match="cannot both draft"):
            Speculation(head=True, draft=engine)
        with Scheduler(engine) as scheduler:
            assert scheduler._drafting is not None
            assert scheduler._drafting._speculation == Speculation(8, 0.5, head=True)
