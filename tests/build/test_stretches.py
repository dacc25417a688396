"""Threads get contiguous stretches of weight rows, and those that are done help the others."""

from __future__ import annotations

import subprocess
from pathlib import Path

from one_unit import one_unit

ROOT = Path(__file__).resolve().parents[2]
NUMA = ("allowed_cpus", "numa_copies", "numa_memory", "numa_topology")
CORE = ("thread_pool", *NUMA, "control_groups", "text")
SOURCES = [ROOT / "tests/build/stretches.cpp", *(ROOT / "csrc/core" / f"{name}.cpp" for name in CORE)]


def test_stretches_of_items(tmp_path: Path, compiler: str) -> None:
    program = tmp_path / "stretches"
    command = [
        compiler, "-std=c++20", "-O1", "-pthread", f"-I{ROOT / 'csrc'}", *one_unit(tmp_path, SOURCES),
        "-o", str(program),
    ]  # fmt: skip
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout
