"""The u-batch that runs if nobody chooses one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dyno
import pytest
from dyno import _core
from dyno._effective import resolve
from dyno._ubatch import CHOICES, UsualUbatch, largest

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
        (100_000, 99_000, 4096),  # does not fit anyway, so that layers will leave
    ],
)
def test_the_largest_that_costs_little_and_fits(memory_mib: int, weights_mib: int, want: int) -> None:
    def needs(ubatch: int) -> tuple[int, int]:
        arena = ubatch * 800 * MIB // 1024
        return arena, arena + weights_mib * MIB

    assert largest(needs, memory_mib * MIB) == want


def test_memory_of_other_programs_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def needs(ubatch: int) -> tuple[int, int]:
        return ubatch * MIB, ubatch * MIB + 10_000 * MIB

    sizes = {free: largest(needs, 200_000 * MIB, free * MIB) for free in (190_000, 12_100, 11_500, 9_000)}
    assert sizes == {190_000: 4096, 12_100: 2048, 11_500: 1024, 9_000: 4096}  # the last fits nowhere
    monkeypatch.setattr(_core, "no_cuda_reason", lambda: "")
    asked: list[int] = []
    monkeypatch.setattr(_core, "gpu_free_bytes", lambda number: asked.append(number) or 1 << 34)
    usual = UsualUbatch(str(MODEL), GPU, "cuda:3")
    assert (usual({"ctx": 2048}), usual({"ctx": 1024})) == (CHOICES[-1], CHOICES[-1])
    assert asked == [3]  # once, before the engine itself takes memory


def test_a_gpu_of_much_memory_takes_the_largest_and_a_small_one_less() -> None:
    values: dict[str, Any] = {"ctx": 2048}
    assert UsualUbatch(str(MODEL), GPU)(values) == CHOICES[-1]
    session = _core.Session(
        MODEL, context={"ctx": 2048}, session={"cuda_graphs": False}, plan_only=True, device=GPU
    )
    arenas = []
    for ubatch in CHOICES:
        session.set({"ubatch": ubatch})
        arenas.append(int(session.plan["arena_bytes"]))
    for larger in (1, 2, 3):
        memory = (arenas[larger] - arenas[0]) / 0.03
        for share, want in ((1.001, CHOICES[larger]), (0.999, CHOICES[larger - 1])):
            gpu = {**GPU, "memory_bytes": int(memory * share)}
            assert UsualUbatch(str(MODEL), gpu)(values) == want


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
