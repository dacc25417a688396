"""The u-batch that runs if nobody chooses one."""

from __future__ import annotations

import bisect
import contextlib
import functools
from pathlib import Path
from typing import Any

import dyno
import pytest
from dyno import _core, _open_model
from dyno._effective import resolve
from dyno._ubatch import (
    CHOICES,
    RESERVE_BYTES,
    SHARE,
    STREAMED_SHARE,
    Needs,
    UsualUbatch,
    free_bytes,
    largest,
)
from dyno.devices import Device

MODEL = Path(__file__).resolve().parents[1] / "data" / "tiny" / "deepseek2-lite-tiny.gguf"
MIB = 1 << 20
GPU: dict[str, Any] = {
    "kind": "cuda",
    "compute_capability": 90,
    "sm_count": 132,
    "shared_per_block_bytes": 232_448,
    "memory_bytes": 1 << 34,
}


@pytest.mark.parametrize(
    ("memory_mib", "weights_mib", "want"),
    [
        (100_000, 1_000, 4096),  # 2800 MiB more than with 512 are 2.8 %
        (90_000, 1_000, 2048),
        (30_000, 1_000, 1024),
        (10_000, 1_000, 512),
        # Each costs little, and only 1024 leaves room for the rest of the machine.
        (100_000, 91_000, 1024),
        # These do not fit anyway: layers will leave, and their copies cross for each u-batch.
        (100_000, 99_000, 4096),
        (28_000, 99_000, 4096),  # 2800 MiB are 10 %
        (27_000, 99_000, 2048),
    ],
)
def test_the_largest_that_costs_little_and_fits(memory_mib: int, weights_mib: int, want: int) -> None:
    def needs(ubatch: int) -> Needs:
        arena = ubatch * 800 * MIB // 1024
        return Needs(arena, weights_mib * MIB, arena + weights_mib * MIB)

    assert largest(needs, memory_mib * MIB) == want


def test_memory_of_other_programs_is_not_counted() -> None:
    def needs(ubatch: int) -> Needs:
        return Needs(ubatch * MIB, 60_000 * MIB, ubatch * MIB + 60_000 * MIB)

    frees = (190_000, 65_000, 63_000, 62_000, 61_000, 60_400, 10_000)
    sizes = {free: largest(needs, 200_000 * MIB, free * MIB) for free in frees}
    # A share of 3 % of what is free: 5,700, 1,950, 1,890, 1,860 and 1,830 MiB for 512, 1,536 or 3,584 more.
    # With 60,400 the model does not fit at all, and a part of it leaves: 10 %, as with 10,000.
    assert list(sizes.values()) == [4096, 2048, 2048, 1024, 512, 4096, 1024]
    assert largest(needs, 200_000 * MIB) == largest(needs, 200_000 * MIB, 300_000 * MIB) == 4096


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("fits", [False, True])
def test_less_free_memory_brings_no_larger_one(fits: bool, streams: bool) -> None:
    """As long as the model fits, and as soon as it does not: then its weights stream."""

    def needs(ubatch: int) -> Needs:
        return Needs(ubatch * MIB, 9_780 * MIB, ubatch * MIB + 9_780 * MIB)

    frees = range(10_300, 200_000, 700) if fits else range(300, 10_290, 70)
    sizes = [largest(needs, 200_000 * MIB, free * MIB, streams) for free in frees]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) > 1


