"""The method against known truth, in CI size: what `benchmarks/` publishes with three hundred seeds, here
with ten for null, harm, repeatability, regret, interactions and drift."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
from conftest_tuner import Simulated
from dyno_tuner.core.intervals import keyed_rng
from dyno_tuner.search.observation import Observation
from dyno_tuner.search.proposers import proposer_of
from dyno_tuner.space.knobs import Fidelity, Knob
from dyno_tuner.targets.simulated.hard_surfaces import either
from dyno_tuner.targets.simulated.surfaces import REGRET_SURFACES, SURFACES, Surface
from dyno_tuner.targets.simulated.target import SimulationNoise

if TYPE_CHECKING:
    from collections.abc import Callable

    from dyno_tuner.core.protocol import Settings

SEEDS = range(10)
TWO_PERCENT = -math.log(0.98)


def test_null_nothing_is_changed_where_nothing_differs() -> None:
    changed = [seed for seed in SEEDS if Simulated("null", seed).outcome.entries]
    assert len(changed) <= 1, changed


def test_a_noisier_null_changes_nothing_either() -> None:
    noise = SimulationNoise(within=0.03, process=0.03, layout=0.01, outliers=0.05)
    changed = [seed for seed in SEEDS if Simulated("null", seed, noise).outcome.entries]
    assert len(changed) <= 1, changed


def test_harm_and_repeatability() -> None:
    """No entry truly slower than its default, and two tunes of one engine agree entry by entry."""
    agree = total = 0
    for seed in SEEDS:
        pair = [Simulated("saturating", s) for s in (2 * seed, 2 * seed + 1)]
        for run in pair:
            assert run.truly_slower_entries() == [], seed
            assert run.outcome.entries
        margin = max(max(run.outcome.margin.values()) for run in pair)
        a, b = pair
        for name in a.outcome.searched:
            swapped = {**a.outcome.settings, name: b.outcome.settings[name]}
            total += 1
            agree += abs(a.truth(swapped) - a.truth(a.outcome.settings)) <= margin
    assert agree >= 0.95 * total


@pytest.mark.parametrize("name", REGRET_SURFACES)
def test_regret_of_the_search(name: str) -> None:
    """Within 2 % of the optimum after max(15, 10 %) evaluations."""
    surface = SURFACES[name]()
    space = surface.space()
    default = surface.truth(space.settings(space.default))
    truths = {p: surface.truth(space.settings(p)) - default for p in space.points()}
    optimum = max(truths.values())
    good = 0
    for seed in SEEDS:
        proposer = proposer_of("guided", space)
        history = [Observation(space.default, 0.0, 0.006)]
        while len(history) < max(15, len(space) // 10):
            point = proposer.propose(history, (seed, len(history)))
            if point is None:
                break
            truth = truths[point]
            seen = truth + 0.006 * float(keyed_rng("n", seed, len(history)).standard_normal())
            history.append(Observation(point, None if truth == -math.inf else seen, 0.006))
        best = max((o for o in history if o.score is not None), key=lambda o: o.score or 0.0)
        good += optimum - truths[best.point] <= TWO_PERCENT
    assert good >= 9


def test_interaction_both_settings_are_found() -> None:
    """A larger u-batch alone loses and its threshold alone does nothing: one by one, neither would be
    taken."""
    found = 0
    for seed in SEEDS:
        run = Simulated("interaction", seed)
        names = {e.name for e in run.outcome.entries}
        assert ("ubatch" in names) == ("threshold" in names)
        found += {"ubatch", "threshold"} <= names
        groups = {e.group for e in run.outcome.entries if e.name in ("ubatch", "threshold")}
        assert len(groups) <= 1
    assert found >= 9


def test_drift_leaves_the_winner() -> None:
    for seed in SEEDS:
        still = Simulated("saturating", seed)
        creeping = Simulated("saturating", seed, SimulationNoise(drift=0.1, drift_seconds=200.0))
        assert abs(creeping.truth(creeping.outcome.settings) - still.truth(still.outcome.settings)) < 0.02
        assert creeping.regret <= TWO_PERCENT


def test_throttling_is_dropped_and_counted() -> None:
    noise = SimulationNoise(throttle=0.2, throttle_period=20.0, throttle_seconds=3.0)
    run = Simulated("saturating", 1, noise)
    assert run.outcome.voided > 0
    assert run.truly_slower_entries() == []


@pytest.mark.parametrize("budget", [30.0, 90.0, 200.0])
def test_the_budget_holds(budget: float) -> None:
    run = Simulated("saturating", 2, budget=budget, max_trials=400)
    assert run.outcome.seconds <= 1.1 * budget
    assert run.truly_slower_entries() == []


@pytest.fixture
def stop_before(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Ctrl-C after so many operations from now on."""
    import dyno_tuner.record.recorder as module

    real = module.Recorder._do
    state = {"left": 0}

    def counted(self: object, *args: object) -> object:
        state["left"] -= 1
        if state["left"] < 0:
            raise KeyboardInterrupt
        return real(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(module.Recorder, "_do", counted)
    return lambda left: state.update(left=left)


def test_an_interrupt_at_any_moment_leaves_a_valid_answer(stop_before: Callable[[int], None]) -> None:
    """Ctrl-C after every so many operations. What no rounds have proven by then stays the default."""
    written = 0
    for surface, stops in (("saturating", (1, 5, 40, 110, 140, 259)), ("cliff", (8, 40, 70, 130, 173))):
        for stop in stops:
            stop_before(stop)
            run = Simulated(surface, 3)
            assert run.outcome.status == "interrupted", stop
            assert run.truly_slower_entries() == []
            assert set(run.outcome.settings) == {k.name for k in run.space.knobs}
            assert not run.outcome.entries or len(run.outcome.stage) > 0, stop
            written += len(run.outcome.entries)
    assert written


def test_faults_cost_their_trial_and_wrong_answers_never_win() -> None:
    for seed in range(3):
        run = Simulated("faulty", seed, max_trials=36)
        statuses = {str(f.status) for f in run.outcome.failures}
        assert "incorrect" in statuses
        assert run.outcome.settings["cpu_isa"] == "auto"
        assert run.surface.fault(run.outcome.settings) is None
        assert run.regret < 0.05


def test_implausible_rates_never_win() -> None:
    run = Simulated("null", 0, SimulationNoise(impossible=0.02), max_trials=30)
    assert run.outcome.entries == []


def test_a_budget_too_short_for_anything_says_so_and_changes_nothing() -> None:
    run = Simulated("saturating", 1, budget=4.0)
    assert run.outcome.status == "budget"
    assert run.outcome.entries == []
    assert run.outcome.searched == []
    assert run.outcome.seconds <= 4.4


SLOWING = SimulationNoise(drift=0.5, drift_seconds=6.0)


@pytest.mark.parametrize("noise", [SimulationNoise(), SLOWING], ids=["steady", "slowing"])
def test_the_noise_takes_a_third_of_the_budget_at_most(noise: SimulationNoise) -> None:
    """Of any budget, also on a machine that gets slower meanwhile. The rest of it is used where something can
    be found. A budget for which that is too little is refused in seconds."""
    shares = {}
    for budget in (4.0, 8.0, 10.0, 12.0, 14.0, 16.0, 20.0, 30.0, 60.0, 90.0):
        run = Simulated("saturating", 1, noise, budget=budget)
        stages = [(d["name"], d["t"]) for kind, d in run.notes if kind == "stage"]
        end = stages[1][1] if len(stages) > 1 else run.outcome.seconds
        shares[budget] = end / budget
        if budget >= 30.0 and noise is not SLOWING:
            assert run.outcome.seconds >= 0.85 * budget, budget
    assert max(shares.values()) <= 0.36, shares


def test_a_budget_that_is_refused_is_told_one_that_is_not() -> None:
    (needed,) = (d["needed"] for k, d in Simulated("saturating", 1, budget=10.0).notes if k == "too_short")
    assert not [k for k, _ in Simulated("saturating", 1, budget=float(needed)).notes if k == "too_short"]


def _answers_for_nothing(s: Settings) -> dict[str, float]:
    return {"pp": 400.0 * (2.0 if s["ubatch"] == 2048 else 1.0), "tg": 30.0}


@pytest.mark.parametrize("budget", [None, 40.0, 90.0])
def test_noise_never_chooses_what_changes_answers(budget: float | None) -> None:
    """A cache type that gains nothing, beside a setting that doubles prefill: it must not ride along, also
    not where no time is left to prove entries one by one."""
    cache = ("f16", "q8_0", "q4_0")
    knobs = (
        Knob("ubatch", (512, 1024, 2048), 512, moves=frozenset({"pp"}), fidelity=Fidelity.ROUNDING),
        Knob("kv_type_k", cache, "f16", moves=frozenset({"tg"}), fidelity=Fidelity.APPROX, ordinal=False),
        Knob("kv_type_v", cache, "f16", moves=frozenset({"tg"}), fidelity=Fidelity.APPROX, ordinal=False),
    )
    noise = SimulationNoise(within=0.02, process=0.02, layout=0.01, outliers=0.05)
    found = 0
    for seed in range(6):
        surface = Surface("for nothing", knobs, _answers_for_nothing)
        run = Simulated(surface, seed, noise, budget=budget, approx_limit=0.1, max_trials=27)
        assert run.outcome.settings["kv_type_k"] == "f16", seed
        assert run.outcome.settings["kv_type_v"] == "f16", seed
        found += run.outcome.settings["ubatch"] == 2048
    assert found >= (3 if budget else 6)


@pytest.mark.parametrize(("seed", "budget"), [(135, 70.7), (183, 73.5), (239, 140.7), (67, 72.1)])
def test_no_time_for_proof_is_no_reason_to_write(seed: int, budget: float) -> None:
    """Three entries that gain as a whole, one of which costs most of it, and no time to leave each out."""
    run = Simulated("cliff", seed, budget=budget, max_trials=400)
    assert run.truly_slower_entries() == []
    assert run.outcome.seconds <= 1.1 * budget


def test_short_budgets_still_find_something() -> None:
    runs = [Simulated("saturating", seed, budget=100.0, max_trials=400) for seed in range(4)]
    assert sum(bool(run.outcome.entries) for run in runs) >= 3
    assert not any(run.truly_slower_entries() for run in runs)


@pytest.mark.parametrize("budget", [None, 300.0])
def test_of_two_settings_that_do_as_well_every_tune_takes_the_same(budget: float | None) -> None:
    """Each gains 12 % alone and together they lose: what a search meets first is chance."""
    taken = [Simulated(either(), seed, budget=budget).outcome.entries for seed in (0, 1, 2)]
    assert [[(e.name, e.value) for e in entries] for entries in taken] == [[("streams", 4)]] * 3


def test_throttling_hides_no_entry() -> None:
    """An eighth of the time, in turns as long as two measurements."""
    noise = SimulationNoise(throttle=0.2, throttle_period=40.0, throttle_seconds=5.0)
    for seed in (4, 11, 27):
        run = Simulated("saturating", seed, noise)
        assert {e.name for e in run.outcome.entries} == {"ubatch", "threads", "threads_batch"}, seed
        assert run.truly_slower_entries() == []


def test_the_budget_holds_where_what_is_left_out_is_slow() -> None:
    """Without its layers on the GPU the profile is a quarter as fast: a round of that takes far longer than
    as many measurements of the default."""
    run = Simulated("cliff", 95, budget=175.9, max_trials=400)
    assert run.outcome.seconds <= 1.1 * 175.9
    assert run.truly_slower_entries() == []


@pytest.mark.parametrize("seed", [83, 4])
def test_what_only_an_interval_speaks_against_is_looked_at_again(seed: int) -> None:
    """One disturbed round in four: without `block`, `order` would harm, and nothing would be left."""
    run = Simulated("wide", seed, max_trials=60)
    assert {"ubatch", "block", "order"} <= {e.name for e in run.outcome.entries}
    assert run.regret <= TWO_PERCENT
