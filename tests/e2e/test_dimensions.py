"""Every architecture in other dimensions than its shipped model: planned for GPUs, run on the CPU, and on a
GPU against the CPU's exact path."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from dyno import _core
from dyno.testing import tiny_gguf
from random_models import SHAPES, Shape, random_model, random_parts

if TYPE_CHECKING:
    from pathlib import Path

GPUS = [d for d in _core.devices() if d["kind"] == "cuda" and not _core.device_problem(d)]
GRAPHS = _core.build_info()["switches"].get("GGML_CUDA_USE_GRAPHS") == "ON"
DESCRIBED: dict[str, Any] = {
    "kind": "cuda",
    "name": "a GPU that need not be here",
    "memory_bytes": 24 << 30,
    "compute_capability": 90,
    "sm_count": 132,
    "l2_bytes": 50 << 20,
    "shared_per_block_bytes": 232_448,
    "pci_bus_id": "",
}
F32 = {"ctx": 256, "kv_type_k": "f32", "kv_type_v": "f32"}
PROMPT = 70  # tokens; then come single ones, a few at once, and another few
PARTS = [PROMPT, *[1] * 6, 5, 3]
by_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)


def nmse(observed: np.ndarray, reference: np.ndarray) -> float:
    o, r = observed.astype(np.float64), reference.astype(np.float64)
    return float(((o - r) ** 2).sum() / ((r - r.mean()) ** 2).sum())


def tokens_of(shape: Shape) -> np.ndarray:
    return np.random.default_rng(3).integers(0, shape.n_vocab, sum(PARTS)).astype(np.int32)


def exact_on_cpu(path: Path, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Logits of all rows, and the experts that were used."""
    s = _core.Session(path, load={"device": "cpu", "numerics": "exact", "cpu_repack": False}, context=F32)
    logits, routing = s.decode([(0, tokens)], "all", capture_routing=bool(s.model["moe_layers"]))
    assert np.isfinite(logits).all()
    assert 0.1 < logits.std() < 100
    return logits, routing


def worst_part(
    s: _core.Session, tokens: np.ndarray, reference: np.ndarray, routing: np.ndarray | None
) -> tuple[float, float]:
    """NMSE of the prompt, and the largest of what follows it; with `routing` pinned where it is given."""
    s.reset()
    errors, at = [], 0
    for size in PARTS:
        part = slice(at, at + size)
        pinned = None if routing is None else np.ascontiguousarray(routing[:, part])
        got = s.decode([(0, tokens[part].copy())], "all", pinned_routing=pinned)[0]
        errors.append(nmse(got, reference[part]))
        at += size
    return errors[0], max(errors[1:])


def test_the_shapes_cover_every_architecture(tiny_dir: Path) -> None:
    shipped = {_core.describe_model(p)["architecture"] for p in tiny_dir.glob("*-tiny.gguf")}
    assert shipped <= {s.architecture for s in SHAPES} == set(_core.architectures())
    assert len({s.name for s in SHAPES}) == len(SHAPES)


@by_shape
def test_on_the_cpu_and_planned_for_gpus(shape: Shape, tmp_path: Path) -> None:
    path = random_model(tmp_path / "m.gguf", shape)
    description = _core.describe_model(path)
    assert not description.get("unused_tensors")
    for compute_capability, shared in ((75, 65_536), (80, 166_912), (90, 232_448)):
        device = {
            **DESCRIBED, "compute_capability": compute_capability, "shared_per_block_bytes": shared
        }  # fmt: skip
        for numerics in ("exact", "default"):
            for settings in ({}, {"fusion": False}, {"flash_attention": False}):
                planned = _core.Session(
                    path, load={"numerics": numerics}, context={"ctx": 256}, session=settings,
                    plan_only=True, device=device,
                )  # fmt: skip
                assert planned.ops()
    tokens = tokens_of(shape)
    reference, routing = exact_on_cpu(path, tokens)
    exact = _core.Session(path, load={"numerics": "exact"}, context=F32, session={"ubatch": 23})
    assert max(worst_part(exact, tokens, reference, None)) < 1e-9
    default = _core.Session(path, context={"ctx": 256})
    assert max(worst_part(default, tokens, reference, routing)) < 1e-3


