"""What of the budget each stage may use. Time is the ledger's, so that decisions by budget repeat."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Any

from ..kernels.stage import least_visits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..core.options import Options
    from ..record.recorder import Ledger

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
PROVING_VISITS = 20  # the least budget: five for A/A, a block of the search, two rounds of five
SHORTEST_PROOF = 10  # visits: two rounds of two configurations beside the default
SCREENING = 0.23  # of the same time, for kernels: a third of it alone, the rest in place
VISITS_A_START = 4  # the default and one other, there and back
ROUNDS_LEARNED = 3  # until then a visit of a round is taken to last as long as one of the default
SEARCH_VISITS = 60  # that a threshold, two dozen trials, finals and the proof of two entries take
ROUNDS_SLACK = 1.15  # for rounds of other configurations than those that were seen


class Schedule:
    """Args:
    kinds: of metrics (`pp`, `tg`) that kernels are chosen for.
    """

    def __init__(self, ledger: Ledger, options: Options, kinds: int) -> None:
        self._ledger = ledger
        self._options = options
        self._kinds = kinds
        self._end = math.inf
        self._visit_cost = 0.0
        self._start_share = 0.0  # of it, for the start of the process
        self._in_rounds: list[float] = []  # seconds of a visit, starts included, by round
        self._gone = 0.0
        self._reserved = 0.0  # seconds at the end, for the proof of kernels

    @property
    def visit_cost(self) -> float:
        """Seconds of a visit of the default; 0 while unknown."""
        return self._visit_cost

    def plan(self, seconds: float) -> None:
        """Before the first whole visit: what one will take."""
        self._visit_cost = seconds

    def learn(self, seconds: float) -> None:
        """What one takes, as measured; deadlines follow from it."""
        self._visit_cost = self._ledger.expected_visit = seconds

    def learn_from(self, fresh: Sequence[float], warm: Sequence[float]) -> None:
        """From visits that begin a process, with the start and the load, and from those that follow in it. A
        round of a comparison has at least VISITS_A_START visits for one start."""
        first = sum(fresh) / len(fresh)
        later = min(first, sum(warm) / len(warm)) if warm else first
        self._start_share = (first - later) / VISITS_A_START
        self.learn(later + self._start_share)

    def follow(self, seconds: float) -> None:
        """A machine gets busier or quieter while a tune runs; the plan of the budget follows.

        Args: `seconds`: of a visit in a process that ran before.
        """
        self.learn(self._visit_cost + 0.15 * (seconds + self._start_share - self._visit_cost))

    def lengthen(self, seconds: float) -> None:
        """Every visit takes so much longer from now on."""
        self.learn(self._visit_cost + seconds)
        self._in_rounds = [known + seconds for known in self._in_rounds]

    def took_round(self, visits: float, seconds: float) -> None:
        """What a round of so many visits took, with the start of its process and all that was repeated."""
        self._in_rounds.append(seconds / visits)

    def of_rounds(self, visits: float) -> float:
        """Seconds of so many visits in rounds. There the default is not alone: what is compared with it is
        mostly faster, and many visits share one start. So rounds that have been run say it better than visits
        of the default, where they say less."""
        cost = self._visit_cost
        if len(self._in_rounds) >= ROUNDS_LEARNED:
            cost = min(cost, ROUNDS_SLACK * statistics.median(self._in_rounds))
        return visits * cost

    def prepared(self) -> None:
        """The stages share what is left from now on, so that a slow start starves none of them."""
        budget = self._options.budget
        self._gone = self._ledger.now if budget is None else min(self._ledger.now, 0.6 * budget)

    @property
    def visits_left(self) -> float:
        """How many visits of the default the rest of the budget has room for."""
        if self._options.budget is None or self._visit_cost <= 0:
            return math.inf
        return max(0.0, (self._options.budget - self._ledger.now) / self._visit_cost)

    def few_visits(self) -> dict[str, Any]:
        """What to say where a visit takes long, as where each is a process that loads the model: users should
        know early what their budget is worth. Empty where it is enough."""
        cost, fit = self._visit_cost, self.visits_left
        if math.isinf(fit) or fit >= SEARCH_VISITS:
            return {}
        budget = self._options.budget
        assert budget is not None
        fit = int(fit)
        minutes = math.ceil((self._ledger.now + SEARCH_VISITS * cost) / 60)
        return {
            "visits": fit, "needed": 60 * minutes,
            "message": f"a visit takes {cost:.1f} s, so {fit} fit into the budget: few to find what is "
            f"best and to prove it; --budget {minutes}m has room for {SEARCH_VISITS}",
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
        however long a visit takes on a machine that is busy, for timing ops and for trying their kernels in
        place. Half of it stays with the settings; where the other half would prove nothing, not even about
        the kernels of one metric, all of it does."""
        end = _ENDS["kernels"][1]
        for kinds in (self._kinds, 1):
            proof = 1.2 * self.of_rounds(least_visits(kinds)) / budget
            if end - proof >= 0.47:
                return max(0.47, min(_ENDS["leave_one_out"][1], end - proof - SCREENING))
        return end

    @property
    def left(self) -> float:
        """Seconds until this stage has to end."""
        return self._end - self._ledger.now

    @property
    def now(self) -> float:
        return self._ledger.now

    def in_time(self, seconds: float | None = None) -> bool:
        """Whether so much more, by default one visit, ends before the whole budget does."""
        budget = self._options.budget
        return budget is None or self._ledger.now + (seconds or self._visit_cost) <= budget

    def more(self, visits: int) -> bool:
        return self.more_seconds(visits * self._visit_cost)

    def more_seconds(self, seconds: float) -> bool:
        return self._ledger.now + seconds <= self._end

    def more_at(self, now: float, visits: int, stage: str | None = None) -> bool:
        """For a device whose own clock says `now`; with a stage: until that one has to end."""
        return now + visits * self._visit_cost <= (self._end if stage is None else self._end_of(stage))

    def still_finds(self, now: float, visits: int) -> bool:
        """Whether a search that has found nothing goes on for so many visits: into the time of the finals,
        and to its end while that leaves room for a proof of what they find."""
        return self.more_at(now, visits, "walk") or self.more_at(
            now, visits + SHORTEST_PROOF, "leave_one_out"
        )

    def fits(self, visits: int, share: float) -> bool:
        """Whether so many more visits end within a share of the budget."""
        budget = self._options.budget
        return budget is None or self._ledger.now + visits * self._visit_cost <= share * budget

    def noise_fits(self, visits: int) -> bool:
        """Whether so many more visits of A/A fit into its share. If visits got slower meanwhile, one visit of
        the second process has to do: it still tells what processes differ by."""
        return self.fits(visits, NOISE)

    @property
    def over(self) -> bool:
        """Whether the whole budget has ended."""
        return self._options.budget is not None and self._ledger.now >= self._options.budget

    @property
    def used_up(self) -> bool:
        budget = self._options.budget
        return budget is not None and self._ledger.now > 0.97 * budget