@pytest.mark.parametrize("free_mib", range(500, 700, 5))
def test_a_larger_one_leaves_room_for_weights(free_mib: int) -> None:
    """Of a model that does not fit: with 4096 the arena alone would fill what the runtime leaves."""

    def needs(ubatch: int) -> Needs:
        arena = ubatch * MIB // 64
        return Needs(arena, 1_000 * MIB, arena + 1_000 * MIB + RESERVE_BYTES)

    ubatch = largest(needs, 80_000 * MIB, free_mib * MIB)
    left, most = (free_mib - 512 - each // 64 for each in (ubatch, CHOICES[0]))
    assert ubatch == CHOICES[0] if most <= 0 else 2 * left >= most


def test_copies_of_weights_are_worth_a_larger_one() -> None:
    def needs(ubatch: int) -> Needs:
        return Needs(ubatch * MIB, 100 * MIB, ubatch * MIB + 100 * MIB)

    assert largest(needs, 40_000 * MIB) == 1024
    assert largest(needs, 40_000 * MIB, streams=True) == 4096


def test_the_engine_can_open_it_beside_its_own_reserve() -> None:
    """By the check that the engine makes before it allocates: of a context with room to spare for few."""
    context = {"ctx": 2048}
    session = _core.Session(
        MODEL, context=context, session={"cuda_graphs": False}, plan_only=True, device=GPU
    )

    def fits(free: int) -> bool:
        try:
            session.check_memory(free)
        except dyno.OutOfMemoryError:
            return False
        return True

    session.set({"ubatch": 1024})
    enough = bisect.bisect_left(range(1 << 30), True, key=fits)
    assert enough > 512 * MIB
    for free, want in ((enough, 1024), (enough - 1, 512)):
        assert UsualUbatch(str(MODEL), GPU, free=lambda free=free: free)(context) == want


def test_free_memory_is_asked_for_once_and_only_where_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(_core, "no_cuda_reason", lambda: "")
    monkeypatch.setattr(_core, "gpu_free_bytes", lambda number: asked.append(number) or 1 << 34)
    assert UsualUbatch(str(MODEL), GPU)({"ctx": 2048}) == CHOICES[-1]  # a GPU that is only described
    usual = UsualUbatch(str(MODEL), GPU, "cuda:3", functools.partial(free_bytes, "cuda:3"))
    assert resolve({"ubatch": 64}, {}, "cuda", 4096, ubatch=usual)["ubatch"] == 64
    assert asked == []
    assert (usual({"ctx": 2048}), usual({"ctx": 1024})) == (CHOICES[-1], CHOICES[-1])
    assert asked == [3]  # once, before the engine itself takes memory


def test_a_plan_alone_asks_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Device("cuda:0", {**GPU, "l2_bytes": 50 * MIB})
    monkeypatch.setattr(_open_model, "resolve_device", lambda name, virtual: gpu)

    def ask(name: str) -> int:
        raise AssertionError(f"{name} was asked")

    monkeypatch.setattr(_open_model, "free_bytes", ask)
    with pytest.raises(AssertionError, match="cuda:0 was asked"):
        dyno.Engine(MODEL, "cuda:0", profile=None)
    # An engine that will run asks, also for whether the weights fit.
    with pytest.raises(AssertionError, match="cuda:0 was asked"):
        dyno.Engine(MODEL, "cuda:0", profile=None, ubatch=64)
    # Planned as far as a build without CUDA goes.
    with contextlib.suppress(dyno.DeviceError, dyno.UnsupportedError):
        dyno.Engine(MODEL, "cuda:0", profile=None, plan_only=True).close()


MEMORIES = [int((1 << 29) * 1.06**step) for step in range(80)]


def test_a_gpu_of_much_memory_takes_the_largest_and_a_small_one_less() -> None:
    values: dict[str, Any] = {"ctx": 2048}
    assert UsualUbatch(str(MODEL), GPU)(values) == CHOICES[-1]
    session = _core.Session(
        MODEL, context={"ctx": 2048}, session={"cuda_graphs": False}, plan_only=True, device=GPU
    )
    found = []
    for ubatch in CHOICES:
        session.set({"ubatch": ubatch})
        plan = session.plan
        main = plan["devices"][0]
        rest = sum(int(main[part]) for part in ("kv_bytes", "state_bytes", "arena_bytes", "stream_bytes"))
        found.append((int(main["arena_bytes"]), rest + int(plan["scratch_bytes"]) + RESERVE_BYTES))
    weights = int(session.plan["devices"][0]["weights_bytes"])

    def expected(memory: int) -> int:
        full = int(0.92 * memory)
        (first_arena, first_rest), fits = found[0], found[0][1] + weights <= full
        good = [
            ubatch
            for ubatch, (arena, rest) in zip(CHOICES, found, strict=True)
            if arena - first_arena <= (SHARE if fits else STREAMED_SHARE) * memory
            and (
                rest + weights <= full
                if fits
                else full > first_rest and 2 * (full - rest) >= full - first_rest
            )
        ]
        return max(good, default=CHOICES[0])

    sizes = {memory: UsualUbatch(str(MODEL), {**GPU, "memory_bytes": memory})(values) for memory in MEMORIES}
    assert sizes == {memory: expected(memory) for memory in MEMORIES}
    assert len(set(sizes.values())) >= 3
    # Some hold nothing beside the runtime, and some hold the model only in part.
    assert MEMORIES[0] < found[0][1] < found[0][1] + weights < MEMORIES[-1]


def test_it_is_a_default_and_no_more() -> None:
    asked: list[dict[str, Any]] = []

    def usual(values: Any) -> int:
        asked.append(dict(values))
        return 2048

    found = resolve({}, {}, "cuda", 4096, ubatch=usual)
    assert (found["ubatch"], found.origins["ubatch"]) == (2048, "default")
    assert asked[0]["ctx"] == 4096  # known by then
    assert resolve({"ubatch": 64}, {}, "cuda", 4096, ubatch=usual)["ubatch"] == 64
    assert resolve({}, {"ubatch": (256, "p.yaml:3")}, "cuda", 4096, ubatch=usual)["ubatch"] == 256
    assert len(asked) == 1
    with dyno.Engine(MODEL, "cpu", profile=None, plan_only=True) as engine:
        assert engine.settings["ubatch"] == 512


def test_a_new_context_brings_its_own_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, whose cache and u-batch share its memory."""

    def usual(values: dict[str, Any]) -> int:
        if values["ctx"] == 50:
            raise dyno.PlanError("[plan] no plan")
        return {1: 64, 2: 16, 3: 1 << 40}[values["sequences"]]

    def found(engine: dyno.Engine) -> tuple[int, int, int]:
        assert engine.plan["settings"]["ubatch"] == engine.settings["ubatch"]
        return engine.settings["sequences"], engine.settings["ctx"], engine.plan["settings"]["ubatch"]

    with dyno.Engine(MODEL, profile=None, ctx=64, threads=1) as engine:
        monkeypatch.setattr(engine, "_usual_ubatch", usual)
        engine.set_context(ctx=32)
        assert found(engine) == (1, 32, 64)
        engine.set_context(sequences=2)
        assert found(engine) == (2, 32, 16)
        for wrong in (
            {"sequences": 3},
            {"ctx": 50},
            {"kv_type_k": "q8_0"},
            {"kv_type_k": "q8_0", "sequences": 1},
        ):
            with pytest.raises(dyno.PlanError):
                engine.set_context(**wrong)
            assert found(engine) == (2, 32, 16), wrong
        engine.set(threads=2)
        engine.set_context(sequences=1)
        assert found(engine) == (1, 32, 64)
        with pytest.raises(dyno.PlanError):
            engine.set_context(kv_type_k="q8_0", sequences=2)
        assert found(engine) == (1, 32, 64)
        engine.set_context(sequences=2, ctx=48)
        assert found(engine) == (2, 48, 16)
        engine.set(ubatch=8)
        engine.set_context(sequences=1)
        assert found(engine) == (1, 48, 8)
