"""Every CUDA candidate of the matrix products against float64, by the program check_products."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

TYPES = [
    "f32",
    "f16",
    "bf16",
    "q4_0",
    "q4_1",
    "q5_0",
    "q5_1",
    "q8_0",
    "q2_k",
    "q3_k",
    "q4_k",
    "q5_k",
    "q6_k",
    "iq4_nl",
    "iq4_xs",
    "mxfp4",
    "q8_16",
    "q4_16",
]


@pytest.fixture(scope="session")
def check_products() -> Path:
    """The program of a build with -DDYNO_BUILD_CUDA_CHECKS=ON; DYNO_CUDA_CHECKS names its folder."""
    folder = os.environ.get("DYNO_CUDA_CHECKS")
    if folder is None:
        pytest.skip("needs DYNO_CUDA_CHECKS=BUILD/tests/cuda of a build with -DDYNO_BUILD_CUDA_CHECKS=ON")
    return Path(folder) / "check_products"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES)
def test_every_candidate_matches_float64(check_products: Path, dtype: str) -> None:
    done = subprocess.run([check_products, dtype], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 faults" in done.stdout
