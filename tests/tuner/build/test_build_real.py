"""`tune build` on this project itself: builds of the CPU engine by pip, and real rounds."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dyno import _core
from dyno_tuner.build.commands import tool

ROOT = Path(__file__).resolve().parents[3]
TOOLS = all(importlib.util.find_spec(name) for name in ("scikit_build_core", "nanobind")) and tool("ninja")
SMALL = {
    "DYNO_CPU_KERNELS": "best",
    "CMAKE_UNITY_BUILD": "ON",
    "CMAKE_CXX_FLAGS_RELEASE": "-O1 -DNDEBUG",
}
"""One instruction set, several files in a unit and few optimisations: a build takes a quarter of the time."""
MEASURED = ("GGML_NATIVE", "GGML_LTO", "CMAKE_CXX_FLAGS_RELEASE")


def tune_build(model: Path, cache: Path, *switches: str) -> dict[str, Any]:
    """The result of `tune build` with two rounds of short work."""
    words = ["build", "--model", str(model), "--device", "cpu", "--source", str(ROOT), "--cache", str(cache)]
    words += [word for name, value in SMALL.items() for word in ("-D", f"{name}={value}")]
    words += [word for switch in switches for word in ("--switch", switch)]
    words += ["--rounds", "2", "--workload", "pp=64,tg=16", "--no-retune", "--force", "--json"]
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


@pytest.mark.builds
@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.skipif(not TOOLS, reason="needs scikit-build-core, nanobind and ninja, all in the test extra")
def test_switches_of_the_cpu_engine(tmp_path: Path, trained_model: Path) -> None:
    """The switches that every user of a CPU has: each gets a build, rounds and a verdict.

    Which one gains is up to the machine. A switch that CMake reads for CUDA alone changes no command here.
    GGML_NATIVE changes no code where the compiler does not know the CPU.
    """
    here = Path(str(_core.__file__))
    before = hashlib.sha256(here.read_bytes()).hexdigest()
    told = tune_build(trained_model, tmp_path, *MEASURED, "CMAKE_CXX_COMPILER", "DYNO_BUILD_LTO_CHECK=ON")
    verdicts = told["verdicts"]
    assert list(verdicts) == [*MEASURED, "CMAKE_CXX_COMPILER", "DYNO_BUILD_LTO_CHECK"]
    inert = verdicts["DYNO_BUILD_LTO_CHECK"]
    assert inert["verdict"] == "inert", inert
    assert inert["reason"] == "every command is that of the default build, so nothing was built"
    assert inert["ratio"] == {}
    tried = [verdicts[name] for name in MEASURED]
    if (native := verdicts["GGML_NATIVE"])["verdict"] == "inert":
        count = re.fullmatch(
            r"the code of all (\d+) objects is that of the default build, so nothing was measured",
            native["reason"],
        )
        assert count, native
        assert int(count[1]) > 50
        assert native["seconds"] > 1, "it was built, and its objects were compared"
        assert native["ratio"] == {}
        tried.remove(native)
    if shutil.which("g++") and shutil.which("clang++"):
        tried.append(verdicts["CMAKE_CXX_COMPILER"])
    else:
        assert verdicts["CMAKE_CXX_COMPILER"]["verdict"] == "refused"
        assert "no other C++ compiler" in verdicts["CMAKE_CXX_COMPILER"]["reason"]
    for row in tried:
        assert row["tried"], row
        assert row["verdict"] in ("on", "default"), row
        assert set(row["ratio"]) == set(row["ci95"]) == {"pp64", "tg16"}
        for name, ratio in row["ratio"].items():
            low, high = row["ci95"][name]  # of two rounds beside other load, it can begin at 0.0000
            assert 0 <= low <= ratio <= high
            assert ratio > 0
        assert row["rounds"] == 2
        assert row["mean_kld"]["variant"] < 0.01
    for row in (told["default"], *tried):
        assert row["seconds"] > 1
        assert row["link_mib"] > 10
        assert row["bytes"] > 100_000
        assert row["load_seconds"] > 0
        assert row["host_mib"] > 10
    chosen = told["chosen"]["defines"] if told["chosen"] else {}
    assert set(chosen) == {name for name, row in verdicts.items() if row["verdict"] == "on"}
    defines = [f"-C {shlex.quote(f'cmake.define.{n}={v}')}" for n, v in {**SMALL, **chosen}.items()]
    assert told["command"] == " ".join(["pip install .", *defines])
    assert hashlib.sha256(here.read_bytes()).hexdigest() == before, "no build touches this environment"

    again = tune_build(trained_model, tmp_path, "CMAKE_CXX_FLAGS_RELEASE")
    assert again["default"]["seconds"] == told["default"]["seconds"], "the second run builds nothing"
    row = again["verdicts"]["CMAKE_CXX_FLAGS_RELEASE"]
    assert row["seconds"] == verdicts["CMAKE_CXX_FLAGS_RELEASE"]["seconds"]
