"""Direct attention over q8_0 caches, thread by thread on the CPU, against float64 NumPy.

Rows of such a cache pass through shared memory. In the emulation a copy arrives only when its thread waits
for it, and NaNs stand there before. So a wait that is missing, or a copy that starts too early, changes the
answers.
"""

from __future__ import annotations

import ctypes
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from ops import cases_attention, cases_rope_attention, rounding
from ops.harness import allowing
from test_emulated import address, built, numbers, pointers
from test_emulated_sparse import both_ways

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from ops.harness import Case
    from ops.reference import Run

HOPPER = (90, 232_448)
AMPERE = (86, 101_376)
TURING = (75, 65_536)


@pytest.fixture(scope="session")
def direct(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = built(tmp_path_factory.mktemp("emulated"), "direct")
    library.attention.restype = library.rope_attention.restype = ctypes.c_char_p
    return library


def aligned(array: NDArray[Any], skew: int = 0) -> NDArray[Any]:
    """The same bytes at a multiple of 64 bytes, or `skew` bytes behind one."""
    buffer = np.full(array.nbytes + 128, 0xFF, np.uint8)
    at = -buffer.ctypes.data % 64 + skew
    inner = buffer[at : at + array.nbytes].view(array.dtype).reshape(array.shape)
    inner[...] = array
    return inner


def check_case(
    library: ctypes.CDLL,
    case: Case,
    rows: int,
    splits: int,
    *,
    chip: tuple[int, int] = HOPPER,
    skew: int = 0,
    staged: bool = True,
    settled: bool = True,
) -> None:
    """Check the answers of a launch, and whether its rows passed through shared memory.

    Args:
        skew: bytes between a multiple of 64 bytes and the caches.
    """
    seed = zlib.crc32(case.id.encode())
    args, before, check = case.make(np.random.default_rng(seed))
    desc, runs = case.desc, np.array(args["runs"], np.int32)
    fused = case.family == "rope_attention"
    arithmetic = rounding.arithmetic_of(case.family, desc, "direct")
    assert arithmetic is not None
    slots = 1 + max(slot for *_, slot in args["runs"])

    if not fused:  # NaN: what stands behind the keys of a sequence is not read
        for name in ("k_cache", "v_cache"):
            cells = args[name].view(np.uint8).reshape(slots, args["slot_positions"], -1)
            for _, count, position, slot in args["runs"]:
                cells[slot, position + count :] = 0xFF

    def run(outputs: dict[str, NDArray[Any]]) -> None:
        caches = {
            name: aligned(outputs[name] if fused else args[name], skew) for name in ("k_cache", "v_cache")
        }
        row_bytes = [cache.nbytes // (slots * args["slot_positions"]) for cache in caches.values()]
        given = {**args, **caches, "out": outputs["out"]}
        shared = [
            *(desc[name] for name in ("m", "heads", "kv_heads", "dk", "dv", "sinks", "windowed", "softcap")),
            args["q_stride"], *row_bytes, args["slot_positions"], slots, len(runs), int(settled),
            args["out_stride"], args.get("window", 0),
        ]  # fmt: skip
        places = ("q", "k_cache", "v_cache", "sinks", "out")
        scale, softcap = ctypes.c_float(args["scale"]), ctypes.c_float(args.get("softcap", 0.0))
        if fused:
            fault = library.rope_attention(
                numbers(rows, splits, *chip),
                numbers(
                    *shared, args["k_stride"], args["v_stride"], desc["n_rot"], desc["neox"], desc["v_norm"]
                ),
                pointers(given, (*places, "k", "v", "q_norm", "k_norm", "inv_freq")), scale, softcap,
                ctypes.c_float(args["eps"]), ctypes.c_float(args["mscale"]), address(runs),
            )  # fmt: skip
            for name, cache in caches.items():
                outputs[name][...] = cache
        else:
            fault = library.attention(
                numbers(rows, splits, *chip), desc["k_type"].encode(), desc["v_type"].encode(),
                numbers(*shared), pointers(given, places), scale, softcap, address(runs),
            )  # fmt: skip
        assert fault is None, fault.decode()
        assert bool(library.was_staged()) == staged

    with allowing(rounding.allowances(case, arithmetic, seed)):
        both_ways(library, run, before, check)


def q8_0(heads: int, kv_heads: int, dim: int, runs: list[Run], types: str = "q8_0 q8_0", **more: Any) -> Case:
    return cases_attention.make(heads, kv_heads, dim, dim, runs, types, **more)


def every_depth(depths: range | list[int]) -> list[Run]:
    """A token of each of many sequences."""
    return [(i, 1, depth, len(depths) - 1 - i) for i, depth in enumerate(depths)]


def test_staged_rows_of_every_number_of_keys(direct: ctypes.CDLL) -> None:
    check_case(direct, q8_0(4, 4, 64, every_depth(range(70))), 8, 1)


# Around tiles of 16 keys, blocks of eight tiles, and the second and the third turn of a ring.
BORDERS = [126, 127, 128, 142, 143, 144, 145, 254, 255, 256, 271, 272, 382, 383, 384, 399, 528]


@pytest.mark.parametrize("types", ["q8_0 q8_0", "q8_0 f16", "f16 q8_0"])
@pytest.mark.parametrize(("dim", "kv_heads"), [(64, 4), (128, 2), (256, 1)])
def test_staged_rows_around_borders(direct: ctypes.CDLL, dim: int, kv_heads: int, types: str) -> None:
    case = q8_0(2 * kv_heads, kv_heads, dim, every_depth(BORDERS), types)
    check_case(direct, case, 8, 1)
    check_case(direct, case, 8, 4)


@pytest.mark.parametrize("settled", [True, False])
@pytest.mark.parametrize("splits", [1, 4, 33])
@pytest.mark.parametrize(("dim", "kv_heads"), [(64, 4), (128, 2), (256, 1)])
def test_staged_rows_of_new_tokens(
    direct: ctypes.CDLL, dim: int, kv_heads: int, splits: int, settled: bool
) -> None:
    runs = [(0, 9, 250, 2), (9, 1, 3, 0), (10, 21, 0, 1), (31, 3, 140, 3)]
    case = q8_0(3 * kv_heads, kv_heads, dim, runs)
    check_case(direct, case, 8, splits, settled=settled)
    if dim <= 128:
        check_case(direct, case, 16, splits, settled=settled)


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (16, 2), (32, 2)])
def test_staged_rows_with_switches(direct: ctypes.CDLL, heads: int, kv_heads: int) -> None:
    runs = [(0, 3, 300, 1), (3, 1, 77, 0)]
    for more in ({"window": 100}, {"softcap": 20.0}, {"sinks": True, "window": 17, "softcap": 5.0, "gap": 4}):
        case = q8_0(heads, kv_heads, 128, runs, **more)
        check_case(direct, case, 8, 4)
        check_case(direct, case, 16, 8)


