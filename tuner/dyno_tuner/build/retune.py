"""Searching a runtime knob again in two builds, because their best u-batches may differ."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..core.protocol import settings_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .builder import Built
    from .measure import Measured

LEAST = 0.03
"""Least apparent gain of a value. One process for each value cannot show less."""


@dataclass(frozen=True)
class Tuned:
    """The values of a knob in the default build and in the variant; empty if the default is kept."""

    base: Mapping[str, Any] = field(default_factory=dict)
    variant: Mapping[str, Any] = field(default_factory=dict)
    measured: Measured | None = None

    @property
    def changes(self) -> bool:
        return bool(self.base or self.variant)

    @property
    def words(self) -> str:
        """Both settings in words, such as `ubatch=1024 in both builds`."""

        def told(settings: Mapping[str, Any]) -> str:
            return settings_text(settings) or "defaults"

        if self.base == self.variant:
            return f"{told(self.base)} in both builds"
        return f"{told(self.variant)} here and {told(self.base)} in the default build"


def retune(
    knob: str, values: Sequence[int], margin: float,
    rate: Callable[[Built, Mapping[str, Any]], float], base: Built, variant: Built,
) -> Tuned:  # fmt: skip
    """The best value of a knob in each build, from one process per value. Rounds must then prove the result.

    Args:
        values: Values to try in addition to the default.
        margin: The smallest difference that the rounds could prove.
        rate: Gives tokens/s of a build with settings.
    """

    def best(build: Built) -> dict[str, Any]:
        default = rate(build, {})
        found = {value: rate(build, {knob: value}) for value in values}
        top = max(found, key=lambda value: found[value])
        return {knob: top} if found[top] > (1 + max(LEAST, margin)) * default else {}

    return Tuned(best(base), best(variant))
