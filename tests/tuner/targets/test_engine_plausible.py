"""What other engines' benchmarks claim, held against the machine and against the time of their processes."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Any

import pytest
from dyno import _core
from dyno_tuner.core.errors import TargetFailure
from dyno_tuner.core.protocol import Configuration, Measurement, OpContext, Sample, TrialStatus, Workload
from dyno_tuner.measure.measurement import judge_plausibility
from dyno_tuner.targets.ggml import rate_limits
from dyno_tuner.targets.ggml import target as ggml_target
from dyno_tuner.targets.ggml.process import Finished
from dyno_tuner.targets.ggml.rate_limits import Limits, Work, bounds, cpu_limits, gpu_limits, work_of
from dyno_tuner.targets.ggml.target import GgmlTarget
from dyno_tuner.targets.ggml.wall_clock import Claim, Walls
from fake_engines import fake

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

MAIN, IK = "llama.cpp-0c1e570", "ik_llama.cpp-4840"
WORKLOAD = Workload(pp=64, tg=8)
NOW = OpContext("test")


@pytest.fixture
def model(tiny_dir: Path) -> str:
    return str(next(iter(sorted(tiny_dir.glob("*qwen3moe*.gguf")))))


def test_a_cpu_bounds_both_kinds() -> None:
    two = cpu_limits({"cores": 2, "l2_bytes": 1 << 21, "l3_bytes": 32 << 20})
    cores = two.cached / (34 << 20)
    assert cores >= 2
    assert two.operations == pytest.approx(cores * 6e9 * 4096)
    small = bounds(Work(1e7, 1e7), [two])  # lives in the caches
    assert small["pp"] == small["tg"] == two.operations / 2e7
    large = bounds(Work(8e9, 4.5e9 + two.cached), [two])
    assert large["tg"] == two.bytes / 4.5e9
    assert large["tg"] < large["pp"]
    assert bounds(Work(0, 0), [two]) == {}


def test_limits_of_this_process_bound_no_engine_that_is_told_its_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usual = cpu_limits({"cores": 1})
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert cpu_limits({"cores": 1}) == usual
    monkeypatch.setattr(_core, "cpu_limits", lambda: {"affinity": 7})
    assert cpu_limits({"cores": 1}).operations == pytest.approx(7 * 6e9 * 4096)


def test_the_work_of_a_model_is_what_a_token_needs(model: str) -> None:
    whole = sum(
        t["nbytes"] for t in _core.Gguf(model).tensors() if len(t["shape"]) > 1 and "embd" not in t["name"]
    )
    every, some = work_of(model, 0, 0), work_of(model, 4, 2)
    assert 0 < some.read < every.read <= whole
    assert some.multiplied < every.multiplied


H200 = {13: 1980000, 16: 132, 36: 3201000, 37: 6144, 38: 62914560, 75: 9, 76: 0}


def driver(folder: Path, attributes: dict[int, int]) -> str:
    """A library that answers what gpu_limits asks the driver."""
    cases = " ".join(f"case {n}: *v = {x}; return 0;" for n, x in attributes.items())
    source = folder / "driver.c"
    source.write_text(
        "int cuInit(unsigned f) { return 0; }\n"
        "int cuDeviceGet(int *d, int n) { *d = n; return n ? 101 : 0; }\n"
        f"int cuDeviceGetAttribute(int *v, int a, int d) {{ switch (a) {{ {cases} }} return 1; }}\n"
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "libcuda.so.1", source], check=True)
    return str(folder / "libcuda.so.1")


def test_a_gpu_bounds_by_what_the_driver_tells(tmp_path: Path) -> None:
    library = driver(tmp_path, H200)
    told = gpu_limits(0, library)
    assert told.operations == pytest.approx(2 * 132 * 1.98e9 * 8192)  # int8, twice
    assert told.bytes == pytest.approx(2 * 4.917e12, rel=1e-3)
    assert told.cached == 62914560
    unknown = gpu_limits(1, library)
    assert (unknown.operations, unknown.bytes) == (2e16, 2e13)
    assert gpu_limits(0, "no-such-library.so") == unknown
    assert Limits(1, 2, 3) + Limits(4, 5, 6) == Limits(5, 7, 9)


@pytest.mark.parametrize("version", [MAIN, IK])
def test_absurd_rates_are_above_the_bound(tmp_path: Path, model: str, version: str) -> None:
    target = GgmlTarget(version.rpartition("-")[0], model, str(fake(tmp_path / "b", version)))
    described = target.describe().bounds
    target.close()
    for metric, tokens in (("pp", 512), ("tg", 64)):
        seconds = tokens / 1e12
        measurement = Measurement(TrialStatus.OK, (Sample(metric, 0, tokens, seconds, seconds),))
        assert judge_plausibility(measurement, described, None).status is TrialStatus.IMPLAUSIBLE


def test_the_cpu_counts_where_weights_may_be_in_host_memory(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = {"kind": "cuda", "compute_capability": "9.0", "sm_count": 132, "memory_mib": 143771}
    monkeypatch.setattr(ggml_target, "cuda_device", lambda number: (device, "GPU"))
    monkeypatch.setattr(rate_limits, "gpu_limits", lambda number: Limits(1e15, 1e13))
    folder = str(fake(tmp_path / "b", MAIN))
    found = []
    for gpu, command in (([0], []), ([0, 1], []), ([0], ["llama-server", "-ot", "exps=CPU"])):
        target = GgmlTarget("llama.cpp", model, folder, gpu=gpu, command=command)
        found.append(target.describe().bounds)
        target.close()
    assert found[1]["pp"] == pytest.approx(2 * found[0]["pp"])
    assert found[0]["pp"] < found[2]["pp"] < found[1]["pp"]


class Pretended:
    """A process of llama-bench, made up: `load` seconds and so many a repetition, of which it claims a
    share."""

    def __init__(self, target: GgmlTarget, monkeypatch: pytest.MonkeyPatch) -> None:
        self.load: dict[str, float] = {}
        self.each: dict[str, float] = {}
        self.share: dict[str, float] = {}
        self.asked: list[int] = []
        monkeypatch.setattr(target, "_start", self.start)

    def start(self, command: Sequence[str], environment: Any, readings: Any = None) -> Finished:
        def value(name: str) -> str:
            return command[list(command).index(name) + 1]

        ubatch, repetitions = value("-ub"), int(value("-r"))
        self.asked.append(repetitions)
        each = self.each.get(ubatch, 0.5)
        samples = [round(1e9 * each * self.share.get(ubatch, 1.0))] * repetitions
        row = f'{{"n_prompt": 64, "n_gen": 0, "samples_ns": {samples}}}'
        return Finished(f"[{row}]", "", self.load.get(ubatch, 3.0) + each * repetitions, 0)


@pytest.fixture
def pretended(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> tuple[GgmlTarget, Pretended]:
    target = GgmlTarget("llama.cpp", model, str(fake(tmp_path / "b", MAIN)))
    process = Pretended(target, monkeypatch)
    target.apply(Configuration({}), NOW)
    target.measure(Workload(pp=64, tg=0), "pp", 0)
    assert process.asked == [4]
    return target, process


def test_a_gain_that_no_clock_outside_sees_is_implausible(
    pretended: tuple[GgmlTarget, Pretended],
) -> None:
    target, process = pretended
    process.share["64"] = 0.01
    target.apply(Configuration({"ubatch": 64}), NOW)
    with pytest.raises(TargetFailure, match="more repetitions that took") as caught:
        target.measure(Workload(pp=64, tg=0), "pp", 0)
    assert caught.value.status == TrialStatus.IMPLAUSIBLE
    assert len(process.asked) == 4  # and twice, with more
    target.close()


def test_a_gain_behind_a_longer_load_is_believed(pretended: tuple[GgmlTarget, Pretended]) -> None:
    target, process = pretended
    process.load |= {"64": 10.0, "128": 9.5}
    process.each |= {"64": 0.1, "128": 0.2, "256": 0.1}
    for ubatch, runs in ((64, 3), (128, 4), (256, 5)):  # once asked, longer loads are no news
        target.apply(Configuration({"ubatch": ubatch}), NOW)
        assert target.measure(Workload(pp=64, tg=0), "pp", 0).seconds < 0.3
        assert len(process.asked) == runs
    target.close()


def test_what_is_too_small_to_be_seen_is_not_asked_again() -> None:
    walls, workload = Walls(), Workload(pp=64, tg=8)
    assert walls.doubt(workload, Claim({"pp": 0.1}, 9.0), 4) == 0  # nothing to compare with
    walls.learn(workload, Claim({"pp": 0.4, "tg": 0.4}, 3.0))
    assert walls.doubt(workload, Claim({"pp": 0.01}, 9.0), 4) == 0  # 0.39 s can't be told from noise
    assert walls.doubt(workload, Claim({"pp": 0.01, "tg": 0.01}, 9.0), 4) > 0
    assert walls.doubt(workload, Claim({"pp": 0.01, "tg": 0.01}, 2.3), 4) == 0  # the process is shorter, too


def test_a_sweep_that_claims_more_than_its_time(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = ("llama-bench", "llama-server", "llama-sweep-bench")
    target = GgmlTarget("ik_llama.cpp", model, str(fake(tmp_path / "b", IK, tools)))
    real = ggml_target.execute
    monkeypatch.setattr(ggml_target, "execute", lambda *a, **k: _at_once(real(*a, **k)))
    target.apply(Configuration({"ubatch": 64}), NOW)
    with pytest.raises(TargetFailure, match="llama-sweep-bench claims") as caught:
        target.measure(Workload(pp=128, tg=8, depth=128), "pp", 0)
    assert caught.value.status == TrialStatus.IMPLAUSIBLE
    target.close()


def _at_once(done: Finished) -> Finished:
    return Finished(done.stdout, done.stderr, 1e-6, done.code)
