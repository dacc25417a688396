"""The expert cache follows the text (`expert_cache=adaptive`); answers stay the same bit for bit."""

from __future__ import annotations

import logging
import signal
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import dyno
import numpy as np
import pytest
from dyno import _core
from dyno.errors import PlanError, ProfileError
from dyno.testing import tiny_model
from numa_tree import Node, cores, write_nodes
from random_models import Shape, random_model
from waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

# Some MiB of experts, of which a cache of 1 MiB holds few in each layer.
SHAPES = {
    "qwen3moe": Shape(
        "qwen3moe", ("q4_0",), 384, 3, 1, 32, 0, 100, n_layers=4, experts=16, used=2, n_ff_expert=256
    ),
    # Biases of experts, in layers of windows.
    "gpt-oss": Shape(
        "gpt-oss", ("mxfp4",), 256, 4, 2, 64, 0, 111, n_layers=3, experts=24, used=3, n_ff_expert=256
    ),
    # Gate and up are of two types, behind a layer without experts.
    "glm4moe": Shape(
        "glm4moe", ("q4_1", "q8_0"), 256, 4, 1, 64, 320, 103, rotary=32, n_layers=3,
        experts=16, used=4, n_ff_expert=128, shared=1,
    ),
    "bf16": Shape("qwen3moe", ("bf16",), 160, 2, 2, 64, 0, 101, experts=16, used=2, n_ff_expert=96),
}  # fmt: skip
CONTEXT = {"ctx": 128, "sequences": 3}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: random_model(folder / f"{name}.gguf", shape) for name, shape in SHAPES.items()}


def opened(
    path: Path, cache: str = "adaptive", mib: int = 1, *, ubatch: int = 8, device: Any = None, **given: Any
) -> _core.Session:
    placement = {"virtual_devices": [device or {}], "cpu_moe": True, **given.pop("placement", {})}
    return _core.Session(
        path,
        load={"device": "cpu:1", "expert_cache_mib": mib, "expert_cache": cache, **given.pop("load", {})},
        context=given.pop("context", CONTEXT),
        session={"ubatch": ubatch, "threads": 2, "offload_min_tokens": 1},
        placement=placement,
        **given,
    )


def whole(path: Path, *, ubatch: int = 8, **load: Any) -> _core.Session:
    """The same model on one device."""
    return _core.Session(path, load=load, context=CONTEXT, session={"ubatch": ubatch, "threads": 2})


def tokens(session: _core.Session, count: int, seed: int = 0) -> NDArray[np.int32]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, session.model["n_vocab"], count).astype(np.int32)


def routing(session: _core.Session, count: int, group: range, seed: int = 0) -> NDArray[np.int32]:
    """Different experts of a group for each token in each layer."""
    rng = np.random.default_rng(seed)
    layers, used = int(session.model["moe_layers"]), int(session.model["experts_used"])
    one = [rng.permutation(group)[:used] for _ in range(layers * count)]
    return np.array(one, np.int32).reshape(layers, count, used)


def feed(session: _core.Session, count: int, group: range, seed: int = 0) -> None:
    """So many single tokens of a sequence that begins."""
    session.reset()
    for i in range(count):
        if session.position(0) == CONTEXT["ctx"]:
            session.reset()
        at = routing(session, 1, group, seed + i)
        session.decode([(0, tokens(session, 1, i))], "none", pinned_routing=at)


