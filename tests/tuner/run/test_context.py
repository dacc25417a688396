"""The context that the stages of a run share, and the policy for a shortage of budget."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from conftest_tuner import WORKLOAD, Simulated
from dyno_tuner.core.options import MeasurementPolicy, Options
from dyno_tuner.core.protocol import TrialStatus, Workload
from dyno_tuner.decide.acceptance import Judge
from dyno_tuner.decide.end_to_end import EndToEnd
from dyno_tuner.kernels.stage import KernelStage
from dyno_tuner.record.context import Processes
from dyno_tuner.run.noise import NoiseStage
from dyno_tuner.run.shortage import ENOUGH, PATIENCE, ROUNDS, Shortage
from dyno_tuner.search.crossover_stage import ThresholdStage
from dyno_tuner.search.observation import Trial


@pytest.mark.parametrize("stage", [NoiseStage, ThresholdStage, KernelStage, EndToEnd, Judge])
def test_stages_take_the_context_and_hardly_anything_else(stage: Any) -> None:
    """`KernelStage` once took fifteen arguments, of which nine were callbacks."""
    given = [p for p in inspect.signature(stage).parameters.values() if p.default is p.empty]
    assert given[0].name == "context"
    assert len(given) <= 2


def test_a_dead_process_is_followed_by_the_next() -> None:
    processes = Processes()
    assert [processes.next(), processes.next()] == [1, 2]
    processes.follow(TrialStatus.INCORRECT)
    assert processes.number == 2
    processes.follow(TrialStatus.CRASH)
    assert processes.number == 3
    processes.follow(TrialStatus.TIMEOUT, 7)
    assert processes.number == 8, "an operation may have begun a later one"


def test_stages_see_the_space_that_is_left() -> None:
    run = Simulated("crossover", 1, max_trials=12)
    assert run.tune.space is run.tune.context.space
    assert len(run.tune.space) < len(run.space), "solved thresholds have fewer values"
    assert Judge(run.tune.context).space is run.tune.space


def test_the_margin_of_the_run_has_the_weights_of_its_mix() -> None:
    mix = Workload.parse("pp=64:9,tg=8")
    context = Simulated("saturating", 1, max_trials=2, workload=mix, weights={}).tune.context
    bar = context.bar(2)
    assert bar.weights == context.weights
    assert len(set(bar.weights.values())) == 2


class Budget(SimpleNamespace):
    """Room for so many measurements by stage."""

    def more_at(self, now: float, measurements: int, stage: str = "") -> bool:
        return measurements <= self.room.get(stage, 0)


def shortage(budget: float | None, few: bool = False, **known: Any) -> Shortage:
    options = Options(WORKLOAD, budget=budget, rounds=4, policy=MeasurementPolicy(prompts=3))
    made = Shortage(options, Budget(**known))  # type: ignore[arg-type]
    made.few = few
    return made


@pytest.mark.parametrize(
    ("seconds", "prompts"), [(1.0, 1), (1.9, 1), (2.1, 2), (2.7, 2), (2.9, 3), (90.0, 3)]
)
def test_samples_of_a_measurement_go_before_measurements_do(seconds: float, prompts: int) -> None:
    assert shortage(30 * seconds).prompts(0.7) == prompts


def test_a_run_without_a_budget_gives_nothing_up() -> None:
    free = shortage(None, measurement_cost=2.0, measurements_left=5)
    policy = MeasurementPolicy()
    assert free.brief(policy) == policy
    assert free.fewer_samples(3, {}, lambda prompts: {}) is None
    assert (free.least_rounds, free.glimpses) == (4, False)


def test_a_short_budget_asks_for_two_rounds_and_looks_at_kernels_first() -> None:
    short = shortage(60.0, few=True, measurement_cost=2.0, kernels_have_time=False)
    assert short.least_rounds == ROUNDS
    assert short.glimpses
    assert short.brief(MeasurementPolicy()).longest == 5.0
    assert not shortage(60.0, few=True, kernels_have_time=True).glimpses


def trial(number: int, log_ratio: float) -> Trial:
    return Trial(number, (number,), TrialStatus.OK, log_ratio)


def test_the_search_goes_on_until_the_proof_has_to_begin() -> None:
    found, proof = trial(3, 0.1), (lambda best: 20)
    short = shortage(60.0, few=True, room={"leave_one_out": 24})
    assert short.goes_on(0.0, 4, [found], [found], proof)
    assert not short.goes_on(0.0, 5, [found], [found], proof)
    stale = [found, *(trial(4 + n, 0.0) for n in range(PATIENCE))]
    assert not short.goes_on(0.0, 4, [found], stale, proof), "it has found nothing better for a while"
    roomy = shortage(600.0, room={"leave_one_out": 24})
    assert not roomy.goes_on(0.0, 4, [found], [found], proof), "the finals have a share of their own"


def test_a_search_ends_before_it_takes_the_time_of_a_long_proof() -> None:
    noisy = shortage(600.0, room={"kernels": 100})
    assert not noisy.ends_search(0.0, 4, [96.0, 40.0]), "the whole proof still fits behind the trial"
    assert noisy.ends_search(0.0, 4, [97.0, 40.0])
    assert not noisy.ends_search(0.0, 4, [120.0, 40.0]), "a smaller proof fits"
    assert noisy.ends_search(0.0, 4, [120.0, 98.0])
    assert not noisy.ends_search(0.0, 4, [120.0, 101.0]), "no proof fits: the search goes on"
    assert not noisy.ends_search(0.0, 4, [])


def test_a_search_without_a_find_uses_the_time_of_the_finals() -> None:
    search = shortage(600.0, room={"walk": 8, "leave_one_out": 5 + ENOUGH})
    assert search.goes_on(0.0, 8, [], [], lambda best: 0)
    assert not search.goes_on(0.0, 9, [], [], lambda best: 0)
