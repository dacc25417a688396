"""The policy for a short budget, which decides about all reductions of a run.

`run.budget` has the shares of the stages. A stage without time for two rounds proves less. To avoid that,
this policy makes measurements shorter, comparisons fewer and the search briefer.
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

PATIENCE = 8  # consecutive trials without a gain that end the search
WIDER = 1.2  # factor by which fewer samples may widen the margin
ROUNDS = 2  # least rounds of a comparison
SLOW = 2.5  # factor on the duration of a measurement of the default, after which no more samples are taken
SPARE = 1.25  # factor on the shortest proof that a search reserves, because a round may take longer
LEAST = 30  # measurements that a budget should have room for, at the cost of samples in each
PROOF = "kernels"  # the stage in whose time a proof of settings must end at the latest
ENOUGH = int(2 * measurements_in_round(2))  # the shortest proof: two configurations and the default


class Shortage:
    """The reductions of a run with this budget.

    `few` says whether the budget has room for only a few measurements. It is known once the noise is. Without
    a budget it is always False, and nothing is reduced.
    """

    def __init__(self, options: Options, budget: Schedule) -> None:
        self._options = options
        self._budget = budget
        self.few = False

    # ---- before the noise is known

    def prompts(self, sample: float) -> int:
        """The number of samples per measurement that leaves room for LEAST measurements.

        Args:
            sample: Seconds of one sample.
        """
        assert self._options.budget is not None
        for prompts in range(self._options.policy.prompts, 1, -1):
            if LEAST * sample * (prompts + 1) <= self._options.budget:
                return prompts
        return 1

    def fewer_samples(
        self, kept: int, noise: Mapping[str, Noise], noise_with: Callable[[int], dict[str, Noise]]
    ) -> tuple[int, dict[str, Noise]] | None:
        """The least number of samples that hardly widens the margin, and the noise with it. In a short
        budget, more measurements are better than longer ones, because samples of one measurement do not show
        differences between processes. None: the current number.

        Args:
            noise_with: Gives the noise as if each measurement had kept this number of samples.
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
        """The policy for all configurations except the default. A very slow one gets only the samples that
        show its slowness."""
        cost = self._budget.measurement_cost
        if self._options.budget is None or not cost:
            return policy
        return dataclasses.replace(policy, longest=round(SLOW * cost, 6))

    @property
    def least_rounds(self) -> int:
        return min(self._options.rounds, ROUNDS) if self.few else self._options.rounds

    @property
    def glimpses(self) -> bool:
        """Whether kernels get a first look before settings, because the shares would leave them no time."""
        return self.few and not self._budget.kernels_have_time

    def ends_search(self, now: float, measurements: float, proofs: Sequence[float]) -> bool:
        """Whether the next trial would use up the time of a proof: a proof that noise makes long, or, in a
        short budget, the proof of a trial that is far ahead.

        Args:
            now: Seconds of the run, by the clock of the asking device.
            measurements: Number of measurements of the next trial.
            proofs: Numbers of measurements of proofs, the largest first. The first one that fits is reserved.
        """
        kept = next((p for p in proofs if self._budget.more_at(now, p, PROOF)), None)
        return kept is not None and not self._budget.more_at(now, measurements + kept, PROOF)

    def goes_on(
        self, now: float, measurements: float, found: Sequence[Trial], trials: Sequence[Trial],
        proof: Callable[[Trial], int],
    ) -> bool:  # fmt: skip
        """Whether the search continues after the end of its share. Without a find, it does not need the time
        of the finals. With a find and a short budget, it continues until the proof must begin.

        Args:
            now: Seconds of the run, by the clock of the asking device.
            measurements: that the next trial takes.
            found: The trials that are worth proving.
            trials: All trials.
            proof: Number of measurements that prove a trial.
        """
        if not found:
            return self._budget.more_at(now, measurements, "walk") or self._budget.more_at(
                now, measurements + ENOUGH, "leave_one_out"
            )
        best = max(found, key=lambda t: t.log_ratio or 0.0)
        if not self.few or sum(t.number > best.number for t in trials) >= PATIENCE:
            return False
        return self._budget.more_at(now, measurements + proof(best), "leave_one_out")
