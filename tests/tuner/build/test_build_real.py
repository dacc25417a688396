"""`tune build` on this project itself: three builds of the CPU engine by pip, and real rounds."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dyno import _core
from dyno_tuner.build.commands import tool

ROOT = Path(__file__).resolve().parents[3]
TOOLS = all(importlib.util.find_spec(name) for name in ("scikit_build_core", "nanobind")) and tool("ninja")


@pytest.mark.builds
@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.skipif(not TOOLS, reason="needs scikit-build-core, nanobind and ninja, all in the test extra")
def test_two_switches_of_the_cpu_engine(tmp_path: Path, trained_model: Path) -> None:
    """Warnings as errors change no code. A call at each entry of a function makes every token slower.

    Little is optimised and the instruction set is one, so that three builds take few minutes.
    """
    here = Path(str(_core.__file__))
    before = hashlib.sha256(here.read_bytes()).hexdigest()
    words = [
        "build", "--model", str(trained_model), "--device", "cpu", "--source", str(ROOT),
        "--cache", str(tmp_path),
        "-D", "GGML_NATIVE=ON", "-D", "CMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG", "--switch", "DYNO_WERROR=ON",
        "--switch", "CMAKE_CXX_FLAGS=-finstrument-functions", "--rounds", "2", "--workload", "pp=64,tg=16",
        "--no-retune", "--force", "--json",
    ]  # fmt: skip

    def run() -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-m", "dyno_tuner.cli", *words],
            capture_output=True,
            text=True,
            timeout=7200,  # a machine with other work on it takes most of an hour
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        told: dict[str, Any] = json.loads(done.stdout)
        return told

    told = run()
    werror, slower = told["verdicts"]["DYNO_WERROR"], told["verdicts"]["CMAKE_CXX_FLAGS"]
    assert werror["verdict"] == "inert", werror
    assert "is that of the default build, so nothing was measured" in werror["reason"]
    assert werror["ratio"] == {}
    assert slower["verdict"] == "default", slower
    assert slower["ratio"]["tg16"] < 1
    assert slower["mean_kld"]["variant"] < 0.01
    for row in (told["default"], slower):
        assert row["seconds"] > 1
        assert row["link_mib"] > 10
        assert row["bytes"] > 100_000
        assert row["load_seconds"] > 0
        assert row["host_mib"] > 10
    command = (
        "pip install . -C cmake.define.GGML_NATIVE=ON -C 'cmake.define.CMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG'"
    )
    assert told["command"] == command
    assert hashlib.sha256(here.read_bytes()).hexdigest() == before
    again = run()
    assert again["default"]["seconds"] == told["default"]["seconds"], "the second run builds nothing"
