from __future__ import annotations

import math

import pytest
from conftest_tuner import Simulated
from dyno_tuner.confirm import Bar, Comparison, Rounds, visits_in_round
from dyno_tuner.target import Configuration, Sample, TrialStatus, Visit
from dyno_tuner.targets.simulated import SimulationNoise

A, B, C = (Configuration({"x": n}) for n in range(3))
WEIGHTS = {"pp": 1.0}


class Engine:
    """Rates by configuration and visit number; counts what it is asked for."""

    def __init__(self, rate, status=lambda configuration: TrialStatus.OK) -> None:
        self.rate = rate
        self.status = status
        self.asked: list[tuple[int, int]] = []  # (configuration, process)
        self.process = 0

    def visit(self, key: str, configuration: Configuration, process: int, anchor: bool) -> Visit:
        number = len(self.asked)
        self.asked.append((int(configuration.settings["x"]), process))
        status = self.status(configuration)
        if status is not TrialStatus.OK:
            return Visit(status, message="as told")
        rate = self.rate(int(configuration.settings["x"]), number)
        return Visit(TrialStatus.OK, tuple(Sample("pp", p, 10, 10 / rate, 10 / rate) for p in range(3)))

    def next_process(self) -> int:
        self.process += 1
        return self.process

    def rounds(self, visits: int = 10**6, void_over: float = 0.03) -> Rounds:
        """Affordable until so many visits have been made."""
        return Rounds(
            self.visit, self.next_process, lambda n: len(self.asked) + n <= visits, ["pp"], void_over
        )


def test_a_round_goes_there_and_back_in_a_process_of_its_own() -> None:
    engine = Engine(lambda x, n: 100.0)
    engine.rounds().compare("k", {"a": A, "b": B, "c": C}, 2)
    assert [x for x, _ in engine.asked] == [0, 1, 2, 2, 1, 0] * 2
    assert [p for _, p in engine.asked] == [1] * 6 + [2] * 6
    assert visits_in_round(3) == 6


def test_a_linear_drift_cancels() -> None:
    engine = Engine(lambda x, n: 100.0 * (1 + 0.2 * (x == 1)) * math.exp(-0.005 * n))
    result = engine.rounds(void_over=0.1).compare("k", {"a": A, "b": B, "c": C}, 3)
    assert result.ratio("b", ["pp"], WEIGHTS).ratio == pytest.approx(1.2)
    assert result.ratio("c", ["pp"], WEIGHTS).ratio == pytest.approx(1.0)
    assert result.ratio("b", ["pp"], WEIGHTS, over="c").ratio == pytest.approx(1.2)
    assert result.ratio("a", ["pp"], WEIGHTS, over="b").ratio == pytest.approx(1 / 1.2)


def test_a_round_whose_anchor_moved_is_void_and_repeated() -> None:
    engine = Engine(lambda x, n: 50.0 if n == 3 else 100.0)
    result = engine.rounds().compare("k", {"a": A, "b": B}, 2)
    assert (result.voided, result.rounds) == (1, 2)
    assert result.ratio("b", ["pp"], WEIGHTS).ratio == pytest.approx(1.0)


@pytest.mark.parametrize("insist", [False, True])
def test_rounds_that_keep_being_void_end_with_the_budget(insist: bool) -> None:
    engine = Engine(lambda x, n: 100.0 + 10 * n)
    result = engine.rounds(visits=13).compare("k", {"a": A, "b": B}, 8, insist=insist)
    assert len(engine.asked) <= 13
    assert result.rounds == 0


def test_nothing_begins_where_two_rounds_do_not_fit() -> None:
    engine = Engine(lambda x, n: 100.0)
    assert engine.rounds(visits=7).compare("k", {"a": A, "b": B}, 4).rounds == 0
    assert engine.asked == []
    assert engine.rounds(visits=7).compare("k", {"a": A, "b": B}, 4, insist=True).rounds == 2


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
