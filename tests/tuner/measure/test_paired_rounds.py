from __future__ import annotations

import dataclasses
import datetime
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from conftest_tuner import Simulated
from dyno_tuner.core.options import MeasurementPolicy
from dyno_tuner.core.protocol import Configuration, Measurement, OpContext, Sample, TrialStatus, Workload
from dyno_tuner.measure.comparison import Comparison
from dyno_tuner.measure.measurement import run_measurement
from dyno_tuner.measure.paired_rounds import OVERTIME, Bar, Rounds, both_ways, measurements_in_round
from dyno_tuner.measure.round_spread import RoundSpread
from dyno_tuner.output.emit import Made, profile_of
from dyno_tuner.space.knobs import Kind, Knob
from dyno_tuner.targets.simulated.surfaces import Surface
from dyno_tuner.targets.simulated.target import SimulatedTarget, SimulationNoise

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dyno_tuner.core.intervals import Estimate
    from dyno_tuner.core.protocol import Settings

A, B, C = (Configuration({"x": n}) for n in range(3))
WEIGHTS = {"pp": 1.0}


class Engine:
    """Rates by configuration and measurement number; counts what it is asked for."""

    def __init__(self, rate, status=lambda configuration: TrialStatus.OK) -> None:
        self.rate = rate
        self.status = status
        self.asked: list[tuple[int, int]] = []  # (configuration, process)
        self.process = 0

    def measurement(
        self, key: str, configuration: Configuration, process: int, baseline: bool, metrics: Sequence[str]
    ) -> Measurement:
        number = len(self.asked)
        self.asked.append((int(configuration.settings["x"]), process))
        status = self.status(configuration)
        if status is not TrialStatus.OK:
            return Measurement(status, message="as told")
        rate = self.rate(int(configuration.settings["x"]), number)
        return Measurement(TrialStatus.OK, tuple(Sample("pp", p, 10, 10 / rate, 10 / rate) for p in range(3)))

    def next_process(self) -> int:
        self.process += 1
        return self.process

    def rounds(self, measurements: int = 10**6, void_over: float = 0.03) -> Rounds:
        """Affordable until so many measurements have been made."""
        return Rounds(self.measurement, self.next_process, Allowance(self, measurements), ["pp"], void_over)


class Allowance:
    """Time that is counted in measurements."""

    def __init__(self, engine: Engine, measurements: int, budget: int | None = None) -> None:
        self._engine, self._measurements = engine, measurements
        self._budget = measurements if budget is None else budget  # of all stages

    @property
    def now(self) -> float:
        return float(len(self._engine.asked))

    def of_rounds(self, measurements: int) -> float:
        return float(measurements)

    def took_round(self, measurements: int, seconds: float) -> None:
        pass

    def more_seconds(self, seconds: float) -> bool:
        return self.now + seconds <= self._measurements

    def in_time(self, seconds: float = 1) -> bool:
        return self.now + seconds <= self._budget


def test_one_failure_of_the_first_configuration_is_forgiven_and_the_second_ends_the_comparison() -> None:
    for deaths, rounds in (([7], 4), ([7, 11], 3), ([0, 1], 0)):
        asked = 0

        def status(configuration: Configuration, deaths: list[int] = deaths) -> TrialStatus:
            nonlocal asked
            asked += configuration == A
            return TrialStatus.CRASH if configuration == A and asked - 1 in deaths else TrialStatus.OK

        spread = RoundSpread()
        engine = Engine(lambda x, n: 100.0 + n % 3, status)
        made = Rounds(
            engine.measurement, engine.next_process, Allowance(engine, 10**6), ["pp"], 0.03, spread=spread
        )  # fmt: skip
        result = made.compare("k", {"a": A, "b": B, "c": C}, 4)
        assert result.rounds == rounds
        assert {len(logs["pp"]) for logs in result.logs.values()} == ({rounds} if rounds else set())
        assert ("a" in result.failed) == (rounds < 4)
        spread.of_level("pp")


