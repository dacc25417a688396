"""Attention of batched decode leaves no thread of a large CPU idle, by counts of its work."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [ROOT / "tests/build/decode_cuts.cpp", ROOT / "csrc/ops/attention/decode_cut.cpp"]


def test_cuts_of_batched_decode(tmp_path: Path, compiler: str) -> None:
    """Rounds of 16 items for 64 threads made attention of 16 texts take 2.7 times as long."""
    program = tmp_path / "decode_cuts"
    command = [
        compiler, "-std=c++20", "-O1", f"-I{ROOT / 'csrc'}", *map(str, SOURCES), "-o", str(program),
    ]  # fmt: skip
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout
