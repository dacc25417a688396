"""The share of the budget that each stage may use. Time is the recorder's, so that decisions by budget
repeat."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Any

from ..kernels.stage import least_measurements

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..core.options import Options
    from ..record.recorder import Recorder

# Share of the time after the preparations (the noise, the exact path's answers) at which each stage has to
# end, without and with kernels behind it.
_ENDS = {
    "thresholds": (0.18, 0.14),
    "screen": (0.40, 0.29),
    "confirm": (0.55, 0.42),
    "walk": (0.64, 0.48),
    "leave_one_out": (0.97, 0.71),
    "kernels": (0.97, 0.97),
    "pareto": (0.98, 0.98),
}


NOISE = 1 / 3  # of the budget at most, for A/A: less than the rest of it proves nothing
PROVING_MEASUREMENTS = 20  # the least budget: five for A/A, a block of the search, two rounds of five
SCREENING = 0.23  # of the same time, for kernels: a third of it alone, the rest in situ
MEASUREMENTS_A_START = 4  # the default and one other, there and back
ROUNDS_LEARNED = 3  # until then a measurement of a round is taken to last as long as one of the default
SEARCH_MEASUREMENTS = 60  # that a threshold, two dozen trials, finals and the proof of two entries take
ROUNDS_SLACK = 1.15  # for rounds of other configurations than those that were seen


class Schedule:
    """The time of a run: its clock, its stages, and the cost of a measurement.

    Args:
    kinds: of metrics (`pp`, `tg`) that kernels are chosen for.
    """

    def __init__(self, recorder: Recorder, options: Options, kinds: int) -> None:
        self._recorder = recorder
        self._options = options
        self._kinds = kinds
        self._end = math.inf
        self._measurement_cost = 0.0
        self._start_share = 0.0  # of it, for the start of the process
        self._loads: list[float] = []  # seconds to load again within a process, and noise
        self._in_rounds: list[float] = []  # seconds of a measurement, starts included, by round
        self._gone = 0.0
        self._reserved = 0.0  # seconds at the end, for the proof of kernels

    @property
    def measurement_cost(self) -> float:
        """Seconds of a measurement of the default; 0 while unknown."""
        return self._measurement_cost

    def plan(self, seconds: float) -> None:
        """Before the first whole measurement: what one will take."""
        self._measurement_cost = seconds

    def learn(self, seconds: float) -> None:
        """Takes over the measured cost of one; deadlines follow from it."""
        self._measurement_cost = self._recorder.expected_measurement = seconds

    def learn_from(self, fresh: Sequence[float], warm: Sequence[float]) -> None:
        """From measurements that begin a process, with the start and the load, and from those that follow in
        it. A round of a comparison has at least MEASUREMENTS_A_START measurements for one start."""
        first = sum(fresh) / len(fresh)
        later = min(first, sum(warm) / len(warm)) if warm else first
        self._start_share = (first - later) / MEASUREMENTS_A_START
        self.learn(later + self._start_share)

    def follow(self, seconds: float) -> None:
        """A machine gets busier or quieter while a tune runs; the plan of the budget follows.

        Args: `seconds`: of a measurement in a process that ran before.
        """
        self.learn(self._measurement_cost + 0.15 * (seconds + self._start_share - self._measurement_cost))

    def loaded(self, seconds: float) -> None:
        """Learns what it takes to load again within a process, and follows the rest: a plan must not take a
        load for a busier machine.

        Args: `seconds`: of a measurement of the default behind one of other weights or another placement.
        """
        self._loads.append(seconds + self._start_share - self._measurement_cost)
        # The first loads may have been slow ones: then no measurement is left of a quick one.
        self.follow(max(seconds - self._load, 0.5 * self._measurement_cost))

    @property
    def _load(self) -> float:
        """Seconds of a load; noise makes one or the other seem less than nothing."""
        return max(0.0, statistics.median(self._loads)) if self._loads else 0.0

    @property
    def loading(self) -> float:
        """Times a measurement, that one with a load takes. Rounds that were seen have their loads."""
        if self._measurement_cost <= 0 or len(self._in_rounds) >= ROUNDS_LEARNED:
            return 1.0
        return 1 + self._load / self._measurement_cost

    def lengthen(self, seconds: float) -> None:
        """Every measurement takes so much longer from now on."""
        self.learn(self._measurement_cost + seconds)
        self._in_rounds = [known + seconds for known in self._in_rounds]

    def took_round(self, measurements: float, seconds: float) -> None:
        """Takes over the seconds of a round of so many measurements, with the start of its process and all
        that was repeated."""
        self._in_rounds.append(seconds / measurements)

    def of_rounds(self, measurements: float) -> float:
        """Seconds of so many measurements in rounds. There the default is not alone: what is compared with it
        is mostly faster, and many measurements share one start. So rounds that have been run say it better
        than measurements of the default, where they say less."""
        cost = self._measurement_cost
        if len(self._in_rounds) >= ROUNDS_LEARNED:
            cost = min(cost + self._load, ROUNDS_SLACK * statistics.median(self._in_rounds))
        return measurements * cost

    def prepared(self) -> None:
        """The stages share what is left from now on, so that a slow start starves none of them."""
        budget = self._options.budget
        self._gone = self._recorder.now if budget is None else min(self._recorder.now, 0.6 * budget)

    @property
    def measurements_left(self) -> float:
        """How many measurements of the default the rest of the budget has room for."""
        if self._options.budget is None or self._measurement_cost <= 0:
            return math.inf
        return max(0.0, (self._options.budget - self._recorder.now) / self._measurement_cost)

    def few_measurements(self) -> dict[str, Any]:
        """A note for users whose measurements take long, because each is a process that loads the model:
        they should know early what their budget is worth. Empty if it is enough."""
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
        """From now on what is asked for has to end with this stage's share."""
        self._end = self._end_of(stage)

    def reserve(self, seconds: float) -> None:
        """From now on every stage ends so much before the kernels have to; 0 ends that."""
        self._reserved = seconds

    @property
    def kernels_have_time(self) -> bool:
        """Whether the shares leave kernels a part of their own before it is known what settings gain."""
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
        """All that is left of the budget."""
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
        """Seconds until this stage has to end."""
        return self._end - self._recorder.now

    @property
    def now(self) -> float:
        return self._recorder.now

    def in_time(self, seconds: float | None = None) -> bool:
        """Whether so much more, by default one measurement, ends before the whole budget does."""
        budget = self._options.budget
        return budget is None or self._recorder.now + (seconds or self._measurement_cost) <= budget

    def more(self, measurements: int) -> bool:
        return self.more_seconds(measurements * self._measurement_cost)

    def more_seconds(self, seconds: float) -> bool:
        return self._recorder.now + seconds <= self._end

    def more_at(self, now: float, measurements: float, stage: str | None = None) -> bool:
        """For a device whose own clock says `now`; with a stage: until that one has to end."""
        return now + measurements * self._measurement_cost <= (
            self._end if stage is None else self._end_of(stage)
        )

    def fits(self, measurements: int, share: float) -> bool:
        """Whether so many more measurements end within a share of the budget."""
        budget = self._options.budget
        return budget is None or self._recorder.now + measurements * self._measurement_cost <= share * budget

    def noise_fits(self, measurements: int) -> bool:
        """Whether so many more measurements of A/A fit into its share. If measurements got slower meanwhile,
        one measurement of the second process has to do: it still tells what processes differ by."""
        return self.fits(measurements, NOISE)

    @property
    def over(self) -> bool:
        """Whether the whole budget has ended."""
        return self._options.budget is not None and self._recorder.now >= self._options.budget

    @property
    def used_up(self) -> bool:
        budget = self._options.budget
        return budget is not None and self._recorder.now > 0.97 * budget
