"""The mean power while a sample runs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ...core.errors import TargetFailure
from ...core.protocol import TrialStatus

if TYPE_CHECKING:
    from dyno import _energy


class PowerMeter:
    """The counters of energy of one device, read around the runs of a sample.

    Args:
        counters: of the device, and of the CPU beside it.
        decides: whether joules decide. If they stand only beside the rates, a counter that fails leaves a
            sample without joules and costs nothing else.
    """

    def __init__(self, counters: _energy.Counters, *, decides: bool) -> None:
        self._counters = counters
        self._decides = decides
        self._failed = False  # in this sample
        self._first: tuple[float, dict[str, float]] | None = None

    def begin(self) -> None:
        """A sample begins; its first run may still read a context that does not count."""
        self._first, self._failed = None, False

    def run_begins(self) -> None:
        """The first run of a sample begins with this call; later ones change nothing.

        Raises:
            TargetFailure: Energy decides, and a counter fails.
        """
        if self._first is None:
            self._first = self._read()

    def watts(self) -> float | None:
        """Mean power from the first run of this sample until now. Between its runs sequences are reset, and
        a graph may be captured anew: so a sample gets the joules of its own seconds alone.

        Returns:
            None where energy decides nothing and a counter failed or has not moved.

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
