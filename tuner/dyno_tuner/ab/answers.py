"""The answers of two sides against the most exact path of the first one."""

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
    """Both sides against A's most exact path, and why B is not as near. Engines of two kinds are each held
    against their own: how far their most exact paths are apart is no matter of the settings compared.

    Args:
        sides: by name, "A" and "B".
        limit_of: the mean KLD that B may have, by A's.
        say: takes a line.
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
    # Written so that a KLD which is not a number fails.
    near = found[1].mean_kld <= limit
    return (found[0], found[1]), "" if near or not alike else f"answers changed: the limit is {limit:.3g}"
