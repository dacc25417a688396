"""The clocks of a machine against each other. Decisions take their time from the monotonic clock alone,
which nobody can set; the wall clock only tells when somebody has, or when the machine has slept."""

from __future__ import annotations

import time
from typing import NamedTuple, Self

_LEAST = 2.0  # seconds apart that count as a jump; slewing by NTP stays far below


class Clocks(NamedTuple):
    """Seconds on each clock at one moment."""

    monotonic: float
    wall: float

    @classmethod
    def read(cls) -> Self:
        return cls(time.monotonic(), time.time())

    def disagreement(self, later: Clocks) -> str:
        """One line where wall clock and monotonic clock have moved apart since; empty where they have not."""
        passed, shown = later.monotonic - self.monotonic, later.wall - self.wall
        if abs(shown - passed) <= _LEAST:
            return ""
        return (
            f"the wall clock moved by {shown:+.0f} s while {passed:.0f} s passed: it was set, or the "
            "machine slept; measurements do not depend on it"
        )
