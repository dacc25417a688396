"""The crossing of two paths. It is not searched, but solved by bisection on a grid of sizes, or by fitted
curves.

A threshold setting is the largest size for which the first path is taken. At a size of the grid, both paths
are measured, and their ratio with its standard error decides the side. Remaining measurements go to the two
sizes next to the crossing, where noise may have caused an error of one step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ..core.crossing import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


# Standard errors. If nothing differs at half a dozen sizes, none exceeds this in 19 of 20 solutions.
DOUBT = 2.6


@dataclass
class Crossing:
    """The solution: the first path is better at `grid[:below]`, and the second one at `grid[below:]`."""

    verdict: Verdict
    below: int
    measurements: int
    seen: dict[int, list[float]] = field(default_factory=dict)  # index -> log ratios first / second
    at: float | None = None  # the size at which the fitted curves cross


def solve(
    grid: Sequence[int],
    measure: Callable[[int, int], tuple[float, float]],
    *,
    margin: float = 0.01,
    limit: int = 12,
) -> Crossing:
    """Find the crossing by bisection.

    Args:
        grid: Sizes in ascending order.
        measure: Takes an index of the grid, and how often it was measured before. Measures both paths there,
            which counts as two measurements, and returns log(first / second) with its standard error.
        margin: Smaller differences do not count, in log units.
        limit: Most measurements; at least 4.

    Raises:
        ValueError: The grid is empty or not ascending, or the limit is too small.
    """
    if not grid or list(grid) != sorted(set(grid)):
        raise ValueError(f"the grid {list(grid)} must be ascending without repetition")
    if limit < 4:
        raise ValueError(f"{limit} measurements are too few; give at least 4")
    search = _Search(grid, measure, margin, limit)
    search.bisect()
    search.check()
    return search.crossing()


def solve_by_curves(
    grid: Sequence[int],
    measure: Callable[[int, int], tuple[float, float]],
    seconds: Callable[[int], tuple[float, float] | None],
    *,
    margin: float = 0.01,
    limit: int = 12,
) -> Crossing:
    """Find the crossing of two paths by a model of their times: a pass over `size` tokens takes a + b x size
    seconds, so a token takes b + a / size.

    Both paths are measured at the smallest and the largest size. The crossing of the two curves is computed,
    and the sizes next to it are measured to confirm it. Each measurement refines the curves. A proposed size
    is measured only if bisection could still find the crossing with the remaining measurements.

    Args:
        grid, measure, margin, limit: As in `solve`.
        seconds: Gives the seconds per token of the first and the second path at a measured index of the grid;
        None for a path that does not run.

    Raises:
        ValueError: As in `solve`.
    """
    if not grid or list(grid) != sorted(set(grid)):
        raise ValueError(f"the grid {list(grid)} must be ascending without repetition")
    if limit < 4:
        raise ValueError(f"{limit} measurements are too few; give at least 4")
    search = _CurveSearch(grid, measure, seconds, margin, limit)
    search.run()
    return search.crossing()


class _Search:
    """The state of the bisection: as far as known, the first path wins at `low`, and the second one at
    `high`."""

    def __init__(
        self,
        grid: Sequence[int],
        measure: Callable[[int, int], tuple[float, float]],
        margin: float,
        limit: int,
    ) -> None:
        self._size = len(grid)
        self._measure = measure
        self._margin = margin
        self._limit = limit
        self._errors: list[float] = []
        self._found = Crossing(Verdict.TIE, 0, 0)
        self._low, self._high = -1, self._size

    @property
    def _seen(self) -> dict[int, list[float]]:
        return self._found.seen

    @property
    def _more(self) -> bool:
        return self._found.measurements + 2 <= self._limit

    def _ask(self, index: int) -> float:
        values = self._seen.setdefault(index, [])
        ratio, error = self._measure(index, len(values))
        values.append(ratio)
        self._errors.append(error)
        self._found.measurements += 2
        return self._mean(index)

    def _mean(self, index: int) -> float:
        return sum(self._seen[index]) / len(self._seen[index])

    def _parted(self) -> bool:
        """Whether the paths differ significantly, by more than the margin, at some size."""

        def at(index: int) -> bool:
            error = max(self._errors) / math.sqrt(len(self._seen[index]))
            return abs(self._mean(index)) > max(self._margin, DOUBT * error)

        return any(at(i) for i in self._seen)

    def bisect(self) -> None:
        while self._high - self._low > 1 and self._more:
            middle = (self._low + self._high) // 2
            if self._ask(middle) > 0:
                self._low = middle
            else:
                self._high = middle

    def check(self) -> None:
        """Use the remaining measurements: at the ends if the curves do not differ so far, or else at the two
        sizes next to the crossing."""
        while self._more:
            if not self._parted():
                # Curves that do not differ at the far end are equal, so the far end is measured before
                # anything counts as a crossing.
                ends = [i for i in (0, self._size - 1) if i not in self._seen]
                if not ends:
                    return
                self._ask(ends[0])
                continue
            beside = [i for i in (self._low, self._high) if 0 <= i < self._size]
            unsure = [i for i in beside if abs(self._mean(i)) < 3 * max(self._errors)]
            index = min(unsure, key=lambda i: len(self._seen[i]), default=None)
            if index is None or len(self._seen[index]) >= 3 or not self._again(index):
                return

    def _again(self, index: int) -> bool:
        """Measure a size next to the crossing once more. If its sign changes, the crossing moves by one step.
        Returns False if no measurement is left for the size beyond."""
        ratio = self._ask(index)
        if index == self._low and ratio <= 0:
            self._low, self._high = self._low - 1, self._low
            beyond = self._low
        elif index == self._high and ratio > 0:
            self._low, self._high = self._high, self._high + 1
            beyond = self._high
        else:
            return True
        if 0 <= beyond < self._size and beyond not in self._seen:
            if not self._more:
                return False
            self._ask(beyond)
        return True

    def crossing(self) -> Crossing:
        found = self._found
        found.below = self._low + 1
        if not self._parted():
            found.verdict = Verdict.TIE
        elif found.below == 0:
            found.verdict = Verdict.NEVER
        elif found.below == self._size:
            found.verdict = Verdict.ALWAYS
        else:
            found.verdict = Verdict.CROSSING
        return found


class _CurveSearch(_Search):
    """A bisection in which fitted curves of both paths propose the next size."""

    def __init__(
        self,
        grid: Sequence[int],
        measure: Callable[[int, int], tuple[float, float]],
        seconds: Callable[[int], tuple[float, float] | None],
        margin: float,
        limit: int,
    ) -> None:
        super().__init__(grid, measure, margin, limit)
        self._grid = list(grid)
        self._seconds = seconds

    def run(self) -> None:
        for end in dict.fromkeys((0, self._size - 1)):
            if self._more:
                self._ask(end)
        if self._mean(0) <= 0:
            self._low, self._high = -1, 0
        elif self._mean(self._size - 1) > 0:
            self._low, self._high = self._size - 1, self._size
        else:
            self._low, self._high = 0, self._size - 1
        while (index := self._proposed()) is not None and self._affordable(index):
            if self._ask(index) > 0:
                self._low = index
            else:
                self._high = index
        self.bisect()
        self.check()
        self._found.at = self._crossing_size()

    def _affordable(self, index: int) -> bool:
        """Whether bisection ends within the limit even if the crossing is on the far side of this size."""
        left = (self._limit - self._found.measurements) // 2 - 1
        return left >= math.ceil(math.log2(max(index - self._low, self._high - index)))

    def _proposed(self) -> int | None:
        """An unmeasured size next to the computed crossing; None if there is none."""
        if self._high - self._low < 2 or not 0 <= self._low < self._high < self._size:
            return None
        at = self._crossing_size()
        if at is None:
            return None
        below = sum(size < at for size in self._grid)
        return min(max(below - 1 if below - 1 > self._low else below, self._low + 1), self._high - 1)

    def _crossing_size(self) -> float | None:
        """The crossing of the curves fitted to all measurements; None if they do not cross."""
        rows = [(self._grid[i], self._seconds(i)) for i in sorted(self._seen)]
        known = [(size, times) for size, times in rows if times is not None and size > 0]
        if len(known) < 2:
            return None
        fits = []
        for path in (0, 1):
            # Relative errors count, so the rows are divided by their time.
            times = np.array([t[path] for _, t in known])
            columns = np.array([[1.0, 1.0 / size] for size, _ in known]) / times[:, None]
            fits.append(np.linalg.lstsq(columns, np.ones(len(known)), rcond=None)[0])
        (each_first, pass_first), (each_second, pass_second) = fits
        if each_first <= each_second or pass_second <= pass_first:
            return None  # the first path never loses, or the second one does not gain with size
        return float((pass_second - pass_first) / (each_first - each_second))
