"""`tune probe` prints and keeps what it measured."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from dyno import _core, _rates
from dyno_tuner.cli.commands import app
from typer.testing import CliRunner

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

SOME = {"memory_gbps": 12.0, "weights_gbps": 9.0, "gflops_one": 3.0, "gflops_many": 40.0, "launch_us": 0.1}


def test_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_virtual_device_has_no_rates_of_its_own() -> None:
    runner = CliRunner()
    assert "virtual" not in runner.invoke(app, ["probe", "--help"]).output
    done = runner.invoke(app, ["probe", "--device", "cpu:1"])
    assert done.exit_code == 1
    assert "'cpu:1' is a virtual device" in str(done.exception or done.output)
    assert "use --device cpu" in str(done.exception or done.output)
