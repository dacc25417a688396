"""An observation: a point of the space that was tried, and its score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..core.protocol import TrialStatus
    from ..measure.measurement import Score
    from ..space.search_space import Point


@dataclass(frozen=True, slots=True)
class Observation:
    """A class of the space that was tried. `score` is a log ratio to the baseline, None where it has none."""

    point: Point
    score: float | None
    sigma: float = 0.01  # standard error of the score


@dataclass(frozen=True)
class Trial:
    """A class of the space that was tried: what it gave, or why it gave nothing."""

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
