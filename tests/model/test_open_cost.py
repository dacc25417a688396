"""The work of opening a file grows with its size, not with its size times its layers."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
from dyno.testing import Array, TensorSpec, tiny_gguf

if TYPE_CHECKING:
    from pathlib import Path

LAYERS = 512
ELEMENTS = 4_000_000
LIMIT_S = 5  # of CPU time; one reading per layer takes several times as much
OPEN = """
import resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[2]), int(sys.argv[2])))
from dyno import _core
print(_core.describe_model(sys.argv[1])["n_layers"])
"""


def test_arrays_are_read_once_and_not_once_a_layer(tmp_path: Path) -> None:
    ones = Array("uint8", np.ones(ELEMENTS, np.uint8).tolist())
    widths = Array("uint8", np.full(ELEMENTS, 32, np.uint8).tolist())
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": LAYERS,
        "llama.embedding_length": 32,
        "llama.context_length": 64,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.attention.head_count": ones,
        "llama.attention.head_count_kv": ones,
        "llama.feed_forward_length": widths,
    }
    square, row = np.zeros((32, 32), np.float32), np.zeros(32, np.float32)
    tensors = [TensorSpec.of("token_embd.weight", square), TensorSpec.of("output_norm.weight", row)]
    for layer in range(LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            tensors.append(TensorSpec.of(f"blk.{layer}.{name}.weight", row))
        for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
            tensors.append(TensorSpec.of(f"blk.{layer}.{name}.weight", square))
    path = tiny_gguf(tmp_path / "arrays.gguf", metadata, tensors)
    done = subprocess.run(
        [sys.executable, "-c", OPEN, path, str(LIMIT_S)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, (
        f"exit status {done.returncode} (-9 or -24: over {LIMIT_S} s of CPU): {done.stderr}"
    )
    assert done.stdout.split() == [str(LAYERS)]
