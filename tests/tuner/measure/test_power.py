"""A GPU that reaches its power limit: what a tune claims is what `dyno bench` finds in fresh processes."""

from __future__ import annotations

import dataclasses
import math
import types
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import dyno.bench
import pytest
from dyno_tuner.core.intervals import estimate
from dyno_tuner.core.options import MeasurementPolicy
from dyno_tuner.core.protocol import Configuration, Measurement, OpContext, Sample, Settings, Workload
from dyno_tuner.execution.inline_executor import InlineExecutor
from dyno_tuner.execution.worker import WorkerExecutor
from dyno_tuner.measure.machine_monitor import NEAR_LIMIT, at_power_limit
from dyno_tuner.measure.measurement import RESTED_WARM_UP, SUSTAINED_SECONDS, run_measurement
from dyno_tuner.record import journal
from dyno_tuner.record.recorder import Recorder
from dyno_tuner.run.tune import Options, Tune
from dyno_tuner.targets.simulated.power import IDLE_DRAW, LIMIT_W, SimulatedPower
from dyno_tuner.targets.simulated.surfaces import SURFACES
from dyno_tuner.targets.simulated.target import SimulatedTarget, SimulationNoise

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from dyno_tuner.core.outcome import Outcome
    from numpy.typing import NDArray

SURFACE = SURFACES["saturating"]()
QUIET = SimulationNoise(
    within=0.002, process=0.002, layout=0.001, outliers=0.0, cold=0.03, power=0.97
)  # an H200's, but for the power, which is more beyond the limit here
HALVES = [(0, 1), (3, 2)]  # of default, profile, profile, default


# ---- the simulated limit


def test_work_beyond_the_limit_is_slowed_down_once_a_second_of_it_has_reached_it() -> None:
    power = SimulatedPower()
    at_full_clock = (1 - IDLE_DRAW) / (1.2 - IDLE_DRAW)
    assert power.work(0.7, 1.2) == pytest.approx(0.7)
    assert power.work(0.5, 1.2) > 0.5 + 0.05 * (0.5 - (at_full_clock - 0.7))
    power.idle(1.0)
    assert power.average == pytest.approx(IDLE_DRAW)
    assert power.work(0.7, 1.2) == pytest.approx(0.7)


def test_work_below_the_limit_is_never_slowed_down() -> None:
    power = SimulatedPower()
    assert sum(power.work(0.1, 0.99) for _ in range(50)) == pytest.approx(5.0)
    assert power.state()["throttle_reasons"] == 0


# ---- what a window says


def test_the_limit_is_reached_where_the_driver_says_so_and_the_power_is_near_it() -> None:
    seen: dict[str, Any] = {"throttle_reasons": 4, "power_limit_w": LIMIT_W, "power_w": [100.0, LIMIT_W]}
    assert at_power_limit(seen)
    assert not at_power_limit({**seen, "throttle_reasons": 1})
    assert not at_power_limit({**seen, "power_w": [100.0, (NEAR_LIMIT - 0.01) * LIMIT_W]})
    assert not at_power_limit({**seen, "power_limit_w": None})
    assert not at_power_limit({k: v for k, v in seen.items() if k != "power_w"})


# ---- the measurement


