"""Models in weight types that a GPU reads as another type, compared with the CPU's exact path."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from dyno import _core
from dyno.testing import tiny_model

if TYPE_CHECKING:
    from pathlib import Path

GPUS = [d for d in _core.devices() if d["kind"] == "cuda" and not _core.device_problem(d)]
F32 = {"ctx": 128, "kv_type_k": "f32", "kv_type_v": "f32"}
PARTS = [70, 1, 1, 5, 3]


def nmse(observed: np.ndarray, reference: np.ndarray) -> float:
    o, r = observed.astype(np.float64), reference.astype(np.float64)
    return float(((o - r) ** 2).sum() / ((r - r.mean()) ** 2).sum())


def logits(path: Path, tokens: np.ndarray, **options: Any) -> np.ndarray:
    s = _core.Session(path, context=F32, **options)
    rows, at = [], 0
    for size in PARTS:
        rows.append(s.decode([(0, tokens[at : at + size])], "all")[0])
        at += size
    return np.concatenate(rows)


# Each form on a GPU: Q8_0, Q4_0, F16, float32, Q8_16 and Q4_16, with every kind of scale and codebook.
TYPES = [
    "iq2_k", "iq2_ks", "iq3_s", "q6_0", "iq1_bn", "q1_0", "q2_0", "tq1_0", "tq2_0", "nvfp4", "iq6_k",
    "iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_k", "iq4_k", "iq5_k", "iq3_ks", "iq4_ks",
    "iq4_kss", "iq5_ks", "iq2_kl", "iq2_bn", "q8_kv", "iq1_kt", "iq2_kt", "iq3_kt", "iq4_kt",
]  # fmt: skip
# Those of several ways to store scales, as experts and on the exact path too.
FEW = ["iq3_s", "tq2_0", "nvfp4", "iq6_k", "iq4_k", "iq3_xxs", "iq4_ks", "iq1_m", "iq4_kt", "iq2_bn"]
WAYS: list[dict[str, Any]] = [{}, {"fusion": False}, {"mmq_max_tokens": 0}, {"matvec_max_tokens": 1}]

needs_gpu = pytest.mark.skipif(not GPUS, reason=f"no GPU: {_core.no_cuda_reason()}")


def compare(path: Path, numerics: str, ways: list[dict[str, Any]], limit: float) -> None:
    tokens = np.random.default_rng(3).integers(0, 200, sum(PARTS)).astype(np.int32)
    reference = logits(path, tokens, load={"device": "cpu", "numerics": "exact"})
    assert np.isfinite(reference).all()
    assert reference.std() > 0.1
    for session in ways:
        found = logits(path, tokens, load={"device": "cuda:0", "numerics": numerics}, session=session)
        assert nmse(found, reference) < limit, session


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", TYPES)
def test_a_recoded_model_on_a_gpu(tmp_path: Path, dtype: str) -> None:
    path = tiny_model(tmp_path / "m.gguf", "qwen3", n_embd=512, n_ff=768, dtype=dtype)
    compare(path, "default", WAYS, 1e-5)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", FEW)
def test_the_exact_path_of_a_recoded_model(tmp_path: Path, dtype: str) -> None:
    path = tiny_model(tmp_path / "m.gguf", "qwen3", n_embd=512, n_ff=768, dtype=dtype)
    compare(path, "exact", [{}], 1e-7)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", FEW)
def test_recoded_experts_on_a_gpu(tmp_path: Path, dtype: str) -> None:
    path = tiny_model(
        tmp_path / "m.gguf",
        "qwen3moe",
        n_embd=512,
        n_ff_expert=256,
        n_experts=16,
        n_experts_used=4,
        dtype=dtype,
    )
    compare(path, "default", [{}, {"fusion": False}, {"mmq_id_max_tokens": 0}], 1e-5)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("architecture", ["qwen3", "qwen3moe"])
def test_a_plan_for_a_gpu_reads_every_type(tmp_path: Path, dtype: str, architecture: str) -> None:
    """Without a GPU: the plan names both types, and the model's values are ordinary."""
    path = tiny_model(
        tmp_path / "m.gguf", architecture, n_embd=512, n_ff=512, n_ff_expert=256, n_layers=1, dtype=dtype
    )
    machine = {"kind": "cuda", "compute_capability": 90, "sm_count": 132, "shared_per_block_bytes": 232_448}
    session = _core.Session(path, plan_only=True, device=machine)
    there = {t["dtype"] for t in session.plan["tensors"]} - {"f32"}
    assert there <= {"q4_0", "q8_0", "q8_16", "q4_16", "f16"}
    form = there.pop() if there else "f32"
    assert not there
    assert f" weights {dtype} as {form}" in session.describe_plan()
    if architecture == "qwen3":
        found = logits(
            path, np.arange(sum(PARTS), dtype=np.int32), load={"device": "cpu", "numerics": "exact"}
        )
        assert np.isfinite(found).all()
        assert 0.1 < found.std() < 10
