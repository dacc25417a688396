"""The expert cache of a GPU follows the text: experts cross while tokens run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from dyno import _core
from random_models import Shape, random_model
from test_adaptive_experts import SHAPES, routing, tokens

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    Arrays = list[NDArray[np.float32]]

GPUS = [d for d in _core.devices() if d["kind"] == "cuda" and not _core.device_problem(d)]
GRAPHS = _core.build_info()["switches"].get("GGML_CUDA_USE_GRAPHS") == "ON"
MODELS = SHAPES | {
    # Super-blocks, of which a GPU reads each type in a layout of its own.
    "k": Shape(
        "qwen3moe", ("q4_k", "q6_k", "q5_k"), 256, 3, 1, 64, 0, 100, n_layers=3, experts=16, used=2,
        n_ff_expert=256,
    ),
}  # fmt: skip
OFF = {f"op_offload.{op}": False for op in ("matmul", "matmul_id", "up_gate", "moe_up_gate")}
# Settings of load and session: each brings experts to their places in another way.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "repacked": ({}, {}),  # from the layout of the CPU's kernels
    "plain": ({"cpu_repack": False}, {}),  # from the file's order
    "exact": ({"numerics": "exact"}, {}),  # as they are
    "alone": ({}, OFF),  # no prompt crosses
}

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPUS, reason=f"no GPU: {_core.no_cuda_reason()}")]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: random_model(folder / f"{name}.gguf", shape) for name, shape in MODELS.items()}


def opened(
    path: Path,
    cache: str = "adaptive",
    way: str = "repacked",
    uses: list[list[int]] | None = None,
    **session: Any,
) -> _core.Session:
    load, of_way = WAYS[way]
    exact = {"kv_type_k": "f32", "kv_type_v": "f32"} if way == "exact" else {}
    return _core.Session(
        path,
        load={"device": "cuda:0", "expert_cache_mib": 1, "expert_cache": cache, **load},
        context={"ctx": 128, "sequences": 3, **exact},
        session={
            "ubatch": 8, "threads": 2, "cuda_graphs": GRAPHS, "offload_min_tokens": 1, **of_way, **session,
        },
        placement={"cpu_moe": True, **({"expert_uses": uses} if uses else {})},
    )  # fmt: skip


def nmse(observed: NDArray[np.float32], reference: NDArray[np.float32]) -> float:
    o, r = observed.astype(np.float64), reference.astype(np.float64)
    return float(((o - r) ** 2).sum() / ((r - r.mean()) ** 2).sum())


def alike(got: Arrays, want: Arrays, limit: float) -> None:
    for number, (one, other) in enumerate(zip(got, want, strict=True)):
        assert nmse(one, other) < limit, f"step {number}"


def cached_counts(session: _core.Session) -> list[int]:
    """Places of each layer with experts."""
    found = {
        i: 0 for i, layer in enumerate(session.model["layers"]) if layer["ffn"]["kind"].startswith("moe")
    }
    for node in session.nodes():
        if node["list"] == "general" and node["name"].endswith("moe_down (cached)"):
            words = dict(word.split("=") for word in node["key"].split() if "=" in word)
            found[node["layer"]] = int(words["experts"])
    return list(found.values())


def last_experts(session: _core.Session) -> list[list[int]]:
    """Of each layer as many of the last experts as it has places, or a token uses if that is more."""
    experts, used = int(session.model["experts"]), int(session.model["experts_used"])
    counts = cached_counts(session)
    assert all(count + max(count, used) <= experts for count in counts)  # none is there at load
    return [list(range(experts - max(count, used), experts)) for count in counts]


def fill(session: _core.Session) -> int:
    """Tokens that choose the last experts of each layer by turns, until these have all places; returns how
    many swaps that took."""
    used = int(session.model["experts_used"])
    groups, places = last_experts(session), sum(cached_counts(session))
    session.reset()
    for i in range(600):
        if session.position(0) == 128:
            session.reset()
        picks = [[group[(i * used + j) % len(group)] for j in range(used)] for group in groups]
        at = np.array(picks, np.int32).reshape(len(groups), 1, used)
        session.decode([(0, tokens(session, 1, i))], "none", pinned_routing=at)
        if i > 150 and session.experts["swapped"] >= places:
            break
    return places


def of_the_same_experts(session: _core.Session) -> list[list[int]]:
    """Recorded use of which a static cache keeps the experts that fill() brings."""
    experts = int(session.model["experts"])
    found = []
    for count, group in zip(cached_counts(session), last_experts(session), strict=True):
        found.append([1 if expert in group[:count] else 0 for expert in range(experts)])
    return found


def free(session: _core.Session) -> Arrays:
    """A prompt and tokens of one sequence and of three, whose routing is the model's."""
    session.reset()
    found = [session.decode([(0, tokens(session, 19, 5))], "all")[0]]
    for i in range(6):
        found.append(session.decode([(0, tokens(session, 1, i))], "last")[0])
    for i in range(6):
        found.append(
            session.decode([(slot, tokens(session, 1, 9 * slot + i)) for slot in range(3)], "last")[0]
        )
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_a_cache_that_has_changed_is_a_static_one(models: dict[str, Path], name: str, way: str) -> None:
    """With the experts that have come it computes what a cache with these experts from the start computes, in
    launches and in graphs: their bytes in their places are the same."""
    session = opened(models[name], way=way)
    places = fill(session)
    assert places > 0
    before = session.experts
    assert before["swapped"] == places
    static = opened(models[name], "static", way, of_the_same_experts(session))
    assert cached_counts(static) == cached_counts(session)
    for graphs in {False, GRAPHS}:
        session.set({"cuda_graphs": graphs})
        static.set({"cuda_graphs": graphs})
        alike(free(session), free(static), 1e-10)
        if graphs:
            assert [row["reason"] for row in session.captures() if not row["captured"]] == []
    if way != "alone":
        # A prompt takes what the cache has from there.
        assert session.streamed["cached"] == static.streamed["cached"] > 0
    # All choices are counted, and the ones that the cache has.
    after = session.experts
    assert after["swapped"] == places
    counts, used = cached_counts(session), int(session.model["experts_used"])
    at = np.array([group[:used] for group in last_experts(session)], np.int32)
    session.decode([(2, tokens(session, 1))], "last", pinned_routing=at[:, np.newaxis])
    assert session.experts["chosen"] - after["chosen"] == at.size
    assert session.experts["cached"] - after["cached"] == sum(min(count, used) for count in counts)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_answers_while_experts_cross(models: dict[str, Path], name: str, way: str) -> None:
    """Texts that choose other experts by turns, in prompts and single tokens of several sequences; settings
    that change while copies are on their way."""

    def answers(session: _core.Session) -> Arrays:
        found: Arrays = []
        experts, used = int(session.model["experts"]), int(session.model["experts_used"])
        for number in range(6):
            session.reset()
            # Few, so that each is worth a place.
            few = [(3 * number + 2 * i) % experts for i in range(used + 1)]

            def chosen(count: int, seed: int, few: list[int] = few) -> NDArray[np.int32]:
                at = routing(session, count, range(len(few)), seed)
                return np.array(few, np.int32)[at]

            batch = [(slot, tokens(session, count, slot)) for slot, count in enumerate((3, 9, 6))]
            found.append(session.decode(batch, "last", pinned_routing=chosen(18, number))[0])
            for step in range(12):
                one = [(slot, tokens(session, 1, slot + step)) for slot in range(3)]
                found.append(session.decode(one, "last", pinned_routing=chosen(3, step))[0])
            prompt = tokens(session, 21, number)
            found.append(session.decode([(0, prompt)], "last", pinned_routing=chosen(21, number))[0])
            least = {"offload_min_tokens": 1 + 99 * (number % 2)}
            session.set(least if way == "alone" else {**least, "op_offload.matmul_id": number % 2 == 0})
        return found

    session, static = opened(models[name], way=way), opened(models[name], "static", way)
    got = answers(session)
    assert session.experts["swapped"] > 0
    assert static.experts["swapped"] == 0
    # A GPU rounds otherwise than the CPU. An expert that is not there yet would be far off.
    alike(got, answers(static), 1e-6 if way == "exact" else 1e-3)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss"])
