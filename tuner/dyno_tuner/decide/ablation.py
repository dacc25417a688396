"""Ablation: the comparison of a profile with itself without each of its parts, in the same rounds as the
default.

A part is a setting, a group of settings, or the kernels of one metric. A profile that gains as a whole may
have parts that cost speed. They show only if they are left out. A tune, `tune verify` and `--pareto` compare
with this module, and `acceptance.accept` decides on its results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ..core.intervals import Estimate
    from ..measure.comparison import Comparison
    from ..measure.paired_rounds import Bar

DEFAULT = "default"  # names of configurations in a comparison
FULL = "full"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a profile that is left out as a unit.

    Args:
        label: Its name in comparisons and notes.
        moves: The metrics that it can affect.
        names: Its settings; empty for kernels.
        group: The metric of its kernels; empty for settings.
    """

    label: str
    moves: tuple[str, ...]
    names: tuple[str, ...] = ()
    group: str = ""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """The result of leaving one part out.

    Args:
        gain: Speed of the profile / speed without the part.
        missed: Whether the part gains its margin and harms no metric.
        needed: Whether the rest of the profile does not run without it.
        saves: Whether it stays because it saves memory.
    """

    part: Part
    gain: Estimate
    missed: bool
    needed: bool = False
    saves: bool = False

    @property
    def holds(self) -> bool:
        return self.missed or self.needed or self.saves


def without(label: str) -> str:
    """The name of a profile without one of its parts."""
    return f"without {label}"


def variants(default: T, whole: T, parts: Iterable[Part], rest: Callable[[Part], T]) -> dict[str, T]:
    """The configurations to compare, by name: the default, the whole, and the whole without each part.

    If the rest of the profile is the default, the measurements of the default count for it.
    """
    named = {without(part.label): rest(part) for part in parts}
    return {DEFAULT: default, FULL: whole} | {n: r for n, r in named.items() if r not in (default, whole)}


def rests(names: Iterable[str]) -> set[str]:
    """The names of a comparison that stand for profiles without a part."""
    return {name for name in names if name.startswith(without(""))}


def rest_of(result: Comparison, part: Part) -> str:
    """The configuration that shows the gain of a part: the rest of the profile, or the default if the rest
    was not measured."""
    name = without(part.label)
    return name if name in result.logs else DEFAULT


def left_out(
    result: Comparison, part: Part, bar: Bar, weights: Mapping[str, float], over: str | None, name: str = FULL
) -> LeftOut:
    """The result of a part, from the rounds of `variants`.

    Args:
        bar: The margin after a number of rounds.
        over: The configuration without the part (see `rest_of`); None: the default.
        name: Name of the profile in the comparison.
    """
    missed, gain = bar.beats(result, name, part.moves, weights, over, touched=part.moves)
    rest = without(part.label)
    return LeftOut(part, gain, missed and not result.untold(rest), needed=rest in result.failed)
