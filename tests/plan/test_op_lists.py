"""Which op list a u-batch runs through, planned for a GPU that need not be here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dyno import _core

TINY = Path(__file__).resolve().parent.parent / "data" / "tiny"
NAMES = sorted(p.name.removesuffix("-tiny.gguf") for p in TINY.glob("*-tiny.gguf"))
HOPPER = {"kind": "cuda", "compute_capability": 90, "sm_count": 132, "shared_per_block_bytes": 232_448}


def plan_for(name: str, device: dict[str, Any] | None = HOPPER, **load: Any) -> _core.Session:
    path = TINY / f"{name}-tiny.gguf"
    return _core.Session(path, load=load, session={"cuda_graphs": False}, plan_only=True, device=device)


def lists(session: _core.Session, tokens: int) -> set[str]:
    return {op["list"] for op in session.ops(tokens)}


@pytest.mark.parametrize("name", NAMES)
def test_few_tokens_take_the_fused_list(name: str) -> None:
    session = plan_for(name)
    assert lists(session, 1) == lists(session, 8) == {"fused"}
    assert lists(session, 9) == lists(session, 512) == {"general"}
    general = sum(op["count"] for op in session.ops(9))
    assert sum(op["count"] for op in session.ops(8)) <= general
    session.set({"fusion": False})
    assert lists(session, 1) == {"general"}
    assert sum(op["count"] for op in session.ops(1)) == general


def test_exact_and_the_cpu_have_one_list() -> None:
    for session in (plan_for(NAMES[0], numerics="exact"), plan_for(NAMES[0], device=None)):
        assert lists(session, 1) == {"general"}
        assert "at most" not in session.describe_plan()


def test_fused_ops_replace_single_ones() -> None:
    session = plan_for("qwen3moe")
    fused = {op["family"]: op["count"] for op in session.ops(1)}
    general = {op["family"]: op["count"] for op in session.ops(9)}
    layers = session.model["n_layers"]
    assert fused["qkv"] == fused["moe_down_sum"] == layers
    assert not {"qkv", "moe_down_sum"} & set(general)
    assert not {"moe_sum", "matmul_id"} & set(fused)
    keys = [op["key"] for op in session.ops(1)]
    assert any(key.startswith("qkv ") and " norm" in key for key in keys)


def test_what_no_fused_launch_covers_stays() -> None:
    """Routers are float32 in the file's order, which no streaming kernel reads: they keep their norm."""
    families = {op["family"] for op in plan_for("qwen3moe").ops(1)}
    assert "norm" in families or "norm_route" in families
