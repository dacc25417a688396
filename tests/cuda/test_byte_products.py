"""Products of bytes have instructions on each chip; without them, sums would stay zero."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NVCC = shutil.which("nvcc", path=os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin")))
KERNEL = """
#include "device/ptx.cuh"
__global__ void multiply(int32_t* out, const uint32_t* in) {
  int32_t c[2][4] = {};
  const uint32_t a[4] = {in[0], in[1], in[2], in[3]};
  dyno::device::mma_s8(c[0], a, in[4], in[5]);
  dyno::device::mma_u8s8(c[1], a, in[4], in[5]);
  for (int i = 0; i < 4; ++i) out[i] = c[0][i], out[4 + i] = c[1][i];
}
"""


@pytest.mark.skipif(NVCC is None, reason="no CUDA toolkit")
@pytest.mark.parametrize(
    ("chip", "shape", "count"), [(75, "m8n8k16", 4), (80, "m16n8k32", 1), (90, "m16n8k32", 1)]
)
def test_products_of_bytes_have_instructions(tmp_path: Path, chip: int, shape: str, count: int) -> None:
    source, ptx = tmp_path / "multiply.cu", tmp_path / "multiply.ptx"
    source.write_text(KERNEL)
    subprocess.run(
        [str(NVCC), "-std=c++20", f"-I{ROOT / 'csrc'}", f"-arch=compute_{chip}", "-ptx", source, "-o", ptx],
        check=True,
    )
    text = ptx.read_text()
    for types in ("s8.s8", "u8.s8"):
        assert text.count(f"mma.sync.aligned.{shape}.row.col.s32.{types}.s32") == count, types
