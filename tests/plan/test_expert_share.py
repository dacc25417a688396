"""The CPU's part of the experts of a streamed prompt, as `cpu_share=-1` solves it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
from dyno import _core
from hole_model import write_hole

if TYPE_CHECKING:
    from pathlib import Path

RATES = {"memory_gbps": 279.0, "gflops_one": 230.0, "gflops_many": 2470.0}
"""Of 16 cores of a Xeon beside an H100."""
LINK = {"link_gbps": 55.0, "latency_us": 10.0, "streams": True}


def layer(path: Path) -> Path:
    """One layer of Qwen3-30B-A3B with its experts, in a file whose weights are a hole."""
    width, inner, experts, head = 2048, 768, 128, 128
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "token_embd": ("f32", (32, width)),
        "output_norm": ("f32", (width,)),
        "blk.0.attn_norm": ("f32", (width,)),
        "blk.0.attn_q": ("q4_0", (4 * head, width)),
        "blk.0.attn_k": ("q4_0", (head, width)),
        "blk.0.attn_v": ("q4_0", (head, width)),
        "blk.0.attn_output": ("q4_0", (width, 4 * head)),
        "blk.0.attn_q_norm": ("f32", (head,)),
        "blk.0.attn_k_norm": ("f32", (head,)),
        "blk.0.ffn_norm": ("f32", (width,)),
        "blk.0.ffn_gate_inp": ("f32", (experts, width)),
        "blk.0.ffn_gate_exps": ("q4_0", (experts, inner, width)),
        "blk.0.ffn_up_exps": ("q4_0", (experts, inner, width)),
        "blk.0.ffn_down_exps": ("q4_0", (experts, width, inner)),
    }
    metadata = {
        "general.architecture": "qwen3moe",
        "qwen3moe.block_count": 1,
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


@pytest.mark.parametrize(("tokens", "least", "most"), [(512, 0.15, 0.45), (4096, 0.0, 0.01)])
def test_the_rows_that_cross_have_to_be_worth_it(
    tmp_path: Path, tokens: int, least: float, most: float
) -> None:
    """On an H100, prompts gained 22 % with u-batches of 512; with 4096 each share lost."""

    def of_the_cpu(share: int) -> float:
        session = _core.Session(
            layer(tmp_path / "layer.gguf"),
            load={"device": "cpu:1"},
            context={"ctx": 4096},
            session={"ubatch": tokens, "threads": 16, "cpu_share": share},
            plan_only=True,
            placement={"virtual_devices": [LINK], "cpu_moe": True},
        )
        parts = session.cost(tokens, logit_rows=1, rates={"cpu": RATES})
        return math.fsum(part["flops"] for part in parts if part["device"] == "cpu")

    assert least <= of_the_cpu(-1) / of_the_cpu(100) <= most
