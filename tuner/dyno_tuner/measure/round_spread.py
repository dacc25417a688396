"""The spread of the ratio of two configurations between rounds.

A/A does not show it. It gives the differences between processes, but not the part that all configurations of
a process have in common. That part cancels in the ratios of a round. The rest shows in the rounds themselves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from ..core.intervals import block_residuals, t975

if TYPE_CHECKING:
    from .comparison import Comparison

ENOUGH = 10  # degrees of freedom from which on rounds are better than A/A
FAR = 4.0  # standard deviations at which residuals are clipped


@dataclass
class RoundSpread:
    """The spread of rounds, from all comparisons of a run."""

    comparisons: list[Comparison] = field(default_factory=list)

    def add(self, comparison: Comparison) -> None:
        """Add a comparison, or update it after further rounds."""
        if all(c is not comparison for c in self.comparisons):
            self.comparisons.append(comparison)

    @property
    def most_rounds(self) -> int:
        """Number of rounds of the longest comparison; 0 if there was none."""
        return max((c.rounds for c in self.comparisons), default=0)

    def of_level(self, metric: str) -> tuple[float, int]:
        """Standard deviation of the level of a configuration in a round, in log, without the effects of round
        and configuration; and its degrees of freedom, which are 0 if nothing is known."""
        parts: list[np.ndarray] = []
        freedom = 0
        for comparison in self.comparisons:
            groups = [
                logs.get(metric, [])
                for name, logs in comparison.logs.items()
                if (name, metric) not in comparison.borrowed
            ]
            whole = [g[comparison.carried :] for g in groups if len(g) == comparison.rounds]
            # Of a few numbers, where NumPy takes ten times as long; a tune asks for them some 100,000 times.
            levels = [[median(pairs) for pairs in own] for own in whole]
            rounds = (
                comparison.rounds - comparison.carried
            )  # the comparison that measured the others includes them
            if levels and rounds > 1:
                base = [0.0] * rounds  # levels are relative to the first configuration
                residual, own = block_residuals([base, *levels])
                parts.append(residual.ravel())
                freedom += own
        if not freedom:
            return math.inf, 0
        residuals = np.concatenate(parts)
        if freedom >= ENOUGH:  # an unnoticed disturbance of a round must not make all gains too small
            typical = 1.4826 * float(np.median(np.abs(residuals))) * math.sqrt(residuals.size / freedom)
            residuals = np.clip(residuals, -FAR * typical, FAR * typical) if typical > 0 else residuals
        return math.sqrt(float((residuals**2).sum()) / freedom), freedom

    def margin(self, metric: str, rounds: int, before: float) -> float:
        """Twice the half-width of the 95 % interval of a ratio after this many rounds. It uses Student's
        quantile, so that few rounds do not give a narrow margin by chance.

        Args:
            before: The margin from A/A, which is the only one before the first rounds. Until there are enough
                rounds, the smaller margin counts. Afterwards only the rounds count, because A/A has two
                degrees of freedom.
        """
        sigma, freedom = self.of_level(metric)
        if not freedom:
            return before
        found = 2 * t975(freedom) * math.sqrt(2 / rounds) * sigma
        return found if freedom >= ENOUGH else min(before, found)
