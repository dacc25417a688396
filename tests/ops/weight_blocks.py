"""Blocks of weight types: sizes and values, by the public `gguf` package; of forms of a GPU from here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gguf
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

GPU_FORMS = ("q8_16",)
"""Types that other ones become on their way to a GPU, and that no file holds."""


def geometry(dtype: str) -> tuple[int, int]:
    """Elements and bytes of a block."""
    if dtype == "q8_16":
        return 64, 72
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[dtype.upper()]]
    return int(elements), int(size)


def dequantize(dtype: str, rows: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Values in float32 of rows of blocks, [rows, bytes] to [rows, elements]."""
    if dtype != "q8_16":
        values: NDArray[np.float32] = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[dtype.upper()])
        return values
    blocks = np.ascontiguousarray(rows).reshape(-1, 72)
    d = blocks[:, :4].copy().view(np.float32)
    scales = d * blocks[:, 4:8].view(np.int8)
    codes = blocks[:, 8:].view(np.int8).reshape(-1, 4, 16)
    return (scales[:, :, None] * codes).reshape(len(rows), -1).astype(np.float32)


def random_scales(
    rng: np.random.Generator, dtype: str, blocks: NDArray[np.uint8], least: float, most: float
) -> None:
    """Ordinary factors of either sign into blocks [n, bytes] of a form of a GPU."""
    assert dtype == "q8_16"
    d = rng.uniform(least, most, len(blocks)) * rng.choice([-1, 1], len(blocks))
    blocks[:, :4] = d.astype(np.float32).reshape(-1, 1).view(np.uint8)
