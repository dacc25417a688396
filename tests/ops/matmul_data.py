"""Weights, activations and float64 references for the tests of the matrix product families."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import gguf
import numpy as np
from dyno import _core
from numpy.typing import NDArray

from ops.weight_blocks import GPU_FORMS, dequantize, geometry, random_scales

ops = _core.ops

QUANTISED = [
    "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k",
    "iq4_nl", "iq4_xs", "mxfp4",
]  # fmt: skip
FLOATS = ["f32", "f16", "bf16"]
TYPES: dict[str, dict[str, Any]] = {t["name"]: t for t in _core.tensor_types()}
# Types whose blocks become codes at load, and those that products take as floats.
CODED = [name for name, t in TYPES.items() if "re-coded" in t["kernels"]]
VALUES = [name for name, t in TYPES.items() if "multiplied in float32" in t["kernels"]]

# Byte offsets of the float16 fields of each block; mxfp4 has a power of two instead.
_HALVES = {
    "q4_0": [0], "q4_1": [0, 2], "q5_0": [0], "q5_1": [0, 2], "q8_0": [0], "q2_k": [80, 82], "q3_k": [108],
    "q4_k": [0, 2], "q5_k": [0, 2], "q6_k": [208], "iq4_nl": [0], "iq4_xs": [0], "tq1_0": [52], "tq2_0": [64],
    "iq1_m": [], "nvfp4": [],
}  # fmt: skip

Bytes = NDArray[np.uint8]
Doubles = NDArray[np.float64]


def block(type_name: str) -> int:
    return geometry(type_name)[0] if type_name in GPU_FORMS else int(TYPES[type_name]["block"])


def coded_weights(rng: np.random.Generator, type_name: str, n: int, k: int) -> tuple[Bytes, Doubles]:
    """As weights(), of any type: rows may begin with a scale of their own.

    The values are those of the dequantisation, which tests/gguf/test_weight_types.py compares with the
    reference implementations.
    """
    t = TYPES[type_name]
    meta = int(t["row_meta_bytes"])
    blocks = rng.integers(0, 256, (n, k // t["block"], t["block_bytes"]), dtype=np.uint8)
    rows = np.zeros((n, meta), np.uint8)
    scales = rng.uniform(-0.02, 0.02, (n, k // t["block"])).astype(np.float16)
    if meta >= 4:
        rows[:, :4] = scales[:, :1].astype(np.float32).view(np.uint8)
    elif meta == 2:
        rows[:] = scales[:, :1].view(np.uint8)
    else:
        for at in _HALVES.get(type_name, [0]):
            blocks[..., at : at + 2] = scales.view(np.uint8).reshape(n, -1, 2)
    if type_name == "iq1_m":  # four bits of the scale in each of the last words
        bits = scales.view(np.uint16).astype(np.int64)
        for i in range(4):
            high = (bits >> (4 * i) & 15) << 4
            blocks[..., 49 + 2 * i] = blocks[..., 49 + 2 * i] & 15 | high
    if type_name == "nvfp4":
        blocks[..., :4] = rng.integers(1, 0x30, (n, k // 64, 4))
    raw = np.concatenate([rows, blocks.reshape(n, -1)], axis=1).reshape(-1)
    return raw, ops.unpack(type_name, "plain", raw, n, k, "auto").astype(np.float64)


def weights(rng: np.random.Generator, type_name: str, n: int, k: int) -> tuple[Bytes, Doubles]:
    """Random bits in every field as a plain matrix [n, k], and its exact values."""
    if type_name in CODED or type_name in VALUES:
        return coded_weights(rng, type_name, n, k)
    if type_name in GPU_FORMS:
        size, nbytes = geometry(type_name)
        raw = rng.integers(0, 256, (n * (k // size), nbytes), dtype=np.uint8)
        random_scales(rng, type_name, raw, 1e-5, 1e-3)
        return raw.reshape(-1), dequantize(type_name, raw.reshape(n, -1)).astype(np.float64)
    kind = gguf.GGMLQuantizationType[type_name.upper()]
    if type_name == "f32":
        values = rng.standard_normal((n, k)).astype(np.float32)
        return values.view(np.uint8).reshape(-1), values.astype(np.float64)
    if type_name == "f16":
        halves = rng.standard_normal((n, k)).astype(np.float16)
        return halves.view(np.uint8).reshape(-1), halves.astype(np.float64)
    if type_name == "bf16":
        bits = rng.standard_normal((n, k)).astype(np.float32).view(np.uint32) & 0xFFFF0000
        upper = (bits >> 16).astype(np.uint16)
        return upper.view(np.uint8).reshape(-1), bits.view(np.float32).astype(np.float64)
    size, nbytes = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (n, k // size, nbytes), dtype=np.uint8)
    for at in _HALVES.get(type_name, []):
        scale = rng.uniform(-0.02, 0.02, (n, k // size)).astype(np.float16)
        raw[..., at : at + 2] = scale.view(np.uint8).reshape(n, k // size, 2)
    if type_name == "mxfp4":
        raw[..., 0] = rng.integers(118, 126, (n, k // size))
    values = gguf.dequantize(raw.reshape(n, -1), kind)
    return raw.reshape(-1), values.astype(np.float64).reshape(n, k)


def in_layout(type_name: str, plain: Bytes, layout: str, n: int, k: int) -> Bytes:
    return plain if layout == "plain" else ops.repack(type_name, plain, n, k)


def layouts(type_name: str) -> list[str]:
    return ["plain", "x16"] if type_name in QUANTISED + CODED else ["plain"]


def activations(type_name: str) -> list[str]:
    return ["q8", "f32"] if type_name in QUANTISED + CODED else ["f32"]


def quantise(x: NDArray[np.float32]) -> tuple[Bytes, Doubles]:
    """q8 rows [m, row bytes] and the values that they stand for, through family copy."""
    m, k = x.shape
    out = np.zeros((m, ops.act_q8_row_bytes(k)), np.uint8)
    ops.run("copy", {"act": "q8", "m": m, "k": k}, None, {"x": x, "out": out})
    q, d, _ = split_q8(out, k)
    with np.errstate(invalid="ignore"):  # rows that are not finite
        return out, (q.reshape(m, k // 32, 32) * d[:, :, None]).reshape(m, k)


def split_q8(rows: Bytes, k: int) -> tuple[Doubles, Doubles, NDArray[np.int16]]:
    """Values [m, k], scales [m, k/32] and sums [m, k/16] of q8 rows."""
    q = rows[:, :k].copy().view(np.int8).astype(np.float64)
    d = rows[:, k : k + k // 8].copy().view(np.float32).astype(np.float64)
    sums = rows[:, k + k // 8 : k + k // 4].copy().view(np.int16)
    return q, d, sums


def prepare(rng: np.random.Generator, act: str, rows: int, k: int) -> tuple[NDArray[Any], Doubles, Doubles]:
    """Activations as the op takes them, the exact values of that, and the values before quantisation."""
    x = rng.standard_normal((rows, k)).astype(np.float32)
    if act == "f32":
        return x, x.astype(np.float64), x.astype(np.float64)
    quantised, exact = quantise(x)
    return quantised, exact, x.astype(np.float64)


def sigmoid(z: Doubles) -> Doubles:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-z))


def gated(activation: str, gate: Doubles, up: Doubles) -> Doubles:
    if activation == "silu":
        return sigmoid(gate) * gate * up
    if activation == "gelu_tanh":
        return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
    if activation == "relu":
        return np.maximum(gate, 0) * up
    clipped = np.minimum(gate, 7)
    return clipped * sigmoid(1.702 * clipped) * (np.clip(up, -7, 7) + 1)


class FencedArray:
    """A copy of an array that ends where readable memory ends: reading past it is a fault."""

    def __init__(self, array: NDArray[Any]) -> None:
        page = mmap.PAGESIZE
        size = max(page, (array.nbytes + page - 1) // page * page)
        self._map = mmap.mmap(-1, size + page)
        base = np.frombuffer(self._map, np.uint8)
        self.array = base[size - array.nbytes : size].view(array.dtype).reshape(array.shape)
        self.array[...] = array
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        if libc.mprotect(base.ctypes.data + size, page, 0) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")
