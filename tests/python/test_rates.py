"""Measured rates: kept for plans, and never trusted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import dyno
import pytest
from dyno import _core, _effective, _rates

if TYPE_CHECKING:
    from typing import Any

MODEL = Path(__file__).resolve().parents[1] / "data" / "tiny" / "qwen3moe-tiny.gguf"
GOOD = {"memory_gbps": 123.0, "gflops_one": 4.0, "gflops_many": 50.0, "launch_us": 0.5}


def test_rates_of_the_cpu_are_numbers_above_zero() -> None:
    found = _rates.measure("cpu", threads=1, seconds=0.01)
    assert set(found) == {"memory_gbps", "gflops_one", "gflops_many", "launch_us"}
    assert all(value > 0 for value in found.values())


def test_the_memory_of_the_cpu_is_measured_by_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy by one of 32 threads showed 27 of 344 GB/s."""
    asked: list[int] = []

    def time(family: str, desc: dict[str, int], *, threads: int, **more: Any) -> list[float]:
        asked.append(threads)
        return [2 * desc["m"] * desc["row"] / 5e9]

    monkeypatch.setattr(_core.ops, "time", time)
    monkeypatch.setattr(_effective, "usable_cores", lambda: 32)
    assert _rates.cpu_memory() == pytest.approx(5.0)
    assert _rates.cpu_memory(3) == pytest.approx(5.0)
    assert asked == [32, 3]


def test_rates_are_kept_by_device(tmp_path: Path) -> None:
    file = tmp_path / "below" / "rates.json"
    cpu = dict(_core.cpu_info())
    other = {**cpu, "cores": int(cpu["cores"]) + 1}
    assert _rates.remembered(cpu, file) == {}
    assert _rates.remember(cpu, GOOD, file) == file
    _rates.remember(other, {**GOOD, "memory_gbps": 7.0}, file)
    assert _rates.remembered(cpu, file) == GOOD
    assert _rates.remembered(other, file)["memory_gbps"] == 7.0
    assert [p.name for p in file.parent.iterdir()] == ["rates.json"]


@pytest.mark.parametrize(
    "rates",
    [
        {**GOOD, "memory_gbps": 0},
        {**GOOD, "memory_gbps": "fast"},
        {**GOOD, "memory_gbps": True},
        {**GOOD, "memory_gbps": float("inf")},
        {**GOOD, "other": 1.0},
        {"memory_gbps": 1.0},
        [1, 2],
    ],
)
def test_a_file_with_other_values_counts_as_none(rates: Any, tmp_path: Path) -> None:
    file = tmp_path / "rates.json"
    cpu = dict(_core.cpu_info())
    file.write_text(json.dumps({_rates.fingerprint(cpu): rates}))
    assert _rates.remembered(cpu, file) == {}
    file.write_text("[" * 100_000)
    assert _rates.remembered(cpu, file) == {}


def test_an_engine_plans_by_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds() -> float:
        with dyno.Engine(MODEL, "cpu", profile=None, plan_only=True) as engine:
            parts = engine.diagnostics.expected_cost(64)
        return float(sum(part["seconds"] for part in parts))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assumed = seconds()
    cpu = dict(_core.cpu_info())
    _rates.remember(cpu, {**GOOD, "gflops_one": 1e-3, "gflops_many": 1e-3})
    assert seconds() > 10 * assumed


def test_explain_prints_expected_times(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from dyno import explain

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with dyno.Engine(
        MODEL, "cpu", profile=None, plan_only=True, virtual_devices=1, placement=[r"blk\.1\.=cpu:1"]
    ) as engine:
        found, text = explain.plan(engine)
        rows = [line.split() for line in text.splitlines() if line.startswith(("  cpu ", "  cpu:1 "))]
        assert "assumed (`tune probe` measures them)" in text
        assert ["cpu:1", "1"] in [row[:2] for row in rows]
        assert ["cpu", "rest"] in [row[:2] for row in rows]
        loads = found["expected"]["loads"]
        assert [load["tokens"] for load in loads] == [1, int(engine.settings["ubatch"])]
        for load in loads:
            parts = load["parts"]
            assert load["seconds"] == pytest.approx(sum(p["seconds"] + p["transfer_seconds"] for p in parts))
            assert sum(p["weights_bytes"] for p in parts) == engine.plan["weights_bytes"]
