"""The mean power during a sample."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ...core.errors import TargetFailure
from ...core.protocol import TrialStatus

if TYPE_CHECKING:
    from dyno import _energy


class PowerMeter:
    """A power meter: the energy counters of a device, read around the runs of a sample.

    Args:
        counters: Counters of the device and of the CPU.
        decides: Whether joules decide. Otherwise a failing counter only leaves a sample without joules.
    """

    def __init__(self, counters: _energy.Counters, *, decides: bool) -> None:
        self._counters = counters
        self._decides = decides
        self._failed = False  # in this sample
        self._first: tuple[float, dict[str, float]] | None = None

    def begin(self) -> None:
        """Begin a sample. Its first run may still process a context that does not count."""
        self._first, self._failed = None, False

    def run_begins(self) -> None:
        """Begin the first run of a sample. Later calls change nothing.

        Raises:
            TargetFailure: Energy decides, and a counter fails.
        """
        if self._first is None:
            self._first = self._read()

    def watts(self) -> float | None:
        """Mean power from the first run of this sample until now. Between runs, sequences are reset and
        graphs may be captured again, so a sample only gets the joules of its own seconds.

        Returns:
            None if energy does not decide and a counter failed or did not change.

        Raises:
            TargetFailure: Energy decides, and a counter fails.
        """
        last = self._read() if self._first is not None else None
        if self._first is None or last is None:
            return None
        joules = sum(self._counters.spent(self._first[1], last[1]).values())
        watts = joules / (last[0] - self._first[0])
        return watts if watts > 0 or self._decides else None

    def _read(self) -> tuple[float, dict[str, float]] | None:
        """The time in seconds, and joules by counter; None if a counter has failed in this sample."""
        if self._failed:
            return None
        try:
            joules = self._counters.read()
        except (OSError, ValueError) as error:
            self._failed = True
            if self._decides:
                message = f"--objective energy: a counter of energy failed: {error}"
                raise TargetFailure(TrialStatus.INVALID, message) from error
            return None
        return time.perf_counter(), joules
