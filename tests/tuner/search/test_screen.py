"""Blocks of trials between two measurements of the default."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import pytest
from dyno_tuner.core.protocol import Measurement, Sample, TrialStatus
from dyno_tuner.search.proposers import GuidedProposer
from dyno_tuner.search.screen import Screen
from dyno_tuner.targets.simulated.surfaces import SURFACES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dyno_tuner.core.protocol import Configuration
    from dyno_tuner.search.context import SearchContext
    from dyno_tuner.search.observation import Trial
    from dyno_tuner.space.search_space import Space


class _Clock:
    """An engine whose measurements take a second each, and whose default gets faster by a half in each of
    them."""

    def __init__(self) -> None:
        self.now = 0.0
        self.resting = False

    def measurement(self, rate: float) -> Measurement:
        self.now += 1.0
        return Measurement(TrialStatus.OK, samples=(Sample("pp", 0, 100, 100 / rate, 100 / rate),))


class _Context:
    """A run that has as much time as it wants and accepts all answers."""

    weights: ClassVar = {"pp": 1.0}
    sigma = 0.01
    void_over = math.inf
    options = SimpleNamespace(block=2, max_trials=3, patience=20)
    gate = SimpleNamespace(admit=lambda point: None)

    def __init__(self, clock: _Clock, space: Space) -> None:
        self.space = space
        self.recorder = clock
        self._clock = clock

    def measure(self, key: str, configuration: Configuration, metrics: Sequence[str]) -> Measurement:
        return self._clock.measurement(100.0)

    def baseline(self, key: str) -> Measurement:
        return self._clock.measurement(100.0 * 1.5**self._clock.now)

    def goes_on(self, now: float, measurements: int, trials: Sequence[Trial]) -> bool:
        return True

    def note(self, kind: str, /, **data: Any) -> None:
        pass


def _scores(*, beside: bool) -> list[float | None]:
    """Of two points, searched or tried beside the winner."""
    clock, space = _Clock(), SURFACES["saturating"]().space()
    points = [p for p in space.points() if p != space.default][:2]
    context = _Context(clock, space)
    screen = Screen(cast("SearchContext", context), GuidedProposer(space), ("s",))
    if beside:
        screen.also(points)
    else:
        screen.run(points)
    return [t.log_ratio for t in screen.trials[1:]]


def test_points_beside_the_winner_are_scored_as_others_are() -> None:
    assert _scores(beside=True) == pytest.approx(_scores(beside=False))
