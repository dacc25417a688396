"""How far the ratio of two configurations strays from round to round.

A/A cannot tell: it says what processes differ by, not how much of that all configurations of a process have
in common. That part cancels in every ratio of a round, and what is left shows in the rounds themselves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from .stats import block_spread, t975

if TYPE_CHECKING:
    from .confirm import Comparison


@dataclass
class RoundSpread:
    """What all comparisons of a run say about it."""

    comparisons: list[Comparison] = field(default_factory=list)

    def add(self, comparison: Comparison) -> None:
        """Once or again: a comparison may have got rounds more."""
        if all(c is not comparison for c in self.comparisons):
            self.comparisons.append(comparison)

    def of_level(self, metric: str) -> tuple[float, int]:
        """Standard deviation of one configuration's level in a round, in log, what is common to the round
        and to the configuration taken out, and its degrees of freedom; 0 of them where nothing is known."""
        squares, freedom = 0.0, 0
        for comparison in self.comparisons:
            levels = [
                [float(np.median(group)) for group in logs[metric]] for logs in comparison.logs.values()
            ]
            if levels and comparison.rounds > 1:
                base = [0.0] * comparison.rounds  # levels are relative to the first configuration's
                sigma, own = block_spread([base, *levels])
                squares += sigma**2 * own
                freedom += own
        return (math.sqrt(squares / freedom), freedom) if freedom else (math.inf, 0)

    def margin(self, metric: str, rounds: int) -> float:
        """Twice the half-width of the 95 % interval of a ratio after so many rounds; infinite where nothing
        is known. The quantile is Student's, so a few rounds do not make a narrow margin by luck."""
        sigma, freedom = self.of_level(metric)
        return 2 * t975(freedom) * math.sqrt(2 / rounds) * sigma if freedom else math.inf
