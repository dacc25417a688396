"""The engine of this project as a target, on a model of a few hundred kilobytes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dyno import Engine, profiles
from dyno._effective import usable_cores
from dyno.errors import DeviceLostError, OutOfMemoryError, PlanError
from dyno_tuner.core.errors import TargetFailure, TargetLost, TargetUnusable
from dyno_tuner.core.options import MeasurementPolicy
from dyno_tuner.core.protocol import Configuration, KernelChoice, KernelOp, OpContext, TrialStatus, Workload
from dyno_tuner.execution.inline_executor import InlineExecutor
from dyno_tuner.execution.worker import WorkerExecutor
from dyno_tuner.measure.measurement import judge_plausibility, run_measurement
from dyno_tuner.run.session import Request
from dyno_tuner.run.tune import Options
from dyno_tuner.space.knobs import Facts, resolve
from dyno_tuner.space.search_space import Space
from dyno_tuner.targets.dyno import answers, bounds, kernel_ops
from dyno_tuner.targets.dyno.target import DynoTarget
from real_tunes import tuned

MODEL = Path(__file__).parents[2] / "data" / "tiny" / "qwen3moe-tiny.gguf"
WORKLOAD = Workload(pp=32, tg=4)
CONTEXT = OpContext("k")


@pytest.fixture(scope="module")
def target() -> Any:
    made = DynoTarget(str(MODEL))
    yield made
    made.close()


@pytest.fixture(scope="module")
def default(target: Any) -> Configuration:
    described = target.describe()
    facts = Facts(described.device, described.model, WORKLOAD, described.engine["defaults"])
    knobs = resolve(facts, approx=True)
    assert {"ubatch", "cpu_repack", "kv_type_k"} <= {k.name for k in knobs}
    space = Space(knobs)
    return space.configuration(space.default)


def test_it_describes_what_a_profile_names(target: Any) -> None:
    described = target.describe()
    assert profiles.CpuDevice(**described.device).cores >= 1
    assert described.model["architecture"] == "qwen3moe"
    assert described.engine["defaults"]["ubatch"] == 512
    assert set(described.bounds) == {"pp", "tg"}
    assert type(described).from_dict(described.to_dict()) == described


@pytest.mark.parametrize("fixed", [{}, {"threads": usable_cores() + 1}, {"numerics": "exact"}], ids=str)
def test_defaults_beside_fixed_settings_are_those_of_an_engine(fixed: dict[str, Any]) -> None:
    made = DynoTarget(str(MODEL), settings=fixed)
    defaults = made.describe().engine["defaults"]
    made.close()
    with Engine(MODEL, profile=None, plan_only=True, **fixed) as engine:
        wanted = {name: ",".join(v) if isinstance(v, list) else v for name, v in engine.settings.items()}
    assert {name: defaults[name] for name in wanted} == {**wanted, "ctx": defaults["ctx"]}


def test_a_visit_with_every_setting(target: Any, default: Configuration) -> None:
    described = target.describe()
    for change in (
        {},
        {"ubatch": 32},
        {"cpu_repack": False},
        {"kv_type_k": "q8_0"},
        {"threads": 1, "ubatch": 64},
    ):
        measurement = run_measurement(
            target, default.replace(**change), WORKLOAD, ["pp", "tg"], MeasurementPolicy(), CONTEXT
        )
        assert measurement.status is TrialStatus.OK, (change, measurement.message)
        assert {len(measurement.rates(m)) for m in ("pp", "tg")} == {3}
        assert judge_plausibility(measurement, described.bounds, None).status is TrialStatus.OK


def test_a_depth_is_filled_once_and_then_rewound(target: Any, default: Configuration) -> None:
    deep = Workload(pp=8, tg=2, depth=40)
    measurement = run_measurement(target, default, deep, ["pp", "tg"], MeasurementPolicy(), CONTEXT)
    assert measurement.status is TrialStatus.OK, measurement.message
    assert target._session.position() == 42
    op = next(op for op in target.kernel_ops(default, deep) if op.metric == "tg")
    other = next(c for c in op.candidates if dict(c) != dict(op.default))
    assert (
        run_measurement(target, default, deep, ["tg"], MeasurementPolicy(), CONTEXT).status is TrialStatus.OK
    )
    target.apply(Configuration(default.settings, (KernelChoice(op.key, op.tokens, dict(other)),)), CONTEXT)
    assert target._depth == 40
    target.measure(deep, "tg", 0)
    assert target._session.position() == 42
    target.apply(default.replace(ubatch=64), CONTEXT)
    assert target._depth is None


def test_settings_that_the_engine_refuses_are_invalid(target: Any, default: Configuration) -> None:
    for change in ({"kv_type_k": "q3_k"}, {"ubatch": -1}, {"ubatch": "many"}):
        with pytest.raises(TargetFailure) as caught:
            target.apply(default.replace(**change), CONTEXT)
        assert caught.value.status == "invalid"
    target.apply(default, CONTEXT)
    op = target.kernel_ops(default, WORKLOAD)[0]
    kernel = KernelChoice(op.key, op.tokens, {**op.default, "variant": "no_such_kernel"})
    with pytest.raises(TargetFailure):
        target.apply(Configuration(default.settings, (kernel,)), CONTEXT)


def test_exact_settings_leave_every_bit(target: Any, default: Configuration, tmp_path: Path) -> None:
    reference = target.quality(default, CONTEXT)
    assert reference.status is TrialStatus.OK
    assert reference.tokens > 300
    assert 0 <= reference.mean_kld < 1e-3
    assert target.quality(default.replace(threads=1, threads_batch=1), CONTEXT).digest == reference.digest
    coarse = target.quality(default.replace(kv_type_k="q8_0", kv_type_v="q8_0"), CONTEXT)
    assert coarse.digest != reference.digest
    assert coarse.mean_kld > reference.mean_kld


def test_a_short_budget_scores_fewer_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """And as many for every configuration of the run, since they are compared with each other."""
    monkeypatch.setattr(bounds, "active_parameters", lambda model: 5_000_000 * usable_cores())
    scored = []
    for contexts in ((CONTEXT,), (OpContext("k", budget=90.0), OpContext("l"))):
        made = DynoTarget(str(MODEL))
        try:
            tokens = [made.quality(Configuration({}), context).tokens for context in contexts]
        finally:
            made.close()
        assert len(set(tokens)) == 1
        scored.append(tokens[0])
    assert 0.4 <= scored[1] / scored[0] <= 0.6


def test_what_a_group_does_not_feel_is_not_asked_again(
    target: Any, default: Configuration, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is taken over is what would have come out, to the bit."""
    reused = [target.quality(default.replace(ubatch=u), CONTEXT) for u in (512, 64)]
    asked: list[int] = []
    answer = answers.answer
    monkeypatch.setattr(answers, "answer", lambda s, g, p: asked.append(g.size) or answer(s, g, p))
    assert target.quality(default.replace(ubatch=64), CONTEXT).digest == reused[1].digest
    assert asked == []
    fresh = DynoTarget(str(MODEL))
    try:
        alone = fresh.quality(default.replace(ubatch=64), CONTEXT)
    finally:
        fresh.close()
    assert alone.groups == reused[1].groups
    assert alone.digest == reused[1].digest != reused[0].digest


