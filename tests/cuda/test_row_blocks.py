"""Page-locked memory of a draft head's rows comes in large slabs and stays within a bound."""

from __future__ import annotations

import ctypes
import random
from itertools import pairwise

import pytest
from test_emulated import built

FLOATS = 256 * 4096
BLOCK = 4 * FLOATS
MOST_SLAB = 64 << 20
KEPT = 128 << 20
ALL = 1 << 40


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    made = built(tmp_path_factory.mktemp("rows"), "row_blocks")
    made.open_pool.argtypes = [ctypes.c_size_t] * 3
    made.share_block.argtypes = [ctypes.c_size_t] * 2
    made.take_block.restype = ctypes.c_bool
    for name in ("take_block", "leave_block", "address_of"):
        getattr(made, name).argtypes = [ctypes.c_size_t]
    for name in ("address_of", "allocated", "released", "held_bytes", "pool_bytes", "used_bytes"):
        getattr(made, name).restype = ctypes.c_size_t
    return made


def test_a_long_text_takes_few_slabs(library: ctypes.CDLL) -> None:
    """128k tokens are 512 blocks of 4 MiB; each would be an allocation of its own."""
    library.open_pool(FLOATS, 512, ALL)
    assert all(library.take_block(i) for i in range(512))
    assert library.allocated() <= 5 + 512 * BLOCK // MOST_SLAB
    assert library.used_bytes() == 512 * BLOCK <= library.pool_bytes() == library.held_bytes()
    assert library.held_bytes() < 512 * BLOCK + MOST_SLAB
    for i in range(512):
        library.leave_block(i)
    assert library.used_bytes() == 0
    assert KEPT - MOST_SLAB < library.held_bytes() <= KEPT
    before = library.allocated()
    for i in range(library.held_bytes() // BLOCK):
        assert library.take_block(i)
    assert library.allocated() == before


def test_a_short_text_takes_little(library: ctypes.CDLL) -> None:
    library.open_pool(256 * 64, 4, ALL)
    for i in range(4):
        assert library.take_block(i)
    assert library.held_bytes() == 4 << 20


def test_a_block_larger_than_a_slab(library: ctypes.CDLL) -> None:
    library.open_pool(20 << 20, 2, ALL)  # 80 MiB
    assert library.take_block(0)
    assert library.take_block(1)
    assert library.allocated() == 2
    library.leave_block(0)
    library.leave_block(1)
    assert library.held_bytes() == 80 << 20


def test_a_last_block_fits_where_a_slab_does_not(library: ctypes.CDLL) -> None:
    library.open_pool(FLOATS, 8, 5 * BLOCK)
    taken = [library.take_block(i) for i in range(8)]
    assert taken == [True] * 5 + [False] * 3
    library.leave_block(2)
    assert library.take_block(5)


def test_blocks_outlive_their_pool(library: ctypes.CDLL) -> None:
    library.open_pool(FLOATS, 2, ALL)
    assert library.take_block(0)
    library.share_block(0, 1)
    library.close_pool()
    library.leave_block(0)
    assert library.held_bytes() > 0
    library.leave_block(1)
    assert library.held_bytes() == 0


@pytest.mark.parametrize("seed", range(5))
def test_no_two_texts_own_the_same_memory(library: ctypes.CDLL, seed: int) -> None:
    rng = random.Random(seed)
    count, floats = 300, 256 * 2048
    library.open_pool(floats, count, ALL)
    owned: dict[int, int] = {}
    for _ in range(3000):
        owner = rng.randrange(count)
        if owner in owned:
            library.leave_block(owner)
            del owned[owner]
        else:
            assert library.take_block(owner)
            owned[owner] = library.address_of(owner)
        assert library.used_bytes() == len(owned) * 4 * floats
        assert library.pool_bytes() == library.held_bytes()
    places = sorted(owned.values())
    assert all(b - a >= 4 * floats for a, b in pairwise(places))
