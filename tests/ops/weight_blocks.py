"""Blocks of weight types: sizes and values, by the public `gguf` package; of forms of a GPU from here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gguf
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

GPU_FORMS = ("q8_16", "q4_16")
"""Types that other ones become on their way to a GPU, and that no file holds."""


def geometry(dtype: str) -> tuple[int, int]:
    """Elements and bytes of a block."""
    if dtype == "q8_16":
        return 64, 72
    if dtype == "q4_16":
        return 256, 168
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[dtype.upper()]]
    return int(elements), int(size)


def dequantize(dtype: str, rows: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Values in float32 of rows of blocks, [rows, bytes] to [rows, elements]."""
    if dtype == "q4_16":
        return _table_values(np.ascontiguousarray(rows).reshape(-1, 168)).reshape(len(rows), -1)
    if dtype != "q8_16":
        values: NDArray[np.float32] = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[dtype.upper()])
        return values
    blocks = np.ascontiguousarray(rows).reshape(-1, 72)
    d = blocks[:, :4].copy().view(np.float32)
    scales = d * blocks[:, 4:8].view(np.int8)
    codes = blocks[:, 8:].view(np.int8).reshape(-1, 4, 16)
    return (scales[:, :, None] * codes).reshape(len(rows), -1).astype(np.float32)


def _table_values(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    d = blocks[:, :4].copy().view(np.float32)
    bytes_of_scales = blocks[:, 4:20].astype(np.int32)
    table, bias = blocks[:, 20:36].view(np.int8).astype(np.int32), blocks[:, 36:37].astype(np.int32)
    shift = blocks[:, 37:38].view(np.int8).astype(np.int32)
    scales = d * ((bytes_of_scales & 254) - bias).astype(np.float32)
    halves = blocks[:, 40:].reshape(-1, 8, 1, 16)
    codes = np.concatenate([halves & 15, halves >> 4], axis=2).reshape(-1, 256).astype(np.int64)
    values = np.take_along_axis(table, codes, axis=1).reshape(-1, 16, 16)
    values = values + ((bytes_of_scales & 1) * shift)[:, :, None]
    return (scales[:, :, None] * values.astype(np.float32)).astype(np.float32).reshape(-1, 256)


def random_scales(
    rng: np.random.Generator, dtype: str, blocks: NDArray[np.uint8], least: float, most: float
) -> None:
    """Ordinary factors of either sign into blocks [n, bytes] of a form of a GPU."""
    assert dtype in GPU_FORMS
    if dtype == "q4_16":  # the table, the bias and the shift are one for a matrix
        blocks[:, 20:36] = blocks[0, 20:36]
        blocks[:, 36] = rng.choice((127, 128))
        blocks[:, 37] = np.int8(rng.integers(-5, 6)).view(np.uint8)
        table = blocks[:, 20:36].view(np.int8)
        # Values with their shift are signed bytes. Those of the first half are below zero.
        table[:] = np.minimum(np.abs(table.astype(np.int32)), 122)
        table[:, :8] = -np.maximum(table[:, :8], 1)
    d = rng.uniform(least, most, len(blocks)) * rng.choice([-1, 1], len(blocks))
    blocks[:, :4] = d.astype(np.float32).reshape(-1, 1).view(np.uint8)
