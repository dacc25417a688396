from __future__ import annotations

import math

import numpy as np
import pytest
from dyno_tuner.core.intervals import (
    Noise,
    block_spread,
    estimate,
    keyed_rng,
    noise_of,
    paired_log_ratios,
    t975,
)


def test_draws_depend_on_their_key_alone() -> None:
    assert keyed_rng(1, "a", 2).random() == keyed_rng(1, "a", 2).random()
    assert keyed_rng(1, "a", 2).random() != keyed_rng(1, "a", 3).random()


def test_pairs_are_by_prompt() -> None:
    ratios = paired_log_ratios({0: 110.0, 1: 220.0, 5: 1.0}, {0: 100.0, 1: 200.0, 2: 7.0})
    assert ratios == pytest.approx([math.log(1.1), math.log(1.1)])


def test_the_spread_of_blocks_is_what_neither_round_nor_configuration_explains() -> None:
    exact = [[c + r for r in (0.0, 0.3, -0.1)] for c in (0.0, 1.0, 5.0)]
    assert block_spread(exact) == (pytest.approx(0.0, abs=1e-12), 4)
    rng = np.random.default_rng(1)
    found = [block_spread(rng.normal(0, 0.02, (5, 2)) + rng.normal(0, 1, (1, 2)))[0] for _ in range(400)]
    assert math.sqrt(sum(x * x for x in found) / len(found)) == pytest.approx(0.02, rel=0.1)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    """Between processes there is more noise than within: an interval over samples alone would be far too
    narrow."""
    truth, hits, trials = math.log(1.05), 0, 200
    for seed in range(trials):
        rng = np.random.default_rng(seed)
        groups = [list(truth + rng.normal(0, 0.01) + rng.normal(0, 0.003, 3)) for _ in range(6)]
        found = estimate(groups, seed, resamples=200)
        hits += found.low <= 1.05 <= found.high
        assert found.low <= found.ratio <= found.high
    assert hits / trials >= 0.95


def test_an_outlier_does_not_move_the_ratio() -> None:
    found = estimate([[0.05, 0.05, 0.05], [0.05, -0.4, 0.05], [0.05, 0.05, 0.05]], "outlier")
    assert found.ratio == pytest.approx(math.exp(0.05))
    assert found.n == 9


def test_groups_of_different_size_and_a_single_one() -> None:
    assert estimate([[0.1], [0.1, 0.1, 0.1], []], "x").ratio == pytest.approx(math.exp(0.1))
    assert estimate([[0.1, 0.1]], "y").low == pytest.approx(math.exp(0.1))
    with pytest.raises(ValueError, match="at least one"):
        estimate([[], []], "z")


def test_noise_tells_within_from_between_and_takes_drift_out() -> None:
    rng = np.random.default_rng(3)
    measurements, step = [], 0
    for _ in range(40):
        process = rng.normal(0, 0.02)
        inner = []
        for _ in range(3):
            level = process + rng.normal(0, 0.004) - 0.0005 * step
            inner.append({p: 100 * math.exp(level + 0.1 * p) for p in range(3)})
            step += 1
        measurements.append(inner)
    noise = noise_of(measurements)
    assert noise.within == pytest.approx(0.004, rel=0.3)
    assert noise.between == pytest.approx(0.02, rel=0.35)
    assert noise.drift == pytest.approx(-0.06, abs=0.02)
    assert noise.processes == 40


@pytest.mark.parametrize(("processes", "measurements"), [(2, 2), (3, 2), (3, 3), (4, 2), (6, 2)])
def test_few_processes_tell_their_spread_all_the_same(processes: int, measurements: int) -> None:
    """As few as a tune runs: the drift that is taken out must not take what processes differ by."""
    rng = np.random.default_rng(7)
    found = []
    for _ in range(600):
        levels = rng.normal(0, 0.01, (processes, 1)) + rng.normal(0, 0.003, (processes, measurements))
        found.append(noise_of([[{0: math.exp(x)} for x in process] for process in levels]).between)
    assert math.sqrt(sum(x * x for x in found) / len(found)) == pytest.approx(0.01, rel=0.1)


def test_the_margin_is_twice_the_half_width_of_sure_noise_and_never_below_one_percent() -> None:
    assert Noise(1e-4, 1e-4, 0.0, 6, 3).margin(4) == 0.01
    sure = Noise(0.004, 0.01, 0.0, 20_000, 10_000)
    assert sure.margin(4) == pytest.approx(2 * sure.half_width(4), rel=1e-3)
    assert sure.margin(16) < sure.margin(4)


@pytest.mark.parametrize(("processes", "measurements"), [(2, 2), (3, 2), (4, 2), (6, 2)])
@pytest.mark.parametrize("between", [0.01, 0.003])
def test_the_half_width_holds_where_few_processes_tell_the_noise(
    processes: int, measurements: int, between: float
) -> None:
    """Of a ratio whose two sides ran in processes of their own."""
    rng = np.random.default_rng(11)
    runs, held, normal = 1500, 0, 0
    for _ in range(runs):
        levels = rng.normal(0, between, (processes, 1)) + rng.normal(0, 0.003, (processes, measurements))
        noise = noise_of([[{0: math.exp(x)} for x in process] for process in levels])
        error = abs(rng.normal(0, math.sqrt(2 * between**2 + 0.003**2)))
        held += error <= noise.half_width(1)
        normal += error <= 1.96 * noise.standard_error(1)
    assert held >= 0.9 * runs
    assert normal < held


def test_students_quantile() -> None:
    assert t975(0) == math.inf
    assert t975(2) == pytest.approx(4.30)
    assert t975(1000) == pytest.approx(1.96, abs=0.01)
