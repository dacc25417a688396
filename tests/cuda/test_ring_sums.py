"""The end of a product whose blocks share k: they add their sums and write y.

It runs on the CPU, thread by thread, against float64 NumPy. The blocks of a cluster run as one.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from ops.harness import expect_close
from test_emulated import address, built, numbers, pointers

if TYPE_CHECKING:
    from numpy.typing import NDArray

F32 = np.float32


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return built(tmp_path_factory.mktemp("emulated"), "ring_sums")


# Rows, n, tokens and rows of w of a block, parts of k, gap between rows of y. Parts that do not divide the
# tokens leave blocks with unequal shares.
SHAPES = [
    (1, 21, 16, 64, 1, 0),
    (7, 150, 16, 256, 7, 3),
    (16, 64, 16, 128, 5, 0),
    (37, 70, 16, 64, 6, 2),
    (21, 150, 32, 128, 3, 0),
    (32, 132, 32, 128, 7, 4),
    (45, 200, 32, 64, 5, 1),
    (32, 64, 32, 64, 8, 0),
    (64, 150, 64, 128, 6, 0),
    (67, 90, 64, 64, 7, 2),
]


def silu(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return x / (1 + np.exp(-x))


@pytest.mark.parametrize("scaled", [False, True], ids=["tiles", "rows"])
@pytest.mark.parametrize("gated", [False, True], ids=["one", "gated"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_every_block_adds_its_share(library: ctypes.CDLL, shape: Any, gated: bool, scaled: bool) -> None:
    rows, n, tokens, rows_of_w, parts, gap = shape
    rng = np.random.default_rng(rows * n + parts)
    sums = rng.standard_normal((parts, rows, 1 + gated, n)).astype(F32)
    args: dict[str, Any] = {"sums": sums, "bias": rng.standard_normal(n).astype(F32)}
    want = sums.astype(np.float64).sum(axis=0)
    if scaled:
        args["scales"] = (2.0 ** rng.integers(-3, 4, rows)).astype(F32)
        want *= args["scales"][:, None, None]
    want[:, 0] += args["bias"]
    if gated:
        y_wanted = silu(want[:, 0]) * want[:, 1]
    else:
        args["residual"] = rng.standard_normal((rows, n + gap)).astype(F32)
        y_wanted = args["residual"][:, :n] + 0.5 * want[:, 0]
    found = []
    for backwards in (0, 1):
        y = np.full((rows, n + gap), 77, F32)
        library.run_backwards(backwards)
        try:
            made = library.add_sums(
                numbers(rows, n, tokens, rows_of_w, parts, n + gap, gated, scaled),
                pointers(args, ("sums", "scales", "bias", "residual")),
                ctypes.c_float(0.5),
                address(y),
            )
        finally:
            library.run_backwards(0)
        assert made == 1
        assert (y[:, n:] == 77).all(), "the gap between rows was written"
        found.append(y)
    np.testing.assert_array_equal(found[1], found[0], err_msg="a barrier is missing")
    expect_close(found[0][:, :n], y_wanted, 1e-12)