def groups_of(session: _core.Session) -> list[range]:
    """Three parts of a layer's experts, with as many as a token uses at least."""
    experts, used = int(session.model["experts"]), int(session.model["experts_used"])
    size = max(used, experts // 4)
    return [
        range(size),
        range(experts - size, experts),
        range(experts // 2 - size // 2, experts // 2 + size // 2 + 1),
    ]


def answers(session: _core.Session) -> list[NDArray[np.float32]]:
    """Texts whose routing changes: prompts, several sequences at once, single tokens, going back, and
    settings that change in between."""
    session.reset()
    found = []
    for number, group in enumerate(groups_of(session)):
        # The model's own routing, and then routing of a few experts.
        found.append(session.decode([(0, tokens(session, 11, number))], "all")[0])
        batch = [(slot, tokens(session, count, slot)) for slot, count in enumerate((3, 9, 6))]
        at = routing(session, 18, group, number)
        found.append(session.decode(batch, "last", pinned_routing=at)[0])
        for step in range(8):
            one = [(slot, tokens(session, 1, slot + step)) for slot in range(3)]
            at = routing(session, 3, group, step)
            found.append(session.decode(one, "last", pinned_routing=at)[0])
        session.rewind(session.position(1) - 5, 1)
        found.append(session.decode([(1, tokens(session, 4))], "all")[0])
        session.set({"threads": 1 + number % 2, "offload_min_tokens": 1 + 99 * (number % 2)})
        session.reset(2)
    return found


def same(got: list[NDArray[np.float32]], want: list[NDArray[np.float32]]) -> None:
    for number, (one, other) in enumerate(zip(got, want, strict=True)):
        np.testing.assert_array_equal(one, other, err_msg=f"step {number}")


@pytest.mark.parametrize("ubatch", [1, 8])
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_answers_are_equal_in_any_state(
    models: dict[str, Path], name: str, streams: bool, ubatch: int
) -> None:
    want = answers(whole(models[name], ubatch=ubatch))
    session = opened(models[name], ubatch=ubatch, device={"streams": streams})
    same(answers(session), want)
    first = session.experts
    assert first["swapped"] > 0
    assert 0 < first["cached"] < first["chosen"]
    # From the state that the first run left.
    session.set({"threads": 2, "offload_min_tokens": 1})
    same(answers(session), want)
    assert session.experts["swapped"] > first["swapped"]
    if streams and ubatch == 8:
        assert session.streamed["cached"] > 0
    # Without a link nothing depends on the time.
    again = opened(models[name], ubatch=ubatch, device={"streams": streams})
    answers(again)
    assert again.experts == first


@pytest.mark.parametrize("load", [{"numerics": "exact"}, {"cpu_repack": False}], ids=str)
def test_other_layouts_of_weights(models: dict[str, Path], load: dict[str, Any]) -> None:
    session = opened(models["qwen3moe"], load=load)
    same(answers(session), answers(whole(models["qwen3moe"], **load)))
    assert session.experts["swapped"] > 0


def test_the_cache_follows_the_choices(models: dict[str, Path]) -> None:
    session = opened(models["qwen3moe"])
    counts = count_of(session)
    assert sum(counts) == 6
    assert min(counts) >= 1  # the first experts of each layer
    feed(session, 40, range(8, 10))
    # Two experts are chosen in each layer, always both, and so many of them as there are places have come.
    # Equal use is no reason to swap.
    assert session.experts["swapped"] == 6
    before = session.experts
    feed(session, 30, range(8, 10), seed=7)
    after = session.experts
    assert after["swapped"] == before["swapped"]
    assert after["chosen"] - before["chosen"] == 30 * 4 * 2
    assert after["cached"] - before["cached"] == 30 * sum(min(count, 2) for count in counts) == 30 * 6


def test_old_choices_are_forgotten(models: dict[str, Path]) -> None:
    """After a long text, another one has the cache after about as many tokens as count fully."""
    session = opened(models["qwen3moe"])
    feed(session, 900, range(8, 10))
    feed(session, 500, range(2, 4))
    before = session.experts
    feed(session, 20, range(2, 4))
    assert session.experts["cached"] - before["cached"] == 20 * 6


def test_a_static_cache_stays(models: dict[str, Path]) -> None:
    session = opened(models["qwen3moe"], "static")
    feed(session, 40, range(8, 10))
    assert session.experts == {"chosen": 40 * 4 * 2, "cached": 0, "swapped": 0}


@pytest.mark.parametrize("share", [0, 40])
def test_streamed_prompts_count(models: dict[str, Path], share: int) -> None:
    """A prompt that is streamed says which experts later tokens use, also if the CPU takes a share."""
    session = opened(models["qwen3moe"], device={"streams": True})
    session.set({"cpu_share": share})
    session.decode([(0, tokens(session, 96))], "none", pinned_routing=routing(session, 96, range(8, 10)))
    assert session.experts["chosen"] == 0
    assert session.experts["swapped"] == 6


def test_a_large_ubatch_is_not_forgotten(models: dict[str, Path]) -> None:
    """Its own choices count as far as the ones of as many single tokens would."""
    session = opened(models["qwen3moe"], ubatch=3072, context={"ctx": 1024, "sequences": 3})
    texts = [(slot, tokens(session, 1024, slot)) for slot in range(3)]
    session.decode(texts, "none", pinned_routing=routing(session, 3072, range(8, 10)))
    feed(session, 3, range(8, 10))  # two experts of a layer come one after the other
    assert session.experts["swapped"] == 6
    feed(session, 5, range(2, 4))
    assert session.experts["swapped"] == 6


def test_the_recorded_use_is_where_it_begins(models: dict[str, Path]) -> None:
    uses = np.zeros((4, 16), int)
    uses[:, 8:10] = 1000
    session = opened(models["qwen3moe"], placement={"expert_uses": uses.tolist()})
    feed(session, 40, range(8, 10))
    before = session.experts
    assert before["cached"] == 40 * 6  # of 4 layers with 2 such experts, 6 have places
    assert before["swapped"] == 0
    # A few tokens of another kind do not change what a text has settled.
    feed(session, 20, range(2, 4))
    assert session.experts["swapped"] == 0


def count_of(session: _core.Session) -> list[int]:
    """Cached experts by layer, from the keys of the ops that multiply by them."""
    found = [0] * 4
    for node in session.nodes():
        if node["list"] == "general" and node["name"].endswith("moe_down (cached)"):
            words = dict(word.split("=") for word in node["key"].split() if "=" in word)
            found[node["layer"]] = int(words["experts"])
    return found


def test_memory_is_that_of_a_static_cache(models: dict[str, Path]) -> None:
    path = models["qwen3moe"]
    static, adaptive = (opened(path, cache, 2).plan for cache in ("static", "adaptive"))
    for key in ("weights_bytes", "arena_bytes", "total_bytes", "scratch_bytes", "devices"):
        assert adaptive[key] == static[key]
    assert adaptive["settings"]["expert_cache"] == "adaptive"
    # Experts that a text never chose have places as well.
    uses = np.zeros((4, 16), int)
    uses[:, 3] = 1
    few, more = (
        opened(path, cache, 2, plan_only=True, placement={"expert_uses": uses.tolist()})
        for cache in ("static", "adaptive")
    )
    assert sum(count_of(few)) == 4
    assert sum(count_of(more)) == sum(count_of(opened(path, "static", 2, plan_only=True)))
    assert "follow the routing of the text" in more.describe_plan()


def test_a_link_brings_experts_later(models: dict[str, Path]) -> None:
    session = opened(models["qwen3moe"], device={"link_gbps": 2, "latency_us": 5, "streams": True})
    same(answers(session), answers(whole(models["qwen3moe"])))
    session.set({"offload_min_tokens": 100})

    def have_come() -> bool:
        feed(session, 30, range(8, 10))
        return int(session.experts["swapped"]) > 0

    until(have_come)


def test_over_numa_copies(models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each node's copy of a place gets the expert."""
    want = answers(whole(models["gpt-oss"]))
    root = write_nodes(tmp_path / "machine", [Node(cores()), Node(cores())])
    monkeypatch.setenv("DYNO_NUMA_ROOT", str(root))
    session = opened(models["gpt-oss"], load={"numa": "mirror"})
    assert session.plan["numa_nodes"] == 2
    session.set({"threads": 4, "threads_batch": 4})
    same(answers(session), want)
    assert session.experts["swapped"] > 0


class BrokenOff(Exception):
    """Of a signal that comes between two u-batches."""


@pytest.fixture
def broken_off() -> Iterator[None]:
    """A signal handler that raises BrokenOff."""

    def handler(*_: object) -> None:
        raise BrokenOff

    before = signal.signal(signal.SIGALRM, handler)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("broken_off")
def test_a_request_that_is_broken_off(models: dict[str, Path]) -> None:
    session = opened(models["qwen3moe"], ubatch=1, context={**CONTEXT, "ctx": 1024})
    count = 1000  # so that a decode takes far longer than the 20 ms between two looks at signals
    text, at = tokens(session, count), routing(session, count, range(8, 10))
    began = time.perf_counter()
    session.decode([(0, text)], "none", pinned_routing=at)
    took = time.perf_counter() - began
    at = routing(session, count, range(2, 4))
    for attempt in range(1, 9):
        session.reset()
        with pytest.raises(BrokenOff):  # noqa: PT012 - the second call only waits for a signal that came too late
            signal.setitimer(signal.ITIMER_REAL, took / 2**attempt)
            session.decode([(0, text)], "none", pinned_routing=at)
            time.sleep(600)
        if session.position(0) == 0:
            break
    assert session.position(0) == 0
    same(answers(session), answers(whole(models["qwen3moe"], ubatch=1)))


def test_a_changed_context_keeps_the_state(models: dict[str, Path]) -> None:
    session = opened(models["qwen3moe"])
    feed(session, 40, range(8, 10))
    before = session.experts
    session.set_context(CONTEXT)
    session.set({"op_offload.matmul_id": False})
    feed(session, 10, range(8, 10))
    assert session.experts["swapped"] == before["swapped"]
    assert session.experts["cached"] - before["cached"] == 10 * 6


def planned(path: Path, cache: str, mib: int = 1, **session: Any) -> _core.Session:
    """Of a GPU that need not be here."""
    machine = {"kind": "cuda", "compute_capability": 90, "sm_count": 132, "shared_per_block_bytes": 232_448}
    return _core.Session(
        path,
        load={"expert_cache_mib": mib, "expert_cache": cache},
        session={"cuda_graphs": False, **session},
        placement={"cpu_moe": True, "beside_gpu": [dict(_core.cpu_info())]},
        plan_only=True,
        device=machine,
    )


@pytest.mark.parametrize("name", SHAPES)
def test_a_plan_of_a_gpu(models: dict[str, Path], name: str) -> None:
    static, adaptive = (planned(models[name], cache) for cache in ("static", "adaptive"))
    assert adaptive.plan["devices"] == static.plan["devices"]
    assert adaptive.nodes() == static.nodes()
    assert "follow the routing of the text" in adaptive.describe_plan()
    assert "follow the routing of the text" not in static.describe_plan()
    # Without prompts that cross, matrices still wait in two stages for their other layout, one in each.
    off = {f"op_offload.{op}": False for op in ("matmul", "matmul_id", "up_gate", "moe_up_gate")}
    static, adaptive = (planned(models[name], cache, **off) for cache in ("static", "adaptive"))
    assert static.plan["devices"][0]["stream_bytes"] == 0
    experts = [
        t for t in adaptive.plan["tensors"] if t["name"].endswith("_exps.weight") and t["device"] == "cpu"
    ]
    cached = {t["name"]: t for t in adaptive.plan["tensors"] if t["name"].endswith(" (cached)")}
    crossing = [t for t in experts if t["layout"] != cached[t["name"] + " (cached)"]["layout"]]
    largest = max((t["bytes"] // adaptive.model["experts"] for t in crossing), default=0)
    assert adaptive.plan["devices"][0]["stream_bytes"] == 2 * (-(-largest // 256) * 256)


def test_types_that_a_gpu_reads_as_others_stay(tmp_path: Path) -> None:
    sizes = {"n_embd": 512, "n_ff_expert": 256, "n_experts": 16, "n_experts_used": 4}
    path = tiny_model(tmp_path / "m.gguf", "qwen3moe", dtype="iq3_s", **sizes)
    with pytest.raises(PlanError, match=r"adaptive .* are iq3_s, which cuda:0 .*; use expert_cache=static"):
        planned(path, "adaptive")
    planned(path, "adaptive", 0)
    assert "expert cache" in planned(path, "static").describe_plan()


def test_another_word(models: dict[str, Path]) -> None:
    with pytest.raises(ProfileError, match="static or adaptive"):
        planned(models["qwen3moe"], "lru")


def test_an_engine_tells_of_swaps(models: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    given: dict[str, Any] = {"virtual_devices": 1, "cpu_moe": True, "profile": None, "ctx": 64}
    caplog.set_level(logging.WARNING)
    with dyno.Engine(models["qwen3moe"], "cpu:1", **given, expert_cache="adaptive"):
        assert "expert_cache=adaptive has no effect, because expert_cache_mib is 0" in caplog.text
    caplog.clear()
    with dyno.Engine(
        models["qwen3moe"], "cpu:1", **given, expert_cache="adaptive", expert_cache_mib=1
    ) as engine:
        assert "does nothing" not in caplog.text
        for start in range(10):
            engine.logits([start] * 60)
        assert engine.expert_choices["swapped"] > 0


def test_a_model_whose_experts_all_have_places(tmp_path: Path) -> None:
    small = replace(SHAPES["bf16"], experts=4)
    path = random_model(tmp_path / "small.gguf", small)
    session = opened(path, mib=8)
    same(answers(session), answers(whole(path)))
    assert session.experts["swapped"] == 0
    assert session.experts["cached"] == session.experts["chosen"] > 0