def test_replayed_tokens_bring_experts(models: dict[str, Path], name: str, ahead: bool) -> None:
    """Graphs count and read the places of now. A text of one word chooses the same experts all along."""
    if not GRAPHS:
        pytest.skip("a build without CUDA graphs")
    session, static = (
        opened(models[name], way="exact"),
        opened(models[name], "static", "exact", cuda_graphs=False),
    )
    slots = [0] if ahead else [0, 1, 2]
    for word, count in ((3, 40), (41, 40), (77, 110)):  # the last one has more uses than the others
        for one in (session, static):
            one.reset()
        for i in range(count):
            step = [(slot, np.array([word], np.int32)) for slot in slots]
            got, want = (one.decode(step, "last")[0] for one in (session, static))
            assert nmse(got, want) < 1e-6, (word, i)
    assert {row["captured"] for row in session.captures()} == {True}
    assert session.experts["swapped"] > 0
    before = [one.experts["cached"] for one in (session, static)]
    for _ in range(15):
        for one in (session, static):
            one.decode([(slot, np.array([77], np.int32)) for slot in slots], "last")
    after = [one.experts["cached"] for one in (session, static)]
    assert after[0] - before[0] > after[1] - before[1]


def test_a_session_ends_while_experts_cross(models: dict[str, Path]) -> None:
    for count in range(1, 12):
        session = opened(models["gpt-oss"])
        for i in range(count):
            at = routing(session, 1, range(20, 24), i)
            session.decode([(0, tokens(session, 1, i))], "none", pinned_routing=at)
        session.close()
