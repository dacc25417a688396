"""On a noisy machine eight rounds prove nothing; more of them prove large gains, and nothing false."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from conftest_tuner import Simulated
from dyno_tuner.core.protocol import TrialStatus, Workload
from dyno_tuner.decide.finalists import beyond_doubt
from dyno_tuner.decide.unproven import best_trial
from dyno_tuner.measure.paired_rounds import WIDEST_MARGIN, Bar
from dyno_tuner.output.verdict import verdict
from dyno_tuner.run.context import NOISY
from dyno_tuner.search.observation import Trial
from dyno_tuner.space.knobs import Fidelity, Kind, Knob
from dyno_tuner.targets.simulated.surfaces import Surface
from dyno_tuner.targets.simulated.target import SimulationNoise

if TYPE_CHECKING:
    from dyno_tuner.core.protocol import Settings
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


# ---- budgets on a noisy machine


WIDE = SimulationNoise(within=0.1, process=0.02, layout=0.04, outliers=0.02)  # four rounds: about 20 %


def slow_defaults(gain: float) -> Surface:
    """Three settings of which each makes what it moves faster by `gain`."""
    pp, tg = frozenset({"pp"}), frozenset({"tg"})
    knobs = (
        Knob("ubatch", (32, 64, 128, 256), 32, moves=pp, fidelity=Fidelity.ROUNDING),
        Knob("threads", (1, 2), 1, Kind.LOAD, tg),
        Knob("threads_batch", (1, 2), 1, Kind.LOAD, pp),
    )

    def rates(s: Settings) -> dict[str, float]:
        prompts = gain ** (math.log2(int(s["ubatch"])) / 3 - 5 / 3)
        prompts *= gain if s["threads_batch"] == 2 else 1.0
        return {"pp": 400 * prompts, "tg": 60 * (gain if s["threads"] == 2 else 1.0)}

    return Surface("slow defaults", knobs, rates)


def _noisy(seed: int, budget: float, gain: float = 2.0) -> Simulated:
    workload = Workload(pp=80, tg=12)  # 0.2 s each, with the defaults
    return Simulated(
        slow_defaults(gain), seed, WIDE, workload=workload, budget=budget, check=False, max_trials=400
    )  # fmt: skip


def test_a_budget_narrows_the_margin_of_a_point_far_ahead() -> None:
    """A search that took its share of the time in any case left too little for the rounds of a proof: of 12
    tunes of a gain of 2 three wrote it."""
    tunes = [_noisy(seed, budget) for seed in range(4) for budget in (90.0, 120.0, 300.0)]
    written = [t for t in tunes if t.outcome.entries]
    assert len(written) >= 6
    assert not [t for t in tunes if t.truly_slower_entries()]
    assert all(t.outcome.seconds <= t.options.budget for t in tunes if t.options.budget)
    assert not _noisy(0, 300.0, gain=1.0).outcome.entries


def test_the_search_ends_while_there_is_time_for_the_rounds_of_a_proof() -> None:
    ended_early = 0
    for seed, budget in ((2, 250.0), (6, 190.0), (9, 220.0), (10, 250.0)):
        tune = _noisy(seed, budget)
        (screened,) = [data for kind, data in tune.notes if kind == "screened"]
        if screened["ended"] != "budget":  # it had seen the whole space before
            continue
        ended_early += 1
        begun = next(float(data["t"]) for kind, data in tune.notes if data.get("name") == "finalists")
        assert begun < 0.4 * budget, "the share of the search"
        looks = [data for kind, data in tune.notes if kind == "without"]
        assert looks[-1]["rounds"] > tune.options.max_rounds
    assert ended_early >= 2


def test_a_tune_that_ends_with_a_wide_margin_says_so() -> None:
    tune = _noisy(0, 60.0)
    assert not tune.outcome.entries
    (promise,) = tune.outcome.promises
    assert promise["margin"] > WIDEST_MARGIN
    assert "the noise margin at the end was" in verdict(tune.outcome)


def test_a_trial_is_beyond_doubt_only_without_its_noise() -> None:
    def trial(log_ratio: float, pp: float) -> Trial:
        score: Any = SimpleNamespace(log_ratio=lambda metric: pp if metric == "pp" else 0.0)
        return Trial(1, (0,), TrialStatus.OK, log_ratio, score)

    least = math.log1p(WIDEST_MARGIN)
    assert beyond_doubt([trial(0.1, least + 0.21)], ["pp", "tg"], 0.1) is not None
    assert beyond_doubt([trial(0.1, least + 0.19)], ["pp", "tg"], 0.1) is None
    assert beyond_doubt([trial(-0.1, least + 0.21)], ["pp", "tg"], 0.1) is None, "slower on the whole"
    best = beyond_doubt([trial(0.3, 0.6), trial(0.4, 0.5)], ["pp"], 0.0)
    assert best is not None
    assert best.log_ratio == 0.4
