"""The power limit of a simulated GPU.

The device keeps its average power over one second within the limit. Work that draws more runs at full clock
until the average reaches the limit, then at a lower clock. Samples of tunes on an H200 fit this model. After
loading, prompts that draw 747 W of 700 W run at full speed for 0.9 s. After 60 ms without work, a device at
its limit runs at full speed for at least half a second.
"""

from __future__ import annotations

from collections import deque
from typing import Any

LIMIT_W = 700.0
FULL_MHZ = 1980.0
IDLE_DRAW = 0.2  # as a share of the limit, like all draws
GENERATION_DRAW = 0.85
_WINDOW = 1.0  # seconds
_STEP = 0.005  # seconds
_CLOCK = 0.4  # the clock is proportional to power raised to this exponent


class SimulatedPower:
    """The power limit of a simulated device, which is idle at first."""

    def __init__(self) -> None:
        steps = round(_WINDOW / _STEP)
        self._draws = deque([IDLE_DRAW] * steps, maxlen=steps)
        self._sum = IDLE_DRAW * steps
        self._part = 0.0  # part of a step since the last whole step
        self._clock = self._slowest = 1.0  # share of the full clock, and the lowest since `look`
        self._highest = self.average

    @property
    def average(self) -> float:
        """Average power over the last second, as a share of the limit."""
        return self._sum / len(self._draws)

    def idle(self, seconds: float) -> None:
        """Let time pass without work."""
        self._spend(seconds, IDLE_DRAW)

    def work(self, seconds: float, draw: float) -> float:
        """Do work that takes `seconds` and draws `draw` at full clock. Returns the seconds that it really
        takes."""
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
        """Begin a window of observation."""
        self._highest, self._slowest = self.average, self._clock

    def state(self) -> dict[str, Any]:
        """The highest power and the lowest clock since `look`, in the form of `dyno._nvml.state`."""
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
