"""Rows of halves as one launch leaves them for the next one's tensor cores, see csrc/ops/half_tiles.h."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ops.cases import EXACT
from ops.harness import expect_close, expect_zeros

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCK = 256
ROW_BYTES = 548
"""Of a row in a block: halves, their sums, a scale."""


class HalfTiles(NamedTuple):
    """The parts of such tiles, of all rows that exist."""

    halves: NDArray[np.float64]  # [rows, blocks, 256], without scale
    sums: NDArray[np.float64]  # [rows, blocks, 8], of every 32 halves
    scales: NDArray[np.float64]  # [rows, blocks]

    @property
    def values(self) -> NDArray[np.float64]:
        """The rows that they mean, [rows, k]."""
        scaled = self.halves * self.scales[..., None]
        return scaled.reshape(len(scaled), -1)


def size(rows: int, k: int, height: int) -> int:
    """Bytes of the tiles."""
    return -(-rows // height) * (k // BLOCK) * height * ROW_BYTES


def _places(rows: int, k: int, height: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Where halves, sums, what sums leave over and scales stand: offsets in bytes of their axes."""
    row, block = np.arange(rows)[:, None, None], np.arange(k // BLOCK)[None, :, None]
    base = (row // height * (k // BLOCK) + block) * (height * ROW_BYTES)
    r, at, part = row % height, np.arange(BLOCK)[None, None], np.arange(8)[None, None]
    swizzled = (at % 64 // 8) ^ (r % 8)
    halves = base + (at // 64 * height + r) * 128 + swizzled * 16 + at % 8 * 2
    sums = base + 512 * height + r // 8 * 256 + r % 8 * 16 + part * 2
    return halves, sums, sums + 128, (base + 544 * height + r * 4)[..., 0]


def _get(data: NDArray[np.uint8], places: NDArray[Any], dtype: type) -> NDArray[Any]:
    width = np.dtype(dtype).itemsize
    return np.ascontiguousarray(data[places[..., None] + np.arange(width)]).view(dtype)[..., 0]


def _put(data: NDArray[np.uint8], places: NDArray[Any], values: NDArray[Any]) -> None:
    width = values.dtype.itemsize
    data[places[..., None] + np.arange(width)] = np.ascontiguousarray(values)[..., None].view(np.uint8)


def decode(data: NDArray[np.uint8], rows: int, k: int, height: int) -> HalfTiles:
    """What stands in the tiles."""
    halves, sums, rests, scales = _places(rows, k, height)
    return HalfTiles(
        _get(data, halves, np.float16).astype(np.float64),
        _get(data, sums, np.float16).astype(np.float64) + _get(data, rests, np.float16).astype(np.float64),
        _get(data, scales, np.float32).astype(np.float64),
    )


def encode(x: NDArray[Any], height: int) -> NDArray[np.uint8]:
    """Tiles of rows. Places of rows that do not exist hold what is no number."""
    rows, k = x.shape
    data = np.full(size(rows, k, height), 0xFF, np.uint8)
    blocks = np.asarray(x, np.float64).reshape(rows, -1, BLOCK)
    most = np.abs(blocks).max(axis=-1)
    scales = np.where(most > 0, np.exp2(np.floor(np.log2(np.where(most > 0, most, 1))) - 9), 1)
    halves = (blocks / scales[..., None]).astype(np.float16)
    sums = halves.astype(np.float64).reshape(rows, -1, 8, 32).sum(axis=-1)
    high = sums.astype(np.float16)
    places = _places(rows, k, height)
    low = (sums - high).astype(np.float16)
    for place, values in zip(places, (halves, high, low, scales.astype(np.float32)), strict=True):
        _put(data, place, values)
    return data


def check(data: NDArray[np.uint8], want: NDArray[np.float64], height: int) -> None:
    """That tiles hold these rows, with scales that fit and the sums of their halves."""
    got = decode(data, *want.shape, height)
    expect_close(got.values, want, EXACT)
    expect_close(got.sums, got.halves.reshape(*got.sums.shape, 32).sum(axis=-1), EXACT)
    largest = np.abs(got.halves).max(axis=-1)
    # The largest value of a block may be rounded up to 1024.
    expect_zeros((largest < 512) | (largest > 1024), "blocks whose scale does not fit their values")