LATENT = [shape for shape in SHAPES if shape.kv_lora and shape.architecture != "kimi-linear"]


@pytest.mark.parametrize("shape", LATENT, ids=lambda shape: shape.name)
def test_the_first_products_of_latent_attention_share_a_launch(shape: Shape, tmp_path: Path) -> None:
    """In the list of a server's step and of prompts; test_on_a_gpu_against_the_cpu runs it."""
    session = _core.Session(
        random_model(tmp_path / "m.gguf", shape), context={"ctx": 256}, session={"mla_mode": "absorbed"},
        plan_only=True, device=DESCRIBED,
    )  # fmt: skip
    for tokens in (9, 23, PROMPT):
        ops = session.ops(tokens)
        assert {op["list"] for op in ops} - {"draw"} == {"batched"}
        for family in ("qkv", "qkv_rope_store"):
            assert sum(op["count"] for op in ops if op["family"] == family) == shape.n_layers


@pytest.mark.gpu
@pytest.mark.skipif(not GPUS, reason=f"no GPU: {_core.no_cuda_reason()}")
@by_shape
def test_on_a_gpu_against_the_cpu(shape: Shape, tmp_path: Path) -> None:
    path = random_model(tmp_path / "m.gguf", shape)
    tokens = tokens_of(shape)
    reference, routing = exact_on_cpu(path, tokens)

    exact = _core.Session(path, load={"device": "cuda:0", "numerics": "exact"}, context=F32)
    found: dict[str, tuple[float, float]] = {}
    for settings in ({}, {"ubatch": 23}):
        exact.set(settings)
        found[f"exact {settings}"] = worst_part(exact, tokens, reference, None)
    exact.close()
    wrong = {name: errors for name, errors in found.items() if max(errors) >= 1e-7}

    default = _core.Session(path, load={"device": "cuda:0"}, context={"ctx": 256})
    ways: list[dict[str, Any]] = [{}, {"fusion": False}, {"ubatch": 23}, {"flash_attention": False}]
    ways.append({"mmq_max_tokens": 0, "mmq_id_max_tokens": 0})
    if shape.kv_lora:
        ways += [{"mla_mode": "expanded"}, {"mla_mode": "absorbed"}]
    known = _core.known_settings()["session"]
    base = {name: known[name] for settings in ways for name in settings}
    for settings in ways:
        default.set({**base, **settings})
        errors = worst_part(default, tokens, reference, routing)
        found[str(settings)] = errors
        if max(errors) >= 1e-5:
            wrong[str(settings)] = errors
    default.set(base)
    for kv in ("bf16", "q8_0"):
        if kv == "q8_0" and (shape.kv_lora or shape.head_dim % 32):
            continue  # rows of no whole number of blocks
        default.set_context({"ctx": 256, "kv_type_k": kv, "kv_type_v": kv})
        errors = worst_part(default, tokens, reference, routing)
        found[f"{kv} cache"] = errors
        if max(errors) >= 1e-2:
            wrong[f"{kv} cache"] = errors
    print(f"{shape.name}: " + ", ".join(f"{k} {a:.1e} {b:.1e}" for k, (a, b) in found.items()))
    assert not wrong


@pytest.mark.parametrize(
    "shape", [shape for shape in SHAPES if shape.architecture == "deepseek2"], ids=lambda shape: shape.name
)
def test_old_files_name_no_gating(tmp_path: Path, shape: Shape) -> None:
    """A bias that corrects the choice of experts belongs to sigmoids (GLM-4.7-Flash), in any vocabulary."""
    metadata, tensors = random_parts(shape)
    del metadata["deepseek2.expert_gating_func"]
    model = _core.describe_model(tiny_gguf(tmp_path / "m.gguf", metadata, tensors))
    corrected = any(tensor.name.endswith("exp_probs_b.bias") for tensor in tensors)
    assert corrected == (shape.q_lora > 0)
    assert model["layers"][-1]["ffn"]["gating"] == ("sigmoid" if corrected else "softmax")
