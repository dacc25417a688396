"""`tune probe` prints and keeps what it measured."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING

from dyno import _core, _rates
from dyno_tuner.cli.commands import app
from dyno_tuner.measure.cpu_monitor import CpuWatch, Load
from typer.testing import CliRunner

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pytest

BUSY = "other programs use 1.5 of 2 cores (python (7))"
SOME = {"memory_gbps": 12.0, "weights_gbps": 9.0, "gflops_one": 3.0, "gflops_many": 40.0, "launch_us": 0.1}


def loaded(monkeypatch: pytest.MonkeyPatch, disturbed: str) -> None:
    """Let a program disturb the measurement, or none."""

    @contextlib.contextmanager
    def window(_: CpuWatch) -> Iterator[Load]:
        yield Load(needed=2.0)

    monkeypatch.setattr(CpuWatch, "window", window)
    monkeypatch.setattr(Load, "disturbed", disturbed)


def test_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded(monkeypatch, "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(_rates, "measure", lambda name, threads: dict(SOME))
    done = CliRunner().invoke(app, ["probe", "--device", "cpu"])
    assert done.exit_code == 0
    assert "memory_gbps         12.00  GB/s of the device's memory" in done.output
    assert _rates.remembered(_core.cpu_info()) == SOME
    other = tmp_path / "other"
    monkeypatch.setenv("XDG_CACHE_HOME", str(other))
    done = CliRunner().invoke(app, ["probe", "--device", "cpu", "--no-keep", "--json"])
    assert json.loads(done.stdout) == {"cpu": SOME}
    assert not other.exists()


def test_rates_of_a_busy_machine_replace_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def probed(memory: float, disturbed: str, *words: str) -> str:
        loaded(monkeypatch, disturbed)
        monkeypatch.setattr(_rates, "measure", lambda name, threads: {**SOME, "memory_gbps": memory})
        done = CliRunner().invoke(app, ["probe", "--device", "cpu", "--json", *words])
        assert json.loads(done.stdout)["cpu"]["memory_gbps"] == memory
        return done.stderr

    def known() -> float:
        return _rates.remembered(_core.cpu_info())["memory_gbps"]

    said = probed(3.0, BUSY)  # the first rates are better than assumed ones
    assert f"warning: {BUSY}, so these rates may be too low; run tune" in said
    assert known() == 3.0
    assert "warning" not in probed(12.0, "")
    assert known() == 12.0
    assert "may be too low; the stored rates of cpu stay; run tune probe again" in probed(4.0, BUSY)
    assert known() == 12.0
    assert "stay" not in probed(5.0, BUSY, "--keep")
    assert known() == 5.0


def test_a_virtual_device_has_no_rates_of_its_own() -> None:
    runner = CliRunner()
    assert "virtual" not in runner.invoke(app, ["probe", "--help"]).output
    done = runner.invoke(app, ["probe", "--device", "cpu:1"])
    assert done.exit_code == 1
    assert "'cpu:1' is a virtual device" in str(done.exception or done.output)
    assert "use --device cpu" in str(done.exception or done.output)
