"""Energy of each test of a llama-bench process, from counters that are read while it runs.

llama-bench prints the row of a test right after its last repetition, and repetitions follow each other
without a pause. So a test begins at the time of its row minus the seconds of its samples. Loading and warm-up
come before that.
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
"""Minimum length of a test in seconds: a shorter one spans only a few steps of a counter."""
MOST_OVERLAP = 0.1
_MARK = b'"samples_ns"'


@dataclass
class Readings:
    """Counter readings during one process, each with the amount of output so far."""

    counters: Counters
    now: Callable[[], float] = time.monotonic
    times: list[float] = field(default_factory=list)
    printed: list[int] = field(default_factory=list)
    """Bytes of standard output at each reading."""
    joules: list[dict[str, float]] = field(default_factory=list)
    """Joules by source since the first reading."""
    failed: str = ""
    """The reason why no reading is valid: a counter stopped being readable."""
    _last: dict[str, float] = field(default_factory=dict)

    def look(self, printed: int) -> None:
        """Take a reading; the process has printed `printed` bytes so far."""
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
        """Joules by source for each test, in the order of the rows; empty if they are unknown.

        Args:
            output: the whole standard output.
            seconds: total time of the samples of each test.
        """
        if self.failed or output.count(_MARK) != len(seconds):
            return [{} for _ in seconds]
        found: list[dict[str, float]] = []
        free = self.times[0] if self.times else 0.0  # the end of the previous test
        behind = 0
        for each in seconds:
            behind = output.index(_MARK, behind) + len(_MARK)
            at = next((n for n, size in enumerate(self.printed) if size >= behind), None)
            if at is None:
                found.append({})
                continue
            end, begin = self.times[at], self.times[at] - each
            # A row is noticed up to one look late, so the next test may seem to overlap the previous one.
            if each < LEAST_SECONDS or free - begin > MOST_OVERLAP * each:
                found.append({})
            else:
                first, last = self._at(max(begin, free)), self.joules[at]
                share = each / (end - max(begin, free))
                found.append({source: share * (last[source] - first[source]) for source in last})
            free = end
        return found

    def _at(self, moment: float) -> dict[str, float]:
        """Joules by source at a moment, by linear interpolation between two readings."""
        n = max(1, bisect.bisect_left(self.times, moment))
        before, after = self.times[n - 1], self.times[n]
        share = (moment - before) / (after - before) if after > before else 0.0
        one, other = self.joules[n - 1], self.joules[n]
        return {source: one[source] + share * (other[source] - one[source]) for source in one}