def test_staged_rows_of_heads_that_two_warps_share(direct: ctypes.CDLL) -> None:
    check_case(direct, q8_0(4, 1, 512, every_depth([0, 15, 63, 64, 200, 277])), 8, 1)
    check_case(direct, q8_0(3, 1, 512, [(0, 5, 333, 1), (5, 1, 4, 0)], window=150, sinks=True), 8, 4)


@pytest.mark.parametrize("depth", [0, 1, 15, 122, 125, 127, 130, 250, 511])
@pytest.mark.parametrize(("dim", "kv_heads"), [(64, 4), (128, 2), (256, 1)])
def test_staged_rows_with_norm_rotation_and_store(
    direct: ctypes.CDLL, dim: int, kv_heads: int, depth: int
) -> None:
    runs = [(0, 1, depth, 1), (1, 5, depth + 9, 0), (6, 2, depth // 2, 2)]
    case = cases_rope_attention.make(
        2 * kv_heads, kv_heads, dim, dim, dim, runs, "q8_0 q8_0", q_norm=True, k_norm=True, v_norm=depth > 100
    )
    check_case(direct, case, 8, 1)
    check_case(direct, case, 8, 4, settled=False)
    if dim <= 128:
        check_case(direct, case, 16, 8)


def test_rows_that_cannot_be_staged(direct: ctypes.CDLL) -> None:
    runs: list[Run] = [(0, 3, 140, 1), (3, 1, 20, 0)]
    whole = q8_0(4, 2, 128, runs)
    check_case(direct, whole, 8, 4, chip=AMPERE)
    check_case(direct, whole, 8, 4, chip=TURING, staged=False)
    check_case(direct, whole, 8, 4, skew=2, staged=False)
    check_case(direct, whole, 8, 4, skew=8, staged=False)
    check_case(direct, q8_0(2, 1, 256, runs), 8, 4, chip=AMPERE, staged=False)
    check_case(direct, q8_0(3, 3, 128, runs), 8, 4, staged=False)  # rows of 408 bytes
    check_case(direct, q8_0(4, 2, 96, runs), 8, 4, staged=False)
    check_case(direct, cases_attention.make(4, 2, 128, 64, runs, "q8_0 q8_0"), 8, 4, staged=False)
