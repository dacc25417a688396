"""The experiments of `tuner_statistics.py`: each takes a seed and gives plain data.

All of them run whole stages of the tuner against the simulated engine, under its noise within and between
processes, outliers, cold first samples, and what an experiment adds to that. Time is simulated.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import optuna
from dyno_tuner.core.crossing import Verdict
from dyno_tuner.core.intervals import keyed_rng
from dyno_tuner.core.options import MeasurementPolicy
from dyno_tuner.core.protocol import OpContext, TrialStatus, Workload
from dyno_tuner.execution.inline_executor import InlineExecutor
from dyno_tuner.measure.measurement import run_measurement
from dyno_tuner.record import recorder as recorder_module
from dyno_tuner.record.recorder import Recorder
from dyno_tuner.run.tune import Options, Tune
from dyno_tuner.search.crossover import solve
from dyno_tuner.search.observation import Observation
from dyno_tuner.search.proposers import proposer_of
from dyno_tuner.targets.simulated.hard_surfaces import HARD
from dyno_tuner.targets.simulated.surfaces import SURFACES, Surface
from dyno_tuner.targets.simulated.target import SimulatedTarget, SimulationNoise

if TYPE_CHECKING:
    from dyno_tuner.core.outcome import Outcome
    from dyno_tuner.space.search_space import Point, Space

WORKLOAD = Workload(pp=64, tg=8)
TWO_PERCENT = -math.log(0.98)
ALL = {**SURFACES, **HARD}
NOISES = {
    "default": SimulationNoise(),
    "quiet": SimulationNoise(within=0.001, process=0.002, layout=0.0005, outliers=0.002),
    "noisy": SimulationNoise(within=0.02, process=0.03, layout=0.01, outliers=0.05),
    "processes": SimulationNoise(within=0.003, process=0.02, layout=0.012),
    "drift": SimulationNoise(drift=0.1, drift_seconds=150.0),
    "throttle": SimulationNoise(throttle=0.2, throttle_period=40.0, throttle_seconds=5.0),
}


def made(surface: str, seed: int, noise: str = "default", **options: Any) -> tuple[Tune, Surface]:
    """A tune that has not run yet, and the truth of its engine."""
    truth = ALL[surface]()
    space = truth.space()
    target = SimulatedTarget(truth, seed, NOISES[noise])
    recorder = Recorder(InlineExecutor(target), WORKLOAD, identity=space.identity, virtual_time=True)
    options.setdefault("max_trials", 60 if len(space) >= 4000 else max(15, len(space) // 10))
    chosen = Options(WORKLOAD, seed=seed, weights=dict(truth.weights), **options)
    return Tune(recorder, space, chosen), truth


def optimum(truth: Surface) -> float:
    space = truth.space()
    return max(truth.truth(space.settings(p)) for p in space.points())


def _entries(outcome: Outcome, truth: Surface) -> dict[str, float]:
    """The true log gain of each entry, given the rest of the profile."""
    whole = truth.truth(outcome.settings)
    return {e.name: whole - truth.truth({**outcome.settings, e.name: e.default}) for e in outcome.entries}


def null(seed: int, noise: str = "default") -> dict[str, Any]:
    """A space of identical configurations."""
    tune, _ = made("null", seed, noise)
    return {"changed": len(tune.run().entries)}


def pair(surface: str, noise: str, seed: int) -> dict[str, Any]:
    """Two independent tunes of one engine: the result of each, and whether they agree."""
    runs = []
    for s in (2 * seed, 2 * seed + 1):
        tune, truth = made(surface, s, noise)
        runs.append(tune.run())
    a, b = runs
    margin = max(max(r.margin.values()) for r in runs)
    worth = truth.truth(a.settings)
    same = [b.settings[n] == v for n, v in a.settings.items()]
    alike = [
        abs(truth.truth({**a.settings, n: b.settings[n]}) - worth) <= math.log1p(margin) for n in a.settings
    ]
    best = optimum(truth)
    covered = measured = 0
    for r in runs:
        defaults = truth.rates(r.defaults)
        for metric, gain in r.gain.items():
            measured += 1
            true = truth.rates(r.settings)[metric] / defaults[metric]
            covered += gain.low - 1e-9 <= true <= gain.high + 1e-9
    gains = [(g, max(r.margin.values())) for r in runs for g in _entries(r, truth).values()]
    return {
        "names": len(same),
        "equal": sum(same),
        "agree": sum(alike),
        "written": len(gains),
        "harmful": sum(g < -math.log1p(m) for g, m in gains),
        "slower": sum(g < -1e-9 for g, _ in gains),
        "regret": [best - truth.truth(r.settings) for r in runs],
        "margin": margin,
        "covered": covered,
        "intervals": measured,
        "names_written": [[e.name for e in r.entries] for r in runs],
        "seconds": [r.seconds for r in runs],
    }


def drift(seed: int) -> dict[str, Any]:
    """The same engine, first without drift, then with a slow drift of 10 %."""
    steady, truth = made("saturating", seed)
    creeping, _ = made("saturating", seed, "drift")
    a, b = steady.run(), creeping.run()
    lost = truth.truth(a.settings) - truth.truth(b.settings)
    return {
        "same": a.settings == b.settings,
        "lost": lost,
        "margin": max(max(x.margin.values()) for x in (a, b)),
    }


def budget(seed: int) -> dict[str, Any]:
    """A budget from 20 s to 300 s, drawn for each seed, that must not be exceeded by more than a tenth."""
    rng = keyed_rng("budget", seed)
    given = float(np.exp(rng.uniform(math.log(20), math.log(300))))
    surface = ("saturating", "crossover", "interaction", "cliff")[seed % 4]
    tune, truth = made(surface, seed, budget=given, max_trials=400)
    outcome = tune.run()
    harmful = sum(g < -math.log1p(max(outcome.margin.values())) for g in _entries(outcome, truth).values())
    return {"share": outcome.seconds / given, "harmful": harmful}


def interrupt(seed: int) -> dict[str, Any]:
    """Ctrl-C before an operation drawn for each seed: what is written then has to hold."""
    surface = ("saturating", "crossover", "interaction", "cliff")[seed % 4]
    tune, truth = made(surface, seed)
    left = int(keyed_rng("interrupt", seed).integers(1, 260))
    real = recorder_module.Recorder._do

    def counted(self: Recorder, *args: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return real(self, *args)

    recorder_module.Recorder._do = counted  # type: ignore[method-assign]
    try:
        outcome = tune.run()
    finally:
        recorder_module.Recorder._do = real  # type: ignore[method-assign]
    margin = max(outcome.margin.values(), default=0.01)
    valid = set(outcome.settings) == {k.name for k in truth.knobs} and truth.fault(outcome.settings) is None
    return {
        "interrupted": outcome.status == "interrupted",
        "valid": valid,
        "written": len(outcome.entries),
        "harmful": sum(g < -math.log1p(margin) for g in _entries(outcome, truth).values()),
    }


def threshold(seed: int, sigma: float) -> dict[str, Any]:
    """A crossover of two noisy curves on a grid drawn for each seed, and a tie."""
    rng = np.random.default_rng(seed)
    steps = int(rng.integers(6, 15))
    slope = float(rng.choice([0.06, 0.12, 0.3]))
    crossing = float(rng.uniform(0.3, steps - 1.3))
    grid = [1 << p for p in range(steps)]
    found = solve(grid, lambda i, n: (slope * (crossing - i) + sigma * rng.standard_normal(), sigma))
    tie = solve(grid, lambda i, n: (sigma * rng.standard_normal(), sigma))
    return {
        "within_one_step": found.verdict is Verdict.CROSSING and abs(found.below - math.ceil(crossing)) <= 1,
        "measurements": max(found.measurements, tie.measurements),
        "tie_is_a_tie": tie.verdict is Verdict.TIE,
    }


# ---- regret of the search


def search(surface: str, method: str, seed: int) -> dict[str, Any]:
    """The true regret of the final settings of a search. The default counts as one evaluation.

    `guided` is this project's screen: blocks between baselines, scores corrected for drift. The others do
    what scripts around llama-bench do: one measurement per evaluation, the mean of all its samples, a failure
    counts 0.
    """
    truth = ALL[surface]()
    space = truth.space()
    limit = 60 if len(space) >= 4000 else max(15, len(space) // 10)
    settings = _guided(truth, seed, limit) if method == "guided" else _RAW[method](truth, space, seed, limit)
    return {
        "regret": optimum(truth) - truth.truth(settings),
        "evaluations": limit,
        "points": len(space),
    }


def _guided(truth: Surface, seed: int, limit: int) -> dict[str, Any]:
    # Only the search runs: thresholds are not solved first, and answers are not checked.
    plain = replace(truth, knobs=tuple(replace(k, threshold_of=None) for k in truth.knobs))
    space = plain.space()
    target = SimulatedTarget(plain, seed, NOISES["default"])
    recorder = Recorder(InlineExecutor(target), WORKLOAD, identity=space.identity, virtual_time=True)
    options = Options(
        WORKLOAD, seed=seed, weights=dict(truth.weights), max_trials=limit, patience=limit, check=False
    )
    tune = Tune(recorder, space, options)
    tune._measure_noise()
    tune._run_screen()
    assert tune._screen is not None
    best = max((t for t in tune._screen.trials if t.log_ratio is not None), key=lambda t: t.log_ratio or 0.0)
    return space.settings(best.point)


class _Raw:
    """Evaluations as in simple scripts: a new process each time, and all samples count."""

    def __init__(self, truth: Surface, space: Space, seed: int) -> None:
        self._target = SimulatedTarget(truth, seed, NOISES["default"])
        self._truth, self._space, self._now, self._number = truth, space, 0.0, 0

    def __call__(self, point: Point) -> float:
        self._number += 1
        context = OpContext(f"raw/{self._number}", self._number, self._now)
        metrics = [m for m in WORKLOAD.metrics if self._truth.weights.get(m, 0.0) > 0]
        measurement = run_measurement(
            self._target, self._space.configuration(point), WORKLOAD, metrics, MeasurementPolicy(), context
        )
        self._now += measurement.seconds
        if measurement.status is not TrialStatus.OK:
            return 0.0
        rates = {
            m: [s.rate for s in (*measurement.warmup, *measurement.samples) if s.metric == m] for m in metrics
        }
        return float(np.prod([np.mean(r) for r in rates.values()]) ** (1 / len(rates)))


def _random(truth: Surface, space: Space, seed: int, limit: int) -> dict[str, Any]:
    rng = keyed_rng("random search", seed)
    measure = _Raw(truth, space, seed)
    points = [space.default, *(space.random(rng) for _ in range(limit - 1))]
    scores = [(measure(p), p) for p in points]
    return space.settings(max(scores, key=lambda s: s[0])[1])


def _tpe(truth: Surface, space: Space, seed: int, limit: int) -> dict[str, Any]:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
    measure = _Raw(truth, space, seed)

    def objective(trial: optuna.Trial) -> float:
        return measure(
            tuple(
                trial.suggest_int(k.name, 0, len(k.values) - 1)
                if k.ordinal
                else int(trial.suggest_categorical(k.name, list(range(len(k.values)))))
                for k in space.knobs
            )
        )

    study.enqueue_trial({k.name: i for k, i in zip(space.knobs, space.default, strict=True)})
    study.optimize(objective, n_trials=limit)
    return space.settings(tuple(int(study.best_params[k.name]) for k in space.knobs))


def _coordinate(truth: Surface, space: Space, seed: int, limit: int) -> dict[str, Any]:
    """One knob after the other from the best so far, until the evaluations are used up."""
    proposer = proposer_of("coordinate", space)
    measure = _Raw(truth, space, seed)
    history = [Observation(space.default, math.log(measure(space.default)))]
    while len(history) < limit:
        point = proposer.propose(history, (seed, len(history)))
        if point is None:
            break
        value = measure(point)
        history.append(Observation(point, math.log(value) if value > 0 else None))
    best = max((o for o in history if o.score is not None), key=lambda o: o.score or 0.0)
    return space.settings(best.point)


_RAW = {"random": _random, "tpe_raw_means": _tpe, "coordinate": _coordinate}
METHODS = ("guided", *_RAW)