def test_rounds_are_asked_for_until_they_are_enough() -> None:
    engine = Engine(lambda x, n: 100.0)
    asked: list[int] = []

    def wanted() -> int:
        asked.append(made.running.rounds)
        return 3 if made.running.rounds < 2 else 5

    made = engine.rounds()
    assert made.compare("k", {"a": A, "b": B}, wanted).rounds == 5
    assert asked == [0, 1, 2, 3, 4, 5]
    assert made.compare("k", {"a": A, "b": B}, lambda: 2, made.running).rounds == 7


def test_the_round_in_which_the_gpu_begins_to_rest_is_made_again() -> None:
    """Prompts that follow a rest are faster, whatever they are read with."""
    for begins in (2, 4, 9):
        told: list[tuple[str, int]] = []
        engine = Engine(lambda x, n: 100.0)
        rounds = Rounds(
            engine.measurement, engine.next_process, Allowance(engine, 10**6), ["pp"], 0.03,
            resting=lambda engine=engine, begins=begins: len(engine.asked) >= begins,
            anew=lambda key, first, told=told: told.append((key, first)),
        )  # fmt: skip
        result = rounds.compare("k", {"a": A, "b": B}, 4)
        lost = 1 + begins // 5  # with the rounds before it
        assert (result.rounds, result.begun, result.voided) == (4, 4 + lost, lost)
        assert told == [("k", lost)], "the rounds before that one are forgotten"
        assert [process for _, process in engine.asked] == [p for p in range(1, 5 + lost) for _ in range(5)]
        assert len(result.logs["b"]["pp"]) == 4


def test_a_round_goes_there_and_back_in_a_process_of_its_own() -> None:
    engine = Engine(lambda x, n: 100.0)
    engine.rounds().compare("k", {"a": A, "b": B, "c": C}, 2)
    assert [x for x, _ in engine.asked] == [0, 1, 2, 0, 2, 1, 0] * 2
    assert [p for _, p in engine.asked] == [1] * 7 + [2] * 7
    assert measurements_in_round(3) == 7


def test_a_linear_drift_cancels() -> None:
    engine = Engine(lambda x, n: 100.0 * (1 + 0.2 * (x == 1)) * math.exp(-0.005 * n))
    result = engine.rounds(void_over=0.1).compare("k", {"a": A, "b": B, "c": C}, 3)
    assert result.ratio("b", ["pp"], WEIGHTS).ratio == pytest.approx(1.2)
    assert result.ratio("c", ["pp"], WEIGHTS).ratio == pytest.approx(1.0)
    assert result.ratio("b", ["pp"], WEIGHTS, over="c").ratio == pytest.approx(1.2)
    assert result.ratio("a", ["pp"], WEIGHTS, over="b").ratio == pytest.approx(1 / 1.2)


def test_a_round_whose_anchor_moved_is_void_and_repeated() -> None:
    engine = Engine(lambda x, n: 50.0 if n == 4 else 100.0)
    result = engine.rounds().compare("k", {"a": A, "b": B}, 2)
    assert (result.voided, result.rounds) == (1, 2)
    assert len(engine.asked) == 15
    assert result.ratio("b", ["pp"], WEIGHTS).ratio == pytest.approx(1.0)


def test_what_is_disturbed_on_one_way_is_visited_again() -> None:
    engine = Engine(lambda x, n: (120.0 if x == 1 else 100.0) * (0.8 if n == 1 else 1.0))
    result = engine.rounds().compare("k", {"a": A, "b": B, "c": C}, 2)
    assert [x for x, _ in engine.asked[:12]] == [0, 1, 2, 0, 2, 1, 0, 0, 1, 0, 1, 0]
    assert {p for _, p in engine.asked[:12]} == {1}
    assert (result.voided, result.rounds) == (1, 2)
    assert result.ratio("b", ["pp"], WEIGHTS).low == pytest.approx(1.2)


