"""The op lists of Gemma 4 for a GPU that need not be here: one launch norms values and stores them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
from dyno import _core
from random_models import SHAPES, Shape, random_model

if TYPE_CHECKING:
    from pathlib import Path

HOPPER = {"kind": "cuda", "compute_capability": 90, "sm_count": 132, "shared_per_block_bytes": 232_448}
GEMMA4 = [shape for shape in SHAPES if shape.architecture == "gemma4"]


@pytest.mark.parametrize("cache", ["f32", "f16"])
@pytest.mark.parametrize("shape", GEMMA4, ids=lambda shape: shape.name)
def test_few_tokens_norm_values_in_the_launch_that_stores_them(
    shape: Shape, cache: str, tmp_path: Path
) -> None:
    session = _core.Session(
        random_model(tmp_path / "model.gguf", shape),
        context={"kv_type_k": cache, "kv_type_v": cache},
        session={"cuda_graphs": False, "ubatch": 1024},
        plan_only=True,
        device=HOPPER,
    )
    own = shape.n_layers - shape.shared_kv
    for tokens in (1, 64, 1024):
        found = Counter[str]()
        for op in session.ops(tokens):
            found[op["family"]] += op["count"]
            if op["family"] in ("qkv_rope_store", "rope_attention"):
                assert " v_norm" in op["key"]
        one_launch = found["rope_attention"] if cache == "f16" and tokens == 1 else found["qkv_rope_store"]
        assert one_launch == own, found
        assert found["kv_store"] == found["copy"] == 0
        assert found["attention"] + found["rope_attention"] == shape.n_layers
    if shape.experts:
        assert "moe_down_sum" in {op["family"] for op in session.ops(1)}
    session.set({"fusion": False, "ubatch": 1024})
    general = {op["family"] for op in session.ops(1024)}
    assert {"norm", "rope", "kv_store"} <= general
