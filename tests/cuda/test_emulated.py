"""CUDA kernels run on the CPU thread by thread and held against float64 NumPy.

These are the kernels with recurrent state, those of few tokens' products, and the one that draws tokens.

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
from ops import reference, rounding
from ops.cases import all_cases
from ops.harness import allowing

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray
    from ops.harness import Case

ROOT = Path(__file__).resolve().parents[2]
CASES = [case for case in all_cases() if case.family in ("linear_attention", "short_conv")]
LINEAR = ("q", "k", "v", "step", "beta", "decay", "step_bias", "skip")
CONV = ("x", "before", "after", "w", "bias")


def built(folder: Path, source: str, *headers: str) -> ctypes.CDLL:
    """A source of the emulation as a library in `folder`.

    Args:
        headers: folders of the emulation whose headers come before the others.
    """
    library = folder / f"{source}.so"
    emulation = ROOT / "tests" / "cuda" / "emulated"
    name = subprocess.run(["c++", "--version"], capture_output=True, text=True, check=True).stdout
    # g++ would call a function that initialises the shared memory, and nothing there needs one.
    flags = [] if "clang" in name else ["-fno-extern-tls-init"]
    # The folder of the emulation comes first, so that the kernels get its launch.h.
    command = [
        "c++", "-std=c++20", "-O1", "-shared", "-fPIC", *flags,
        *(f"-I{emulation / each}" for each in (*headers, "")), f"-I{ROOT / 'csrc'}",
        "-Wno-unknown-pragmas", str(emulation / f"{source}.cpp"), "-o", str(library),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return built(tmp_path_factory.mktemp("emulated"), "recurrent")


@pytest.fixture(scope="session")
def products(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = built(tmp_path_factory.mktemp("emulated"), "products")
    library.multiply_by_experts.restype = ctypes.c_char_p
    library.sum_over_experts.restype = ctypes.c_char_p
    library.multiply_row.restype = ctypes.c_char_p
    return library


@pytest.fixture(scope="session")
def sampling(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return built(tmp_path_factory.mktemp("emulated"), "sample")


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
        return (64, 256) if case.desc["m"] < 10_000 else (64,)  # a block each
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


TYPES = ("q4_0", "q4_k", "q5_0", "q5_k", "q6_k", "iq4_nl", "iq4_xs", "q4_16", "q8_0", "mxfp4")
EXPERTS = [
    case
    for case in all_cases()
    if case.family in ("matmul_id", "moe_up_gate")
    and case.desc["layout"] == "gpu"
    and case.desc["type"] in TYPES
    and case.desc["m"] * case.desc["used"] <= 32  # as much as the ring takes
    and case.desc["n"] < 300
]
KINDS = ("stream", "ring", "walk")  # as in emulated/products.cpp
ACTIVATIONS = ("silu", "gelu_tanh", "swiglu_oai", "relu")  # as in ops::Activation


def multiply(
    library: ctypes.CDLL, case: Case, args: dict[str, Any], before: dict[str, NDArray[Any]],
    choice: tuple[str, int, int],
) -> dict[str, NDArray[Any]]:  # fmt: skip
    """The outputs of a product with experts: by ("ring", share, blocks), ("stream", warps, stripes) or
    ("walk", warps, blocks)."""
    desc, outputs = case.desc, {name: array.copy() for name, array in before.items()}
    gated = case.family == "moe_up_gate"
    names = (
        ("x", "w_gate", "w_up", "bias_gate", "bias_up") if gated else ("x", "w", "w_up", "bias", "bias_up")
    )
    weights = args[names[1]]
    error = library.multiply_by_experts(
        desc["type"].encode(), KINDS.index(choice[0]),
        numbers(
            desc["m"] * desc["used"], desc["n"], desc["k"], desc["experts"],
            1 if desc.get("x_per_slot") else desc["used"], ACTIVATIONS.index(desc.get("activation", "silu")),
            *choice[1:], desc.get("shared", 0),
        ),
        pointers(args, (*names, "norm_weight", "shared_gate", "shared_up", "x_bytes")),
        ctypes.c_float(args.get("norm_eps", 0)),
        ctypes.c_int64(0 if weights is None else weights.nbytes // desc["experts"]), address(args["ids"]),
        address(outputs["y"]), address(outputs.get("shared_y", outputs["y"])),
    )  # fmt: skip
    assert error is None, error
    return outputs


def product_choices(case: Case) -> Iterator[tuple[str, int, int]]:
    if case.desc.get("bytes"):
        for warps in (2, 4):
            if -(-case.desc["k"] // 128) >= warps:
                yield "walk", warps, 2
    if case.desc.get("shared"):
        return  # only walk takes a shared expert along
    for share in (1, 8):
        # It norms a single row.
        if not (case.desc.get("norm") and case.desc["m"] > 1):
            yield "ring", share, 2
    yield "stream", 4, 1
    yield "stream", 8, 2


@pytest.mark.parametrize("case", EXPERTS, ids=lambda case: f"{case.family}:{case.id}")
def test_an_emulated_product_with_experts_gives_what_numpy_gives(products: ctypes.CDLL, case: Case) -> None:
    seed = zlib.crc32(case.id.encode())
    allowances: dict[rounding.Arithmetic, list[float]] = {}  # of all choices with one arithmetic
    for choice in product_choices(case):
        args, outputs, check = case.make(np.random.default_rng(seed))
        arithmetic = rounding.arithmetic_of(case.family, case.desc, choice[0])
        assert arithmetic is not None
        if arithmetic not in allowances:
            allowances[arithmetic] = rounding.allowances(case, arithmetic, seed)
        for backwards in (1, 0):
            products.run_backwards(backwards)
            got = multiply(products, case, args, outputs, choice)
            with allowing(allowances[arithmetic]):
                check(got)


ROWS = [
    case
    for case in all_cases()
    if case.family in ("matmul", "qkv")
    and case.desc["layout"] == "gpu"
    and case.desc["m"] == 1
    and case.desc["type"] in TYPES
    and all(case.desc.get(name, case.desc["type"]) == case.desc["type"] for name in ("type_k", "type_v"))
    and not case.desc.get("x_tiles")
]


def multiply_row(
    library: ctypes.CDLL,
    case: Case,
    args: dict[str, Any],
    before: dict[str, NDArray[Any]],
    warps: int,
    stripes: int,
) -> dict[str, NDArray[Any]]:
    """The outputs of a product of one row, or of its three products."""
    desc, outputs = case.desc, {name: array.copy() for name, array in before.items()}
    parts = ("q", "k", "v") if case.family == "qkv" else ("y",)
    batch = desc.get("batch", 1)
    of = (lambda name: [f"{name}_{part}" for part in parts]) if case.family == "qkv" else lambda name: [name]
    weights, biases = of("w"), of("bias")
    absent = [""] * (3 - len(parts))
    counts = [desc["n"], desc.get("n_k", 0), desc.get("n_v", 0)]
    results = [outputs[part] for part in parts]
    error = library.multiply_row(
        desc["type"].encode(),
        numbers(desc["k"], warps, stripes, batch, desc["n"], *counts),
        pointers(args, ("x", "norm_weight", "residual", *weights, *absent, *biases, *absent)),
        ctypes.c_float(args.get("norm_eps", 0)), ctypes.c_float(args.get("scale", 1)),
        ctypes.c_int64(args[weights[0]].nbytes // batch),
        (ctypes.c_void_p * 3)(*(array.ctypes.data for array in results)),
    )  # fmt: skip
    assert error is None, error
    return outputs


@pytest.mark.parametrize("case", ROWS, ids=lambda case: f"{case.family}:{case.id}")
def test_an_emulated_product_of_one_row_gives_what_numpy_gives(products: ctypes.CDLL, case: Case) -> None:
    """Stripes have 16 rows; 3 stands for three stripes of two blocks."""
    seed = zlib.crc32(case.id.encode())
    arithmetic = rounding.arithmetic_of(case.family, case.desc, "stream")
    assert arithmetic is not None
    allowances = rounding.allowances(case, arithmetic, seed)
    for warps, stripes in ((4, 1), (8, 2), (4, 3), (8, 3), (16, 3)):
        args, outputs, check = case.make(np.random.default_rng(seed))
        for backwards in (1, 0):
            products.run_backwards(backwards)
            got = multiply_row(products, case, args, outputs, warps, stripes)
            with allowing(allowances):
                check(got)


RINGS_OF_BYTES = ("iq4_nl", "iq4_xs", "q4_16", "mxfp4")
STREAMS_OF_BYTES = ("mxfp4", "q4_0", "q4_k", "q6_k", "q8_0")
INTEGERS = [
    *((dtype, ("ring", 1, 2)) for dtype in RINGS_OF_BYTES),
    *((dtype, ("stream", warps, warps // 4)) for dtype in STREAMS_OF_BYTES for warps in (4, 8)),
]


@pytest.mark.parametrize(("dtype", "choice"), INTEGERS)
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_a_number_does_not_become_one(
    products: ctypes.CDLL, dtype: str, choice: tuple[str, int, int], wrong: float
) -> None:
    """These kernels make integers of x, which have no NaN."""
    of_type = (c for c in EXPERTS if c.family == "matmul_id" and c.desc["type"] == dtype)
    case = next(c for c in of_type if c.desc["m"] > 1)
    args, outputs, check = case.make(np.random.default_rng(3))
    args["ids"][:] = np.maximum(args["ids"], 0)  # every row has an expert
    args["x"][1, 7] = wrong
    found = multiply(products, case, args, outputs, choice)["y"]
    of_x = found.reshape(len(args["x"]), -1)
    assert np.isnan(of_x[1]).all()
    assert np.isfinite(np.delete(of_x, 1, axis=0)).all()
    with pytest.raises(AssertionError):
        check({"y": found})


@pytest.mark.parametrize(("dtype", "choice"), INTEGERS)
def test_the_largest_value_of_a_row_fits_its_number(
    products: ctypes.CDLL, dtype: str, choice: tuple[str, int, int]
) -> None:
    """A number of 16 bits has two signed bytes, so the largest is below 2^15 - 128, also after rounding."""
    of_type = (c for c in EXPERTS if c.family == "matmul_id" and c.desc["type"] == dtype)
    case = next(c for c in of_type if c.desc["m"] > 1)
    args, outputs, _ = case.make(np.random.default_rng(3))
    args["ids"][:] = 0
    args["bias"] = None
    values = np.array([0x7EFE00, 0x7EFF00, 0x7EFF01, 0x7EFFFF, 0x7F0000, 0x7FFFFF, 0], np.uint32)
    values = (values | np.uint32(0x3F800000)).view(np.float32)

    def column(value: float) -> NDArray[Any]:
        args["x"][:] = 0
        args["x"][:, 7] = value
        return multiply(products, case, args, outputs, choice)["y"].astype(np.float64) / value

    expected = column(1.0)
    assert np.abs(expected).max() > 0
    for value in [*values, *-values]:
        np.testing.assert_allclose(column(value), expected, rtol=1e-4)


SUMS = [
    case
    for case in all_cases()
    if case.family == "moe_down_sum" and case.desc["type"] in ("q4_0", "q4_k", "q8_0", "mxfp4")
]


def add_up(
    library: ctypes.CDLL, case: Case, args: dict[str, Any], before: dict[str, NDArray[Any]],
    choice: tuple[str, int, int],
) -> dict[str, NDArray[Any]]:  # fmt: skip
    """The sum over experts, by a choice as of multiply()."""
    desc, outputs = case.desc, {name: array.copy() for name, array in before.items()}
    error = library.sum_over_experts(
        desc["type"].encode(), KINDS.index(choice[0]),
        numbers(
            *(desc[name] for name in ("m", "n", "k", "experts", "used")), *choice[1:], desc.get("shared", 0)
        ),
        pointers(args, ("x", "w", "bias", "residual", "weights", "shared_x", "shared_w")),
        ctypes.c_float(args["scale"]), ctypes.c_int64(args["w"].nbytes // desc["experts"]),
        address(args["ids"]), address(outputs["out"]),
    )  # fmt: skip
    assert error is None, error
    return outputs


@pytest.mark.parametrize("case", SUMS, ids=lambda case: f"{case.family}:{case.id}")
def test_an_emulated_sum_over_experts_gives_what_numpy_gives(products: ctypes.CDLL, case: Case) -> None:
    seed = zlib.crc32(case.id.encode())
    allowances: dict[rounding.Arithmetic, list[float]] = {}
    for choice in (("ring", 1, 2), ("ring", 8, 2), ("stream", 4, 1), ("stream", 16, 1), ("stream", 8, 2)):
        if case.desc["shared"] and choice[0] == "ring":
            continue  # only stream adds the shared expert's product
        args, outputs, check = case.make(np.random.default_rng(seed))
        arithmetic = rounding.arithmetic_of(case.family, case.desc, choice[0])
        assert arithmetic is not None
        if arithmetic not in allowances:
            allowances[arithmetic] = rounding.allowances(case, arithmetic, seed)
        for backwards in (1, 0):
            products.run_backwards(backwards)
            got = add_up(products, case, args, outputs, choice)
            with allowing(allowances[arithmetic]):
                check(got)


def test_rows_without_an_expert_read_no_weights(products: ctypes.CDLL) -> None:
    """The weights are at address 0 here, where a read ends the process."""
    cases = [case for case in EXPERTS if "none=1" in case.id]
    assert {case.family for case in cases} == {"matmul_id", "moe_up_gate"}
    for case in cases:
        for choice in product_choices(case):
            args, outputs, _ = case.make(np.random.default_rng(1))
            assert (args["ids"] == -1).all()
            nowhere = {
                name: None if name.startswith(("w", "bias")) else value for name, value in args.items()
            }
            if case.family == "moe_up_gate":
                nowhere["w_up"] = np.zeros(16, np.uint8)  # null would say that the product is no pair
            assert not multiply(products, case, nowhere, outputs, choice)["y"].any()


@pytest.mark.parametrize("rows", [1, 37, 700, 5000])
@pytest.mark.parametrize("absent", [0.0, 0.6, 1.0])
def test_rows_are_grouped_by_expert_and_zeroed_without_one(
    products: ctypes.CDLL, rows: int, absent: float
) -> None:
    rng = np.random.default_rng(rows)
    matrices, tile_rows, n = 67, 16, 5
    ids = rng.integers(0, matrices, rows).astype(np.int32)
    ids[rng.random(rows) < absent] = -1
    groups = np.full(2 * (matrices + 1) + rows, -7, np.int32)
    y = np.full((rows, n), 77, np.float32)
    products.group_rows(address(ids), rows, matrices, tile_rows, n, address(groups), address(y))

    first_tile, first_row, order = np.split(groups, (matrices + 1, 2 * matrices + 2))
    counts = np.bincount(ids[ids >= 0], minlength=matrices)
    np.testing.assert_array_equal(first_row, np.concatenate([[0], np.cumsum(counts)]))
    np.testing.assert_array_equal(first_tile, np.concatenate([[0], np.cumsum(-(-counts // tile_rows))]))
    for expert in range(matrices):
        found = order[first_row[expert] : first_row[expert + 1]]
        np.testing.assert_array_equal(np.sort(found), np.flatnonzero(ids == expert))
    assert (order[counts.sum() :] == -7).all()
    assert (y[ids < 0] == 0).all()
    assert (y[ids >= 0] == 77).all()


class SampleSettings(ctypes.Structure):
    """`ops::SampleSettings`."""

    _fields_ = (
        ("temperature", ctypes.c_float),
        ("top_k", ctypes.c_int32),
        ("top_p", ctypes.c_float),
        ("min_p", ctypes.c_float),
    )


def drawn(
    library: ctypes.CDLL, logits: NDArray[Any], uniform: float, settings: dict[str, float], blocks: int
) -> int:
    """The token that `blocks` blocks draw from one row."""
    chosen = SampleSettings(**{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **settings})
    # Top-p alone sorts the row, and needs memory for that. A top-k of all tokens leaves top-p alone.
    sorts = chosen.temperature > 0 and chosen.top_p < 1 and not 0 < chosen.top_k < logits.size
    token: int = library.draw(
        address(logits),
        ctypes.c_int64(logits.size),
        ctypes.byref(chosen),
        ctypes.c_float(uniform),
        1,
        blocks,
        int(sorts),
    )
    return token


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 1},
        {"top_k": 40, "top_p": 0.95, "min_p": 0.05, "temperature": 0.8},
        {"top_k": 256, "top_p": 0.9999, "temperature": 1.5},
        {"top_k": 7, "min_p": 0.3},
        {"top_k": 60, "top_p": 1e-6},
    ],
    ids=lambda settings: "-".join(f"{name}={value}" for name, value in settings.items()),
)
def test_few_kept_tokens_are_drawn_as_numpy_draws(sampling: ctypes.CDLL, settings: dict[str, float]) -> None:
    """Of rows with ties, with holes, with more equal logits than are sorted, and of many chunks."""
    rng = np.random.default_rng(3)
    settings = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, **settings}
    rows = [3 * rng.standard_normal(300), np.round(rng.standard_normal(261)), np.zeros(600)]
    rows[1][rng.random(261) < 0.4] = -np.inf
    rows.append(np.full(203, -np.inf))
    rows[3][[5, 200]] = 1.0, 1.5
    rows.append(4 * rng.standard_normal(45_001))
    for at, row in enumerate(rows):
        logits = row.astype(np.float32)
        for backwards, uniform in ((0, 0.0), (1, float(np.float32(rng.random())))):
            sampling.run_backwards(backwards)
            want = reference.sample(logits.astype(np.float64), uniform=uniform, **settings)  # type: ignore[arg-type]
            assert drawn(sampling, logits, uniform, settings, blocks=1 + 2 * at) == want
