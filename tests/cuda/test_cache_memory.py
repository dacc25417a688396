"""Memory of a GPU's cache comes and goes with the work that uses it, on an emulated driver.

Work of the emulated device is over when somebody waits for it. The device counts a fault if a work lacks
memory at its start, or loses it before its end.
"""

from __future__ import annotations

import ctypes
import random
from typing import TYPE_CHECKING

import pytest
from test_emulated import built

if TYPE_CHECKING:
    from collections.abc import Callable

PIECE = 4096
PIECES = 16


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    made = built(tmp_path_factory.mktemp("emulated"), "cache_memory", "driver")
    for name in ("open_cache", "take", "take_without_event", "start", "give_back", "give_back_later"):
        getattr(made, name).argtypes = [ctypes.c_size_t, ctypes.c_size_t]
    for name in ("take", "take_without_event", "unsettled"):
        getattr(made, name).restype = ctypes.c_bool
    for name in ("taken", "mapped", "faults", "waits"):
        getattr(made, name).restype = ctypes.c_size_t
    return made


@pytest.fixture
def cache(library: ctypes.CDLL) -> ctypes.CDLL:
    """A cache of 16 pieces on a device that has them all."""
    library.open_cache(PIECES * PIECE, PIECES)
    return library


def test_pieces_leave_at_once_when_they_settle(cache: ctypes.CDLL) -> None:
    assert cache.take(0, 8 * PIECE)
    cache.start(0, 8 * PIECE)
    cache.give_back_later(100, 5 * PIECE)
    assert cache.taken() == 8 * PIECE
    assert cache.unsettled()
    cache.finish()
    cache.settle()
    assert cache.taken() == cache.mapped() == 4 * PIECE  # the first one is shared
    assert not cache.unsettled()
    assert cache.faults() == 0


def test_pieces_of_earlier_turns_settle_too(cache: ctypes.CDLL) -> None:
    assert cache.take(0, 8 * PIECE)
    for turn in range(3):
        cache.start(turn * PIECE, 8 * PIECE)
        cache.give_back_later(turn * PIECE, (turn + 1) * PIECE)
        cache.take(7 * PIECE, 8 * PIECE)
    assert cache.taken() > 5 * PIECE
    cache.finish()
    cache.settle()
    assert cache.taken() == 5 * PIECE
    assert cache.faults() == 0


def test_a_piece_that_is_taken_again_stays(cache: ctypes.CDLL) -> None:
    assert cache.take(0, 4 * PIECE)
    cache.give_back_later(0, 3 * PIECE)
    assert cache.take(PIECE, 2 * PIECE)
    cache.finish()
    cache.settle()
    assert cache.taken() == 2 * PIECE
    cache.start(PIECE, 2 * PIECE)
    cache.start(3 * PIECE, 4 * PIECE)
    assert cache.faults() == 0


def test_settled_pieces_can_be_taken_by_another_text(library: ctypes.CDLL) -> None:
    library.open_cache(PIECES * PIECE, 4)
    assert library.take(0, 4 * PIECE)
    assert not library.take(8 * PIECE, 10 * PIECE)
    library.give_back_later(0, 2 * PIECE)
    library.finish()
    library.settle()
    before = library.waits()
    assert library.take(8 * PIECE, 10 * PIECE)
    assert library.waits() == before  # nothing had to be waited for
    library.start(2 * PIECE, 4 * PIECE)
    library.start(8 * PIECE, 10 * PIECE)
    assert library.faults() == 0


def test_pieces_leave_after_a_take_that_failed(cache: ctypes.CDLL) -> None:
    assert cache.take(0, 4 * PIECE)
    cache.give_back_later(0, 3 * PIECE)
    assert cache.take_without_event(8 * PIECE, 9 * PIECE)
    assert cache.unsettled()
    cache.finish()
    cache.settle()
    assert cache.taken() == cache.mapped() == PIECE
    assert cache.faults() == 0


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_calls_keeps_memory_under_work(library: ctypes.CDLL, seed: int) -> None:
    rng = random.Random(seed)
    library.open_cache(PIECES * PIECE, PIECES)
    held: set[int] = set()  # pieces that a sequence holds
    actions: list[Callable[[int, int], None]] = []

    def take(first: int, last: int) -> None:
        assert library.take(first * PIECE, last * PIECE)
        held.update(range(first, last))

    def compute(first: int, last: int) -> None:
        for piece in held & set(range(first, last)):
            library.start(piece * PIECE, (piece + 1) * PIECE)

    def leave(first: int, last: int) -> None:
        library.give_back_later(first * PIECE, last * PIECE)
        held.difference_update(range(first, last))

    def forget(first: int, last: int) -> None:
        leave(first, last)
        library.finish()
        library.settle()
        assert library.taken() == library.mapped() == len(held) * PIECE

    def trim(first: int, last: int) -> None:
        library.finish()
        library.give_back(first * PIECE, last * PIECE)
        held.difference_update(range(first, last))

    actions = [take, compute, compute, leave, forget, trim]
    for _ in range(400):
        first, last = sorted(rng.sample(range(PIECES + 1), 2))
        rng.choice(actions)(first, last)
        assert library.taken() >= len(held) * PIECE
    assert library.faults() == 0
