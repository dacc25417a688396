"""Measured rates: kept for plans, and never trusted."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import dyno
import pytest
from dyno import _core, _effective, _open_model, _rates
from dyno._placement import Placement

if TYPE_CHECKING:
    from typing import Any

MODEL = Path(__file__).resolve().parents[1] / "data" / "tiny" / "qwen3moe-tiny.gguf"
GOOD = {"memory_gbps": 123.0, "weights_gbps": 60.0, "gflops_one": 4.0, "gflops_many": 50.0, "launch_us": 0.5}


def test_rates_of_the_cpu_are_numbers_above_zero() -> None:
    found = _rates.measure("cpu", threads=1, seconds=0.01)
    spread = found.pop("spread_us")
    assert spread >= 0
    assert set(found) == {
        "memory_gbps",
        "weights_gbps",
        "core_gbps",
        "gflops_one",
        "gflops_many",
        "launch_us",
    }
    assert all(value > 0 for value in found.values())


def test_threads_that_begin_and_end_are_no_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 32 threads, a product of one row of 1024 x 1024 took 9 us on a Xeon, of which they took most."""

    def time(family: str, desc: dict[str, Any], *, rotate_bytes: int, **more: Any) -> list[float]:
        if family == "transfer":
            return [1e-6]
        read, operations = _core.ops.cost(family, desc)
        return [9e-6 + (read / 155e9 if rotate_bytes else operations / 2000e9)]

    monkeypatch.setattr(_core.ops, "time", time)
    found = _rates.measure("cpu", threads=32)
    assert found["gflops_one"] == pytest.approx(2000, rel=1e-3)
    assert found["gflops_many"] == pytest.approx(2000, rel=1e-3)
    assert found["weights_gbps"] == pytest.approx(155, rel=1e-3)
    assert found["spread_us"] == pytest.approx(9, rel=1e-3)


def test_few_rows_are_measured_where_no_cache_holds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread adds the rows of a token's experts, which 15 others have written."""

    def time(family: str, desc: dict[str, Any], *, rotate_bytes: int, **more: Any) -> list[float]:
        read, _ = _core.ops.cost(family, desc)
        if family == "moe_sum":
            return [read / (25e9 if rotate_bytes else 110e9)]
        return [1e-6 + read / 100e9]

    monkeypatch.setattr(_core.ops, "time", time)
    assert _rates.measure("cpu", threads=16)["core_gbps"] == pytest.approx(25, rel=1e-3)


def test_a_gpu_knows_its_experts_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an H200, products of experts took 2 to 4 us more than dense ones beside their bytes."""

    def time(family: str, desc: dict[str, Any], **more: Any) -> list[float]:
        assert more["device"] == "cuda:0"
        read, operations = _core.ops.cost(family, desc)
        if family == "norm":
            return [2e-6]
        late = 3e-6 if family == "moe_up_gate" else 0.0
        return [2.4e-6 + late + max(read / 2700e9, operations / 450e12)]

    found = {
        "memory_gbps": 2950.0, "host_to_device_gbps": 55.0, "device_to_host_gbps": 54.0, "transfer_us": 7.6
    }  # fmt: skip
    monkeypatch.setattr(_core, "measure_rates", lambda device: found, raising=False)
    monkeypatch.setattr(_core.ops, "time", time)
    rates = _rates.measure("cuda:0")
    assert rates["weights_gbps"] == pytest.approx(2700, rel=1e-3)
    assert rates["spread_us"] == pytest.approx(0.4, rel=1e-2)
    assert rates["experts_us"] == pytest.approx(3, rel=1e-2)
    assert set(rates) == set(_rates.RATES) - {"core_gbps"}


def test_rates_are_kept_by_the_number_of_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(_effective, "usable_cores", lambda: 32)
    asked: list[int] = []

    def measure(name: str, threads: int, seconds: float) -> dict[str, float]:
        asked.append(threads)
        return {**GOOD, "memory_gbps": float(threads)}

    monkeypatch.setattr(_rates, "measure", measure)
    cpu = {"cpu": dict(_core.cpu_info())}
    assert _rates.known(cpu, 16, measure_missing=False) == {}
    for threads in (16, 32, 16):
        found = _rates.known(cpu, threads, measure_missing=True)
        assert found["cpu"]["memory_gbps"] == threads
    assert asked == [16, 32]
    # Without a measurement of its own, all cores stand for it.
    assert _rates.known(cpu, 8, measure_missing=False)["cpu"]["memory_gbps"] == 32


def test_rates_that_cannot_be_measured_are_assumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def measure(name: str, threads: int, seconds: float) -> dict[str, float]:
        raise dyno.errors.OutOfMemoryError("8 MiB are free")

    monkeypatch.setattr(_rates, "measure", measure)
    assert _rates.known({"cuda:0": {"kind": "cuda"}}, 4, measure_missing=True) == {}
    assert "using assumed rates for cuda:0, because they could not be measured: 8 MiB are free" in caplog.text


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
        assert "assumed rates; `tune probe` measures them" in text
        assert ["cpu:1", "1"] in [row[:2] for row in rows]
        assert ["cpu", "rest"] in [row[:2] for row in rows]
        loads = found["expected"]["loads"]
        assert [load["tokens"] for load in loads] == [1, int(engine.settings["ubatch"])]
        for load in loads:
            parts = load["parts"]
            # Virtual devices share their threads, so nothing runs beside something else.
            assert load["seconds"] == pytest.approx(sum(p["seconds"] + p["transfer_seconds"] for p in parts))
            assert sum(p["weights_bytes"] for p in parts) == engine.plan["weights_bytes"]


@pytest.mark.parametrize(
    ("free", "plan_only", "measures"), [(1 << 40, False, False), (4096, False, True), (4096, True, False)]
)
def test_a_model_that_may_not_fit_is_reason_to_measure(
    free: int, plan_only: bool, measures: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, bool]] = []

    def known(devices: Any, threads: int, *, measure_missing: bool) -> dict[str, dict[str, float]]:
        asked.append((threads, measure_missing))
        return {name: GOOD for name in devices}

    monkeypatch.setattr(_rates, "known", known)
    monkeypatch.setattr(_open_model, "free_bytes", lambda name: free)
    gpu = SimpleNamespace(kind="cuda", name="cuda:0", info={"kind": "cuda", "memory_bytes": 1 << 40})
    model = SimpleNamespace(
        device="cuda:0",
        _device=gpu,
        _placement=Placement.of("auto", 0, None, None, None),
        _plan_only=plan_only,
        settings={"threads": 3},
    )
    model._may_be_placed = functools.partial(_open_model.OpenModel._may_be_placed, model)
    found = _open_model.OpenModel._known_rates(model, _core.Gguf(str(MODEL)), {})  # type: ignore[arg-type]
    assert set(found) == {"cpu", "cuda:0"}
    assert asked == [(3, measures)]
