"""On a noisy machine eight rounds prove nothing; more of them prove large gains, and nothing false."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from conftest_tuner import Simulated
from dyno_tuner.core.protocol import TrialStatus
from dyno_tuner.decide.unproven import best_trial
from dyno_tuner.measure.paired_rounds import WIDEST_MARGIN, Bar
from dyno_tuner.run.context import NOISY
from dyno_tuner.search.observation import Trial
from dyno_tuner.targets.simulated.target import SimulationNoise

if TYPE_CHECKING:
    from dyno_tuner.run.context import RunContext

NOISE = SimulationNoise(within=0.15, process=0.05)
SEEDS = (1, 2, 4, 5)  # with eight rounds at most, seed 2 alone wrote an entry


@pytest.fixture(scope="module")
def context() -> RunContext:
    return Simulated("interaction", 0, max_trials=4).tune.context


@pytest.mark.parametrize(
    ("of_one_round", "rounds"),
    [
        (0.01, 4),  # the least
        (0.036, 6),
        (0.28, 8),  # below WIDEST_MARGIN after eight rounds: no more of them
        (0.35, 13),  # 0.35 / sqrt(13) is the first below it
        (0.48, 24),
        (0.50, 8),  # no number of rounds that is allowed proves anything: none is wasted
        (math.inf, 8),
    ],
)
def test_rounds_follow_the_noise(
    context: RunContext, monkeypatch: pytest.MonkeyPatch, of_one_round: float, rounds: int
) -> None:
    monkeypatch.setattr(context, "bar", lambda n: Bar({"pp": of_one_round / math.sqrt(n), "tg": 0.01}))
    assert context.options.max_rounds == 8
    assert context.round_count() == rounds
    assert rounds <= NOISY * context.options.max_rounds


@pytest.mark.parametrize(("of_one_round", "rounds"), [(0.1, 4), (0.35, 13), (0.48, 24), (0.50, None)])
def test_a_budget_is_named_for_as_many_rounds_as_prove_something(
    context: RunContext, monkeypatch: pytest.MonkeyPatch, of_one_round: float, rounds: int | None
) -> None:
    monkeypatch.setattr(context, "bar", lambda n: Bar({"pp": of_one_round / math.sqrt(n), "tg": 0.01}))
    monkeypatch.setattr(type(context.budget), "of_rounds", lambda budget, measurements: 10 * measurements)
    judge = context.judge()
    point = next(p for p in context.space.points() if p != context.space.default)
    monkeypatch.setattr(judge, "moved", lambda point: ["pp"])
    score: Any = SimpleNamespace(log_ratio=lambda metric: 2.0)
    trial = Trial(1, point, TrialStatus.OK, 2.0, score)
    (promise,) = best_trial(judge, [trial], now=100.0, short=True)
    if rounds is None:  # no budget has room for that
        assert "needed" not in promise
    else:
        proof = 10 * judge.ablation_measurements(point, rounds)
        assert promise["needed"] == 30 * math.ceil((100 + proof) / 30)


def test_a_large_gain_is_proven_on_a_noisy_machine() -> None:
    tunes = [Simulated("interaction", seed, NOISE, max_trials=60) for seed in SEEDS]
    assert all(not t.truly_slower_entries() for t in tunes)
    written = [t for t in tunes if t.outcome.entries]
    assert len(written) >= 3
    for tune in written:
        assert min(tune.outcome.margin.values()) <= WIDEST_MARGIN
        assert tune.truth(tune.outcome.settings) > tune.truth({k.name: k.default for k in tune.space.knobs})


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_proven_where_nothing_gains(seed: int) -> None:
    assert not Simulated("null", seed, NOISE, max_trials=30).outcome.entries
