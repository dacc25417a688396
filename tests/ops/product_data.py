"""Weights and activations of the cases that multiply.

Weights are random blocks of every type with ordinary scales; what they mean is left to the public `gguf`
package. Activations in q8 are quantised here, from the description in csrc/ops/copy/act_q8.h.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
from dyno import _core

from ops import reference, rounding
from ops.cases import F32, normal
from ops.weight_blocks import GPU_FORMS, dequantize, geometry, random_scales

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

FLOATS = ("f32", "f16", "bf16")
HALVES = 2e-7  # NMSE of rounding to halves, 4.3e-8 as tests/ops/test_rounding.py says, and a margin
# Bytes of a block where its f16 scales lie; mxfp4 has an exponent byte instead.
SCALES: dict[str, tuple[int, ...]] = {
    "q4_0": (0,),
    "q4_1": (0, 2),
    "q5_0": (0,),
    "q5_1": (0, 2),
    "q8_0": (0,),
    "q2_k": (80, 82),
    "q3_k": (108,),
    "q4_k": (0, 2),
    "q5_k": (0, 2),
    "q6_k": (208,),
    "iq4_nl": (0,),
    "iq4_xs": (0,),
    "mxfp4": (),
}
ON_GPU = (*FLOATS[1:], *SCALES, *GPU_FORMS)
"""Types with a layout that the kernels of a GPU read."""


class Weights:
    """A stack of random matrices [count, n, k] of one type: bytes in a layout, and values in float64."""

    def __init__(self, rng: np.random.Generator, dtype: str, layout: str, count: int, n: int, k: int) -> None:
        if dtype in FLOATS:
            qtype = gguf.GGMLQuantizationType[dtype.upper()]
            plain = gguf.quants.quantize(normal(rng, count * n, k), qtype).view(np.uint8)
        else:
            elements, size = geometry(dtype)
            blocks = rng.integers(0, 256, (count * n * (k // elements), size)).astype(np.uint8)
            if dtype in GPU_FORMS:
                random_scales(rng, dtype, blocks, 1e-4, 1e-3)
            for at in SCALES.get(dtype, ()):
                scale = (rng.uniform(0.01, 0.1, len(blocks)) * rng.choice([-1, 1], len(blocks))).astype(
                    np.float16
                )
                blocks[:, at : at + 2] = scale.reshape(-1, 1).view(np.uint8)
            if dtype == "mxfp4":
                blocks[:, 0] = rng.integers(120, 126, len(blocks))
            plain = blocks.reshape(count * n, -1)
        wanted = plain.view(F32) if dtype == "f32" else plain
        values = dequantize(dtype, wanted)
        exact = values.reshape(count, n, k).astype(np.float64)
        self.values = rounding.weights(dtype, plain.view(np.uint8), exact)
        matrices = np.ascontiguousarray(plain).reshape(count, -1)
        if layout != "plain":
            repacked = [_core.ops.repack(dtype, matrix, n, k, layout=layout) for matrix in matrices]
            matrices = np.stack(repacked)
        self.bytes = matrices.reshape(-1)


def activations(
    rng: np.random.Generator, act: str, rows: int, k: int
) -> tuple[NDArray[Any], NDArray[np.float64]]:
    """Rows as matmul takes them, and the values that they mean [rows, k]."""
    x = normal(rng, rows, k)
    if act == "f32":
        return x, x.astype(np.float64)
    blocks = x.reshape(rows, k // 32, 32)
    d = (np.abs(blocks).max(axis=-1) / F32(127)).astype(F32)
    q = np.rint(blocks / d[..., None]).astype(np.int8)
    sums = q.reshape(rows, k // 16, 16).sum(axis=-1).astype(np.int16)
    packed = np.zeros((rows, _core.ops.act_q8_row_bytes(k)), np.uint8)
    packed[:, :k] = q.reshape(rows, k).view(np.uint8)
    packed[:, k : k + k // 8] = d.view(np.uint8)
    packed[:, k + k // 8 : k + k // 4] = sums.view(np.uint8)
    return packed, (q * d[..., None].astype(np.float64)).reshape(rows, k)


def kinds() -> Iterator[tuple[str, str, str]]:
    """Every (type, layout, act) that has kernels."""
    for dtype in FLOATS:
        yield dtype, "plain", "f32"
    for dtype in SCALES:
        yield dtype, "plain", "q8"
        yield dtype, "x16", "q8"
    for dtype in ("q4_0", "q6_k"):
        yield dtype, "plain", "f32"
        yield dtype, "x16", "f32"


def normed(
    rng: np.random.Generator, x: NDArray[np.float64], *, weight: bool = True
) -> tuple[dict[str, Any], NDArray[np.float64]]:
    """Arguments of a norm inside of a product, and the rows that the product then sees."""
    args: dict[str, Any] = {"norm_eps": 1e-5}
    if weight:
        args["norm_weight"] = normal(rng, x.shape[-1])
    wide = args["norm_weight"].astype(np.float64) if weight else None
    return args, reference.rms_norm(x, wide, None, 1e-5)