def test_the_exact_path_is_computed_once_for_all_workers(tmp_path: Path, default: Configuration) -> None:
    from dyno_tuner.targets.dyno.target import DynoTarget

    first, second = (DynoTarget(str(MODEL), scratch=str(tmp_path)) for _ in range(2))
    a = first.quality(default, CONTEXT)
    assert [path.name for path in tmp_path.iterdir()] == ["exact.answers"]
    b = second.quality(default, CONTEXT)
    assert (a.mean_kld, a.digest) == (b.mean_kld, b.digest)
    for one, two in zip(first._exact()[0], second._exact()[0], strict=True):
        assert np.array_equal(one, two)
    first.close()
    second.close()


def test_kernels_can_be_listed_timed_and_applied(target: Any, default: Configuration) -> None:
    ops = target.kernel_ops(default, WORKLOAD)
    assert {op.metric for op in ops} == {"pp", "tg"}
    op = next(o for o in ops if o.metric == "tg")
    assert op.default in op.candidates
    other = next(c for c in op.candidates if c != op.default)
    times = target.time_ops(op.key, op.m, [op.default, other], threads=1, seconds=0.001)
    assert len(times) == 2
    assert all(t and min(t) > 0 for t in times)
    chosen = Configuration(default.settings, (KernelChoice(op.key, op.tokens, other),))
    target.apply(chosen, CONTEXT)
    assert [r["status"] for r in target._session.kernel_report()] == ["applied"]
    assert target.quality(chosen, CONTEXT).status is TrialStatus.OK


