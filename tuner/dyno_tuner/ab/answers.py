"""Comparison of the answers of two sides with the most exact path of the first side."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .run import Answers, Side


def compare_answers(
    sides: Mapping[str, Side], limit_of: Callable[[float], float], say: Callable[[str], None]
) -> tuple[tuple[Answers, Answers] | None, str]:
    """Compare both sides with A's most exact path, and give the reason if B is less close. Two different
    engines are each compared with their own most exact path, because the distance of those paths does not
    depend on the compared settings.

    Args:
        sides: The sides by name, "A" and "B".
        limit_of: Function from the mean KLD of A to the largest allowed mean KLD of B.
        say: Receives a line of text.
    """
    alike = len({side.kind for side in sides.values()}) == 1
    with tempfile.TemporaryDirectory(prefix="dyno-ab-") as folder:
        say("comparing answers")
        found = []
        for name in "AB":
            place = Path(folder) if alike else Path(folder) / name
            place.mkdir(exist_ok=True)
            found.append(sides[name].answers(place, first=name == "A" or not alike))
    if found[0] is None or found[1] is None:
        lacking = "A" if found[0] is None else "B"
        say(
            f"answers are not compared: side {lacking} has no llama-perplexity, or the model has no "
            "vocabulary"
        )
        return None, ""
    limit = limit_of(found[0].mean_kld)
    # Written so that a KLD of NaN fails.
    near = found[1].mean_kld <= limit
    return (found[0], found[1]), "" if near or not alike else f"answers changed: the limit is {limit:.3g}"
