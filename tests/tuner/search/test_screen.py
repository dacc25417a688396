"""Blocks of trials between two measurements of the default."""

from __future__ import annotations

import math

import pytest
from dyno_tuner.core.protocol import Measurement, Sample, TrialStatus
from dyno_tuner.search.proposers import GuidedProposer
from dyno_tuner.search.screen import Screen, ScreenPlan
from dyno_tuner.targets.simulated.surfaces import SURFACES


class _Clock:
    """An engine whose measurements take a second each, and whose default gets faster by a half in each of
    them."""

    def __init__(self) -> None:
        self.now = 0.0

    def measurement(self, rate: float) -> Measurement:
        self.now += 1.0
        return Measurement(TrialStatus.OK, samples=(Sample("pp", 0, 100, 100 / rate, 100 / rate),))


def _scores(*, beside: bool) -> list[float | None]:
    """Of two points, searched or tried beside the winner."""
    clock, space = _Clock(), SURFACES["saturating"]().space()
    points = [p for p in space.points() if p != space.default][:2]
    plan = ScreenPlan(
        measurement=lambda key, point, metrics: clock.measurement(100.0),
        baseline=lambda key: clock.measurement(100.0 * 1.5**clock.now),
        admit=lambda point: None,
        now=lambda: clock.now,
        more=lambda measurements: True,
        note=lambda kind, **data: None,
        weights={"pp": 1.0},
        sigma=0.01,
        void_over=math.inf,
        block=2,
        max_trials=3,
    )
    screen = Screen(space, GuidedProposer(space), plan, ("s",))
    if beside:
        screen.also(points)
    else:
        screen.run(points)
    return [t.log_ratio for t in screen.trials[1:]]


def test_points_beside_the_winner_are_scored_as_others_are() -> None:
    assert _scores(beside=True) == pytest.approx(_scores(beside=False))
