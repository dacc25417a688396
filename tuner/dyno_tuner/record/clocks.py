"""A comparison of the clocks of a machine. Decisions only use the monotonic clock, which cannot be set. The
wall clock shows whether it was set, or whether the machine has slept."""

from __future__ import annotations

import time
from typing import NamedTuple, Self

_LEAST = 2.0  # difference in seconds that counts as a jump; slewing by NTP is far below


class Clocks(NamedTuple):
    """The seconds of each clock at one moment."""

    monotonic: float
    wall: float

    @classmethod
    def read(cls) -> Self:
        return cls(time.monotonic(), time.time())

    def disagreement(self, later: Clocks) -> str:
        """A line if wall clock and monotonic clock have diverged since; else empty."""
        passed, shown = later.monotonic - self.monotonic, later.wall - self.wall
        if abs(shown - passed) <= _LEAST:
            return ""
        return (
            f"the wall clock moved by {shown:+.0f} s while {passed:.0f} s passed: it was set, or the "
            "machine slept; measurements do not depend on it"
        )
