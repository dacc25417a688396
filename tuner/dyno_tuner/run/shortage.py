"""The policy for a shortage of budget: everything that a run does less of is decided here.

The shares of the stages are in `run.budget`. A stage that has too little time for two rounds proves less;
this policy keeps measurements short, comparisons few and the search brief before it comes to that.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from ..core.intervals import LEAST_MARGIN
from ..measure.paired_rounds import measurements_in_round
from .budget import SEARCH_MEASUREMENTS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ..core.intervals import Noise
    from ..core.options import MeasurementPolicy, Options
    from ..search.observation import Trial
    from .budget import Schedule

PATIENCE = 8  # trials without a gain that end the search
WIDER = 1.2  # times the margin, that fewer samples may cost
ROUNDS = 2  # of a comparison at least
SLOW = 2.5  # times a measurement of the default; what takes longer gets no more samples
SPARE = 1.25  # times the shortest proof, that a search keeps for it: a round may take longer than planned
LEAST = 30  # measurements that a budget should have room for; samples of each are given up for that
PROOF = "kernels"  # the stage in whose time a proof of settings has to end, at the latest
ENOUGH = int(2 * measurements_in_round(2))  # the shortest proof, of two configurations beside the default


class Shortage:
    """The things that a run with this budget gives up.

    `few` says whether the budget has room for few measurements. It is known when the noise is; without a
    budget it stays False and nothing is given up.
    """

    def __init__(self, options: Options, budget: Schedule) -> None:
        self._options = options
        self._budget = budget
        self.few = False

    # ---- before the noise is known

    def prompts(self, sample: float) -> int:
        """Samples of a measurement that leave room for LEAST measurements.

        Args:
            sample: seconds of one.
        """
        assert self._options.budget is not None
        for prompts in range(self._options.policy.prompts, 1, -1):
            if LEAST * sample * (prompts + 1) <= self._options.budget:
                return prompts
        return 1

    def fewer_samples(
        self, kept: int, noise: Mapping[str, Noise], noise_with: Callable[[int], dict[str, Noise]]
    ) -> tuple[int, dict[str, Noise]] | None:
        """The fewest samples that hardly widen the margin, and the noise with them: in a short budget more
        measurements tell more than longer ones. Samples of one measurement do not tell what processes differ
        by. None: as many as are kept.

        Args:
            noise_with: the noise as if every measurement had kept so many samples.
        """
        if self._options.budget is None or self._budget.measurements_left >= SEARCH_MEASUREMENTS:
            return None
        for prompts in range(1, kept):
            found = noise_with(prompts)
            widest = {m: max(LEAST_MARGIN, WIDER * n.margin(ROUNDS)) for m, n in noise.items()}
            if all(n.margin(ROUNDS) <= widest[m] for m, n in found.items()):
                return prompts, found
        return None

    # ---- after it

    def brief(self, policy: MeasurementPolicy) -> MeasurementPolicy:
        """For all but the default: a configuration that is very slow gets no samples beyond those that show
        it."""
        cost = self._budget.measurement_cost
        if self._options.budget is None or not cost:
            return policy
        return dataclasses.replace(policy, longest=round(SLOW * cost, 6))

    @property
    def least_rounds(self) -> int:
        return min(self._options.rounds, ROUNDS) if self.few else self._options.rounds

    @property
    def glimpses(self) -> bool:
        """Whether kernels are looked at before settings, because the shares would leave them no time."""
        return self.few and not self._budget.kernels_have_time

    def ends_search(self, now: float, measurements: float, proofs: Sequence[float]) -> bool:
        """Whether the next trial would take the time of a proof: of one that noise makes long, or in a short
        budget of what is far ahead.

        Args:
            now: seconds of the run, by the clock of the device that asks.
            measurements: that the next trial takes.
            proofs: measurements of proofs, the largest first. The first that there is time for is kept.
        """
        kept = next((p for p in proofs if self._budget.more_at(now, p, PROOF)), None)
        return kept is not None and not self._budget.more_at(now, measurements + kept, PROOF)

    def goes_on(
        self, now: float, measurements: float, found: Sequence[Trial], trials: Sequence[Trial],
        proof: Callable[[Trial], int],
    ) -> bool:  # fmt: skip
        """Whether the search goes on when its own share has ended. A search without a find has no use for the
        finals that follow it. With a find, a short budget goes on until the proof has to begin.

        Args:
            now: seconds of the run, by the clock of the device that asks.
            measurements: that the next trial takes.
            found: the trials that are worth proving.
            trials: all trials.
            proof: measurements that prove a trial.
        """
        if not found:
            return self._budget.more_at(now, measurements, "walk") or self._budget.more_at(
                now, measurements + ENOUGH, "leave_one_out"
            )
        best = max(found, key=lambda t: t.log_ratio or 0.0)
        if not self.few or sum(t.number > best.number for t in trials) >= PATIENCE:
            return False
        return self._budget.more_at(now, measurements + proof(best), "leave_one_out")
