"""Observations: tried points of the space, and their scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..core.protocol import TrialStatus
    from ..measure.measurement import Score
    from ..space.search_space import Point


@dataclass(frozen=True, slots=True)
class Observation:
    """A tried class of the space. `score` is its log ratio to the baseline; None if it has none."""

    point: Point
    score: float | None
    sigma: float = 0.01  # standard error of the score


@dataclass(frozen=True)
class Trial:
    """A trial: a tried class of the space, with its result or its failure."""

    number: int
    point: Point
    status: TrialStatus
    log_ratio: float | None  # combined, to the baseline
    score: Score | None = None
    message: str = ""

    @classmethod
    def failed(cls, number: int, point: Point, status: TrialStatus, message: str) -> Trial:
        """A trial without a score."""
        return cls(number, point, status, None, None, message)
