"""The shares of the budget for the stages. They use the time of the recorder, so that decisions by budget are
repeated."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Any

from ..kernels.stage import least_measurements

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..core.options import Options
    from ..record.recorder import Recorder

# Share of the time after the preparations (noise, answers of the exact path) at which each stage must end,
# without and with a later kernel stage.
_ENDS = {
    "thresholds": (0.18, 0.14),
    "screen": (0.40, 0.29),
    "confirm": (0.55, 0.42),
    "walk": (0.64, 0.48),
    "leave_one_out": (0.97, 0.71),
    "kernels": (0.97, 0.97),
    "pareto": (0.98, 0.98),
}


NOISE = 1 / 3  # largest share of the budget for A/A; the rest is needed for a proof
PROVING_MEASUREMENTS = 20  # least budget: five for A/A, a block of the search, two rounds of five
SCREENING = 0.23  # share for screening kernels: a third for single launches, the rest in situ
MEASUREMENTS_A_START = 4  # the default and another one, forth and back
ROUNDS_LEARNED = 3  # rounds after which their actual duration counts, instead of the duration of the default
SEARCH_MEASUREMENTS = 60  # for a threshold, two dozen trials, the finals and the proof of two entries
ROUNDS_SLACK = 1.15  # factor for rounds of other configurations than the measured ones


class Schedule:
    """The schedule of a run: its clock, its stages, and the cost of a measurement.

    Args:
    kinds: Kinds of metrics (`pp`, `tg`) for which kernels are chosen.
    """

    def __init__(self, recorder: Recorder, options: Options, kinds: int) -> None:
        self._recorder = recorder
        self._options = options
        self._kinds = kinds
        self._end = math.inf
        self._measurement_cost = 0.0
        self._start_share = 0.0  # share of it for the start of the process
        self._loads: list[float] = []  # seconds of a reload within a process, with noise
        self._in_rounds: list[float] = []  # seconds per measurement by round, including starts
        self._gone = 0.0
        self._reserved = 0.0  # reserved seconds at the end for the proof of kernels

    @property
    def measurement_cost(self) -> float:
        """Seconds of a measurement of the default; 0 while unknown."""
        return self._measurement_cost

    def plan(self, seconds: float) -> None:
        """Set the expected cost before the first whole measurement."""
        self._measurement_cost = seconds

    def learn(self, seconds: float) -> None:
        """Set the measured cost of a measurement, from which deadlines follow."""
        self._measurement_cost = self._recorder.expected_measurement = seconds

    def learn_from(self, fresh: Sequence[float], warm: Sequence[float]) -> None:
        """Learn the costs from measurements that begin a process, including start and load, and from later
        ones in the process. A round of a comparison has at least MEASUREMENTS_A_START measurements per
        start."""
        first = sum(fresh) / len(fresh)
        later = min(first, sum(warm) / len(warm)) if warm else first
        self._start_share = (first - later) / MEASUREMENTS_A_START
        self.learn(later + self._start_share)

    def follow(self, seconds: float) -> None:
        """Update the cost, because a machine gets busier or quieter during a tune.

        Args: `seconds`: seconds of a measurement in an already running process.
        """
        self.learn(self._measurement_cost + 0.15 * (seconds + self._start_share - self._measurement_cost))

    def loaded(self, seconds: float) -> None:
        """Learn the cost of a reload within a process, and update the rest, because a reload must not look
        like a busier machine.

        Args: `seconds`: seconds of a measurement of the default after one with other load settings.
        """
        self._loads.append(seconds + self._start_share - self._measurement_cost)
        # If the first loads were slow, subtracting them could leave no time for a measurement with a quick
        # load.
        self.follow(max(seconds - self._load, 0.5 * self._measurement_cost))

    @property
    def _load(self) -> float:
        """Seconds of a load. Because of noise, single values may seem negative."""
        return max(0.0, statistics.median(self._loads)) if self._loads else 0.0

    @property
    def loading(self) -> float:
        """The cost of a measurement with a load, in units of a measurement. Measured rounds include their
        loads."""
        if self._measurement_cost <= 0 or len(self._in_rounds) >= ROUNDS_LEARNED:
            return 1.0
        return 1 + self._load / self._measurement_cost

    def lengthen(self, seconds: float) -> None:
        """From now on, all measurements take this much longer."""
        self.learn(self._measurement_cost + seconds)
        self._in_rounds = [known + seconds for known in self._in_rounds]

    def took_round(self, measurements: float, seconds: float) -> None:
        """Record the seconds of a round with this number of measurements, including the start of its process
        and repetitions."""
        self._in_rounds.append(seconds / measurements)

    def of_rounds(self, measurements: float) -> float:
        """Seconds of this many measurements in rounds. The compared configurations are mostly faster than the
        default, and many measurements share one start. So if actual rounds were shorter, they are a better
        estimate than measurements of the default."""
        cost = self._measurement_cost
        if len(self._in_rounds) >= ROUNDS_LEARNED:
            cost = min(cost + self._load, ROUNDS_SLACK * statistics.median(self._in_rounds))
        return measurements * cost

    def prepared(self) -> None:
        """From now on, the stages share the remaining time, so that a slow start leaves time for all of
        them."""
        budget = self._options.budget
        self._gone = self._recorder.now if budget is None else min(self._recorder.now, 0.6 * budget)

    @property
    def measurements_left(self) -> float:
        """The number of measurements of the default in the rest of the budget."""
        if self._options.budget is None or self._measurement_cost <= 0:
            return math.inf
        return max(0.0, (self._options.budget - self._recorder.now) / self._measurement_cost)

    def few_measurements(self) -> dict[str, Any]:
        """A note if the budget has room for only a few measurements, because each one is a process that loads
        the model. Empty if the budget is sufficient."""
        cost, fit = self._measurement_cost, self.measurements_left
        if math.isinf(fit) or fit >= SEARCH_MEASUREMENTS:
            return {}
        budget = self._options.budget
        assert budget is not None
        fit = int(fit)
        minutes = math.ceil((self._recorder.now + SEARCH_MEASUREMENTS * cost) / 60)
        return {
            "visits": fit, "needed": 60 * minutes,
            "message": f"a measurement takes {cost:.1f} s, so {fit} fit into the budget, which is few for a "
                f"search and its proof; --budget {minutes}m has room for {SEARCH_MEASUREMENTS}",
        }  # fmt: skip

    def until(self, stage: str) -> None:
        """From now on, time queries refer to the share of this stage."""
        self._end = self._end_of(stage)

    def reserve(self, seconds: float) -> None:
        """From now on, all stages end this many seconds before the end of the kernel stage; 0 cancels
        that."""
        self._reserved = seconds

    @property
    def kernels_have_time(self) -> bool:
        """Whether the shares leave time for kernels, before the gain of settings is known."""
        if self._options.budget is None:
            return True
        return self._before_kernels(self._options.budget - self._gone) < _ENDS["kernels"][1]

    def _end_of(self, stage: str) -> float:
        if self._options.budget is None:
            return math.inf
        return min(self._share_of(stage), self._share_of("kernels") - self._reserved)

    def _share_of(self, stage: str) -> float:
        assert self._options.budget is not None
        budget = self._options.budget - self._gone
        share = _ENDS[stage][1 if self._options.kernels else 0]
        if self._options.kernels and stage not in ("kernels", "pareto"):
            share *= self._before_kernels(budget) / _ENDS["leave_one_out"][1]
        if self._options.pareto and stage != "pareto":
            share *= 0.8
        return self._gone + budget * share

    def until_the_end(self) -> None:
        """The remaining seconds of the budget."""
        self._end = math.inf if self._options.budget is None else self._options.budget

    def _before_kernels(self, budget: float) -> float:
        """Share of the budget after which kernels begin: early enough for two rounds of the whole profile,
        however long a measurement takes on a machine that is busy, for timing ops and for trying their
        kernels in situ. Half of it stays with the settings; where the other half would prove nothing, not
        even about the kernels of one metric, all of it does."""
        end = _ENDS["kernels"][1]
        for kinds in (self._kinds, 1):
            proof = 1.2 * self.of_rounds(least_measurements(kinds)) / budget
            if end - proof >= 0.47:
                return max(0.47, min(_ENDS["leave_one_out"][1], end - proof - SCREENING))
        return end

    @property
    def left(self) -> float:
        """Seconds until this stage must end."""
        return self._end - self._recorder.now

    @property
    def now(self) -> float:
        return self._recorder.now

    def in_time(self, seconds: float | None = None) -> bool:
        """Whether this much more work, by default one measurement, ends before the whole budget."""
        budget = self._options.budget
        return budget is None or self._recorder.now + (seconds or self._measurement_cost) <= budget

    def more(self, measurements: int) -> bool:
        return self.more_seconds(measurements * self._measurement_cost)

    def more_seconds(self, seconds: float) -> bool:
        return self._recorder.now + seconds <= self._end

    def more_at(self, now: float, measurements: float, stage: str | None = None) -> bool:
        """Whether this many more measurements fit, for a device whose clock says `now`; with `stage`: until
        that stage must end."""
        return now + measurements * self._measurement_cost <= (
            self._end if stage is None else self._end_of(stage)
        )

    def fits(self, measurements: int, share: float) -> bool:
        """Whether this many more measurements end within a share of the budget."""
        budget = self._options.budget
        return budget is None or self._recorder.now + measurements * self._measurement_cost <= share * budget

    def noise_fits(self, measurements: int) -> bool:
        """Whether this many more measurements of A/A fit into its share. If measurements became slower, one
        measurement of the second process is enough, because it still shows the difference between
        processes."""
        return self.fits(measurements, NOISE)

    @property
    def over(self) -> bool:
        """Whether the whole budget has ended."""
        return self._options.budget is not None and self._recorder.now >= self._options.budget

    @property
    def used_up(self) -> bool:
        budget = self._options.budget
        return budget is not None and self._recorder.now > 0.97 * budget
