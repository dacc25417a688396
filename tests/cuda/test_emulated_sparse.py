"""CUDA kernels of sparse attention and of norms, thread by thread on the CPU, against float64 NumPy.

The kernels run as in test_emulated.py: each with its first thread first and with its last one first.
"""

from __future__ import annotations

import ctypes
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from dyno import _core
from ops import rounding
from ops.cases import all_cases
from ops.harness import allowing
from test_emulated import address, built, numbers, pointers

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from ops.harness import Case

Arrays = dict[str, Any]
SELECT = [case for case in all_cases() if case.family == "index_select"]
NORMS = [case for case in all_cases() if case.family == "norm"]
ATTENTION = [
    case
    for case in all_cases()
    if case.family == "attention"
    and 0 < case.desc["m"] * case.desc["heads"] * case.desc["dk"] * case.desc["selected"] < 6_000_000
]
HOPPER = {"kind": "cuda", "compute_capability": 90, "sm_count": 132, "shared_per_block_bytes": 232_448}


def splits_of(case: Case, variant: str, *wanted: int) -> list[int]:
    """The numbers of parts that a variant offers for a case."""
    configs = _core.ops.candidates(case.family, case.desc, HOPPER, "legal")
    return [c["splits"] for c in configs if c["variant"] == variant and c["splits"] in wanted]


@pytest.fixture(scope="session")
def select(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return built(tmp_path_factory.mktemp("emulated"), "select")


@pytest.fixture(scope="session")
def attention(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return built(tmp_path_factory.mktemp("emulated"), "attention")


def both_ways(
    library: ctypes.CDLL, run: Callable[[Arrays], None], before: Arrays, check: Callable[[Arrays], None]
) -> None:
    """Check the outputs of a kernel, and that they do not depend on the order of threads."""
    found: list[Arrays] = []
    for backwards in (0, 1):
        outputs = {name: array.copy() for name, array in before.items()}
        library.run_backwards(backwards)
        try:
            run(outputs)
        finally:
            library.run_backwards(0)
        found.append(outputs)
    check(found[0])
    for name, array in found[0].items():
        np.testing.assert_array_equal(found[1][name], array, err_msg=f"{name}: a barrier is missing")


def made(case: Case) -> tuple[Arrays, dict[str, NDArray[Any]], Callable[[Arrays], None]]:
    args, outputs, check = case.make(np.random.default_rng(zlib.crc32(case.id.encode())))
    return args, outputs, check


@pytest.mark.parametrize(
    ("case", "splits"), [(case, splits) for case in SELECT for splits in splits_of(case, "blocks", 1, 4, 132)]
)
def test_emulated_selections(select: ctypes.CDLL, case: Case, splits: int) -> None:
    args, before, check = made(case)
    runs = np.array(args["runs"], np.int32)
    desc = case.desc

    def run(outputs: Arrays) -> None:
        assert select.index_select(
            splits,
            numbers(
                *(desc[name] for name in ("m", "heads", "dk", "selected")), args["q_stride"],
                args["weights_stride"], args["slot_positions"], len(runs), args["out_stride"],
            ),
            address(args["q"]), address(args["weights"]), address(args["keys"]), address(runs),
            address(outputs["out"]),
        ), "memory behind the workspace was written"  # fmt: skip

    both_ways(select, run, before, check)


@pytest.mark.parametrize("threads", [32, 128, 1024])
@pytest.mark.parametrize("case", NORMS, ids=lambda case: case.id)
def test_emulated_norms(select: ctypes.CDLL, case: Case, threads: int) -> None:
    args, before, check = made(case)
    desc = case.desc

    def run(outputs: Arrays) -> None:
        select.norm(
            threads,
            numbers(
                *(desc[name] for name in ("m", "n", "rows_per_token", "add", "centred")), args["x_stride"],
                args["out_stride"], args.get("weight_stride", 0),
            ),
            pointers(args, ("x", "weight", "residual", "bias")), ctypes.c_float(args["eps"]),
            ctypes.c_float(args.get("scale", 1.0)), address(outputs["out"]),
        )  # fmt: skip

    both_ways(select, run, before, check)


@pytest.mark.parametrize(
    ("case", "variant", "splits"),
    [
        (case, variant, splits)
        for case in ATTENTION
        for variant in ("rows", "latent")
        for splits in splits_of(case, variant, 1, 4)
    ],
)
def test_emulated_attention_to_selected_positions(
    attention: ctypes.CDLL, case: Case, variant: str, splits: int
) -> None:
    args, before, check = made(case)
    runs = np.array(args["runs"], np.int32)
    desc = case.desc
    arithmetic = rounding.arithmetic_of("attention", desc, variant)
    seed = zlib.crc32(case.id.encode())
    allowed = rounding.allowances(case, arithmetic, seed) if arithmetic else [0.0]
    row = args["k_cache"].nbytes // (args["slot_positions"] * (1 + max(slot for *_, slot in args["runs"])))

    def run(outputs: Arrays) -> None:
        assert attention.attention(
            int(variant == "latent"), splits, desc["k_type"].encode(),
            numbers(
                *(desc[name] for name in ("m", "heads", "dk", "dv", "sinks", "softcap", "selected")),
                args["q_stride"], row, args["slot_positions"], len(runs), args["selected_stride"],
                args["out_stride"],
            ),
            address(args["q"]), address(args["k_cache"]),
            address(args["sinks"]) if desc["sinks"] else None, ctypes.c_float(args["scale"]),
            ctypes.c_float(args.get("softcap", 0.0)), address(runs), address(args["selected"]),
            address(outputs["out"]),
        ), "memory behind the workspace was written, or a counter is not zero"  # fmt: skip

    with allowing(allowed):
        both_ways(attention, run, before, check)
