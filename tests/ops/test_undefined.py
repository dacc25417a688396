"""Vector functions under the undefined-behaviour sanitizer: NaN, infinities and what lies between."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "csrc"

EXP = """
#define DYNO_KERNEL_NAMESPACE kernels
#include "ops/simd.h"
#include <bit>
#include <cmath>
#include <cstdio>
#include <initializer_list>
int main() {
  using namespace kernels;
  for (const float x : {std::bit_cast<float>(0x7fc0007fu),
                       std::bit_cast<float>(0x7fc000ffu), INFINITY, -INFINITY, 88.5f, -87.5f, 0.0f}) {
    const vf e = kernels::exp(broadcast(x));
    for (int i = 0; i < kLanes; ++i) std::printf("%g ", std::fabs(double{e[i]}));
  }
  for (float x = -86.9f; x < 88.0f; x += 0.37f) {
    if (std::fabs(kernels::exp(broadcast(x))[0] / std::exp(double{x}) - 1) > 1.3e-7) return 1;
  }
}
"""
EXP2I = """
#define DYNO_KERNEL_NAMESPACE kernels
#include <cstdint>
#include <cstring>
#include "ops/matmul/simd_portable.h"
#include <cstdio>
#include <initializer_list>
int main() {
  kernels::F n;
  for (const float x : {NAN, INFINITY, -INFINITY, 3e9f, -3e9f}) {
    for (float& lane : n.v) lane = x;
    if (kernels::f_exp2i(n).v[3] != 1.0f) return 1;
  }
  for (int whole = -126; whole <= 127; ++whole) {
    for (float& lane : n.v) lane = static_cast<float>(whole);
    if (kernels::f_exp2i(n).v[5] != std::ldexp(1.0f, whole)) return 2;
  }
}
"""


def run(tmp_path: Path, text: str, *flags: str) -> str:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler here")
    source, program = tmp_path / "values.cpp", tmp_path / "values"
    source.write_text(text)
    checks = "-fsanitize=undefined,float-cast-overflow"
    build = [compiler, "-std=c++20", "-O1", checks, "-fno-sanitize-recover=all", *flags, "-w", f"-I{SOURCE}"]
    subprocess.run([*build, source, "-o", program], check=True, timeout=300)
    done = subprocess.run([program], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr or f"exit status {done.returncode}"
    return done.stdout


def test_exp_of_what_is_not_finite(tmp_path: Path) -> None:
    seven = run(tmp_path, EXP).split()
    lanes = len(seven) // 7
    assert seven[: 2 * lanes] == ["nan"] * 2 * lanes
    assert seven[3 * lanes : 4 * lanes] == ["0"] * lanes
    assert seven[2 * lanes] == seven[4 * lanes]  # infinity and 88.5 stay at e^88
    assert seven[5 * lanes :] == ["0"] * lanes + ["1"] * lanes


def test_a_power_of_two_of_what_is_not_finite(tmp_path: Path) -> None:
    run(tmp_path, EXP2I)
