"""AddressSanitizer sees accesses past a tensor, a layer of the cache or a thread's scratch."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [ROOT / "tests" / "fuzz" / "memory_overruns.cpp", ROOT / "csrc" / "runtime" / "host_buffer.cpp"]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory, compiler: str) -> Path:
    """The overruns, under the sanitizer."""
    out = tmp_path_factory.mktemp("overruns") / "overruns"
    command = [
        compiler,
        "-std=c++20",
        "-fsanitize=address",
        f"-I{ROOT / 'csrc'}",
        *map(str, SOURCES),
        "-o",
        str(out),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0 and ("asan" in done.stderr or "sanitize" in done.stderr):
        pytest.skip(f"{compiler} has no AddressSanitizer runtime")
    assert done.returncode == 0, done.stderr
    return out


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("ASAN_OPTIONS", "LD_PRELOAD")}
    return subprocess.run(
        [str(program), *arguments], capture_output=True, text=True, check=False, env=environment
    )


def test_every_overrun_is_seen(program: Path) -> None:
    inside = run(program)
    assert inside.returncode == 0, inside.stderr
    count = int(inside.stdout.split()[0])
    assert count == 4
    for number in range(1, count + 1):
        done = run(program, str(number))
        assert done.returncode != 0, f"overrun {number} was not seen"
        assert "ERROR: AddressSanitizer" in done.stderr
