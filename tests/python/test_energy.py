"""Counters of energy, on folders and libraries of the tests' own."""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING, Any

import pytest
from dyno._energy import Counters

if TYPE_CHECKING:
    from pathlib import Path


def domain(folder: Path, name: str, title: str, joules: float, most: float = 262_143.0) -> Path:
    place = folder / name
    place.mkdir(parents=True)
    (place / "name").write_text(f"{title}\n")
    (place / "energy_uj").write_text(f"{joules * 1e6:.0f}\n")
    (place / "max_energy_range_uj").write_text(f"{most * 1e6:.0f}\n")
    return place / "energy_uj"


def test_packages_and_their_memory_are_added_and_cores_are_not_counted_twice(tmp_path: Path) -> None:
    one = domain(tmp_path, "intel-rapl:0", "package-0", 100)
    two = domain(tmp_path, "intel-rapl:1", "package-1", 50)
    memory = domain(tmp_path, "intel-rapl:0:1", "dram", 10)
    cores = domain(tmp_path, "intel-rapl:0:0", "core", 70)
    domain(tmp_path, "intel-rapl-mmio:0", "package-0", 100)
    counters = Counters(powercap=str(tmp_path))
    assert counters.sources == ["cpu"]
    before = counters.read()
    for path, joules in ((one, 103), (two, 54), (memory, 11), (cores, 999)):
        path.write_text(f"{joules * 1_000_000}\n")
    assert counters.spent(before, counters.read()) == {"cpu": pytest.approx(3 + 4 + 1)}


def test_a_counter_that_starts_again_is_made_whole(tmp_path: Path) -> None:
    path = domain(tmp_path, "intel-rapl:0", "package-0", 995, most=1000)
    counters = Counters(powercap=str(tmp_path))
    before = counters.read()
    path.write_text("7000000\n")
    assert counters.spent(before, counters.read()) == {"cpu": pytest.approx(12)}


def test_a_counter_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for folder, said in ((tmp_path / "absent", "No such file"), (tmp_path, "no RAPL domain")):
        counters = Counters(powercap=str(folder))
        assert counters.sources == []
        assert said in counters.missing["cpu"]
        assert counters.spent(counters.read(), counters.read()) == {}
    domain(tmp_path, "intel-rapl:0", "package-0", 1).unlink()
    assert "energy_uj" not in Counters(powercap=str(tmp_path)).sources
    assert "No such file" in Counters(powercap=str(tmp_path)).missing["cpu"]


class Library(types.ModuleType):
    """NVML with one card, whose energy grows with every question."""

    class NVMLError(Exception):
        """As in the real one."""

    def __init__(self, supported: bool) -> None:
        super().__init__("pynvml")
        self.supported, self.millijoules = supported, 5000

    def nvmlInit(self) -> None:
        """Nothing to load."""

    def nvmlDeviceGetHandleByPciBusId(self, bus: str) -> str:
        return bus

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        if not self.supported:
            raise self.NVMLError("Not Supported")
        self.millijoules += 1500
        return self.millijoules


@pytest.mark.parametrize("supported", [True, False])
def test_a_gpu_tells_its_own_energy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, supported: bool) -> None:
    library: Any = Library(supported)
    monkeypatch.setitem(sys.modules, "pynvml", library)
    counters = Counters("0000:01:00.0", str(tmp_path))
    if supported:
        assert counters.sources == ["gpu"]
        assert counters.spent(counters.read(), counters.read()) == {"gpu": pytest.approx(1.5)}
        library.supported = False
        with pytest.raises(OSError, match="NVML: Not Supported"):
            counters.read()
    else:
        assert counters.sources == []
        assert counters.missing["gpu"] == "NVML: Not Supported"


def test_bench_shows_energy_where_it_can_be_read(
    tmp_path: Path, trained_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dyno import _energy, bench
    from dyno._bench_formats import as_markdown, record
    from dyno.bench import cases, machine_facts, model_facts

    monkeypatch.setattr(_energy, "POWERCAP", str(tmp_path))
    path = domain(tmp_path, "intel-rapl:0", "package-0", 0)
    grid = cases([16], [], [], [0], [512], {})

    once = bench._once

    def draining(*arguments: Any) -> int:
        """A run during which the package uses two joules."""
        path.write_text(f"{int(path.read_text()) + 2_000_000}\n")
        return once(*arguments)

    monkeypatch.setattr(bench, "_once", draining)

    def rows() -> list[dict[str, Any]]:
        found = bench.run(str(trained_model), grid, repetitions=3, device="cpu", profile=None)
        return [record(r, machine_facts("cpu"), model_facts(str(trained_model))) for r in found]

    (drained,) = rows()
    told = drained["energy"]["cpu"]
    assert told["joules_per_token"] == pytest.approx(2 / 16)
    assert told["watts"] == pytest.approx(2 * 3 / (sum(drained["samples_ns"]) / 1e9))
    assert "CPU J/t" in as_markdown([drained])
    monkeypatch.setattr(_energy, "POWERCAP", str(tmp_path / "absent"))
    (unknown,) = rows()
    assert unknown["energy"] == {}
    assert "J/t" not in as_markdown([unknown])
    table = as_markdown([drained, unknown]).splitlines()
    assert len({line.count("|") for line in table}) == 1
