"""Files of models whose weights are a hole: for plans, which read none of them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dyno.testing import BLOCK_GEOMETRY, TensorSpec, build_gguf

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def write_hole(
    path: Path, metadata: Mapping[str, object], shapes: Mapping[str, tuple[str, tuple[int, ...]]]
) -> None:
    """A file with these keys and tensors, of which only the header takes room on the disk.

    Args:
        path: Of the file.
        metadata: Keys.
        shapes: By name without `.weight`: type and shape (NumPy order).
    """
    tensors, offset = [], 0
    for name, (dtype, shape) in shapes.items():
        tensors.append(TensorSpec(f"{name}.weight", shape, dtype, b"", offset=offset))
        block, size = BLOCK_GEOMETRY[dtype]
        offset += math.prod(shape) // block * size
        offset += -offset % 32
    header = build_gguf(metadata, tensors).data
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + offset)


def qwen3moe_hole(path: Path, layers: int) -> Path:
    """So many layers of Qwen3-30B-A3B in Q4_0, with few heads and a small vocabulary."""
    width, inner, experts, head = 2048, 768, 128, 128
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "token_embd": ("f32", (32, width)),
        "output_norm": ("f32", (width,)),
    }
    for i in range(layers):
        shapes |= {
            f"blk.{i}.{name}": shape
            for name, shape in {
                "attn_norm": ("f32", (width,)),
                "attn_q": ("q4_0", (4 * head, width)),
                "attn_k": ("q4_0", (head, width)),
                "attn_v": ("q4_0", (head, width)),
                "attn_output": ("q4_0", (width, 4 * head)),
                "attn_q_norm": ("f32", (head,)),
                "attn_k_norm": ("f32", (head,)),
                "ffn_norm": ("f32", (width,)),
                "ffn_gate_inp": ("f32", (experts, width)),
                "ffn_gate_exps": ("q4_0", (experts, inner, width)),
                "ffn_up_exps": ("q4_0", (experts, inner, width)),
                "ffn_down_exps": ("q4_0", (experts, width, inner)),
            }.items()
        }
    metadata = {
        "general.architecture": "qwen3moe",
        "qwen3moe.block_count": layers,
        "qwen3moe.embedding_length": width,
        "qwen3moe.context_length": 8192,
        "qwen3moe.attention.layer_norm_rms_epsilon": 1e-6,
        "qwen3moe.attention.head_count": 4,
        "qwen3moe.attention.head_count_kv": 1,
        "qwen3moe.attention.key_length": head,
        "qwen3moe.attention.value_length": head,
        "qwen3moe.rope.freq_base": 1e6,
        "qwen3moe.feed_forward_length": inner,
        "qwen3moe.expert_feed_forward_length": inner,
        "qwen3moe.expert_count": experts,
        "qwen3moe.expert_used_count": 8,
    }
    write_hole(path, metadata, shapes)
    return path
