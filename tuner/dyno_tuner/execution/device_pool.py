"""Several devices of one kind that measure in parallel, each with its own recorder (worker, journal).

Joint work is decided before it begins, and its results are used after all devices have ended, in the order of
the devices. So a run is a pure function of its journals, whatever the relative speed of the devices, and can
be resumed.
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

    from ..core.options import MeasurementPolicy
    from ..core.protocol import Configuration, Measurement, Quality
    from ..record.recorder import Recorder

T = TypeVar("T")

_PROCESSES = 100_000  # worker processes of further devices are numbered from multiples of this
_STOPPING = 0.2  # seconds between two attempts to end running work


class PoolMember:
    """A device of the pool. Only one thread uses it at a time.

    Args:
        number: 0 for the confirming device.
        name: Name for messages.
    """

    def __init__(self, number: int, name: str, recorder: Recorder) -> None:
        self.number = number
        self.name = name
        self.recorder = recorder
        self.process = number * _PROCESSES
        self.costs: list[float] = []  # seconds of measurements of the default since the last query
        self.unstable = 0

    def measurement(
        self, key: str, configuration: Configuration, metrics: Sequence[str], policy: MeasurementPolicy,
        *, baseline: bool = False,
    ) -> Measurement:  # fmt: skip
        begun = self.recorder.useful
        measurement = self.recorder.measurement(
            key, configuration, metrics, policy, process=self.process, baseline=baseline
        )
        if baseline and measurement.status is TrialStatus.OK:
            self.costs.append(self.recorder.useful - begun)
        self._survived(measurement.status)
        self.unstable += not measurement.stable
        return measurement

    def default(
        self, key: str, configuration: Configuration, metrics: Sequence[str], policy: MeasurementPolicy
    ) -> Measurement:
        """A measurement of the default, which must run. It may fail once."""
        for attempt in (key, f"{key}/retry"):
            measurement = self.measurement(attempt, configuration, metrics, policy, baseline=True)
            if measurement.status is TrialStatus.OK:
                return measurement
        raise TuneError(
            f"{self.name}: the engine's default settings do not run ({measurement.status}): "
            f"{measurement.message}"
        )

    def quality(self, key: str, configuration: Configuration) -> Quality:
        quality = self.recorder.quality(key, configuration, process=self.process)
        self._survived(quality.status)
        return quality

    def _survived(self, status: TrialStatus) -> None:
        if status.kills:
            self.process += 1  # the next operation gets a new worker


class DevicePool:
    """The devices of one kind that measure in parallel.

    Args: `members`: the first device also does work that only one device does."""

    def __init__(self, members: Sequence[PoolMember]) -> None:
        self.members = list(members)

    def __len__(self) -> int:
        return len(self.members)

    def together(self, work: Callable[[PoolMember], T]) -> list[T]:
        """Run `work` for all members in parallel, and return their results in the order of the members.

        Ctrl-C, or an error of one member, ends the work of the others. The error is raised when all have
        ended.
        """
        first = self.members[0].recorder
        for member in self.members[1:]:
            member.recorder.follow(first)
        failed = threading.Event()

        def guarded(member: PoolMember) -> T:
            try:
                return work(member)
            except BaseException:
                failed.set()
                raise

        with concurrent.futures.ThreadPoolExecutor(len(self.members), "device") as pool:
            futures: list[concurrent.futures.Future[T]] = []
            try:
                for member in self.members:
                    futures.append(pool.submit(guarded, member))
                self._wait(futures, failed)
            except BaseException:
                self._stop(futures)
                raise
        first.catch_up(max(member.recorder.now for member in self.members))
        return [f.result() for f in futures]

    def _wait(self, futures: Sequence[concurrent.futures.Future[T]], failed: threading.Event) -> None:
        concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_EXCEPTION)
        if failed.is_set():
            for future in futures:
                error = future.exception() if future.done() else None
                if error is not None:
                    raise error

    def _stop(self, futures: Sequence[concurrent.futures.Future[T]]) -> None:
        """Stop all work, and return only when all have ended, because nothing else would stop them later. So
        a second Ctrl-C has no effect."""
        stopped = False
        while not stopped or not all(f.done() for f in futures):
            with contextlib.suppress(KeyboardInterrupt):
                for member in self.members:
                    member.recorder.stop()
                stopped = True
                concurrent.futures.wait(futures, timeout=_STOPPING)
