"""The writer of models with random weights, on a model that is small enough for a test."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from dyno import _core
from dyno.tokenizer import Tokenizer

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


def mixture(synthetic: Any, layers: int = 2, dtype: str = "q4_0") -> Any:
    return synthetic.grouped(
        "qwen3moe", dtype, layers, 3, width=WIDTH, heads=4, kv=2, head=64, vocab=VOCAB, ff=FF, base=1e6,
        count=EXPERTS, used=4,
    )  # fmt: skip


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


@pytest.mark.parametrize("dtype", ["iq3_s", "iq2_k", "iq4_ks"])
def test_types_of_both_engines_are_written(synthetic: Any, tmp_path: Path, dtype: str) -> None:
    """iq4_ks has a scale before each row, so a tensor has to begin at a row of the random weights."""
    path = tmp_path / "m.gguf"
    f = synthetic.grouped(
        "llama", dtype, 2, 3, width=WIDTH, heads=4, kv=2, head=64, vocab=VOCAB, ff=512, base=1e4, tied=True,
        norms=False,
    )  # fmt: skip
    f.write(path, "a test")
    values = _core.Gguf(path).dequantize("blk.1.ffn_down.weight")
    assert np.isfinite(values).all()
    rows = values.reshape(WIDTH, 512).std(axis=1)
    assert rows == pytest.approx((4 * 512) ** -0.5, rel=0.5)
    session = _core.Session(path, context={"ctx": 64}, session={"threads": 1})
    logits, _ = session.decode([(0, np.arange(32, dtype=np.int32))], "all")
    assert logits is not None
    assert 0.3 < logits.std() < 3


def test_two_tensors_of_one_shape_differ(synthetic: Any, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    mixture(synthetic).write(path, "a test")
    file = _core.Gguf(path)
    a, b = file.dequantize("blk.0.attn_q.weight"), file.dequantize("blk.1.attn_q.weight")
    assert np.corrcoef(a.ravel(), b.ravel())[0, 1] < 0.02


def test_a_vocabulary_of_words_gives_each_token_a_text(synthetic: Any, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    mixture(synthetic).write(path, "a test", words=True)
    tokenizer = Tokenizer.from_gguf(path)
    assert len(tokenizer) == VOCAB
    ids = tokenizer.encode("hi  ")
    assert len(ids) == 3
    assert tokenizer.decode([300, *ids]) == "w300hi  "
    assert all(tokenizer.piece(token) for token in range(VOCAB) if token != tokenizer.eos)
