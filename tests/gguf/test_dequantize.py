"""Dequantisation agrees bit for bit with the public gguf package, quantisation with its rounding."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import numpy as np
import pytest
from dyno import _core
from dyno.errors import UnsupportedError
from dyno.testing import BLOCK_GEOMETRY, TENSOR_TYPE_IDS, TensorSpec, pack_tensor, tiny_gguf, tiny_model

if TYPE_CHECKING:
    from pathlib import Path

gguf = pytest.importorskip("gguf")

WEIGHT_TYPES = [
    "f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k",
    "iq4_nl", "iq4_xs", "mxfp4", "iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "tq1_0",
    "tq2_0", "nvfp4",
]  # fmt: skip
# Of ik_llama.cpp, which the package does not know.
OF_IK = [
    "q6_0", "iq1_bn", "iq2_bn", "iq2_k", "iq3_k", "iq4_k", "iq5_k", "iq6_k", "iq4_ks", "iq2_ks", "iq4_kss",
    "q8_kv", "iq5_ks", "iq1_kt", "iq2_kt", "iq3_kt", "iq4_kt", "iq3_ks", "iq2_kl",
]  # fmt: skip
# Compared in test_weight_types.py: the package does not know them.
NEWER_THAN_THE_PACKAGE = {"q1_0", "q2_0"}
SCALE_OFFSETS = {
    "q4_0": [0], "q4_1": [0, 2], "q5_0": [0], "q5_1": [0, 2], "q8_0": [0], "q2_k": [80, 82], "q3_k": [108],
    "q4_k": [0, 2], "q5_k": [0, 2], "q6_k": [208], "iq4_nl": [0], "iq4_xs": [0], "iq1_s": [0], "iq2_xxs": [0],
    "iq2_xs": [0], "iq2_s": [0], "iq3_xxs": [0], "iq3_s": [0], "tq1_0": [52], "tq2_0": [64],
}  # fmt: skip


def reference(raw: np.ndarray, dtype: str) -> np.ndarray:
    kind = gguf.GGMLQuantizationType[dtype.upper()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NaN and infinity are part of these inputs
        return np.ascontiguousarray(gguf.quants.dequantize(raw.reshape(1, -1), kind), np.float32).reshape(-1)


def dequantize(path: Path, raw: np.ndarray, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    tiny_gguf(path, {}, [TensorSpec("w", shape, dtype, raw.tobytes())])
    values = _core.Gguf(path).dequantize("w")
    assert values.shape == shape
    assert values.dtype == np.float32
    return values.reshape(-1)


def assert_same_bits(mine: np.ndarray, theirs: np.ndarray) -> None:
    nan = np.isnan(theirs)
    np.testing.assert_array_equal(np.isnan(mine), nan)
    np.testing.assert_array_equal(mine.view(np.uint32)[~nan], theirs.view(np.uint32)[~nan])


@pytest.mark.parametrize("dtype", WEIGHT_TYPES)
def test_random_bytes(tmp_path: Path, dtype: str) -> None:
    """Every byte is random, scales included: subnormals, infinities and NaNs too."""
    block, size = BLOCK_GEOMETRY[dtype]
    n_blocks = 3 * 1024 * (32 if block == 1 else 1)
    raw = np.random.default_rng(TENSOR_TYPE_IDS[dtype]).integers(0, 256, n_blocks * size, dtype=np.uint8)
    shape = (3, n_blocks // 3 * block)
    assert_same_bits(dequantize(tmp_path / "x.gguf", raw, dtype, shape), reference(raw, dtype))


@pytest.mark.parametrize("dtype", sorted(SCALE_OFFSETS))
@pytest.mark.parametrize("scale", [0.0, -0.0, 6e-8, 65504.0, np.inf, -np.inf, np.nan])
def test_special_scales(tmp_path: Path, dtype: str, scale: float) -> None:
    block, size = BLOCK_GEOMETRY[dtype]
    raw = np.random.default_rng(5).integers(0, 256, (64, size), dtype=np.uint8)
    for at in SCALE_OFFSETS[dtype]:
        raw[:, at : at + 2] = np.array([scale], np.float16).view(np.uint8)
    assert_same_bits(dequantize(tmp_path / "x.gguf", raw, dtype, (64 * block,)), reference(raw, dtype))


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_every_half(tmp_path: Path, dtype: str) -> None:
    raw = np.arange(65536, dtype=np.uint16)
    wide = (raw.astype(np.uint32) << 16).view(np.float32)
    theirs = raw.view(np.float16).astype(np.float32) if dtype == "f16" else wide
    assert_same_bits(dequantize(tmp_path / "x.gguf", raw, dtype, (65536,)), theirs)


def test_every_mxfp4_exponent(tmp_path: Path) -> None:
    raw = np.random.default_rng(1).integers(0, 256, (256, 17), dtype=np.uint8)
    raw[:, 0] = np.arange(256)
    assert_same_bits(dequantize(tmp_path / "x.gguf", raw, "mxfp4", (256 * 32,)), reference(raw, "mxfp4"))


def test_four_dimensions(tmp_path: Path) -> None:
    values = np.arange(2 * 3 * 5 * 64, dtype=np.float32).reshape(2, 3, 5, 64)
    tiny_gguf(tmp_path / "x.gguf", {}, [TensorSpec.of("w", values)])
    np.testing.assert_array_equal(_core.Gguf(tmp_path / "x.gguf").dequantize("w"), values)


@pytest.mark.parametrize("dtype", sorted(set(TENSOR_TYPE_IDS) - set(WEIGHT_TYPES) - NEWER_THAN_THE_PACKAGE))
def test_types_without_kernels_open_and_are_named_when_used(tmp_path: Path, dtype: str) -> None:
    tiny_gguf(tmp_path / "x.gguf", {}, [TensorSpec.zeros("odd.weight", (2, 256), dtype)])
    file = _core.Gguf(tmp_path / "x.gguf")
    assert file.tensors()[0]["dtype"] == dtype
    assert f"{dtype} " in file.describe()
    with pytest.raises(UnsupportedError, match=rf"odd\.weight.*type {dtype}\b"):
        file.dequantize("odd.weight")


# ---- Quantisation ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0"])
def test_quantize_agrees_with_the_package(dtype: str) -> None:
    rng = np.random.default_rng(3)
    values = (rng.standard_normal(32 * 512) * 10.0 ** rng.integers(-6, 4, 32 * 512)).astype(np.float32)
    values[:64] = 0.0
    expected = gguf.quants.quantize(values.reshape(1, -1), gguf.GGMLQuantizationType[dtype.upper()])
    assert _core.quantize(dtype, values) == np.ascontiguousarray(expected).tobytes()


def test_half_rounding_at_every_tie() -> None:
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    ties = (halves[:-1].astype(np.float64) + halves[1:]) / 2
    values = np.concatenate([ties, [65504.0, 65519.9, 65520.0, 1e30, np.inf], halves]).astype(np.float32)
    neighbours = [np.nextafter(values, np.float32(end)) for end in (0, 9e9)]
    values = np.concatenate([values, -values, *neighbours])
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16)
    np.testing.assert_array_equal(
        np.frombuffer(_core.quantize("f16", values), np.uint16), expected.view(np.uint16)
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_q8_0_block_that_is_not_finite_stays_visible(tmp_path: Path, bad: float) -> None:
    values = np.ones(96, np.float32)
    values[40] = bad
    raw = np.frombuffer(_core.quantize("q8_0", values), np.uint8)
    back = dequantize(tmp_path / "x.gguf", raw, "q8_0", (96,))
    np.testing.assert_array_equal(np.isnan(back), (np.arange(96) // 32) == 1)


def test_quantize_names_a_type_it_cannot_write() -> None:
    with pytest.raises(UnsupportedError, match="q4_k"):
        _core.quantize("q4_k", np.zeros(256, np.float32))


# ---- The builder itself ------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0"])
def test_builder_packs_what_the_engine_reads(tmp_path: Path, dtype: str) -> None:
    values = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    raw = np.frombuffer(pack_tensor(dtype, values), np.uint8)
    back = dequantize(tmp_path / "x.gguf", raw, dtype, (4, 64)).reshape(4, 64)
    np.testing.assert_allclose(back, values, atol={"f32": 0, "f16": 2e-3, "bf16": 2e-2, "q8_0": 2e-2}[dtype])


@pytest.mark.parametrize("dtype", [*WEIGHT_TYPES, *sorted(NEWER_THAN_THE_PACKAGE), *OF_IK])
def test_tiny_model_weights_have_the_asked_scale(tmp_path: Path, dtype: str) -> None:
    path = tiny_model(tmp_path / "m.gguf", "qwen3moe", n_embd=256, n_ff_expert=256, n_experts=4, dtype=dtype)
    weights = _core.Gguf(path).dequantize("blk.1.ffn_up_exps.weight")
    assert weights.shape == (4, 256, 256)
    assert abs(float(weights.mean())) < 0.005
    assert 0.7 < float(weights.std()) * 16 < 1.42  # mxfp4 scales are powers of two
