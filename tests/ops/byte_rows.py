"""Rows as pairs of bytes, which one launch leaves for the next one's tensor cores, see
csrc/ops/matmul/byte_rows.h."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

UNIT = 128


def encode(x: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Byte rows of x [m, k], finite: [m, bytes of a row]."""
    m, k = x.shape
    units = -(-k // (2 * UNIT)) * 2
    values = np.zeros((m, units, UNIT), np.float32)
    values.reshape(m, -1)[:, :k] = x
    largest = np.abs(values).max(axis=2).view(np.uint32)
    exponents = np.maximum((largest + 0x10100) >> 23, 15) - 14
    scales = (exponents << 23).astype(np.uint32).view(np.float32)
    numbers = np.rint(values / scales[..., None]).astype(np.int64)
    assert np.abs(numbers).max(initial=0) < 2**15 - 128
    high = (numbers + 128) >> 8
    low = numbers - 256 * high

    # Lane 8·r + 4·c + t has the 32 values with index r: of the bytes `high` (c = 0) or `low`, values 2·t,
    # 2·t + 8, 2·t + 1 and 2·t + 9 of both steps of 16.
    lanes = np.zeros((m, units, 4, 2, 4, 16), np.uint8)
    by_column = np.stack([high, low]).astype(np.int8).view(np.uint8).reshape(2, m, units, 4, 2, 16)
    for t in range(4):
        order = [2 * t, 2 * t + 8, 2 * t + 1, 2 * t + 9]
        words = by_column[..., order].reshape(2, m, units, 4, 8)  # both steps follow each other
        lanes[..., t, :8] = np.moveaxis(words, 0, 3)
    sums = numbers.reshape(m, units, 4, 2, 16).sum(axis=-1).astype(np.int32)
    of_32 = sums.sum(axis=-1, dtype=np.int32)  # [m, units, 4], of the lane's t
    lanes[..., 8:12] = np.ascontiguousarray(of_32).view(np.uint8).reshape(m, units, 1, 1, 4, 4)
    lanes[..., 12:16] = np.ascontiguousarray(scales).view(np.uint8).reshape(m, units, 1, 1, 1, 4)
    parts: list[NDArray[Any]] = [lanes.reshape(m, -1), sums.reshape(m, -1).view(np.uint8)]
    return np.concatenate(parts, axis=1)
