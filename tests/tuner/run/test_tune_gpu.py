"""`tune --gpu 0` on the shipped model with a small budget, and its profile in a fresh process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dyno import _core, profiles
from dyno_tuner.core.options import MeasurementPolicy
from dyno_tuner.core.protocol import Configuration, KernelChoice, OpContext, TrialStatus, Workload
from dyno_tuner.decide.answer_check import ROUNDING_FACTOR, ROUNDING_FLOOR, judge
from dyno_tuner.execution.worker import WorkerExecutor
from dyno_tuner.record import journal
from dyno_tuner.record.recorder import Recorder
from dyno_tuner.space.knobs import Fidelity

ROOT = Path(__file__).resolve().parents[3]
GPUS = [d for d in _core.devices() if d["kind"] == "cuda" and not _core.device_problem(d)]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPUS, reason=f"no GPU: {_core.no_cuda_reason()}")]


def run(module: str, *arguments: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)], capture_output=True, text=True, check=False
    )


def test_a_tune_from_end_to_end(trained_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "gpu.yaml"
    done = run("dyno_tuner.cli", "--model", trained_model, "--gpu", 0, "--budget", "40s", "--workload",
               "pp=512,tg=32", "--out", out, "--json", "--quiet")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["status"] in ("complete", "budget")
    profile = profiles.load_profile(out)
    device = profile.match.device
    assert isinstance(device, profiles.CudaDevice)
    assert device.sm_count == GPUS[0]["sm_count"]
    assert (device.memory_gbps or 0) > 10
    assert (device.pcie_gbps or 0) > 0.5
    assert profile.evidence is not None
    assert set(profile.evidence.baseline) == {"pp512", "tg32"}
    assert all(name not in ("threads", "cpu_repack") for name in profile.settings)
    text = run("dyno", "run", "-m", trained_model, "-p", "def f(", "-n", 8, "--gpu", 0, "--profile", out,
               "--require-profile")  # fmt: skip
    assert text.returncode == 0, text.stderr
    assert "(exact match)" in text.stderr


def test_the_target_measures_on_the_gpu(trained_model: Path) -> None:
    from dyno_tuner.targets.dyno.target import DynoTarget

    target = DynoTarget(str(trained_model), device="cuda:0")
    try:
        described = target.describe()
        assert described.device["kind"] == "cuda"
        assert {"ubatch", "cuda_graphs"} <= set(described.engine["defaults"])
        assert not {"cpu_repack", "cpu_isa"} & set(described.engine["defaults"])
        assert {"memory_gbps", "pcie_gbps", "f16_tflops"} == set(described.rates)
        default = Configuration({"ubatch": 512})
        target.apply(default, OpContext("k"))
        workload = Workload(pp=256, tg=8)
        for metric in workload.metrics:
            rate = target.measure(workload, metric, 0).rate
            assert 0 < rate < described.bounds.get(metric, float("inf"))
        quality = target.quality(default, OpContext("q"))
        assert quality.status is TrialStatus.OK, quality.message
        assert quality.mean_kld < 5e-3
        ops = target.kernel_ops(default, workload)
        assert ops
        times = target.time_ops(ops[0].key, ops[0].m, ops[0].candidates, threads=1, seconds=0.002)
        assert len(times) == len(ops[0].candidates)
        assert all(t and min(t) > 0 for t in times)
    finally:
        target.close()


# In the worker: settings that cost it the GPU.
_LOSING = """
import sys
sys.path.insert(0, {helpers!r})
from break_context import NoCompiler, break_context
from dyno_tuner.targets.dyno.target import DynoTarget
real = DynoTarget.apply

def apply(self, configuration, context):
    real(self, configuration, context)
    if configuration.settings["ubatch"] == 96:
        try:
            break_context("illegal address")
        except NoCompiler as error:
            print("no compiler", file=open({note!r}, "w"))
            raise

DynoTarget.apply = apply
"""


def test_settings_that_cost_the_gpu_cost_one_trial(
    trained_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    helpers, note = ROOT / "tests" / "cuda", tmp_path / "note"
    (tmp_path / "sitecustomize.py").write_text(_LOSING.format(helpers=str(helpers), note=str(note)))
    monkeypatch.syspath_prepend(str(tmp_path))
    executor = WorkerExecutor("dyno", {"model": str(trained_model), "device": "cuda:0"})
    workload = Workload(pp=128, tg=8)
    try:
        with journal.Journal(tmp_path / "j") as book:
            recorder = Recorder(executor, workload, journal=book)

            def status(key: str, ubatch: int) -> tuple[TrialStatus, str]:
                configuration = Configuration({"ubatch": ubatch})
                measurement = recorder.measurement(key, configuration, ["pp"], MeasurementPolicy(), process=0)
                return measurement.status, measurement.message

            assert status("a", 128)[0] is TrialStatus.OK
            lost = status("b", 96)
            if note.exists():
                pytest.skip("this driver cannot compile the kernel that faults")
            assert lost[0] is TrialStatus.CRASH
            assert "cuda:0 is lost" in lost[1]
            starts = executor.starts
            assert status("c", 128)[0] is TrialStatus.OK
            assert executor.starts == starts + 1
            assert "not tried again" in status("d", 96)[1]
            assert executor.starts == starts + 1
    finally:
        executor.close()


def test_correct_kernels_are_not_called_wrong(trained_model: Path) -> None:
    """What is within the limit in the mean of all batch sizes is within it at each of them."""
    from dyno_tuner.targets.dyno.target import DynoTarget

    target = DynoTarget(str(trained_model), device="cuda:0")
    try:
        default = target.quality(Configuration({}), OpContext("default"))
        assert default.status is TrialStatus.OK, default.message
        settings: list[dict[str, Any]] = [
            {"ubatch": 64}, {"ubatch": 33}, {"fusion": False}, {"flash_attention": False},
            {"matvec_max_tokens": 0}, {"matvec_id_max_tokens": 0},
            {"mmq_max_tokens": 0, "mmq_id_max_tokens": 0},
        ]  # fmt: skip
        ops = target.kernel_ops(Configuration({}), Workload(pp=512, tg=8))
        asked = [Configuration(s) for s in settings] + [
            Configuration({}, (KernelChoice(op.key, op.tokens, config),))
            for op in ops[:4]
            for config in (op.candidates[0], op.candidates[-1])
        ]
        judged = 0
        for number, configuration in enumerate(asked):
            found = target.quality(configuration, OpContext(f"sound/{number}"))
            assert found.status is TrialStatus.OK, (configuration, found.message)
            if found.mean_kld <= ROUNDING_FACTOR * default.mean_kld + ROUNDING_FLOOR:
                judged += 1
                verdict = judge(found, default, Fidelity.ROUNDING, None)
                assert verdict.ok, (configuration, verdict.reason)
        assert judged >= len(asked) // 2
    finally:
        target.close()
