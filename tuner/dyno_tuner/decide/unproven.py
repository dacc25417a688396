"""Settings that looked faster in the search but are not written, and the budget that would prove them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ..measure.paired_rounds import WIDEST_MARGIN
from .acceptance import LEAST_ROUNDS
from .finalists import worth_proving

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..search.observation import Trial
    from ..space.search_space import Point, Space
    from .acceptance import Judge

PROOF_ROUNDS = 4  # least number of rounds for which a budget is suggested


def best_trial(judge: Judge, trials: Sequence[Trial], now: float, short: bool) -> list[dict[str, Any]]:
    """The best trial, if it gained the margin. `margin` is present if the final margin of the rounds was too
    wide for a proof. `needed` is a budget that is enough for a proof.

    Args:
        now: Used seconds of the budget.
        short: Whether time was short. If so, a budget is suggested, provided that the noise allows a proof at
            all.
    """
    bar, space = judge.bar(judge.wanted()), judge.space
    worth = worth_proving(trials, bar, judge.weights)
    best = max(worth, key=lambda t: t.log_ratio or 0.0, default=None)
    if best is None or best.log_ratio is None or best.log_ratio < bar.of(list(judge.weights)):
        return []
    settings, moved = space.settings(best.point), judge.moved(best.point)
    changed = [space.knobs[n].name for n in space.entries(best.point)]
    # Noise that prevents the proof of one metric may not prevent the proof of another one.
    margin = min(judge.bar(max(judge.most_rounds, LEAST_ROUNDS)).of([m]) for m in moved)
    wide = margin > WIDEST_MARGIN
    rounds = judge.proving_rounds(PROOF_ROUNDS, moved) if short or wide else None
    found: dict[str, Any] = {"margin": margin} if wide else {}
    if rounds is not None:
        proof = judge.rounds.seconds(judge.ablation_measurements(best.point, rounds))
        found["needed"] = budget(now + proof)
    return [{"settings": {k: settings[k] for k in changed}, "ratio": math.exp(best.log_ratio), **found}]


def left_open(judge: Judge, trials: Sequence[Trial]) -> list[str]:
    """The knobs with another value in a trial that gained the margin. Without rounds, their defaults have not
    won."""
    bar, space = judge.bar(judge.wanted()), judge.space
    least = bar.of(list(judge.weights))
    worth = [t for t in worth_proving(trials, bar, judge.weights) if (t.log_ratio or 0.0) >= least]
    changed = {n for t in worth for n in space.entries(t.point)}
    return [k.name for n, k in enumerate(space.knobs) if n in changed]


def in_part(space: Space, missed: tuple[Point, float] | None) -> dict[str, Any]:
    """Settings that were faster in the search than the profile, but were proven only in part.

    Args: `missed`: the point and its log ratio.
    """
    if missed is None:
        return {}
    point, log_ratio = missed
    settings = space.settings(point)
    changed = {space.knobs[n].name for n in space.entries(point)}
    return {
        "settings": {k: v for k, v in settings.items() if k in changed}, "ratio": math.exp(log_ratio),
    }  # fmt: skip


def budget(seconds: float) -> int:
    """A budget, rounded up to half minutes."""
    return 30 * math.ceil(seconds / 30)
