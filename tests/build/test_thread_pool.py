"""The thread pool computes each part once, wakes its threads, passes exceptions on, and ends."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from one_unit import one_unit

ROOT = Path(__file__).resolve().parents[2]
NUMA = ("allowed_cpus", "numa_copies", "numa_memory", "numa_topology")
CORE = ("thread_pool", *NUMA, "control_groups", "text")
SOURCES = [ROOT / "tests/build/thread_pool.cpp", *(ROOT / "csrc/core" / f"{name}.cpp" for name in CORE)]
NO_RUNTIME = ("cannot find", "unrecognized", "unsupported")  # of linkers and compilers without the sanitizer
NO_SHADOW = "unexpected memory mapping"  # a kernel that randomizes more address bits than the runtime expects


@pytest.mark.parametrize("sanitizer", ["", "-fsanitize=thread"])
def test_properties_of_the_pool(tmp_path: Path, compiler: str, sanitizer: str) -> None:
    program = tmp_path / "thread_pool"
    command = [
        compiler, "-std=c++20", "-O1", "-g1", "-pthread", f"-I{ROOT / 'csrc'}", *sanitizer.split(),
        *one_unit(tmp_path, SOURCES), "-o", str(program),
    ]  # fmt: skip
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if sanitizer and any(reason in built.stderr for reason in NO_RUNTIME):
        pytest.skip(f"{compiler} has no runtime for {sanitizer}")
    assert built.returncode == 0, built.stderr
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False, timeout=900)
    if NO_SHADOW in done.stderr:
        pytest.skip(f"{sanitizer} does not run on this kernel")
    assert done.returncode == 0, done.stdout + done.stderr
