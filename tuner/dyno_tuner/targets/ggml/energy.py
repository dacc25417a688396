"""Energy of the tests of a llama-bench process, by counters that are read while it runs.

llama-bench prints the row of a test right after its last repetition, and the repetitions follow each other.
The time at which a row appears, less the seconds of its samples, is when the test began. Loading and warming
up come before that.
"""

from __future__ import annotations

import bisect
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dyno._energy import Counters

LEAST_SECONDS = 0.1
"""Of a test: a shorter one is a few steps of a counter."""
MOST_OVERLAP = 0.1
_MARK = b'"samples_ns"'


@dataclass
class Readings:
    """Readings of counters over one process, with what it had printed by then."""

    counters: Counters
    now: Callable[[], float] = time.monotonic
    times: list[float] = field(default_factory=list)
    printed: list[int] = field(default_factory=list)
    """Bytes of standard output at each reading."""
    joules: list[dict[str, float]] = field(default_factory=list)
    """By source, since the first reading."""
    failed: str = ""
    """Why nothing counts: a counter could not be read any more."""
    _last: dict[str, float] = field(default_factory=dict)

    def look(self, printed: int) -> None:
        """Takes a reading, when the process has printed so many bytes."""
        if self.failed:
            return
        try:
            read = self.counters.read()
        except (OSError, ValueError) as error:
            self.failed = str(error) or type(error).__name__
            return
        if not self.times:
            spent = dict.fromkeys(self.counters.sources, 0.0)
        else:
            step = self.counters.spent(self._last, read)
            spent = {source: before + step[source] for source, before in self.joules[-1].items()}
        self._last = read
        self.times.append(self.now())
        self.printed.append(printed)
        self.joules.append(spent)

    def of_tests(self, output: bytes, seconds: Sequence[float]) -> list[dict[str, float]]:
        """Joules by source of each test, in the order of the rows; empty where they cannot be told.

        Args:
            output: the whole standard output.
            seconds: the sum of the samples of each test.
        """
        if self.failed or output.count(_MARK) != len(seconds):
            return [{} for _ in seconds]
        found: list[dict[str, float]] = []
        free = self.times[0] if self.times else 0.0  # the end of the test before
        behind = 0
        for each in seconds:
            behind = output.index(_MARK, behind) + len(_MARK)
            at = next((n for n, size in enumerate(self.printed) if size >= behind), None)
            if at is None:
                found.append({})
                continue
            end, begin = self.times[at], self.times[at] - each
            # A row is seen a look late, so the next test may seem to begin in the one before.
            if each < LEAST_SECONDS or free - begin > MOST_OVERLAP * each:
                found.append({})
            else:
                first, last = self._at(max(begin, free)), self.joules[at]
                share = each / (end - max(begin, free))
                found.append({source: share * (last[source] - first[source]) for source in last})
            free = end
        return found

    def _at(self, moment: float) -> dict[str, float]:
        """Joules by source at a moment between two readings, as if they grew evenly there."""
        n = max(1, bisect.bisect_left(self.times, moment))
        before, after = self.times[n - 1], self.times[n]
        share = (moment - before) / (after - before) if after > before else 0.0
        one, other = self.joules[n - 1], self.joules[n]
        return {source: one[source] + share * (other[source] - one[source]) for source in one}
