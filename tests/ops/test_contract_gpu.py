"""The op contract on a GPU: every candidate of every family against the float64 reference.

Bit for bit the same again and as a replayed graph, with guard bytes around every argument in device memory,
which the launcher checks.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest
from dyno import _core
from dyno.errors import DeviceError

from ops.cases import all_cases
from ops.harness import Case, at_least, launch

GPUS = [d for d in _core.devices() if d["kind"] == "cuda"]
DEVICE = {key: value for key, value in GPUS[0].items() if key != "ordinal"} if GPUS else {}

HOPPER = {"kind": "cuda", "compute_capability": 90, "sm_count": 132, "shared_per_block_bytes": 232_448}
TURING = {"kind": "cuda", "compute_capability": 75, "sm_count": 46, "shared_per_block_bytes": 65_536}

needs_gpu = pytest.mark.skipif(not GPUS, reason=f"no GPU: {_core.no_cuda_reason()}")
by_case = pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.family + ":" + case.id)


def tolerance(case: Case, config: dict[str, Any]) -> float:
    """NMSE that the operands of a variant's products allow: 11 bits of a half, 8 of a bfloat16."""
    if case.family == "attention" and config["variant"] in ("flash", "flash_split", "direct", "latent"):
        return 1e-5 if case.desc["k_type"] == "bf16" else 1e-6
    if config["variant"] in ("stream", "mma", "wgmma"):
        # With a min, a weight is the difference of two numbers that were rounded to halves.
        types = {case.desc.get(name) for name in ("type", "type_k", "type_v")}
        return 8e-6 if types & {"q4_1", "q5_1", "q2_k", "q4_k", "q5_k"} else 1e-6
    return 0.0


@pytest.mark.gpu
@needs_gpu
@by_case
def test_every_candidate_is_right_on_the_gpu(case: Case) -> None:
    seed = zlib.crc32(case.id.encode())
    args, outputs, check = case.make(np.random.default_rng(seed))
    configs = _core.ops.candidates(case.family, case.desc, DEVICE)
    if not configs:
        pytest.skip("no CUDA variant")
    for config in configs:
        try:
            first = launch(case, config, args, outputs, device="cuda:0")
            with at_least(tolerance(case, config)):
                check(first)
            for captured in (False, True):
                again = launch(case, config, args, outputs, device="cuda:0", captured=captured)
                for name, value in first.items():
                    if name == "workspace":  # scratch memory: rows of an expert in any order
                        continue
                    same = np.array_equal(again[name].view(np.uint8), value.view(np.uint8))
                    assert same, f"{name} differs, captured={captured}"
        except AssertionError as error:
            error.add_note(f"{case.family} {case.desc} with {config}, seed {seed}")
            raise


@by_case
def test_selection_for_a_gpu_needs_none(case: Case) -> None:
    for machine in (HOPPER, TURING):
        legal = _core.ops.candidates(case.family, case.desc, machine, "legal")
        assert len({tuple(config.items()) for config in legal}) == len(legal)
        compiled = _core.ops.candidates(case.family, case.desc, machine, "compiled")
        assert [config for config in legal if config in compiled] == compiled
        for config in legal:
            ok, why = _core.ops.supports(case.family, case.desc, config, machine)
            # A build without code for the chip says what one with code would; others answer for themselves.
            assert ok == (config in compiled or not compiled), why
            assert ok == (why == "")
            assert ok or "GGML_CUDA_INSTANCES" in why
        if legal:
            assert _core.ops.default_config(case.family, case.desc, machine) in (compiled or legal)
        if _core.build_info()["switches"]["GGML_CUDA"] == "OFF":
            assert compiled == []


def test_a_device_that_is_not_there_is_an_error() -> None:
    probe: dict[str, Any] = {"x": np.zeros(4, np.float32), "out": np.zeros(4, np.float32)}
    with pytest.raises(DeviceError, match="cuda:99"):
        _core.ops.run("norm", {"n": 4}, None, probe, device="cuda:99")
