"""The writer of models with random weights, on a model that is small enough for a test."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from dyno import _core

if TYPE_CHECKING:
    from types import ModuleType

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "synthetic_model.py"
WIDTH, FF, EXPERTS, VOCAB = 256, 64, 16, 320


@pytest.fixture(scope="module")
def synthetic() -> ModuleType:
    spec = importlib.util.spec_from_file_location("synthetic_model", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def mixture(synthetic: Any, layers: int = 2) -> Any:
    f = synthetic.ModelFile("qwen3moe", "q4_0", layers, seed=3)
    f.keys |= {
        "context_length": 512, "embedding_length": WIDTH, "vocab_size": VOCAB, "attention.head_count": 4,
        "attention.head_count_kv": 2, "attention.key_length": 64, "attention.value_length": 64,
        "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e6, "expert_count": EXPERTS,
        "expert_used_count": 4, "expert_feed_forward_length": FF,
    }  # fmt: skip
    f.matrix("token_embd.weight", VOCAB, WIDTH, gain=WIDTH**0.5)
    f.matrix("output.weight", VOCAB, WIDTH, dtype="q6_k")
    f.vector("output_norm.weight", WIDTH)
    for i in range(layers):
        layer = f"blk.{i}."
        f.vector(layer + "attn_norm.weight", WIDTH)
        f.vector(layer + "ffn_norm.weight", WIDTH)
        synthetic.attention(f, layer, WIDTH, 4, 2, 64)
        synthetic.experts(f, layer, WIDTH, FF, EXPERTS)
    return f


def test_a_written_model_runs_and_uses_all_experts(synthetic: Any, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    written = mixture(synthetic).write(path, "a test")
    assert 0 < path.stat().st_size - written < 8192
    session = _core.Session(path, context={"ctx": 512}, session={"threads": 1})
    tokens = np.random.default_rng(1).integers(0, VOCAB, 256).astype(np.int32)
    logits, routing = session.decode([(0, tokens)], "all", capture_routing=True)
    assert logits is not None
    assert routing is not None
    assert 0.3 < logits.std() < 3
    for layer in routing:
        counts = np.bincount(layer.ravel(), minlength=EXPERTS)
        assert counts.min() > 0
        assert 1.3 < counts.max() / counts.mean() < 6


def test_matrices_have_the_gain_that_was_asked_for(synthetic: Any, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    mixture(synthetic, layers=8).write(path, "a test")
    file = _core.Gguf(path)
    for name, want in (
        ("token_embd.weight", 1.0),
        ("output.weight", WIDTH**-0.5),
        ("blk.1.attn_q.weight", WIDTH**-0.5),
        ("blk.1.attn_output.weight", (16 * WIDTH) ** -0.5),
        ("blk.7.ffn_down_exps.weight", (16 * FF) ** -0.5),
    ):
        values = file.dequantize(name)
        assert values.std() == pytest.approx(want, rel=0.1), name
        assert abs(values.mean()) < 0.05 * values.std(), name


def test_two_tensors_of_one_shape_differ(synthetic: Any, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    mixture(synthetic).write(path, "a test")
    file = _core.Gguf(path)
    a, b = file.dequantize("blk.0.attn_q.weight"), file.dequantize("blk.1.attn_q.weight")
    assert np.corrcoef(a.ravel(), b.ravel())[0, 1] < 0.02
