"""The solution of a threshold: the sizes at which one path is faster than another."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


class Verdict(enum.StrEnum):
    CROSSING = "crossing"
    ALWAYS = "always"  # the first path is faster at all sizes of the grid
    NEVER = "never"
    TIE = "tie"  # at no size do the paths differ by more than the margin and the noise


@dataclass(frozen=True)
class Solved:
    """The solution of one threshold."""

    knob: str
    verdict: Verdict
    up_to: int | None  # the largest size of the grid at which the first path is faster
    ratios: Mapping[int, float]  # first path / second, by size

    def to_dict(self) -> dict[str, Any]:
        ratios = [round(r, 4) for r in self.ratios.values()]
        return {
            "verdict": str(self.verdict), "up_to": self.up_to, "ubatch": list(self.ratios), "ratio": ratios,
        }  # fmt: skip
