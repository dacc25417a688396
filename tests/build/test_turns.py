"""A list that takes turns between a GPU and the CPU: in which order its backends get it, without a GPU."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from one_unit import one_unit

if TYPE_CHECKING:
    from build.conftest import Configure

ROOT = Path(__file__).resolve().parents[2]


def test_the_next_piece_of_the_gpu_is_started_before_the_turn(
    tmp_path: Path, compiler: str, configure: Configure
) -> None:
    program = tmp_path / "turns"
    generated = configure(GGML_CUDA="OFF").folder / "generated"
    names = ("segment_executor", "weight_stream", "expert_places")
    parts = [ROOT / "csrc" / "runtime" / f"{name}.cpp" for name in names]
    sources = [ROOT / "tests" / "build" / "turns.cpp", *parts]
    command = [
        compiler, "-std=c++20", "-O0", "-pthread", f"-I{ROOT / 'csrc'}", f"-I{generated}",
        *one_unit(tmp_path, sources), "-o", str(program),
    ]  # fmt: skip
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout
