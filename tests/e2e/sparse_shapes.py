"""Models whose attention reads only positions that an indexer selects, in contexts beyond their number."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dyno.testing import tiny_gguf
from dyno.testing.models import byte_vocabulary
from random_models import Shape, random_parts

if TYPE_CHECKING:
    from pathlib import Path

_SPARSE = {
    "shared": 1, "q_lora": 32, "kv_lora": 48, "rotary": 16, "nope": 24, "v_head": 40,
    "experts": 6, "used": 2, "n_ff_expert": 48,
}  # fmt: skip
SPARSE_SHAPES = [
    Shape(
        "deepseek32", ("f16", "bf16"), 96, 3, 1, 0, 96, 120, n_layers=3, groups=3, groups_used=2,
        index_heads=21, index_dim=40, metadata={"attention.indexer.top_k": 20}, **_SPARSE,
    ),
    Shape(
        "deepseek32", ("q8_0",), 64, 12, 1, 0, 64, 77, index_heads=3, index_dim=64,
        metadata={"attention.indexer.top_k": 71},
        **{**_SPARSE, "kv_lora": 64, "rotary": 32, "nope": 32, "v_head": 32, "n_ff_expert": 64},
    ),
    Shape(
        "glm-dsa", ("f16",), 64, 10, 1, 0, 96, 121, n_layers=5, index_heads=19, index_dim=64,
        metadata={
            "attention.indexer.top_k": 37,
            "attention.indexer.types": [True, False, False, True, False],
        }, **_SPARSE,
    ),
    Shape(
        "glm-dsa", ("bf16", "f16"), 80, 2, 1, 0, 64, 90, n_layers=3, index_heads=16, index_dim=17,
        metadata={"attention.indexer.top_k": 1, "attention.indexer.types": [True, True, False]}, **_SPARSE,
    ),
]  # fmt: skip


def selected(shape: Shape) -> int:
    """The number of positions that a query reads."""
    return int(shape.metadata["attention.indexer.top_k"])  # type: ignore[call-overload]


def with_vocabulary(path: Path, shape: Shape, seed: int = 0) -> Path:
    """Writes such a model with a vocabulary of bytes, for texts."""
    shape = replace(shape, n_vocab=288)
    metadata, tensors = random_parts(shape, seed)
    return tiny_gguf(path, {**metadata, **byte_vocabulary(shape.n_vocab, words=True)}, tensors)
