"""What rows of a KV cache are, type by type: bytes from values and values from bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ops.cases import EXACT, F32

if TYPE_CHECKING:
    from numpy.typing import NDArray


def to_bf16(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to nearest even."""
    bits = x.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def to_cache(x: NDArray[np.float32], dtype: str) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    """Rows [..., n] as bytes [..., row_bytes] of a cache type, and the values that these bytes mean."""
    if dtype == "f32":
        return x.view(np.uint8), x.astype(np.float64)
    if dtype == "f16":
        half = x.astype(np.float16)
        return half.view(np.uint8), half.astype(np.float64)
    if dtype == "bf16":
        bits = to_bf16(x)
        return bits.view(np.uint8), (bits.astype(np.uint32) << 16).view(F32).astype(np.float64)
    assert dtype == "q8_0"
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    amax = np.abs(blocks).max(axis=-1, keepdims=True)
    inverse = np.divide(F32(127), amax, out=np.zeros_like(amax), where=amax > 0)
    q = np.rint(blocks.astype(np.float64) * inverse).astype(np.int8)
    d = (amax / F32(127)).astype(np.float16)
    packed = np.concatenate([d.view(np.uint8), q.view(np.uint8)], axis=-1)
    return packed.reshape(*x.shape[:-1], -1), (q * d.astype(np.float64)).reshape(x.shape)


# NMSE that the rounding of a cache type costs.
LOSS = {"f32": EXACT, "f16": 1e-6, "bf16": 1e-4, "q8_0": 1e-4}


def from_cache(packed: NDArray[np.uint8], dtype: str) -> NDArray[np.float64]:
    """The values of rows [..., row_bytes] of a cache type."""
    packed = np.ascontiguousarray(packed)
    if dtype == "f32":
        return packed.view(F32).astype(np.float64)
    if dtype == "f16":
        return packed.view(np.float16).astype(np.float64)
    if dtype == "bf16":
        return (packed.view(np.uint16).astype(np.uint32) << 16).view(F32).astype(np.float64)
    blocks = packed.reshape(*packed.shape[:-1], -1, 34)
    scale = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float64)
    return (blocks[..., 2:].view(np.int8) * scale).reshape(*packed.shape[:-1], -1)


REST_FACTOR = F32(2048)


def as_pairs(x: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Rows [..., n] as bytes [..., 4 n] of f16 pairs: the high parts, then the rests times REST_FACTOR."""
    high = x.astype(np.float16)
    rest = ((x - high.astype(F32)) * REST_FACTOR).astype(np.float16)
    return np.concatenate([high, rest], axis=-1).view(np.uint8)


def from_pairs(packed: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The values of rows [..., 4 n] of f16 pairs."""
    high, rest = np.split(np.ascontiguousarray(packed).view(np.float16).astype(F32), 2, axis=-1)
    return high + rest / REST_FACTOR
