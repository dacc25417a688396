"""The distance between the CPUs: how long a cache line takes from one CPU to another one and back.

A hypervisor may move virtual CPUs between the chiplets of a processor, for seconds at a time. Threads then
wait longer for each other, although nothing else shows it: steal time is 0, and each CPU alone is as fast as
before. A measurement by several threads can take half as long again. For a second or so, two virtual CPUs may
even share a core. Then they are nearer than usual, and two threads take nearly twice as long. So a window in
which the CPUs were farther apart than at best in the run, or much nearer than usual, does not count, like a
window in which other programs used the CPUs.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dyno import _core

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

FACTOR = 2.0
LEAST_NS = 150.0
"""The CPUs are far apart if a figure is larger than at best in the run, by this factor and this many ns. On a
virtual machine, a pair took 50 to 60 ns on one core, 105 to 145 within a chiplet, and 490 to 590 beyond."""
ONE_CORE = 0.6
"""Two CPUs share a core if the figure of most pairs is smaller than this share of the usual one."""
USUAL = 3  # windows before a distance is usual
TRIES = 3  # probes before the answer is unknown
FAR_SHARE = 0.25
"""The share of its time that a run loses at most because of CPUs far apart, beyond the first wait."""


@dataclass(frozen=True, slots=True)
class Distance:
    """The time of a cache line from one CPU to another one and back, in ns, over pairs of CPUs."""

    median: float
    farthest: float
    pair: tuple[int, int] | None = None  # numbers of the farthest CPUs, which a journal does not keep

    def beyond(self, nearest: Distance) -> str:
        """The reason why the CPUs are far apart, in words; empty if they are not."""
        between = "" if self.pair is None else f" between cpu{self.pair[0]} and cpu{self.pair[1]}"
        for ns, best, where in (
            (self.farthest, nearest.farthest, between),
            (self.median, nearest.median, " between most CPUs"),
        ):
            if ns > max(FACTOR * best, best + LEAST_NS):
                return (
                    f"the CPUs are far apart at the moment: a cache line takes {ns:.0f} ns{where}, and "
                    f"{best:.0f} ns at best; a hypervisor moves virtual CPUs"
                )
        return ""

    def to_list(self) -> list[float]:
        """The figures for the journal."""
        return [round(self.median, 1), round(self.farthest, 1)]


def least(distances: Iterable[Distance | None]) -> Distance | None:
    """The least of each figure; None if all are unknown."""
    known = [d for d in distances if d is not None]
    if not known:
        return None
    return Distance(min(d.median for d in known), min(d.farthest for d in known))


def probe(measure: Callable[[], Mapping[str, Any]] = _core.cpu_distances) -> Distance | None:
    """The distance between the CPUs now; None if it is unknown, for example because a CPU is busy."""
    for _ in range(TRIES):
        found = measure()
        if found["pairs"]:
            first, second = found["farthest"]
            return Distance(found["median_ns"], found["farthest_ns"], (first, second))
    return None


class CpuDistances:
    """The distances between the CPUs in the windows of a run.

    Each answer follows from the figures that a journal keeps of the windows that count. So a resumed run
    knows the same.
    """

    def __init__(self) -> None:
        self.nearest: Distance | None = None  # the least distance of the run
        self._windows: list[Distance] = []  # the larger distance of each window that counts

    def why_far(self, seen: Sequence[Distance], at_best: Distance | None = None) -> str:
        """The reason why the CPUs are far apart, or share a core; empty if they do not.

        Args:
            seen: Distances before and after a window.
            at_best: The least distance in windows that do not count.
        """
        nearest = least([self.nearest, at_best, *seen])
        reasons = [d.beyond(nearest) for d in seen] if nearest is not None else []
        return next((r for r in reasons if r), "") or self._why_on_one_core(seen)

    def _why_on_one_core(self, seen: Sequence[Distance]) -> str:
        """The reason why CPUs are too near, in words; empty if they are not."""
        nearest = self.nearest
        near = [w.median for w in self._windows if nearest is not None and not w.beyond(nearest)]
        if len(near) < USUAL or not seen:
            return ""
        usual, ns = statistics.median(near), min(d.median for d in seen)
        if ns >= ONE_CORE * usual:
            return ""
        return (
            f"CPUs share a core at the moment: a cache line takes {ns:.0f} ns between them, and usually "
            f"{usual:.0f} ns; a hypervisor moves virtual CPUs"
        )

    def throughout(self, seen: Sequence[Distance], at_best: Distance | None = None) -> bool:
        """Whether the CPUs were far apart both before and after a window, as far as this is known."""
        return all(self.why_far([d], at_best) for d in seen)

    def too_far(self, seen: Sequence[Distance], at_best: Distance | None = None) -> str:
        """The reason why a window does not count; empty if it does.

        If the CPUs have stayed far apart, windows in that state count. A run waits for nearer CPUs again only
        after they have come."""
        last = self._windows[-1:]
        stayed = bool(last) and self.throughout([*last, *seen])
        stayed = stayed and not any(d.beyond(last[0]) or last[0].beyond(d) for d in seen)
        return "" if stayed else self.why_far(seen, at_best)

    def add(self, window: Mapping[str, Any]) -> None:
        """Add a window that counts: `between_ns` and `nearest_ns` of `Load`, as far as they were recorded."""
        seen = [Distance(*figures) for figures in window.get("between_ns") or ()]
        best = window.get("nearest_ns")
        self.nearest = least([self.nearest, *seen, Distance(*best) if best else None])
        if seen:
            self._windows.append(Distance(max(d.median for d in seen), max(d.farthest for d in seen)))

    @property
    def far(self) -> int:
        """Number of windows that count although the CPUs were far apart, or shared a core."""
        return sum(bool(self.why_far([w])) for w in self._windows)


class Approach:
    """The waits of a run for nearer CPUs.

    Args:
        cpus: Distances in the windows of the run.
        rest: Rests for a moment. Returns the distances around it, and its seconds.
        note: Receives notes: a kind, and data with a `message`.
    """

    def __init__(
        self, cpus: CpuDistances, rest: Callable[[], tuple[Sequence[Distance], float]],
        note: Callable[..., None],
    ) -> None:  # fmt: skip
        self._cpus = cpus
        self._rest = rest
        self._note = note
        self._begun = time.monotonic()
        self._told: set[str] = set()  # kinds of messages that were given
        self.lost = 0.0  # seconds of waits, and of windows that did not count

    def wait(self, why: str, at_best: Distance | None, patience: float) -> tuple[bool, float]:
        """Wait until the CPUs are nearer. Returns whether they came, and the seconds of the wait.

        Args:
            why: The reason why the last window did not count.
            at_best: The least distance in windows that do not count.
            patience: Most seconds.
        """
        fair = patience + FAR_SHARE * (time.monotonic() - self._begun) - self.lost
        waited = 0.0
        while waited < min(patience, fair):
            self._tell(f"{why}: such measurements are repeated", "repeated")
            seen, seconds = self._rest()
            waited += seconds
            if not self._cpus.why_far(seen, at_best):
                return True, waited
        self._tell(f"{why}: they stay so, and the tune measures them as they are", "stay")
        return False, waited

    def _tell(self, message: str, kind: str) -> None:
        """Give a message of a kind once in the run, because bursts may come every minute."""
        if kind not in self._told:
            self._told.add(kind)
            self._note("moved_cpus", message=message)