class _Steady:
    """Runs of one length; remembers what was asked for."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.asked: list[str] = []

    def apply(self, configuration: Configuration, context: OpContext) -> None:
        self.asked.append("apply")

    def measure(self, workload: Workload, metric: str, prompt: int) -> Sample:
        self.asked.append(f"{metric}{prompt}")
        return Sample(metric, prompt, workload.tokens(metric), self.seconds, self.seconds)

    def count_energy(self, wanted: str | None) -> str:
        return ""

    def rest(self, seconds: float) -> None:
        self.asked.append(f"rest {seconds:g}")

    def clock(self) -> float:
        return self.seconds * len(self.asked)


def _asked(seconds: float, metrics: list[str], **policy: Any) -> tuple[list[str], Measurement]:
    target = _Steady(seconds)
    measurement = run_measurement(  # type: ignore[arg-type]
        target, Configuration({}), Workload(pp=64, tg=8), metrics, MeasurementPolicy(**policy), OpContext("k")
    )
    return target.asked, measurement


def test_short_prompts_are_read_after_a_rest_and_more_of_them_are_dropped() -> None:
    asked, measurement = _asked(0.1, ["tg", "pp"], rest=0.5)
    pp = [f"pp{i % 3}" for i in range(1 + RESTED_WARM_UP + 3)]
    assert asked == ["apply", "tg0", "tg1", "tg2", "tg0", pp[0], "rest 0.5", *pp[1:]]
    assert [s.prompt for s in measurement.samples if s.metric == "pp"] == [1, 2, 0]
    assert sum(s.metric == "pp" for s in measurement.warmup) == 1 + RESTED_WARM_UP
    assert measurement.stable


def test_long_prompts_need_no_rest() -> None:
    asked, measurement = _asked(SUSTAINED_SECONDS, ["pp"], rest=0.5)
    assert (asked, measurement) == _asked(SUSTAINED_SECONDS, ["pp"])
    assert asked == ["apply", "pp0", "pp1", "pp2", "pp0"]


def test_a_rest_crosses_to_a_worker() -> None:
    options: dict[str, Any] = {"surface": "saturating", "seed": 1, "noise": dataclasses.asdict(QUIET)}
    asked: Any = (
        Configuration({}),
        Workload(pp=80, tg=8),
        ["pp"],
        MeasurementPolicy(rest=0.5),
        OpContext("k"),
        300.0,
    )
    executor = WorkerExecutor("simulated", options)
    try:
        found = executor.measurement(*asked)
    finally:
        executor.close()
    assert found == InlineExecutor(SimulatedTarget(**options)).measurement(*asked)
    assert len(found.warmup) == 1 + RESTED_WARM_UP


# ---- the tune


def _recorder(
    seed: int, rests: bool, noise: SimulationNoise = QUIET, workload: Workload | None = None, **other: Any
) -> Recorder:
    target = SimulatedTarget(SURFACE, seed, noise)
    return Recorder(
        InlineExecutor(target), workload or Workload(pp=80, tg=8), identity=SURFACE.space().identity,
        virtual_time=True, watch=target, rests=rests, **other,
    )  # fmt: skip


def _tune(recorder: Recorder, seed: int, **options: Any) -> Outcome:
    options = {"max_trials": 29, "weights": dict(SURFACE.weights), **options}
    return Tune(recorder, SURFACE.space(), Options(Workload(pp=80, tg=8), seed=seed, **options)).run()


class _Engine:
    """The simulated engine in a process of its own, as far as `dyno bench` asks it for prompts."""

    diagnostics = SimpleNamespace(draws_on_device=False)

    def __init__(self, target: SimulatedTarget) -> None:
        self._target = target
        self._runs = 0
        self.model = {"n_vocab": 1000, "recurrent_layers": 0}
        self.settings: dict[str, Any] = {}
        self.device_info: dict[str, Any] = {}
        self.expert_choices = {"chosen": 0, "cached": 0}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._target.close()

    def reset(self) -> None:
        pass

    def position(self) -> int:
        return 0

    def logits(self, tokens: NDArray[np.int32], **how: Any) -> None:
        self._target.measure(Workload(pp=len(tokens), tg=0), "pp", self._runs % 3)
        self._runs += 1


class _Bench:
    """`dyno bench -p 80` in fresh processes, on virtual time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
        self._monkeypatch = monkeypatch
        self._seed = seed
        self._process = 1000

    def rates(self, settings: Settings) -> list[float]:
        self._process += 1
        target = SimulatedTarget(SURFACE, self._seed, QUIET)
        target.apply(Configuration(settings), OpContext(f"bench/{self._process}", self._process))
        clock = types.SimpleNamespace(
            perf_counter_ns=lambda: round(target.clock() * 1e9), strftime=lambda *a: "", gmtime=lambda: None
        )
        self._monkeypatch.setattr(dyno.bench, "time", clock)
        self._monkeypatch.setattr(dyno.bench, "Engine", lambda path, **settings: _Engine(target))
        (found,) = dyno.bench.run("", [dyno.bench.BenchCase(80, 0)])
        return found.samples_ts

    def ratio(self, settings: Settings) -> float:
        """As benchmarks/tune_models.py measures it, with two rounds."""
        groups = []
        for _ in range(2):
            took = [self.rates(s) for s in ({}, settings, settings, {})]
            for default, profile in HALVES:
                pairs = zip(took[default], took[profile], strict=True)
                groups.append([math.log(b / a) for a, b in pairs])
        return estimate(groups, "bench").ratio


