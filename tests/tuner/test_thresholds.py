from __future__ import annotations

import math

import numpy as np
import pytest
from dyno_tuner.thresholds import Verdict, solve

GRID = [1 << p for p in range(0, 11)]


def _curves(crossing: float, slope: float = 0.12):
    """log(first / second) at every size: positive below the crossing (in steps of the grid)."""
    return [slope * (crossing - i) for i in range(len(GRID))]


def _measure(truth: list[float], sigma: float, seed: int):
    rng = np.random.default_rng(seed)
    return lambda index, repeat: (truth[index] + sigma * rng.standard_normal(), sigma)


def test_a_crossing_of_noisy_curves_is_located_to_one_step_in_twelve_measurements() -> None:
    good = total = 0
    for seed in range(120):
        crossing = 0.5 + seed % 10
        found = solve(GRID, _measure(_curves(crossing), 0.02, seed))
        assert found.measurements <= 12
        total += 1
        good += abs(found.below - math.ceil(crossing)) <= 1 and found.verdict is Verdict.CROSSING
    assert good / total >= 0.97


def test_a_tie_is_called_a_tie() -> None:
    ties = sum(
        solve(GRID, _measure([0.0] * len(GRID), 0.002, seed)).verdict is Verdict.TIE for seed in range(60)
    )
    assert ties >= 58


def test_one_path_wins_everywhere() -> None:
    always = solve(GRID, _measure([0.3] * len(GRID), 0.01, 1))
    assert always.verdict is Verdict.ALWAYS
    assert always.below == len(GRID)
    never = solve(GRID, _measure([-0.3] * len(GRID), 0.01, 1))
    assert never.verdict is Verdict.NEVER
    assert never.below == 0


def test_small_grids_and_nonsense() -> None:
    assert solve([64], _measure([0.2], 0.01, 0)).verdict is Verdict.ALWAYS
    assert solve([64, 128], _measure([0.2, -0.2], 0.01, 0)).below == 1
    with pytest.raises(ValueError, match="ascending"):
        solve([2, 1], _measure([0, 0], 0.1, 0))
    with pytest.raises(ValueError, match="too few"):
        solve([1, 2], _measure([0, 0], 0.1, 0), limit=2)
