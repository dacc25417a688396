"""The power limit of a simulated GPU.

What the device draws is held to its limit on average over a second: work that draws more runs at full clock
until the average has reached the limit, and slower from then on. The samples of tunes on an H200 fit that: a
process that has been loading reads prompts that draw 747 of 700 W at full speed for 0.9 s, and after 60 ms
without work a device that was at its limit does so for at least half a second.
"""

from __future__ import annotations

from collections import deque
from typing import Any

LIMIT_W = 700.0
FULL_MHZ = 1980.0
IDLE_DRAW = 0.2  # of the limit, like all draws
GENERATION_DRAW = 0.85
_WINDOW = 1.0  # seconds
_STEP = 0.005  # seconds
_CLOCK = 0.4  # power goes with the clock to the power of one over this


class SimulatedPower:
    """The device, which has done nothing for long."""

    def __init__(self) -> None:
        steps = round(_WINDOW / _STEP)
        self._draws = deque([IDLE_DRAW] * steps, maxlen=steps)
        self._sum = IDLE_DRAW * steps
        self._part = 0.0  # of a step, that has passed beyond the last whole one
        self._clock = self._slowest = 1.0  # of the full clock; the slowest since `look`
        self._highest = self.average

    @property
    def average(self) -> float:
        """The power that the device has drawn over the last second, as a share of its limit."""
        return self._sum / len(self._draws)

    def idle(self, seconds: float) -> None:
        """Time passes without work."""
        self._spend(seconds, IDLE_DRAW)

    def work(self, seconds: float, draw: float) -> float:
        """Work that takes so many seconds at full clock and would draw `draw` then; returns the seconds that
        it takes."""
        took = 0.0
        while seconds > 0:
            limited = draw > 1 and self.average >= 1
            self._clock = draw**-_CLOCK if limited else 1.0
            self._slowest = min(self._slowest, self._clock)
            step = min(_STEP, seconds / self._clock)
            self._spend(step, 1.0 if limited else draw)
            seconds -= step * self._clock
            took += step
        return took

    def look(self) -> None:
        """Begins a window."""
        self._highest, self._slowest = self.average, self._clock

    def state(self) -> dict[str, Any]:
        """As `dyno._nvml.state`: the highest power and the lowest clock since `look`."""
        return {
            "power_w": round(LIMIT_W * self._highest, 1),
            "power_limit_w": LIMIT_W,
            "sm_mhz": round(FULL_MHZ * self._slowest),
            "throttle_reasons": 4 if self._slowest < 1 else 0,
        }

    def _spend(self, seconds: float, draw: float) -> None:
        steps, self._part = divmod(self._part + seconds, _STEP)
        for _ in range(min(int(steps), len(self._draws))):
            self._sum += draw - self._draws[0]
            self._draws.append(draw)
        self._highest = max(self._highest, self.average)