@pytest.mark.parametrize("seed", range(3))
def test_bench_in_fresh_processes_finds_what_the_tune_claims(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = _tune(_recorder(seed, rests=True), seed)
    claim, found = outcome.gain["pp"], _Bench(monkeypatch, seed).ratio(outcome.settings)
    assert claim.ratio > 1.25
    assert claim.low <= found * 1.01
    assert found <= claim.high * 1.01
    assert abs(math.log(found / claim.ratio)) < 0.02
    assert outcome.conditions["power_limited"] > 0


@pytest.mark.parametrize("seed", range(3))
def test_without_rests_the_tune_claims_less_than_bench_finds(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What rests are for: if this fails, the simulated limit shows nothing."""
    outcome = _tune(_recorder(seed, rests=False), seed)
    claim, found = outcome.gain["pp"], _Bench(monkeypatch, seed).ratio(outcome.settings)
    assert found > claim.high * 1.01
    assert math.log(found / claim.ratio) > 0.05


def test_a_gpu_below_its_limit_is_tuned_as_before() -> None:
    """Bit by bit, and in the same time."""
    below = SimulationNoise(power=0.5)
    rested, plain = (_recorder(3, rests=r, noise=below) for r in (True, False))
    assert _tune(rested, 3).to_dict() == _tune(plain, 3).to_dict()
    assert rested.now == plain.now
    assert not rested.resting


def test_the_rest_is_said_once_and_stands_in_the_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with journal.Journal(path) as book:
        recorder = _recorder(1, rests=True, journal=book)
        said: list[str] = []
        recorder.on_note = lambda kind, data: (
            said.append(data["message"]) if kind == "power_limited" else None
        )
        first = _tune(recorder, 1)
    assert len(said) == 1
    assert f"power limit of {LIMIT_W:.0f} W" in said[0]
    records = journal.load(path).records
    measurements = [r for r in records if r.get("op") == "visit" and "pp" in r["args"]["metrics"]]
    rested = ["rest" in r["args"]["policy"] for r in measurements]
    begun = rested.index(True)
    assert begun > 0
    assert all(rested[begun:])
    assert at_power_limit(measurements[begun - 1]["result"]["gpu"])

    # The measurement that has shown the limit is made again.
    assert measurements[begun]["key"] == measurements[begun - 1]["key"]

    again = _recorder(1, rests=True, past=records)
    assert _tune(again, 1).to_dict() == first.to_dict()
    assert again.performed == 0


@pytest.mark.parametrize("seed", range(4))
def test_what_is_compared_has_rested_or_has_not(seed: int, tmp_path: Path) -> None:
    """The block of the screen in which the GPU begins to rest is measured again from its first trial on."""
    path = tmp_path / "journal.jsonl"
    with journal.Journal(path) as book:
        _tune(_recorder(seed, rests=True, journal=book), seed)
    records = journal.load(path).records
    measurements = [r for r in records if r.get("op") == "visit" and "pp" in r["args"]["metrics"]]
    begun = ["rest" in r["args"]["policy"] for r in measurements].index(True)
    keys = [str(r["key"]) for r in measurements]
    assert keys[begun].startswith("screen/")
    baseline = max(i for i in range(begun) if not keys[i].startswith("screen/t"))
    block = {k for k in keys[baseline + 1 : begun + 1] if k.startswith("screen/t")}
    assert block
    assert {f"{k}/again0" for k in block} <= set(keys[begun + 1 :])
    assert any(r.get("note") == "void" for r in records)


def test_a_a_begins_anew_where_the_default_itself_reaches_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    noise = dataclasses.replace(QUIET, power=1.1)
    with journal.Journal(path) as book:
        recorder = _recorder(0, rests=True, noise=noise, journal=book)
        tune = Tune(recorder, SURFACE.space(), Options(Workload(pp=80, tg=8), max_trials=2))
        tune.run()
    records = [r for r in journal.load(path).records if str(r.get("key", "")).startswith("aa/p")]
    rested = ["rest" in r["args"]["policy"] for r in records]
    begun = rested.index(True)
    first = records[begun]["process"]
    assert first == records[begun - 1]["process"]  # the measurement that showed it, once more
    assert {r["process"] for r in records if r["process"] > first} == {first + 1, first + 2, first + 3}
    assert tune.context.noise["pp"].processes == 3
    assert tune.context.noise["pp"].measurements == 6
    assert tune.context.rounds()._resting()  # what is compared from here on begins with a GPU that rests


def test_a_workload_without_prompts_knows_no_rests() -> None:
    noise = dataclasses.replace(QUIET, power=1.3)
    recorder = _recorder(0, rests=True, noise=noise, workload=Workload(pp=0, tg=8))
    options = Options(Workload(pp=0, tg=8), max_trials=3)
    Tune(recorder, SURFACE.space(), options).run()
    assert not recorder.resting


@pytest.mark.parametrize("budget", [120.0, 250.0])
def test_the_budget_holds_with_rests(budget: float) -> None:
    recorder = _recorder(2, rests=True)
    outcome = _tune(recorder, 2, budget=budget, max_trials=400)
    assert recorder.resting
    assert outcome.seconds <= 1.05 * budget
