"""Session settings that choose between configurations on a GPU; planned, not run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dyno import _core

TINY = Path(__file__).resolve().parent.parent / "data" / "tiny"
NAMES = sorted(p.name.removesuffix("-tiny.gguf") for p in TINY.glob("*-tiny.gguf"))
HOPPER = {"kind": "cuda", "compute_capability": 90, "sm_count": 132, "shared_per_block_bytes": 232_448}
GRAPHS = _core.build_info()["switches"].get("GGML_CUDA_USE_GRAPHS") == "ON"


def plan_for(name: str, *, kernels: Any = (), sequences: int = 1, **session: Any) -> _core.Session:
    settings = {"cuda_graphs": False, "fusion": False, **session}
    return _core.Session(
        TINY / f"{name}-tiny.gguf",
        context={"ctx": 64, "sequences": sequences},
        session=settings,
        kernels=list(kernels),
        plan_only=True,
        device=HOPPER,
    )


def attention(session: _core.Session, tokens: int) -> list[dict[str, Any]]:
    return [op for op in session.ops(tokens) if op["family"] == "attention"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tokens", [1, 512])
def test_without_flash_attention_scores_are_float32(name: str, tokens: int) -> None:
    on, off = plan_for(name), plan_for(name, flash_attention=False)
    assert {op["config"]["variant"] for op in attention(off, tokens)} == {"rows"}
    assert all("flash_attention is off" in op["reason"] for op in attention(off, tokens))
    assert not any("flash_attention" in op["reason"] for op in attention(on, tokens))
    assert [op["key"] for op in off.ops(tokens)] == [op["key"] for op in on.ops(tokens)]
    rest = [op for op in on.ops(tokens) if op["family"] != "attention"]
    assert rest == [op for op in off.ops(tokens) if op["family"] != "attention"]


def test_without_flash_attention_no_fused_launch_brings_it_back() -> None:
    session = plan_for("qwen3moe", fusion=True)
    assert {op["list"] for op in session.ops(1)} == {"fused", "draw"}
    assert not attention(session, 1)
    session.set({"flash_attention": False})
    assert {op["list"] for op in session.ops(1)} == {"general", "draw"}
    assert {op["config"]["variant"] for op in attention(session, 1)} == {"rows"}
    session.set({"flash_attention": True})
    assert {op["list"] for op in session.ops(1)} == {"fused", "draw"}


def test_flash_attention_can_be_changed_between_two_calls() -> None:
    session = plan_for("qwen3moe")
    before = session.ops(512)
    assert {op["config"]["variant"] for op in attention(session, 512)} != {"rows"}
    session.set({"flash_attention": False})
    assert session.plan["settings"]["flash_attention"] is False
    assert {op["config"]["variant"] for op in attention(session, 512)} == {"rows"}
    session.set({"flash_attention": True})
    assert session.ops(512) == before


def test_a_profile_cannot_bring_tensor_cores_back() -> None:
    key = attention(plan_for("llama"), 512)[0]["key"]
    entry = (key, "m257-512", {"variant": "flash_wgmma", "rows": 128, "splits": 1}, "p.yaml:7")
    assert attention(plan_for("llama"), 512)[0]["config"] != entry[2]
    assert attention(plan_for("llama", kernels=[entry]), 512)[0]["config"] == entry[2]
    session = plan_for("llama", kernels=[entry], flash_attention=False)
    assert attention(session, 512)[0]["config"]["variant"] == "rows"
    report = session.kernel_report()[0]
    assert report["status"] == "rejected"
    assert "flash_attention is off" in report["reason"]


def test_the_cpu_has_neither_setting_to_follow() -> None:
    session = _core.Session(
        TINY / "llama-tiny.gguf", session={"cuda_graphs": False, "flash_attention": False}, plan_only=True
    )
    assert not any("flash_attention" in op["reason"] for op in session.ops(1))


def beside(session: _core.Session, tokens: int = 1) -> list[dict[str, Any]]:
    return [op for op in session.ops(tokens) if "graph_concurrency" in op["reason"]]


@pytest.mark.skipif(not GRAPHS, reason="a build without CUDA graphs")
@pytest.mark.parametrize("name", NAMES)
def test_products_of_one_input_run_beside_each_other(name: str) -> None:
    """q, k and v, or the two of latent attention; where a file has them in one matrix, nothing."""
    on = plan_for(name, graph_concurrency=True, cuda_graphs=True)
    ops = beside(on)
    assert {op["family"] for op in ops} <= {"matmul"}
    assert bool(ops) == (name != "bailingmoe2")
    off = plan_for(name, graph_concurrency=False, cuda_graphs=True)
    assert not beside(off)
    strip = [{**op, "reason": ""} for op in on.ops(1)]
    assert strip == [{**op, "reason": ""} for op in off.ops(1)]
    # Each of two further streams has its own workspace, in the plan's memory.
    more = on.plan["scratch_bytes"] - off.plan["scratch_bytes"]
    assert (more > 0) == bool(ops)
    assert more % 2 == 0


@pytest.mark.skipif(not GRAPHS, reason="a build without CUDA graphs")
def test_graph_concurrency_needs_graphs_and_separate_products() -> None:
    assert not beside(plan_for("llama", graph_concurrency=True, cuda_graphs=False))
    fused = plan_for("llama", graph_concurrency=True, cuda_graphs=True, fusion=True)
    assert {op["list"] for op in fused.ops(1)} == {"fused", "draw"}
    assert not beside(fused)
    # More sequences than the fused list takes go through the general one.
    many = plan_for("llama", graph_concurrency=True, cuda_graphs=True, fusion=True, sequences=12)
    assert beside(many, 12)
