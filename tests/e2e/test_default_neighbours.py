"""Defaults that depend on the launch before, planned for a small GPU that need not be here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from dyno import _core
from random_models import Shape, random_model

if TYPE_CHECKING:
    from pathlib import Path

DEVICE = {"kind": "cuda", "compute_capability": 90, "sm_count": 8, "shared_per_block_bytes": 232_448}
MODEL = {"types": ("q4_0",), "n_embd": 128, "heads": 16, "n_ff": 256, "n_vocab": 300}
PLAIN = Shape(architecture="llama", kv_heads=16, head_dim=128, **MODEL)
LATENT = Shape(
    architecture="deepseek2", kv_heads=1, head_dim=128, rotary=64, kv_lora=512, nope=128, v_head=128, **MODEL,
    experts=4, used=2, n_ff_expert=64, shared=1,
)  # fmt: skip


@pytest.mark.parametrize(("shape", "stripes"), [(PLAIN, 2), (LATENT, 1)], ids=["attention", "batch"])
def test_stripes_of_the_output_product_depend_on_the_launch_before(
    shape: Shape, stripes: int, tmp_path: Path
) -> None:
    """Latent attention ends with a product of a batch, whose blocks occupy the chip."""
    path = tmp_path / "model.gguf"
    random_model(path, shape)
    session = _core.Session(path, session={"cuda_graphs": False}, plan_only=True, device=DEVICE)
    (product,) = [op for op in session.ops(1) if op["key"].startswith("matmul q4_0 n=128 k=2048 ")]
    assert product["config"] == {"variant": "stream", "warps": 16, "stripes": stripes}
