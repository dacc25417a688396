"""A build for one profile (GGML_CUDA_PROFILE) runs its model, and refuses models that it has no kernels for.

cmake -S . -B build/pruned -GNinja -DGGML_CUDA=ON -DGGML_CUDA_PROFILE=profiles/h200-llama-8b-q4_k.yaml
cmake --build build/pruned && cp build/pruned/csrc/bindings/_core*.so python/dyno/
python -m pytest tests/cuda/test_pruned_build.py tests/e2e/test_kernel_groups.py
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from dyno import _core, info
from dyno.errors import UnsupportedError
from dyno.testing import tiny_model

if TYPE_CHECKING:
    from pathlib import Path

TYPES = [
    *("f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k"),
    *("iq4_nl", "iq4_xs", "mxfp4"),
]
BUILD = _core.build_info()
BUILT = set(BUILD["cuda_types"])
GROUPS = set(BUILD["cuda_groups"])
GPUS = [d for d in _core.devices() if d["kind"] == "cuda" and not _core.device_problem(d)]
HOPPER = {"kind": "cuda", "compute_capability": 90, "sm_count": 132, "shared_per_block_bytes": 232_448}

pytestmark = pytest.mark.skipif(
    not BUILT or set(TYPES) <= BUILT or "90a" not in BUILD["switches"]["CMAKE_CUDA_ARCHITECTURES"],
    reason="needs a module of GGML_CUDA_PROFILE for 90a; this one has no CUDA kernels, or those of all types",
)


def model(folder: Path, dtype: str) -> Path:
    return tiny_model(folder / "m.gguf", "llama", n_embd=512, n_ff=768, dtype=dtype)


def test_info_names_the_types_and_groups() -> None:
    text = info.text(info.collect("cpu"))
    assert f"GPU weight types  {', '.join(BUILD['cuda_types'])}; GGML_CUDA_PROFILE=" in text
    assert f"GPU kernel groups {', '.join(BUILD['cuda_groups'])}; GGML_CUDA_PROFILE=" in text


def test_attention_of_other_heads_has_its_exact_kernels_alone() -> None:
    """The tuner compares with these."""
    size = next(size for size in (64, 128, 256) if f"heads_{size}" not in GROUPS)
    desc = {"m": 1, "heads": 4, "kv_heads": 2, "dk": size, "dv": size, "k_type": "f16", "v_type": "f16"}
    assert {c["variant"] for c in _core.ops.candidates("attention", desc, HOPPER)} == {"rows"}
    assert "direct" in {c["variant"] for c in _core.ops.candidates("attention", desc, HOPPER, "legal")}


@pytest.mark.parametrize("dtype", TYPES)
def test_a_plan_for_a_gpu(tmp_path: Path, dtype: str) -> None:
    path = model(tmp_path, dtype)
    if dtype in BUILT:
        plan = _core.Session(path, plan_only=True, device=HOPPER).plan
        assert dtype in {t["dtype"] for t in plan["tensors"]}
        return
    with pytest.raises(UnsupportedError) as refused:
        _core.Session(path, plan_only=True, device=HOPPER)
    message = str(refused.value)
    assert (
        f"is {dtype}, but this build has no GPU kernels for weights of type {dtype}: GGML_CUDA_PROFILE="
        in message
    )
    assert "Build without GGML_CUDA_PROFILE, or with a profile of this model; " in message
    _core.Session(path, plan_only=True, load={"device": "cpu"})  # where nothing was left out


@pytest.mark.parametrize("dtype", [t for t in TYPES if t != "f32"])
def test_candidates(dtype: str) -> None:
    desc = {"type": dtype, "layout": "gpu", "act": "f32", "m": 1, "n": 4096, "k": 4096}
    compiled = _core.ops.candidates("matmul", desc, HOPPER)
    legal = _core.ops.candidates("matmul", desc, HOPPER, "legal")
    assert legal
    assert bool(compiled) == (dtype in BUILT)
    held, reason = _core.ops.supports("matmul", desc, legal[0], HOPPER)
    assert held == (dtype in BUILT)
    assert ("GGML_CUDA_PROFILE" in reason) == (dtype not in BUILT)


def logits(path: Path, tokens: np.ndarray, **options: Any) -> np.ndarray:
    session = _core.Session(path, context={"ctx": 256, "kv_type_k": "f32", "kv_type_v": "f32"}, **options)
    rows, at = [], 0
    for size in (130, 1, 1, 5, 3):
        rows.append(session.decode([(0, tokens[at : at + size])], "all")[0])
        at += size
    return np.concatenate(rows)


@pytest.mark.gpu
@pytest.mark.skipif(not GPUS, reason=f"no GPU: {_core.no_cuda_reason()}")
@pytest.mark.parametrize(
    "session", [{}, {"mmq_max_tokens": 0}, {"matvec_max_tokens": 1}, {"fusion": False}], ids=str
)
@pytest.mark.parametrize("dtype", sorted(BUILT & set(TYPES)) or ["none"])
def test_logits_of_each_type_that_was_kept(tmp_path: Path, dtype: str, session: dict[str, Any]) -> None:
    """Against the CPU's exact path; the path of unpacked weights multiplies them as halves."""
    path = model(tmp_path, dtype)
    tokens = np.random.default_rng(3).integers(0, 200, 140).astype(np.int32)
    reference = logits(path, tokens, load={"device": "cpu", "numerics": "exact"})
    found = logits(path, tokens, load={"device": "cuda:0"}, session=session)
    o, r = found.astype(np.float64), reference.astype(np.float64)
    assert ((o - r) ** 2).sum() / ((r - r.mean()) ** 2).sum() < 1e-5
