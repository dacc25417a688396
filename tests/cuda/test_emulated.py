"""CUDA kernels with recurrent state, run on the CPU thread by thread and held against float64 NumPy.

`emulated/` gives their source CUDA's words. So a machine without a GPU checks their arithmetic and indices on
the cases of the contract suite. Each runs with its first thread first and with its last one first: a missing
barrier makes the two differ. Memory stays with compute-sanitizer on a GPU.
"""

from __future__ import annotations

import ctypes
import subprocess
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from ops.cases import all_cases

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from ops.harness import Case

ROOT = Path(__file__).resolve().parents[2]
CASES = [case for case in all_cases() if case.family in ("linear_attention", "short_conv")]
LINEAR = ("q", "k", "v", "step", "beta", "decay", "step_bias", "skip")
CONV = ("x", "before", "after", "w", "bias")


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = tmp_path_factory.mktemp("emulated") / "recurrent.so"
    folder = ROOT / "tests" / "cuda" / "emulated"
    name = subprocess.run(["c++", "--version"], capture_output=True, text=True, check=True).stdout
    # g++ would call a function that initialises the shared memory, and nothing there needs one.
    flags = [] if "clang" in name else ["-fno-extern-tls-init"]
    # The folder of the emulation comes first, so that the kernels get its launch.h.
    command = [
        "c++", "-std=c++20", "-O1", "-shared", "-fPIC", *flags, f"-I{folder}", f"-I{ROOT / 'csrc'}",
        "-Wno-unknown-pragmas", str(folder / "recurrent.cpp"), "-o", str(library),
    ]  # fmt: skip
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return ctypes.CDLL(str(library))


def pointers(args: dict[str, Any], names: Sequence[str]) -> ctypes.Array[ctypes.c_void_p]:
    """Addresses of the arrays; null for one that is not there. `args` has to outlive them."""
    found = [None if args.get(name) is None else args[name].ctypes.data for name in names]
    return (ctypes.c_void_p * len(names))(*found)


def numbers(*values: int) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*(int(value) for value in values))


def address(array: NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def launch(
    library: ctypes.CDLL, case: Case, args: dict[str, Any], before: dict[str, NDArray[Any]], choice: int
) -> dict[str, NDArray[Any]]:
    """The outputs of a kernel that runs as the launch of its op does.

    Args:
        before: what stands in the outputs first; not changed, because the check reads the state from it.
        choice: chunks or not, or the threads of a block.
    """
    desc, outputs = case.desc, {name: array.copy() for name, array in before.items()}
    runs = np.array(args["runs"], np.int32)
    if case.family == "short_conv":
        library.short_conv(
            choice,
            numbers(
                desc["m"], desc["n"], desc["taps"], desc["silu"], desc["gated"], args["x_stride"],
                args["y_stride"], len(runs),
            ),
            pointers(args, CONV), address(runs), address(outputs["state"]), address(outputs["y"]),
        )  # fmt: skip
        return outputs
    library.linear_attention(
        choice,
        numbers(
            desc["m"], desc["k_heads"], desc["v_heads"], desc["dk"], desc["dv"], desc["rule"] == "additive",
            desc["grouped"], desc["channel_decay"], args["q_stride"], args["out_stride"], len(runs),
        ),
        pointers(args, LINEAR), ctypes.c_float(args["eps"]), address(runs), address(outputs["state"]),
        address(outputs["out"]),
    )  # fmt: skip
    return outputs


def choices(case: Case) -> tuple[int, ...]:
    if case.family == "short_conv":
        return (64, 256)
    # Chunks take one decay a head, of at most 256 dimensions.
    return (0,) if case.desc["channel_decay"] or case.desc["dk"] > 256 else (0, 1)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_an_emulated_kernel_gives_what_numpy_gives(kernels: ctypes.CDLL, case: Case) -> None:
    for choice in choices(case):
        args, outputs, check = case.make(np.random.default_rng(zlib.crc32(case.id.encode())))
        found = launch(kernels, case, args, outputs, choice)
        check(found)
        kernels.run_backwards(1)
        try:
            other = launch(kernels, case, args, outputs, choice)
        finally:
            kernels.run_backwards(0)
        for name, array in found.items():
            np.testing.assert_array_equal(other[name], array, err_msg=f"{name}: a barrier is missing")


def test_a_wrong_answer_is_seen(kernels: ctypes.CDLL) -> None:
    """The check is not satisfied by what stood in the outputs, or by the answer to other inputs."""
    case = next(c for c in CASES if c.family == "linear_attention" and c.desc["m"] == 75)
    args, outputs, check = case.make(np.random.default_rng(1))
    with pytest.raises(AssertionError):
        check(outputs)
    changed = launch(kernels, case, {**args, "decay": args["decay"] * 1.01}, outputs, 1)
    with pytest.raises(AssertionError):
        check(changed)