def test_what_hides_on_both_sides_of_the_turn_shows_in_the_turn() -> None:
    """Both measurements of the last configuration lie in the window in which everything is slow."""
    engine = Engine(lambda x, n: 80.0 if n in (2, 3, 4) else 100.0)
    result = engine.rounds().compare("k", {"a": A, "b": B, "c": C}, 2)
    assert [x for x, _ in engine.asked[7:12]] == [0, 2, 0, 2, 0]
    for name in ("b", "c"):
        assert result.ratio(name, ["pp"], WEIGHTS).low == pytest.approx(1.0)


def test_what_never_holds_still_is_measured_as_it_is() -> None:
    engine = Engine(lambda x, n: 100.0 * (1.1 if x == 1 and n % 2 else 1.0))
    result = engine.rounds().compare("k", {"a": A, "b": B, "c": C}, 2)
    assert result.rounds == 2
    assert len(engine.asked) <= 2 * (7 + 5 + 5)


def test_rounds_that_keep_being_void_end_with_the_budget() -> None:
    engine = Engine(lambda x, n: 100.0 + 10 * n)
    result = engine.rounds(measurements=13).compare("k", {"a": A, "b": B}, 8)
    assert len(engine.asked) <= 13
    assert result.rounds == 0


def test_nothing_begins_where_two_rounds_do_not_fit() -> None:
    engine = Engine(lambda x, n: 100.0)
    assert engine.rounds(measurements=9).compare("k", {"a": A, "b": B}, 4).rounds == 0
    assert engine.asked == []
    assert engine.rounds(measurements=10).compare("k", {"a": A, "b": B}, 4).rounds == 2
    assert len(engine.asked) == 10


@pytest.mark.parametrize(("budget", "rounds"), [(30, 2), (19, 1), (24, 2)])
def test_a_second_round_is_run_beyond_the_time_of_the_stage(budget: int, rounds: int) -> None:
    """A measurement takes twice as long as was planned: one round decides nothing, so it must not stay
    alone."""
    engine = Engine(lambda x, n: 100.0)

    class Slow(Allowance):
        @property
        def now(self) -> float:
            return 2.0 * len(self._engine.asked)

    made = Rounds(engine.measurement, engine.next_process, Slow(engine, 12, budget), ["pp"], 0.03)
    assert made.compare("k", {"a": A, "b": B}, 4).rounds == rounds


def test_rounds_beyond_the_time_of_the_stage_are_few() -> None:
    engine = Engine(lambda x, n: 100.0 + 10 * n)  # every round is void
    made = Rounds(engine.measurement, engine.next_process, Allowance(engine, 13, 10**6), ["pp"], 0.03)
    assert made.compare("k", {"a": A, "b": B}, 8).rounds == 0
    assert len(engine.asked) <= 13 + 5 * OVERTIME


def test_a_round_that_the_budget_cuts_short_counts_for_nothing() -> None:
    """Slow configurations: what was planned for two rounds does not last for one."""
    engine = Engine(lambda x, n: 100.0)
    rounds = engine.rounds(measurements=5)
    rounds.affordable = lambda measurements: True
    assert rounds.compare("k", {"a": A, "b": B, "c": C}, 4).rounds == 0
    assert len(engine.asked) == 5


def test_two_rounds_tell_the_spread_from_all_that_was_compared() -> None:
    """Their own two values would: Student's t with one degree of freedom is 12.7."""
    noise = [0.3, -0.2, 0.1, 0.4, -0.3, 0.2, 0.0, -0.1]
    engine = Engine(lambda x, n: (100.0 + 10 * x) * (1 + 0.01 * noise[n % 8]))
    result = engine.rounds().compare("k", {"a": A, "b": B, "c": C}, 2)
    two = result.ratio("b", ["pp"], WEIGHTS)
    assert 1.09 < two.low < two.ratio < two.high < 1.11


