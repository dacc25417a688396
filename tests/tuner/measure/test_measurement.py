from __future__ import annotations

import dataclasses
import math

import pytest
from dyno_tuner.core.errors import TargetFailure
from dyno_tuner.core.options import MeasurementPolicy
from dyno_tuner.core.protocol import (
    Configuration,
    Measurement,
    OpContext,
    Quality,
    Sample,
    TrialStatus,
    Workload,
)
from dyno_tuner.decide.answer_check import judge
from dyno_tuner.measure.measurement import baseline_moved, judge_plausibility, run_measurement, score
from dyno_tuner.space.knobs import Fidelity
from dyno_tuner.targets.simulated.target import SimulatedTarget, SimulationNoise

CONTEXT = OpContext("k", 0, 0.0)
WORKLOAD = Workload(pp=100, tg=0)


class Scripted:
    """Gives rates from a list, then the last one for ever."""

    def __init__(self, rates: list[float], failure: TargetFailure | None = None) -> None:
        self.rates = list(rates)
        self.failure = failure
        self.now = 0.0

    def apply(self, configuration: Configuration, context: OpContext) -> None:
        if self.failure is not None:
            raise self.failure

    def measure(self, workload: Workload, metric: str, prompt: int) -> Sample:
        rate = self.rates.pop(0) if len(self.rates) > 1 else self.rates[0]
        self.now += workload.pp / rate
        return Sample(metric, prompt, workload.pp, workload.pp / rate, workload.pp / rate)

    def count_energy(self, wanted: str | None) -> str:
        return ""

    def clock(self) -> float:
        return self.now


def _measurement(target: Scripted, **policy: float) -> Measurement:
    return run_measurement(target, Configuration({}), WORKLOAD, ["pp"], MeasurementPolicy(**policy), CONTEXT)  # type: ignore[arg-type]


def _flat(rate: float, prompts: int = 3) -> Measurement:
    return Measurement(
        TrialStatus.OK, tuple(Sample("pp", p, 100, 100 / rate, 100 / rate) for p in range(prompts))
    )


def test_the_cold_first_sample_never_counts() -> None:
    measurement = _measurement(Scripted([50.0, 100.0]))
    assert [s.rate for s in measurement.warmup] == pytest.approx([50.0])
    assert [s.rate for s in measurement.samples] == pytest.approx([100.0] * 3)
    assert {s.prompt for s in measurement.samples} == {0, 1, 2}
    assert measurement.stable


def test_what_is_hopelessly_slow_gets_no_more_samples() -> None:
    kept = [len(_measurement(Scripted([50.0, 100.0]), longest=t).samples) for t in (10.0, 3.5, 2.5, 0.0)]
    assert kept == [3, 2, 1, 1]
    cold = _measurement(Scripted([1.0, 1.2]), longest=30.0)
    assert (len(cold.samples), len(cold.warmup)) == (1, 0)
    assert cold.status is TrialStatus.OK
    warm = _measurement(Scripted([1.0, 1.2]), longest=150.0)
    assert [s.rate for s in warm.samples] == pytest.approx([1.2])
    assert MeasurementPolicy().to_dict() == {"prompts": 3, "tolerance": 0.02, "cap": 8}


def test_warming_up_goes_on_until_rates_stop_rising() -> None:
    measurement = _measurement(Scripted([50.0, 60.0, 75.0, 90.0, 100.0]))
    assert min(measurement.rates("pp").values()) == pytest.approx(90.0, rel=0.12)
    assert measurement.stable
    assert len(measurement.warmup) >= 3


def test_a_visit_that_never_settles_is_marked() -> None:
    measurement = _measurement(Scripted([100 * 1.2**i for i in range(40)]), cap=6)
    assert not measurement.stable
    assert len(measurement.samples) + len(measurement.warmup) == 6


def test_a_failure_is_a_status() -> None:
    measurement = _measurement(Scripted([1.0], TargetFailure("invalid", "no such layout")))
    assert measurement.status is TrialStatus.INVALID
    assert measurement.message == "no such layout"


def test_a_visit_survives_the_journal() -> None:
    measurement = _measurement(Scripted([50.0, 100.0, 101.0, 99.5]))
    assert Measurement.from_dict(measurement.to_dict()) == measurement


def test_scores_are_ratios_to_the_anchor_interpolated_in_time() -> None:
    before, after = (0.0, _flat(100.0)), (10.0, _flat(110.0))
    candidate = _flat(120.0)
    only = score(candidate, [before], 5.0, ["pp"]).log_ratio("pp")
    both = score(candidate, [before, after], 5.0, ["pp"]).log_ratio("pp")
    assert only == pytest.approx(math.log(1.2))
    assert both == pytest.approx(math.log(120 / math.sqrt(100 * 110)))
    assert score(candidate, [before], 5.0, ["pp", "tg"]).log_ratio("tg") == 0.0
    assert baseline_moved(_flat(100.0), _flat(96.0), ["pp"]) == pytest.approx(0.04)


def test_plausibility() -> None:
    good = _flat(100.0)
    assert judge_plausibility(good, {"pp": 1000.0}, 10.0).status is TrialStatus.OK
    above = judge_plausibility(good, {"pp": 99.0}, None)
    assert above.status is TrialStatus.IMPLAUSIBLE
    assert "bound" in above.message
    too_fast = judge_plausibility(good, {}, elapsed=1.5)
    assert too_fast.status is TrialStatus.IMPLAUSIBLE
    skewed = dataclasses.replace(good, samples=(Sample("pp", 0, 100, 0.1, 1.0),))
    assert judge_plausibility(skewed, {}, None).status is TrialStatus.IMPLAUSIBLE
    for seconds in (0.0, -1.0, math.nan):
        broken = dataclasses.replace(good, samples=(Sample("pp", 0, 100, seconds, 1.0),))
        assert judge_plausibility(broken, {}, None).status is TrialStatus.IMPLAUSIBLE


def test_a_clock_that_stands_still_never_wins() -> None:
    target = SimulatedTarget("null", 1, SimulationNoise(impossible=1.0))
    configuration = target.surface.space().configuration(target.surface.space().default)
    measurement = run_measurement(target, configuration, WORKLOAD, ["pp"], MeasurementPolicy(), CONTEXT)
    assert judge_plausibility(measurement, target.describe().bounds, None).status is TrialStatus.IMPLAUSIBLE


def _quality(kld: float, digest: str = "x", status: TrialStatus = TrialStatus.OK) -> Quality:
    return Quality(status, kld, kld, 1.0, 512, digest)


def test_answers_come_before_speed() -> None:
    default = _quality(1e-4, "d")
    assert judge(_quality(1e-4, "d"), default, Fidelity.EXACT, None).ok
    assert not judge(_quality(1e-4, "e"), default, Fidelity.EXACT, None).ok
    assert judge(_quality(1.59e-4), default, Fidelity.ROUNDING, None).ok
    assert not judge(_quality(1.61e-4), default, Fidelity.ROUNDING, None).ok
    assert not judge(_quality(1e-3), default, Fidelity.APPROX, None).ok
    assert judge(_quality(1e-3), default, Fidelity.APPROX, 2e-3).ok
    assert not judge(_quality(math.nan), default, Fidelity.ROUNDING, None).ok
    assert not judge(_quality(0.0, status=TrialStatus.OOM), default, Fidelity.ROUNDING, None).ok
