"""NVFP4 matrices with a factor in a tensor beside them: as the same weights in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from dyno import _core
from dyno.errors import ModelError, UnsupportedError
from dyno.testing import TensorSpec, pack_tensor, tiny_gguf
from random_models import Shape, random_parts

if TYPE_CHECKING:
    from pathlib import Path

SHAPES = [
    Shape("llama", ("f32",), 128, 4, 2, 64, 192, 101),
    # Biases, which stand behind the factor.
    Shape("qwen2", ("f32",), 128, 2, 1, 64, 192, 103),
    Shape("qwen3moe", ("f32",), 128, 2, 1, 64, 0, 107, experts=6, used=3, n_ff_expert=64),
    # Shared experts; a query and a gate in one matrix, both halves under one factor.
    Shape(
        "qwen35moe", ("f32",), 128, 2, 1, 64, 0, 109, n_layers=3, rotary=32,
        experts=5, used=2, n_ff_expert=64, shared=1, linear_keys=2, linear_values=4, linear_dim=32,
    ),
    # Experts without a gate.
    Shape(
        "nemotron_h_moe", ("f32",), 128, 2, 1, 64, 64, 113, n_layers=6,
        experts=6, used=2, n_ff_expert=64, shared=1,
        linear_keys=2, linear_values=4, linear_dim=32, linear_state=16,
    ),
    Shape(
        "deepseek2", ("f32",), 128, 2, 1, 0, 128, 127, rotary=64, nope=64, v_head=64,
        experts=6, used=2, n_ff_expert=64, shared=1, q_lora=64, kv_lora=128,
    ),
]  # fmt: skip
QUANTISED = ("attn", "ffn", "ssm_out", "output.weight", "token_embd")
KEPT = ("norm", "bias", "ffn_gate_inp", "exp_probs")


def nvfp4_blocks(count: int, rng: np.random.Generator) -> np.ndarray:
    """Blocks of four scales (unsigned e4m3, 1/4 to 1) and 64 codes."""
    blocks = rng.integers(0, 256, (count, 36), dtype=np.uint8)
    blocks[:, :4] = rng.integers(0x28, 0x38, (count, 4), dtype=np.uint8)
    return blocks


def both_files(
    folder: Path, shape: Shape, without: tuple[str, ...] = (), **change: np.ndarray
) -> tuple[Path, Path]:
    """The model with NVFP4 matrices and factors, and with what they amount to in float32."""
    rng = np.random.default_rng(11)
    metadata, tensors = random_parts(shape)
    coded, extra = [], []
    for t in tensors:
        plain = not any(part in t.name for part in QUANTISED) or any(part in t.name for part in KEPT)
        if plain or len(t.shape) < 2 or t.shape[-1] % 64 or t.name in without:
            coded.append(t)
            continue
        size = int(np.prod(t.shape))
        coded.append(TensorSpec(t.name, t.shape, "nvfp4", nvfp4_blocks(size // 64, rng).tobytes()))
        stem = t.name.removesuffix(".weight")
        experts = t.shape[0] if stem.endswith("_exps") else 1
        factor = rng.uniform(0.5, 1.5, experts).astype(np.float32) * np.float32(0.6 * t.shape[-1] ** -0.5)
        if stem == "token_embd":
            factor /= np.float32(0.6 * t.shape[-1] ** -0.5)
        factor = change.get(stem, factor)
        extra.append(TensorSpec(f"{stem}.scale", (len(factor),), "f32", pack_tensor("f32", factor)))
        extra.append(TensorSpec(f"{stem}.input_scale", (1,), "f32", pack_tensor("f32", factor[:1])))
    path = tiny_gguf(folder / "nvfp4.gguf", metadata, [*coded, *extra])
    file = _core.Gguf(path)
    factors = {t.name.removesuffix(".scale"): t for t in extra if t.name.endswith(".scale")}
    twins = []
    for t in coded:
        if t.dtype != "nvfp4":
            twins.append(t)
            continue
        values = file.dequantize(t.name).reshape(t.shape)
        factor = np.frombuffer(factors[t.name.removesuffix(".weight")].data, np.float32)
        shaped = factor.reshape(-1, *[1] * (len(t.shape) - 1)) if len(factor) > 1 else factor
        twins.append(TensorSpec(t.name, t.shape, "f32", pack_tensor("f32", values * shaped)))
    return path, tiny_gguf(folder / "f32.gguf", metadata, twins)


def logits(path: Path, numerics: str, tokens: np.ndarray) -> np.ndarray:
    s = _core.Session(
        path,
        load={"numerics": numerics, "device": "cpu"},
        context={"ctx": 64, "kv_type_k": "f32", "kv_type_v": "f32"},
        session={"threads": 2, "ubatch": 7},
    )
    parts = [tokens[:20], tokens[20:21], tokens[21:]]
    return np.concatenate([s.decode([(0, part.copy())], "all")[0] for part in parts])


def nmse(observed: np.ndarray, reference: np.ndarray) -> float:
    o, r = observed.astype(np.float64), reference.astype(np.float64)
    return float(((o - r) ** 2).sum() / ((r - r.mean()) ** 2).sum())


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_factors_are_part_of_the_weights(shape: Shape, tmp_path: Path) -> None:
    path, twin = both_files(tmp_path, shape)
    assert _core.describe_model(path)["types"]["nvfp4"] > 0.5
    assert not _core.describe_model(path)["unused_tensors"]
    tokens = np.random.default_rng(5).integers(0, shape.n_vocab, 26).astype(np.int32)
    want = logits(twin, "exact", tokens)
    assert 0.05 < want.std() < 100
    assert nmse(logits(path, "exact", tokens), want) < 1e-9
    if not shape.experts:  # int8 activations; they may flip a router's near-tie
        assert nmse(logits(path, "default", tokens), want) < 2e-3


def test_a_factor_for_all_experts_is_refused(tmp_path: Path) -> None:
    one = np.array([0.5], np.float32)
    path, _ = both_files(tmp_path, SHAPES[2], **{"blk.0.ffn_up_exps": one})
    with pytest.raises(ModelError, match="one for each of 6 experts"):
        _core.describe_model(path)
    zero = np.array([0.0], np.float32)
    path, _ = both_files(tmp_path, SHAPES[0], **{"blk.0.attn_q": zero})
    with pytest.raises(ModelError, match=r"blk\.0\.attn_q\.scale is 0"):
        _core.describe_model(path)


def test_biases_of_scaled_experts_are_refused(tmp_path: Path) -> None:
    shape = Shape("gpt-oss", ("f32",), 128, 2, 1, 64, 0, 131, experts=4, used=2, n_ff_expert=64)
    path, _ = both_files(tmp_path, shape)
    with pytest.raises(UnsupportedError, match="biases of experts whose matrices have factors"):
        _core.describe_model(path)
