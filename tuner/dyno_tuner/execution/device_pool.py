"""Several devices of one kind that work at the same time, each with a ledger (worker, journal) of its own.

What is done together is decided before it begins and used after all have ended, in the order of the devices:
so a run is a pure function of its journals, however the devices overtake each other, and can be resumed.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from typing import TYPE_CHECKING, TypeVar

from ..core.errors import TuneError
from ..core.protocol import TrialStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..core.options import VisitPolicy
    from ..core.protocol import Configuration, Quality, Visit
    from ..record.recorder import Ledger

T = TypeVar("T")

_PROCESSES = 100_000  # further devices number their worker processes from multiples of this
_STOPPING = 0.2  # seconds between two attempts to end what runs


class Lane:
    """One device. Used by one thread at a time.

    Args:
        number: 0 for the device that confirms.
        name: for people.
    """

    def __init__(self, number: int, name: str, ledger: Ledger) -> None:
        self.number = number
        self.name = name
        self.ledger = ledger
        self.process = number * _PROCESSES
        self.costs: list[float] = []  # seconds of visits of the default, since they were last asked for
        self.unstable = 0

    def visit(
        self, key: str, configuration: Configuration, metrics: Sequence[str], policy: VisitPolicy,
        *, anchor: bool = False,
    ) -> Visit:  # fmt: skip
        begun = self.ledger.useful
        visit = self.ledger.visit(key, configuration, metrics, policy, process=self.process, anchor=anchor)
        if anchor and visit.status is TrialStatus.OK:
            self.costs.append(self.ledger.useful - begun)
        self._survived(visit.status)
        self.unstable += not visit.stable
        return visit

    def default(
        self, key: str, configuration: Configuration, metrics: Sequence[str], policy: VisitPolicy
    ) -> Visit:
        """A visit of the default, which has to run; one failure is forgiven."""
        for attempt in (key, f"{key}/retry"):
            visit = self.visit(attempt, configuration, metrics, policy, anchor=True)
            if visit.status is TrialStatus.OK:
                return visit
        raise TuneError(
            f"{self.name}: the engine's default settings do not run ({visit.status}): {visit.message}"
        )

    def quality(self, key: str, configuration: Configuration) -> Quality:
        quality = self.ledger.quality(key, configuration, process=self.process)
        self._survived(quality.status)
        return quality

    def _survived(self, status: TrialStatus) -> None:
        if status.kills:
            self.process += 1  # whatever comes next has a new worker


class Crew:
    """Args: `lanes`: the first is the device that also does what is done alone."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self.lanes = list(lanes)

    def __len__(self) -> int:
        return len(self.lanes)

    def together(self, work: Callable[[Lane], T]) -> list[T]:
        """`work` of every lane, at the same time; what they return, in the order of the lanes.

        Ctrl-C and the error of one lane end what the others do; it is raised when all have ended.
        """
        first = self.lanes[0].ledger
        for lane in self.lanes[1:]:
            lane.ledger.follow(first)
        failed = threading.Event()

        def guarded(lane: Lane) -> T:
            try:
                return work(lane)
            except BaseException:
                failed.set()
                raise

        with concurrent.futures.ThreadPoolExecutor(len(self.lanes), "device") as pool:
            futures: list[concurrent.futures.Future[T]] = []
            try:
                for lane in self.lanes:
                    futures.append(pool.submit(guarded, lane))
                self._wait(futures, failed)
            except BaseException:
                self._stop(futures)
                raise
        first.catch_up(max(lane.ledger.now for lane in self.lanes))
        return [f.result() for f in futures]

    def _wait(self, futures: Sequence[concurrent.futures.Future[T]], failed: threading.Event) -> None:
        concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_EXCEPTION)
        if failed.is_set():
            for future in futures:
                error = future.exception() if future.done() else None
                if error is not None:
                    raise error

    def _stop(self, futures: Sequence[concurrent.futures.Future[T]]) -> None:
        """Does not return before all have ended: nothing would stop those that still run. So a second Ctrl-C
        changes nothing."""
        stopped = False
        while not stopped or not all(f.done() for f in futures):
            with contextlib.suppress(KeyboardInterrupt):
                for lane in self.lanes:
                    lane.ledger.stop()
                stopped = True
                concurrent.futures.wait(futures, timeout=_STOPPING)
