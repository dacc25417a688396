"""The op contract on a GPU: every candidate of every family against the float64 reference.

Bit for bit the same again, as a replayed graph and on other numbers of multiprocessors, with guard bytes
around every argument in device memory, which the launcher checks. Empty experts and all tokens to one expert
are cases; what rounding allows each variant, ops.rounding says.
"""

from __future__ import annotations

import itertools
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from dyno import _core
from dyno.errors import DeviceError

from ops import rounding
from ops.cases import all_cases
from ops.harness import Case, allowing, launch

if TYPE_CHECKING:
    from collections.abc import Iterable

GPUS = [d for d in _core.devices() if d["kind"] == "cuda"]
DEVICE = {key: value for key, value in GPUS[0].items() if key != "ordinal"} if GPUS else {}

HOPPER = {"kind": "cuda", "compute_capability": 90, "sm_count": 132, "shared_per_block_bytes": 232_448}
TURING = {"kind": "cuda", "compute_capability": 75, "sm_count": 46, "shared_per_block_bytes": 65_536}
FEW, MANY = 7, 2 * 132 + 61  # multiprocessors: no powers of two, fewer and more than any chip has

needs_gpu = pytest.mark.skipif(not GPUS, reason=f"no GPU: {_core.no_cuda_reason()}")
by_case = pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.family + ":" + case.id)


@pytest.mark.gpu
@needs_gpu
@by_case
def test_every_candidate_is_right_on_the_gpu(case: Case) -> None:
    seed = zlib.crc32(case.id.encode())
    args, outputs, check = case.make(np.random.default_rng(seed))
    configs = _core.ops.candidates(case.family, case.desc, DEVICE)
    if not configs:
        pytest.skip("no CUDA variant")
    nothing = itertools.repeat(0.0)  # a check compares as often as its case has runs
    allowed: dict[rounding.Arithmetic | None, Iterable[float]] = {}
    force_bf16 = _core.build_info()["switches"]["GGML_CUDA_FORCE_BF16"] == "ON"
    for config in configs:
        arithmetic = rounding.arithmetic_of(case.family, case.desc, config["variant"], force_bf16=force_bf16)
        if arithmetic not in allowed:
            allowed[arithmetic] = rounding.allowances(case, arithmetic, seed) if arithmetic else nothing
        try:
            first = launch(case, config, args, outputs, device="cuda:0")
            with allowing(allowed[arithmetic]):
                check(first)
            for captured, sm_count in ((False, 0), (True, 0), (False, FEW), (True, MANY)):
                again = launch(
                    case, config, args, outputs, device="cuda:0", captured=captured, sm_count=sm_count
                )
                if sm_count and config["variant"] == "adaptive":  # it divides the keys for the chip
                    with allowing(allowed[arithmetic]):
                        check(again)
                    continue
                for name, value in first.items():
                    if name == "workspace":  # scratch memory: rows of an expert in any order
                        continue
                    same = np.array_equal(again[name].view(np.uint8), value.view(np.uint8))
                    assert same, f"{name} differs, captured={captured}, sm_count={sm_count}"
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
