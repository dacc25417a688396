"""Rows of prompts sorted by expert: their tiles, and the list of tiles that clusters multiply.

The kernels run on the CPU, thread by thread. The kernel that sorts needs blocks that run at the same time.
So here the test sorts, and the contract suite checks that kernel on a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from test_emulated import address, built

if TYPE_CHECKING:
    import ctypes

    from numpy.typing import NDArray

UNIT, MOST = 32, 256
"""Rows by which the widths of tiles differ, and the largest width."""


@pytest.fixture(scope="module")
def sorting(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return built(tmp_path_factory.mktemp("sorted"), "sorted")


class Converted:
    """A workspace after the conversion of random rows.

    Args:
        ids: the expert of each row (token, slot), -1 without one.
        used: slots of a token.
    """

    def __init__(
        self, sorting: ctypes.CDLL, ids: NDArray[np.int32], used: int, k: int, matrices: int, passes: int
    ) -> None:
        rows, n = len(ids), 3
        numbers = np.array([rows, k, matrices, passes, used, n], np.int64)
        found = np.zeros(8, np.int64)
        sorting.layout(address(numbers), address(found))
        self.places, scales_at, experts_at, list_at, _, place_at, size, self.most_tiles = map(int, found)
        self.counts = np.bincount(ids[ids >= 0], minlength=matrices)
        ends = np.cumsum(-(-self.counts // 8) * 8)
        self.first = np.concatenate([[0], ends[:-1]]).astype(np.int32)
        self.place_of = np.full(rows, -1, np.int32)
        for expert in range(matrices):
            mine = np.flatnonzero(ids == expert)
            self.place_of[mine] = self.first[expert] + np.arange(len(mine))

        memory = np.full(size, 0xEE, np.uint8)
        table = np.stack([self.first, self.counts.astype(np.int32)], axis=1)
        memory[experts_at : experts_at + 8 * matrices] = table.reshape(-1).view(np.uint8)
        memory[place_at:] = self.place_of.view(np.uint8)
        rng = np.random.default_rng(rows)
        self.x = rng.normal(size=(rows // used, k)).astype(np.float32)
        self.x[:, 0] *= np.float32(1e6)  # far beyond the range of halves
        self.y = np.full((rows, n), 77, np.float32)
        sorting.convert(address(numbers), address(self.x), address(memory), address(self.y))

        self.scales = memory[scales_at:experts_at].view(np.float32)
        tiles = memory[list_at : list_at + 16 * (1 + self.most_tiles)].view(np.int32).reshape(-1, 4)
        self.tiles = tiles[1 : 1 + tiles[0, 0]]
        k_tiles = passes * -(-k // 64)
        chunks = memory[:scales_at].reshape(k_tiles, self.places, 8, 16)
        swizzled = np.arange(8)[None, :] ^ (np.arange(self.places) % 8)[:, None]
        ordered = np.take_along_axis(chunks, swizzled[None, :, :, None], axis=2)
        halves = np.ascontiguousarray(ordered).view(np.float16).reshape(k_tiles, self.places, 64)
        self.values = halves.transpose(1, 0, 2).reshape(self.places, passes, -1)

    def row(self, row: int, used: int) -> NDArray[np.float64]:
        """The values of a row's place, times its scale."""
        place = self.place_of[row]
        values: NDArray[np.float64] = self.values[place].astype(np.float64).sum(axis=0) * self.scales[place]
        return values[: self.x.shape[1]]


def routed(rng: np.random.Generator, rows: int, matrices: int, absent: float) -> NDArray[np.int32]:
    """Experts of rows; a few experts have most of them, and some have none."""
    weights = rng.gamma(0.5, size=matrices)
    ids = rng.choice(matrices, rows, p=weights / weights.sum()).astype(np.int32)
    ids[rng.random(rows) < absent] = -1
    return ids


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize(
    ("rows", "used", "k", "matrices", "passes", "absent"),
    [
        (1, 1, 96, 1, 1, 0.0),
        (60, 4, 64, 7, 1, 0.3),
        (24, 3, 160, 5, 2, 0.0),
        (8, 2, 2304, 3, 1, 0.0),
        (12, 6, 32, 40, 1, 1.0),
    ],
)
def test_rows_are_written_to_their_places(
    sorting: ctypes.CDLL,
    rows: int,
    used: int,
    k: int,
    matrices: int,
    passes: int,
    absent: float,
    backwards: bool,
) -> None:
    sorting.run_backwards(int(backwards))
    ids = routed(np.random.default_rng(k), rows, matrices, absent)
    done = Converted(sorting, ids, used, k, matrices, passes)
    bits = 11 * passes
    for row in range(rows):
        x = done.x[row // used].astype(np.float64)
        if ids[row] < 0:
            assert (done.y[row] == 0).all()
            continue
        assert (done.y[row] == 77).all()
        # Halves keep eleven bits of each value, down to 2^-24 of the row's scale.
        bound = np.abs(x) * 2.0**-bits + done.scales[done.place_of[row]] * 2.0**-25
        assert (np.abs(done.row(row, used) - x) <= bound).all()
        assert (done.values[done.place_of[row]][:, k:] == 0).all(), "k is padded with zeros"


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("matrices", [1, 5, 33, 200])
@pytest.mark.parametrize("rows", [3, 500, 3000])
def test_each_row_is_in_one_tile_and_the_widest_tiles_come_first(
    sorting: ctypes.CDLL, rows: int, matrices: int, backwards: bool
) -> None:
    sorting.run_backwards(int(backwards))
    ids = routed(np.random.default_rng(rows + matrices), rows, matrices, 0.1)
    done = Converted(sorting, ids, 1, 32, matrices, 1)
    assert len(done.tiles) <= done.most_tiles
    widths = done.tiles[:, 2]
    assert (np.diff(widths) <= 0).all()
    assert set(widths) <= set(range(2 * UNIT, MOST + 1, UNIT))
    taken = np.zeros(done.places, int)
    for expert, first, width, of_rows in done.tiles:
        assert 0 < of_rows <= width
        assert width - of_rows < UNIT or width == 2 * UNIT
        assert first % 8 == 0
        assert done.first[expert] <= first
        assert first + of_rows <= done.first[expert] + done.counts[expert]
        assert first + width <= done.places, "the window ends within the workspace"
        taken[first : first + of_rows] += 1
    expected = np.zeros(done.places, int)
    expected[done.place_of[done.place_of >= 0]] = 1
    np.testing.assert_array_equal(taken, expected)
    # As few tiles as possible: an expert of up to 256 rows has one.
    for expert in range(matrices):
        assert (done.tiles[:, 0] == expert).sum() == -(-done.counts[expert] // MOST)
