"""How far the ratio of two configurations strays from round to round.

A/A cannot tell: it says what processes differ by, not how much of that all configurations of a process have
in common. That part cancels in every ratio of a round, and what is left shows in the rounds themselves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ..core.intervals import block_residuals, t975

if TYPE_CHECKING:
    from .comparison import Comparison

ENOUGH = 10  # degrees of freedom from which on rounds say more than A/A
FAR = 4.0  # standard deviations beyond which a residual counts as one of so many


@dataclass
class RoundSpread:
    """The spread of rounds by all comparisons of a run."""

    comparisons: list[Comparison] = field(default_factory=list)

    def add(self, comparison: Comparison) -> None:
        """Once or again: a comparison may have got rounds more."""
        if all(c is not comparison for c in self.comparisons):
            self.comparisons.append(comparison)

    @property
    def most_rounds(self) -> int:
        """The rounds of the longest comparison; 0 if there was none."""
        return max((c.rounds for c in self.comparisons), default=0)

    def of_level(self, metric: str) -> tuple[float, int]:
        """Standard deviation of one configuration's level in a round, in log, what is common to the round
        and to the configuration taken out, and its degrees of freedom; 0 of them where nothing is known."""
        parts: list[np.ndarray] = []
        freedom = 0
        for comparison in self.comparisons:
            groups = [
                logs.get(metric, [])
                for name, logs in comparison.logs.items()
                if (name, metric) not in comparison.borrowed
            ]
            whole = [g[comparison.carried :] for g in groups if len(g) == comparison.rounds]
            levels = [[float(np.median(pairs)) for pairs in own] for own in whole]
            rounds = (
                comparison.rounds - comparison.carried
            )  # the comparison that measured the others has them
            if levels and rounds > 1:
                base = [0.0] * rounds  # levels are relative to the first configuration's
                residual, own = block_residuals([base, *levels])
                parts.append(residual.ravel())
                freedom += own
        if not freedom:
            return math.inf, 0
        residuals = np.concatenate(parts)
        if freedom >= ENOUGH:  # a round that was disturbed unseen must not make every gain too small
            typical = 1.4826 * float(np.median(np.abs(residuals))) * math.sqrt(residuals.size / freedom)
            residuals = np.clip(residuals, -FAR * typical, FAR * typical) if typical > 0 else residuals
        return math.sqrt(float((residuals**2).sum()) / freedom), freedom

    def margin(self, metric: str, rounds: int, before: float) -> float:
        """Twice the half-width of the 95 % interval of a ratio after so many rounds. The quantile is
        Student's, so a few rounds do not make a narrow margin by luck.

        Args:
            before: what A/A says, which is all that is known before the first rounds. The smaller one counts
                until there have been enough of them, and theirs from then on: A/A has two degrees of freedom.
        """
        sigma, freedom = self.of_level(metric)
        if not freedom:
            return before
        found = 2 * t975(freedom) * math.sqrt(2 / rounds) * sigma
        return found if freedom >= ENOUGH else min(before, found)
