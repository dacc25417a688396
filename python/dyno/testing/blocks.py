"""The tensor types of the format, and blocks of random weights in each type that the engine supports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

# Id, elements and bytes of a block.
_TYPES: Final[dict[str, tuple[int, int, int]]] = {
    "f32": (0, 1, 4), "f16": (1, 1, 2), "q4_0": (2, 32, 18), "q4_1": (3, 32, 20), "q5_0": (6, 32, 22),
    "q5_1": (7, 32, 24), "q8_0": (8, 32, 34), "q8_1": (9, 32, 36), "q2_k": (10, 256, 84),
    "q3_k": (11, 256, 110), "q4_k": (12, 256, 144), "q5_k": (13, 256, 176), "q6_k": (14, 256, 210),
    "q8_k": (15, 256, 292), "iq2_xxs": (16, 256, 66), "iq2_xs": (17, 256, 74), "iq3_xxs": (18, 256, 98),
    "iq1_s": (19, 256, 50), "iq4_nl": (20, 32, 18), "iq3_s": (21, 256, 110), "iq2_s": (22, 256, 82),
    "iq4_xs": (23, 256, 136), "i8": (24, 1, 1), "i16": (25, 1, 2), "i32": (26, 1, 4), "i64": (27, 1, 8),
    "f64": (28, 1, 8), "iq1_m": (29, 256, 56), "bf16": (30, 1, 2), "tq1_0": (34, 256, 54),
    "tq2_0": (35, 256, 66), "mxfp4": (39, 32, 17), "nvfp4": (40, 64, 36), "q1_0": (41, 128, 18),
    "q2_0": (42, 64, 18),
}  # fmt: skip

# The types of ik_llama.cpp: the same numbers, and the bytes before the blocks of a row (a scale in float16 or
# float32).
_OF_IK: Final[dict[str, tuple[int, int, int, int]]] = {
    "q6_0": (133, 32, 26, 0), "iq1_bn": (134, 64, 13, 2), "iq2_bn": (135, 64, 16, 4),
    "iq2_k": (137, 256, 76, 0), "iq3_k": (138, 256, 110, 0), "iq4_k": (139, 256, 144, 0),
    "iq5_k": (140, 256, 176, 0),
    "iq6_k": (141, 256, 212, 0), "iq4_ks": (144, 256, 136, 4), "iq2_ks": (145, 256, 70, 2),
    "iq4_kss": (146, 256, 128, 4), "q8_kv": (151, 32, 32, 8), "iq5_ks": (152, 256, 168, 4),
    "iq2_kt": (153, 256, 68, 4), "iq3_kt": (154, 256, 100, 4), "iq4_kt": (155, 256, 128, 4),
    "iq3_ks": (156, 256, 102, 2), "iq2_kl": (157, 256, 86, 2), "iq1_kt": (158, 256, 56, 4),
}  # fmt: skip

TENSOR_TYPE_IDS: Final[dict[str, int]] = {name: row[0] for name, row in _TYPES.items()}
"""Tensor type ids of the format, by lower-case name."""

BLOCK_GEOMETRY: Final[dict[str, tuple[int, int]]] = {name: row[1:] for name, row in _TYPES.items()}
"""Elements and bytes of a block, by type name."""

# For random codes: byte offset of the scale `d`, byte offset of the minimum, the factor of d that makes the
# mean zero (None: the type has no minimum), and the standard deviation of the weights at d = 1.
_RANDOM: Final[dict[str, tuple[int, tuple[int, float] | None, float]]] = {
    "q4_0": (0, None, 4.64),
    "q4_1": (0, (2, -7.5), 4.61),
    "q5_0": (0, None, 9.25),
    "q5_1": (0, (2, -15.5), 9.23),
    "q8_0": (0, None, 73.9),
    "q2_k": (80, (82, 1.5), 14.0),
    "q3_k": (108, None, 43.4),
    "q4_k": (0, (2, 7.5), 258.0),
    "q5_k": (0, (2, 15.5), 527.0),
    "q6_k": (208, None, 1367.0),
    "iq4_nl": (0, None, 70.0),
    "iq4_xs": (0, None, 1290.0),
    "iq2_xxs": (0, None, 53.1),
    "iq2_xs": (0, None, 55.9),
    "iq2_s": (0, None, 56.3),
    "iq3_xxs": (0, None, 142.0),
    "iq3_s": (0, None, 140.0),
    "iq1_s": (0, None, 7.18),
    "tq1_0": (52, None, 0.817),
    "tq2_0": (64, None, 1.22),
    "q1_0": (0, None, 1.0),
    "q2_0": (0, None, 1.23),
    "q6_0": (0, None, 18.6),
    "iq2_k": (0, None, 85.4),
    "iq3_k": (0, None, 630.0),
    "iq4_k": (0, None, 1240.0),
    "iq5_k": (0, None, 1230.0),
    "iq6_k": (0, None, 4810.0),
}
# The same for types with a scale before the row, or at several places in a block.
_RANDOM_ELSEWHERE: Final[dict[str, float]] = {
    "iq1_m": 7.28,
    "nvfp4": 4.47,
    "iq1_bn": 0.828,
    "iq2_bn": 1.22,
    "iq4_ks": 5050.0,
    "iq2_ks": 172.0,
    "iq4_kss": 5010.0,
    "q8_kv": 74.7,
    "iq5_ks": 4950.0,
    "iq2_kt": 2670.0,
    "iq3_kt": 331.0,
    "iq4_kt": 1380.0,
    "iq3_ks": 315.0,
    "iq2_kl": 541.0,
    "iq1_kt": 2490.0,
}


def random_type(dtype: str) -> tuple[int, int, int]:
    """Id, elements and bytes of a block of a type that random_blocks() supports, including types of
    ik_llama.cpp."""
    return _TYPES[dtype] if dtype in _TYPES else _OF_IK[dtype][:3]


def row_bytes(dtype: str, elements: int) -> int:
    """Bytes of a row with this number of elements, including the scale that some types of ik_llama.cpp put
    before it."""
    block, size = random_type(dtype)[1:]
    return elements // block * size + (_OF_IK[dtype][3] if dtype in _OF_IK else 0)


def random_blocks(
    dtype: str,
    n_elements: int,
    rng: np.random.Generator,
    *,
    std: float = 0.02,
    row_elements: int | None = None,
) -> bytes:
    """Packed random weights with mean zero and approximately the given standard deviation.

    Args:
        dtype: Any weight type of the engine except the interleaved ones.
        n_elements: A multiple of the block of `dtype`.
        rng: Source of the codes.
        std: Standard deviation of the dequantised weights.
        row_elements: Elements of a row, for types with a scale before each row; None: there is one row.

    Raises:
        ValueError: `dtype` is not one of these types, or `n_elements` is not a multiple of its block.
    """
    if dtype in ("f32", "f16", "bf16"):
        return pack_tensor(dtype, rng.normal(0.0, std, n_elements).astype(np.float32))
    block, size = random_type(dtype)[1:] if dtype in _TYPES or dtype in _OF_IK else (1, 0)
    if dtype not in _RANDOM and dtype not in _RANDOM_ELSEWHERE and dtype != "mxfp4":
        expected = ["f32", "f16", "bf16", *_RANDOM, *_RANDOM_ELSEWHERE, "mxfp4"]
        raise ValueError(f"no random weights of type {dtype!r}; expected one of {expected}")
    if n_elements % block:
        raise ValueError(f"{n_elements} elements are not a multiple of the {dtype} block of {block}")
    n = n_elements // block
    blocks = rng.integers(0, 256, (n, size), dtype=np.uint8)
    if dtype == "mxfp4":
        blocks[:, 0] = round(127 + float(np.log2(std / 2.93)))
        return blocks.tobytes()
    if dtype in _RANDOM_ELSEWHERE:
        return _scaled_elsewhere(
            dtype, blocks, rng, std / _RANDOM_ELSEWHERE[dtype], row_elements or n_elements
        )
    at, minimum, unit_std = _RANDOM[dtype]
    # Random signs, because the codes of some types have a mean other than zero.
    d = std / unit_std * rng.uniform(0.8, 1.2, n) * rng.choice((-1.0, 1.0), n)
    blocks[:, at : at + 2] = d.astype(np.float16).reshape(n, 1).view(np.uint8)
    if minimum is not None:
        m_at, factor = minimum
        blocks[:, m_at : m_at + 2] = (d * factor).astype(np.float16).reshape(n, 1).view(np.uint8)
    return blocks.tobytes()


def _scaled_elsewhere(
    dtype: str, blocks: npt.NDArray[np.uint8], rng: np.random.Generator, scale: float, row_elements: int
) -> bytes:
    """Rows of `blocks` with scales of about `scale`, for types that keep scales elsewhere."""
    if dtype == "nvfp4":  # one byte per 16 elements: four bits of exponent and three of mantissa
        exponent = max(round(float(np.log2(scale))) + 7, 0)
        blocks[:, :4] = rng.integers(8 * exponent, 8 * exponent + 8, (len(blocks), 4))
        return blocks.tobytes()
    if dtype == "iq1_m":  # four bits of the scale in each of the last four words
        bits = (
            (scale * rng.uniform(0.8, 1.2, len(blocks))).astype(np.float16).view(np.uint16).astype(np.int64)
        )
        for i in range(4):
            at = 49 + 2 * i
            blocks[:, at] = (blocks[:, at] & 15) | ((bits >> (4 * i) & 15) << 4)
        return blocks.tobytes()
    block, before = _OF_IK[dtype][1], _OF_IK[dtype][3]
    rows = blocks.reshape(-1, row_elements // block * blocks.shape[1])
    factors = scale * rng.uniform(0.8, 1.2, (len(rows), 1)) * rng.choice((-1.0, 1.0), (len(rows), 1))
    meta = np.zeros((len(rows), before), np.uint8)
    if before == 2:
        meta[:] = factors.astype(np.float16).view(np.uint8)
    else:
        meta[:, :4] = factors.astype(np.float32).view(np.uint8)
    return np.concatenate([meta, rows], axis=1).tobytes()


def pack_tensor(dtype: str, values: npt.NDArray[np.float32] | Sequence[float]) -> bytes:
    """Float values as the bytes of a tensor of type f32, f16, bf16 (nearest even) or q8_0.

    Raises:
        ValueError: The type is another one, or the size of a q8_0 tensor is not a multiple of 32.
    """
    x = np.ascontiguousarray(values, np.float32).reshape(-1)
    if dtype == "f32":
        return x.tobytes()
    if dtype == "f16":
        return x.astype(np.float16).tobytes()
    if dtype == "bf16":
        bits = x.view(np.uint32).astype(np.uint64)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()
    if dtype == "q8_0":
        if x.size % 32:
            raise ValueError(f"{x.size} elements are not a multiple of the q8_0 block of 32")
        rows = x.reshape(-1, 32)
        d = np.abs(rows).max(axis=1, keepdims=True) / np.float32(127)
        scaled = np.divide(rows, d, out=np.zeros_like(rows), where=d > 0)
        codes = (np.sign(scaled) * np.floor(np.abs(scaled) + 0.5)).astype(np.int8)
        return np.concatenate([d.astype(np.float16).view(np.uint8), codes.view(np.uint8)], axis=1).tobytes()
    raise ValueError(f"cannot pack values as {dtype!r}; expected f32, f16, bf16 or q8_0 (see random_blocks)")
