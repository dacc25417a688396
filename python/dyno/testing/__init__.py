"""Builders of small GGUF files: unusual and hostile ones for the reader, and tiny random models for the
engine.

They need NumPy, and the `gguf` package for valid files. The engine itself does not use them.
"""

from __future__ import annotations

from dyno.testing.blocks import BLOCK_GEOMETRY, TENSOR_TYPE_IDS, pack_tensor, random_blocks
from dyno.testing.gguf_writer import (
    Array,
    GgufImage,
    TensorSpec,
    Typed,
    build_gguf,
    hand_written_gguf,
    split_path,
    tiny_gguf,
    tiny_gguf_split,
)
from dyno.testing.models import byte_vocabulary, tiny_model

__all__ = [
    "BLOCK_GEOMETRY",
    "TENSOR_TYPE_IDS",
    "Array",
    "GgufImage",
    "TensorSpec",
    "Typed",
    "build_gguf",
    "byte_vocabulary",
    "hand_written_gguf",
    "pack_tensor",
    "random_blocks",
    "split_path",
    "tiny_gguf",
    "tiny_gguf_split",
    "tiny_model",
]