def test_attention_is_timed_at_the_depth_of_the_workload(
    target: Any, default: Configuration, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record of the run keeps it, and older records have none."""
    mix = Workload.parse("pp=8,depth=0; tg=2,depth=100,weight=1; tg=2,depth=300,weight=3")
    ops = target.kernel_ops(default, mix)
    depths = {(op.key.split()[0] == "attention", op.metric): op.depth for op in ops}
    assert depths[True, "tg"] == 250
    assert depths[True, "pp"] == depths[False, "tg"] == depths[False, "pp"] == 0
    assert {op.depth for op in target.kernel_ops(default, Workload(pp=8, tg=2, depth=40))} == {0, 40}
    asked = []

    def times(family: str, desc: Any, configs: Any, **more: Any) -> list[list[float]]:
        asked.append((family, more["depth"]))
        return [[1.0] for _ in configs]

    monkeypatch.setattr(kernel_ops._core.ops, "time_configs", times)
    executor = InlineExecutor(target)
    for op in ops:
        if op.metric == "tg":
            request = {"key": op.key, "m": op.m, "configs": [op.default], "threads": 1, "seconds": 0.1}
            executor.time_ops(request | ({"depth": op.depth} if op.depth else {}), CONTEXT, 9.0)
    assert ("attention", 250) in asked
    assert {depth for family, depth in asked if family != "attention"} == {0}
    old = {name: value for name, value in ops[0].to_dict().items() if name != "depth"}
    assert KernelOp.from_dict(old).depth == 0


@pytest.mark.parametrize("content", [b"GGUF", None])
def test_a_model_that_cannot_be_loaded_is_one_clear_line(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(MODEL.read_bytes()[:3000] if content is None else content)
    with pytest.raises(TargetUnusable, match=r"broken\.gguf|gguf"):
        WorkerExecutor("dyno", {"model": str(path)}).describe()
    done = subprocess.run(
        [sys.executable, "-m", "dyno_tuner.cli", "--model", str(path), "--out", str(tmp_path / "p.yaml")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("tune: ")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "p.yaml").exists()


def test_a_tune_from_end_to_end(tmp_path: Path) -> None:
    """The profile that comes out is the one that the runtime takes, as an exact match."""
    out = tmp_path / "p.yaml"
    options = Options(WORKLOAD, budget=24.0, max_trials=4, rounds=2, max_rounds=2, kernels=True, patience=3)
    tuned(Request(str(MODEL), options, out=out, quiet=True, command="tune --model x"))
    profile = profiles.load_profile(out)
    assert set(profile.settings) <= {"ubatch", "threads", "threads_batch", "cpu_repack"}
    assert profile.evidence is not None
    assert profile.evidence.quality is not None
    assert profile.evidence.quality.routing_pinned
    with Engine(str(MODEL), profile=str(out), require_profile=True) as engine:
        assert engine.logits([1, 2, 3]).shape[0] == 3


def test_a_short_sample_is_repeated_and_its_median_run_counts(
    target: Any, default: Configuration, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths are scripted, so that no clock decides: one run is put aside, and does not count."""
    target.apply(default, CONTEXT)
    lengths = [0.02, 0.02, 0.5, 0.02]
    asked: list[int] = []

    def one_run(workload: Workload, metric: str, prompt: int) -> tuple[float, float]:
        asked.append(prompt)
        return lengths[len(asked) - 1], lengths[len(asked) - 1]

    monkeypatch.setattr(target, "_run", one_run)
    sample = target.measure(WORKLOAD, "pp", 2)
    assert (sample.seconds, sample.clock_seconds, sample.tokens) == (0.02, 0.02, WORKLOAD.pp)
    assert asked == [2, 2, 2]
    lengths[:] = [1.0]
    asked.clear()
    assert target.measure(WORKLOAD, "pp", 0).seconds == 1.0
    assert len(asked) == 1
    lengths[:] = [1e-6] * 1000
    asked.clear()
    target.measure(WORKLOAD, "pp", 0)
    assert len(asked) == 64  # a clock that hardly moves does not hold it up


class _Failing:
    """A session whose every call raises the same."""

    draws_on_device = False
    capture_failures = 0

    def __init__(self, error: Exception) -> None:
        self._error = error

    def close(self) -> None:
        """Works on a lost device too."""

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            raise self._error

        return call


@pytest.mark.parametrize("error", [DeviceLostError("lost"), OutOfMemoryError("full"), PlanError("no")])
def test_errors_in_every_call_of_the_engine(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost device ends the process; memory and impossible settings cost a trial."""
    made = DynoTarget(str(MODEL))
    configuration = Configuration({})
    made.apply(configuration, CONTEXT)
    loaded = dict(made._loaded)
    wanted = {
        DeviceLostError: (TargetLost, None),
        OutOfMemoryError: (TargetFailure, "oom"),
        PlanError: (TargetFailure, "invalid"),
    }[type(error)]
    calls = {
        "apply": lambda: made.apply(configuration.replace(ubatch=64), CONTEXT),
        "measure pp": lambda: made.measure(WORKLOAD, "pp", 0),
        "measure tg": lambda: made.measure(WORKLOAD, "tg", 0),
        "routing": lambda: made.routing(Configuration({}), WORKLOAD),
    }
    for name, call in calls.items():
        made._session, made._loaded = _Failing(error), dict(loaded)
        if name == "routing":
            monkeypatch.setattr(made, "_switch", lambda configuration: None)
        with pytest.raises(wanted[0]) as caught:
            call()
        assert getattr(caught.value, "status", None) == wanted[1], name
    made._session, made._loaded = _Failing(error), dict(loaded)
    groups = made._asked()[:1]
    monkeypatch.setattr(made, "_asked", lambda: groups)
    monkeypatch.setattr(made, "_exact", lambda: ([np.zeros((1, 4))], [None]))
    if wanted[0] is TargetLost:
        with pytest.raises(TargetLost):
            made.quality(configuration, CONTEXT)
    else:
        assert str(made.quality(configuration, CONTEXT).status) == wanted[1]


class _Uncaptured:
    """A session whose first runs each leave a graph that could not be captured."""

    draws_on_device = False

    def __init__(self, failures: int) -> None:
        self.capture_failures, self.runs, self._left = 0, 0, failures

    def reset(self) -> None:
        """Begins a run."""
        self.runs += 1

    def decode(self, *arguments: Any, **named: Any) -> None:
        if self._left and self.capture_failures < self.runs:
            self._left -= 1
            self.capture_failures += 1

    def captures(self) -> list[dict[str, Any]]:
        return [{"reason": "too many nodes"}]


@pytest.mark.parametrize(("failures", "runs"), [(0, 1), (1, 2), (2, 3), (3, None)])
def test_a_run_without_its_graph_is_made_again(failures: int, runs: int | None) -> None:
    made = DynoTarget(str(MODEL))
    made.apply(Configuration({}), CONTEXT)
    made._session = session = _Uncaptured(failures)
    if runs is None:
        with pytest.raises(TargetFailure, match="too many nodes"):
            made._run(WORKLOAD, "tg", 0)
        return
    assert made._run(WORKLOAD, "tg", 0)[0] > 0
    assert session.runs == runs
