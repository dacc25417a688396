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


@pytest.mark.gpu
@pytest.mark.skipif(not GPUS, reason=f"no GPU: {_core.no_cuda_reason()}")
@pytest.mark.parametrize("dtype", ["iq3_s", "tq1_0", "tq2_0"])
@pytest.mark.parametrize("numerics", ["default", "exact"])
def test_a_recoded_model_on_a_gpu(tmp_path: Path, dtype: str, numerics: str) -> None:
    path = tiny_model(tmp_path / "m.gguf", "qwen3", n_embd=512, n_ff=768, dtype=dtype)
    tokens = np.random.default_rng(3).integers(0, 200, sum(PARTS)).astype(np.int32)
    reference = logits(path, tokens, load={"device": "cpu", "numerics": "exact"})
    assert np.isfinite(reference).all()
    assert reference.std() > 0.1
    ways: list[dict[str, Any]] = [{}]
    if numerics == "default":
        ways += [{"fusion": False}, {"mmq_max_tokens": 0}, {"matvec_max_tokens": 1}]
    for session in ways:
        found = logits(path, tokens, load={"device": "cuda:0", "numerics": numerics}, session=session)
        assert nmse(found, reference) < (1e-7 if numerics == "exact" else 1e-5), session
