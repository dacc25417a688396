"""What of the noise between processes cancels in a round."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
from dyno_tuner.core.intervals import noise_of, t975
from dyno_tuner.core.protocol import Workload
from dyno_tuner.execution.inline_executor import InlineExecutor
from dyno_tuner.measure.comparison import Comparison
from dyno_tuner.measure.round_spread import ENOUGH, RoundSpread
from dyno_tuner.record.recorder import Recorder
from dyno_tuner.run.tune import Options, Tune
from dyno_tuner.targets.simulated.surfaces import SURFACES
from dyno_tuner.targets.simulated.target import SimulatedTarget, SimulationNoise

if TYPE_CHECKING:
    from dyno_tuner.core.outcome import Outcome


def _comparison(levels: list[list[float]], metric: str = "pp") -> Comparison:
    """Of a base and others, by their log level in each round, two pairs each."""
    base, *others = levels
    made = Comparison(["base", *(f"c{i}" for i in range(len(others)))], rounds=len(base))
    for i, own in enumerate(others):
        made.logs[f"c{i}"] = {metric: [[x - b, x - b] for x, b in zip(own, base, strict=True)]}
    return made


@pytest.mark.parametrize(("configurations", "rounds"), [(2, 2), (2, 8), (4, 4), (5, 3)])
def test_it_is_what_is_left_beside_round_and_configuration(configurations: int, rounds: int) -> None:
    """Against a least-squares fit of one effect per round and one per configuration, in float64."""
    rng = np.random.default_rng(configurations * 10 + rounds)
    levels = rng.normal(size=(configurations, rounds))
    rows, columns = np.indices(levels.shape)
    design = np.hstack([np.eye(configurations)[rows.ravel()], np.eye(rounds)[columns.ravel()]])
    fit, _, rank, _ = np.linalg.lstsq(design, levels.ravel(), rcond=None)
    left = levels.ravel() - design @ fit
    freedom = levels.size - rank
    spread = RoundSpread([_comparison(levels.tolist())])
    sigma, found = spread.of_level("pp")
    assert found == freedom == (configurations - 1) * (rounds - 1)
    assert sigma == pytest.approx(math.sqrt(float(left @ left) / freedom))
    margin = 2 * t975(freedom) * sigma * math.sqrt(2 / 4)
    assert spread.margin("pp", 4, math.inf) == pytest.approx(margin)
    # Until there are enough of them, A/A may say that it is less.
    assert spread.margin("pp", 4, margin / 3) == pytest.approx(margin if freedom >= ENOUGH else margin / 3)


@pytest.mark.parametrize("beside", [(-3.0, 0.0, 0.5), (-0.25, -4.0, 0.25, 9.0), (8.0, 0.0, 0.0)])
def test_the_level_of_a_round_is_the_median_of_its_pairs(beside: tuple[float, ...]) -> None:
    levels = np.random.default_rng(3).integers(-64, 64, (3, 6)) / 64.0  # sums of them are exact
    alone, several = _comparison(levels.tolist()), _comparison(levels.tolist())
    rounds = several.logs["c1"]["pp"]
    rounds[2] = [rounds[2][0] + b for b in beside]
    assert RoundSpread([several]).of_level("pp") == RoundSpread([alone]).of_level("pp")


def test_comparisons_add_up_and_one_that_goes_on_counts_once() -> None:
    rng = np.random.default_rng(7)
    first, second = (_comparison(rng.normal(size=(3, 4)).tolist()) for _ in range(2))
    spread = RoundSpread()
    for comparison in (first, second, first):
        spread.add(comparison)
    sigmas = [RoundSpread([c]).of_level("pp") for c in (first, second)]
    assert [f for _, f in sigmas] == [6, 6]
    assert spread.of_level("pp") == (pytest.approx(math.sqrt(sum(s * s for s, _ in sigmas) / 2)), 12)


def test_of_a_single_round_or_of_none_nothing_is_known() -> None:
    for spread in (RoundSpread(), RoundSpread([_comparison([[0.0], [0.1]])]), RoundSpread([Comparison([])])):
        assert spread.of_level("pp") == (math.inf, 0)
        assert spread.margin("pp", 4, 0.02) == 0.02


def test_what_is_not_whole_is_left_out() -> None:
    """A comparison in which an interrupt has come between two of its configurations."""
    whole = _comparison([[0.0, 0.0], [0.02, 0.01], [0.03, 0.05]])
    torn = _comparison([[0.0, 0.0], [0.02, 0.01], [0.03, 0.05]])
    torn.logs["late"] = {"pp": [[0.1]]}
    torn.logs["none"] = {}
    assert RoundSpread([torn]).of_level("pp") == RoundSpread([whole]).of_level("pp")


def test_one_disturbed_round_does_not_make_every_gain_too_small() -> None:
    levels = np.random.default_rng(3).normal(scale=0.004, size=(5, 4))
    plain = RoundSpread([_comparison(levels.tolist())] * 3).of_level("pp")[0]
    levels[2, 1] -= 0.2
    shaken = _comparison(levels.tolist())
    calm = [_comparison(np.random.default_rng(s).normal(scale=0.004, size=(5, 4)).tolist()) for s in range(3)]
    assert RoundSpread([shaken]).of_level("pp")[0] > 0.02  # as much as all it has says
    assert RoundSpread([shaken, *calm]).of_level("pp")[0] < 2 * plain


def _tuned(noise: SimulationNoise, seed: int) -> tuple[Tune, Outcome]:
    surface = SURFACES["saturating"]()
    recorder = Recorder(
        InlineExecutor(SimulatedTarget(surface, seed, noise)), Workload(64, 8),
        identity=surface.space().identity, virtual_time=True,
    )  # fmt: skip
    tune = Tune(recorder, surface.space(), Options(Workload(64, 8), seed=seed, max_trials=28))
    return tune, tune.run()


@pytest.mark.parametrize("seed", range(3))
def test_what_a_process_does_to_all_alike_asks_for_no_more_rounds(seed: int) -> None:
    """Processes that differ by 2 %: A/A alone would have eight rounds, and entries gain more than 4 %."""
    common = SimulationNoise(within=0.003, process=0.02, layout=0.001)
    tune, outcome = _tuned(common, seed)
    assert all(n.margin(8) > 0.02 for n in tune.context.noise.values())
    assert max(outcome.margin.values()) < 0.012
    assert tune.context.round_count() == 4
    truth = SURFACES["saturating"]().truth
    best = max(truth(tune.space.settings(p)) for p in tune.space.points())
    assert best - truth(outcome.settings) < 0.01


@pytest.mark.parametrize("seed", range(3))
def test_what_differs_in_a_process_from_one_configuration_to_the_next_still_counts(seed: int) -> None:
    tune, outcome = _tuned(SimulationNoise(within=0.003, process=0.0, layout=0.02), seed)
    assert max(outcome.margin.values()) > 0.02
    assert tune.context.round_count() == 8
    assert max(c.rounds for c in tune.context.spread.comparisons) >= 8


def test_a_lucky_a_a_does_not_outweigh_what_rounds_show() -> None:
    """Configurations that differ by 2 % from one process to the next, where the default by chance did not."""
    noise = SimulationNoise(within=0.003, process=0.0, layout=0.02)
    for seed in range(24):
        tune, outcome = _tuned(noise, seed)
        (metric, lucky) = min(((m, n.margin(8)) for m, n in tune.context.noise.items()), key=lambda x: x[1])
        if lucky < 0.015:
            assert tune.context.spread.of_level(metric)[1] >= ENOUGH
            assert outcome.margin[metric] > 0.02
            return
    raise AssertionError("no seed of these has a lucky A/A")


def test_without_a_comparison_the_margin_is_that_of_a_a() -> None:
    surface = SURFACES["null"]()
    target = SimulatedTarget(surface, 1, SimulationNoise())
    recorder = Recorder(InlineExecutor(target), Workload(64, 8), virtual_time=True)
    tune = Tune(recorder, surface.space(), Options(Workload(64, 8)))
    tune.context.noise = {"pp": noise_of([[{0: 100.0}, {0: 101.0}], [{0: 103.0}, {0: 102.0}]])}
    assert tune.context.bar(4).margin == {"pp": tune.context.noise["pp"].margin(4)}