@pytest.mark.parametrize("rounds", [2, 3, 4, 8])
@pytest.mark.parametrize(("process", "layout"), [(0.03, 0.0), (0.03, 0.01)])
def test_the_interval_holds_what_no_entry_moves(rounds: int, process: float, layout: float) -> None:
    """Two configurations that are equally fast, in processes that differ, also in how either lies in one."""
    held, runs = 0, 300
    for seed in range(runs):
        rng = np.random.default_rng((seed, rounds))
        levels = process * rng.standard_normal((rounds, 1)) + layout * rng.standard_normal((rounds, 2))
        within = 0.003 * rng.standard_normal(5 * rounds)
        engine = Engine(lambda x, n, u=levels, w=within: 100.0 * math.exp(u[n // 5, x] + w[n]))
        result = engine.rounds(void_over=1.0).compare("k", {"a": A, "b": B}, rounds)
        found = result.ratio("b", ["pp"], WEIGHTS)
        held += found.low <= 1 <= found.high
    assert held >= 0.92 * runs  # two and a half standard errors of 300 runs below 95 %


def test_what_is_too_slow_for_every_prompt_is_compared_all_the_same() -> None:
    whole = [{0: 100.0, 1: 110.0, 2: 120.0}] * 2
    assert both_ways([{0: 50.0}, {0: 50.0, 1: 55.0}], whole) == [pytest.approx(math.log(0.5))]
    assert both_ways([{1: 55.0}, {2: 60.0}], whole) == [pytest.approx(math.log(57.4456 / 110.0), abs=1e-4)]


def test_what_fails_is_left_out_and_the_rest_goes_on() -> None:
    def fails(configuration: Configuration) -> TrialStatus:
        return TrialStatus.CRASH if configuration.settings["x"] == 1 else TrialStatus.OK

    engine = Engine(lambda x, n: 100.0 + 5 * x, fails)
    result = engine.rounds().compare("k", {"a": A, "b": B, "c": C}, 2)
    assert set(result.failed) == {"b"}
    assert set(result.logs) == {"c"}
    assert result.ratio("c", ["pp"], WEIGHTS).ratio == pytest.approx(1.1)
    alone = Engine(lambda x, n: 100.0, fails).rounds().compare("k", {"a": A, "b": B}, 2)
    assert alone.rounds == 0


def test_the_bar() -> None:
    bar = Bar({"pp": 0.02, "tg": 0.3})
    gains = Engine(lambda x, n: 100.0 + 1.9 * x).rounds().compare("k", {"a": A, "b": B, "c": C}, 3)
    assert not bar.beats(gains, "b", ["pp"], WEIGHTS)[0]
    assert bar.beats(gains, "c", ["pp"], WEIGHTS)[0]
    assert bar.of(["pp"]) == 0.02
    slower = Engine(lambda x, n: 100.0 - 10 * x).rounds().compare("k", {"a": A, "b": B}, 3)
    estimate = slower.ratio("b", ["pp"], WEIGHTS)
    assert bar.harms(estimate, "pp")
    assert bar.harms(estimate, "tg")  # noise has made that margin wide, but the loss is beyond doubt


def test_the_margin_of_a_mean_has_its_weights() -> None:
    margin = {"pp": 0.05, "tg": 0.01}
    assert Bar(margin).of(["pp", "tg"]) == pytest.approx(math.hypot(0.05, 0.01) / 2)
    assert Bar(margin, {"pp": 9.0, "tg": 1.0}).of(["pp", "tg"]) == pytest.approx(math.hypot(0.45, 0.01) / 10)
    rng = np.random.default_rng(0)
    mean = (9 * 0.05 * rng.standard_normal(10**5) + 0.01 * rng.standard_normal(10**5)) / 10
    assert Bar(margin, {"pp": 9.0, "tg": 1.0}).of(["pp", "tg"]) == pytest.approx(mean.std(), rel=0.02)
    assert Bar(margin, {"pp": 9.0, "tg": 1.0}).of(["tg"]) == 0.01


def test_noise_in_what_cannot_have_changed_hides_no_gain() -> None:
    """tg is not moved by the entry: only a fall beyond doubt counts there. pp is: its median does."""
    bar = Bar({"pp": 0.02, "tg": 0.02})
    logs = {"pp": [[0.2]] * 4, "tg": [[-0.05], [-0.01], [-0.04], [-0.03]]}
    result = Comparison(["default", "a"], logs={"a": logs}, rounds=4)
    weights = {"pp": 1.0, "tg": 1.0}
    assert not bar.beats(result, "a", ["pp"], weights)[0]
    assert bar.beats(result, "a", ["pp"], weights, touched=["pp"])[0]
    logs["tg"] = [[-0.05], [-0.051], [-0.049], [-0.05]]
    assert not bar.beats(result, "a", ["pp"], weights, touched=["pp"])[0]


@pytest.mark.parametrize("seed", [502, 505])
def test_a_large_gain_is_found_where_processes_differ(seed: int) -> None:
    """Processes of one configuration 2 % apart, a gain of a third beside a metric that nothing moves."""
    noise = SimulationNoise(within=0.003, process=0.02, layout=0.012)
    run = Simulated("crossover", seed, noise)
    assert run.outcome.settings["ubatch"] == 4096
    assert run.truly_slower_entries() == []


def test_a_comparison_gets_rounds_more() -> None:
    engine = Engine(lambda x, n: 100.0 + 5 * x)
    rounds = engine.rounds()
    result = rounds.compare("k", {"a": A, "b": B}, 2)
    assert rounds.compare("k", {"a": A, "b": B}, 3, into=result) is result
    assert result.rounds == 5
    assert [p for _, p in engine.asked] == [p for p in (1, 2, 3, 4, 5) for _ in range(5)]
    assert result.ratio("b", ["pp"], WEIGHTS).n == 15


def _reads_faster(settings: Settings) -> dict[str, float]:
    """As was seen on an H200: the u-batch nearly doubles the speed of prompts, and generation cannot feel
    it."""
    return {"pp": 39000.0 if settings["ubatch"] == 4096 else 21000.0, "tg": 508.0}


class Hot:
    """Rounds of an engine whose generation is slower right behind prompts, the more so behind fast ones."""

    surface = Surface("hot", (Knob("ubatch", (512, 4096), 512, moves=frozenset({"pp"})),), _reads_faster)
    noise = SimulationNoise(within=0.001, process=0.0, layout=0.0, outliers=0.0, heat=0.03, heat_seconds=0.25)

    def __init__(self, order: str, seed: int) -> None:
        self.target = SimulatedTarget(self.surface, seed, self.noise)
        self.order = order
        self.made: list[tuple[str, tuple[str, ...]]] = []  # key and metrics of every measurement
        self.time = 0.0
        self.process = 0

    def measurement(
        self, key: str, configuration: Configuration, process: int, baseline: bool, metrics: Sequence[str]
    ) -> Measurement:
        self.made.append((key, tuple(metrics)))
        if self.order == "prompts first":
            metrics = sorted(metrics)
        workload, context = Workload(pp=4096, tg=64), OpContext(key, process, self.time)
        measurement = run_measurement(
            self.target, configuration, workload, metrics, MeasurementPolicy(), context
        )
        self.time += measurement.seconds
        return measurement

    def next_process(self) -> int:
        self.process += 1
        return self.process

    def generation(self, rounds: int = 4) -> Estimate:
        """Of the u-batch that generation does not feel."""
        made = Rounds(
            self.measurement, self.next_process, Unlimited(), ["pp", "tg"], 0.03,
            lambda configurations: self.order == "apart",
        )  # fmt: skip
        points = {str(n): Configuration({"ubatch": n}) for n in (512, 4096)}
        return made.compare("k", points, rounds).ratio("4096", ["tg"], {"pp": 1.0, "tg": 1.0})


class Unlimited:
    now = 0.0

    def of_rounds(self, measurements: int) -> float:
        return float(measurements)

    def took_round(self, measurements: int, seconds: float) -> None:
        pass

    def more_seconds(self, seconds: float) -> bool:
        return True

    def in_time(self, seconds: float | None = None) -> bool:
        return True


def test_generation_does_not_follow_prompts() -> None:
    """In one measurement it follows its own, or those of the configuration before: either is a claim of a few
    tenths of a percent for what changes nothing."""
    seeds = range(5)
    found = {
        order: [Hot(order, seed).generation() for seed in seeds]
        for order in ("prompts first", "generation first", "apart")
    }
    mean = {order: np.mean([math.log(e.ratio) for e in some]) for order, some in found.items()}
    assert mean["prompts first"] < -0.003
    assert mean["generation first"] > 0.002
    assert abs(mean["apart"]) < 0.0005
    assert all(e.low <= 1 <= e.high for e in found["apart"])


def test_generation_goes_a_way_of_its_own() -> None:
    hot = Hot("apart", 0)
    hot.generation(rounds=2)
    assert hot.made[:10] == [
        *((f"k/r0/{n}/tg", ("tg",)) for n in range(5)), *((f"k/r0/{n}/pp", ("pp",)) for n in range(5)),
    ]  # fmt: skip
    assert hot.process == 2
    together = Hot("generation first", 0)
    together.generation(rounds=2)
    assert together.made[:5] == [(f"k/r0/{n}", ("tg", "pp")) for n in range(5)]


def test_what_is_visited_again_does_not_follow_prompts() -> None:
    class Shaken(Hot):
        def measurement(self, key: str, *args: Any) -> Measurement:
            measurement = super().measurement(key, *args)
            if key != "k/r0/1/tg":
                return measurement
            slow = [dataclasses.replace(s, seconds=1.2 * s.seconds) for s in measurement.samples]
            return dataclasses.replace(measurement, samples=tuple(slow))

    hot = Shaken("apart", 0)
    hot.generation(rounds=2)
    again = [made for made in hot.made if "/again0/" in made[0]]
    assert again[0] == ("k/r0/again0/before", ("tg",))
    assert again[1] == ("k/r0/again0/0/tg", ("tg",))
    assert len(again) == 11


def test_what_is_loaded_for_is_visited_once() -> None:
    """A way more would load the weights once more for every measurement."""
    for kind, apart in ((Kind.SESSION, True), (Kind.LOAD, False)):
        (knob,) = Hot.surface.knobs
        surface = dataclasses.replace(Hot.surface, knobs=(dataclasses.replace(knob, kind=kind),))
        run = Simulated(surface, 0)
        keys = [key for key, _ in run.visited if "/r0/" in key]
        assert any(key.endswith("/tg") for key in keys) == apart
        assert run.outcome.settings["ubatch"] == 4096


def test_a_measure_that_no_entry_moves_is_marked() -> None:
    """Its ratio is 1: what is written for it is an error, and at least as wide as processes differ."""
    noise = dataclasses.replace(Hot.noise, layout=0.003, heat=0.0)
    run = Simulated(Hot.surface, 1, noise)
    outcome = run.outcome
    assert [e.name for e in outcome.entries] == ["ubatch"]
    assert outcome.untouched == {"tg"}
    half = outcome.noise["tg"].half_width(1)
    gain = outcome.gain["tg"]
    assert gain.low <= gain.ratio * math.exp(-half) * (1 + 1e-9)
    assert gain.high >= gain.ratio * math.exp(half) * (1 - 1e-9)
    null = Simulated("null", 0).outcome
    assert null.entries == []
    assert null.untouched == set()
    made = Made(run.options.workload, 0, "", None, "", datetime.date(2026, 1, 1))
    written = profile_of(outcome, run.recorder._executor.describe(), made)
    assert written.evidence is not None
    assert written.evidence.gain["tg8"].untouched is True
    assert written.evidence.gain["pp64"].untouched is None


@pytest.mark.parametrize("status", [TrialStatus.CRASH, TrialStatus.TIMEOUT, TrialStatus.IMPLAUSIBLE])
def test_one_failure_of_any_configuration_throws_no_rounds_away(status: TrialStatus) -> None:
    """Others can kill a worker: what was measured before stands, and the round is made again."""
    engine = Engine(lambda x, n: 100.0 + 5 * x)
    engine.status = lambda configuration: status if len(engine.asked) == 17 else TrialStatus.OK
    result = engine.rounds().compare("k", {"a": A, "b": B, "c": C}, 4)
    assert result.failed == {}
    assert result.rounds == 4
    assert {len(logs["pp"]) for logs in result.logs.values()} == {4}
    retry = engine.asked[17]
    assert retry[0] == engine.asked[16][0]
    assert [process for _, process in engine.asked].count(retry[1]) == 1, "in a process of its own"


def test_a_second_failure_leaves_a_configuration_out_and_a_refusal_needs_none() -> None:
    for status, asked in ((TrialStatus.CRASH, 2), (TrialStatus.INVALID, 1)):
        engine = Engine(lambda x, n: 100.0, lambda c, s=status: s if c == B else TrialStatus.OK)
        result = engine.rounds().compare("k", {"a": A, "b": B, "c": C}, 2)
        assert set(result.failed) == {"b"}
        assert [x for x, _ in engine.asked].count(1) == asked


@pytest.mark.parametrize("ran", [0, 1, 2])
def test_a_rest_that_has_run_keeps_its_rounds_and_ends_the_comparison(ran: int) -> None:
    """It does run, whatever ended it, so nothing is needed for that."""
    engine = Engine(lambda x, n: 100.0 + 5 * x)
    engine.status = lambda c: TrialStatus.OOM if c == B and len(engine.asked) > 7 * ran else TrialStatus.OK
    named, rests = {"a": A, "without b": B, "c": C}, {"without b"}
    result = engine.rounds().compare("k", named, 4, rests=rests)
    assert set(result.halted) == (rests if ran else set())
    assert set(result.failed) == (set() if ran else rests)
    assert result.rounds == (ran or 4)
    assert {len(logs["pp"]) for logs in result.logs.values()} == {ran or 4}
    asked = len(engine.asked)
    if ran:
        assert engine.rounds().compare("k", named, 4, result, rests=rests).rounds == ran
        assert len(engine.asked) == asked, "no round that lacks it goes on with them"


@pytest.mark.parametrize("kills", [2, 3])
def test_a_rest_that_failed_twice_before_any_round_is_tried_again_behind_them(kills: int) -> None:
    """Both tries follow each other, so one program beside can end both."""
    engine, left = Engine(lambda x, n: 100.0), [TrialStatus.OOM] * kills
    engine.status = lambda c: left.pop() if c == B and left else TrialStatus.OK
    named, rests = {"a": A, "without b": B, "c": C}, {"without b"}
    result = engine.rounds().compare("k", named, 4, rests=rests)
    assert [x for x, _ in engine.asked].count(1) == 3
    assert engine.asked[-1][0] == 1, "behind all rounds"
    assert set(result.failed) == (rests if kills == 3 else set())
    assert result.untold("without b") == (kills == 2)
    assert (result.rounds, set(result.logs)) == (4, {"c"})


def test_a_rest_that_failed_twice_proves_nothing_if_no_time_is_left() -> None:
    engine = Engine(lambda x, n: 100.0, lambda c: TrialStatus.OOM if c == B else TrialStatus.OK)
    made = Rounds(engine.measurement, engine.next_process, Allowance(engine, 10**6, 14), ["pp"], 0.03)
    result = made.compare("k", {"a": A, "without b": B, "c": C}, 4, rests={"without b"})
    assert result.failed == {}
    assert result.untold("without b")


def test_a_failure_at_the_end_of_the_time_proves_nothing() -> None:
    """Nobody knows whether it would run: the rounds before it count, and it has not failed."""
    engine = Engine(lambda x, n: 100.0)
    engine.status = lambda configuration: TrialStatus.TIMEOUT if len(engine.asked) == 17 else TrialStatus.OK
    made = Rounds(engine.measurement, engine.next_process, Allowance(engine, 10**6, 17), ["pp"], 0.03)
    result = made.compare("k", {"a": A, "b": B, "c": C}, 4)
    assert (result.rounds, result.failed) == (2, {})
    assert set(result.logs) == {"b", "c"}
