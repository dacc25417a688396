"""What is seen of a GPU around measurements, with a made-up NVML: nothing here needs a GPU."""

from __future__ import annotations

import dataclasses
import os
import sys
import types
from typing import TYPE_CHECKING, Any

import pytest
from conftest_tuner import WORKLOAD
from dyno import _nvml, profiles
from dyno_tuner.ab.run import Run
from dyno_tuner.build.builder import Built
from dyno_tuner.build.measure import RealBench
from dyno_tuner.core.options import MeasurementPolicy
from dyno_tuner.core.protocol import Configuration, KernelOp, Measurement, TrialStatus, Workload
from dyno_tuner.execution import ray_workers
from dyno_tuner.execution.inline_executor import InlineExecutor
from dyno_tuner.measure import machine_monitor
from dyno_tuner.measure.machine_monitor import COOLING, Conditions, GpuWatch, Machine
from dyno_tuner.output.emit import profile_of
from dyno_tuner.output.progress import Progress
from dyno_tuner.record import journal
from dyno_tuner.record.recorder import Recorder
from dyno_tuner.run.tune import Options, Tune
from dyno_tuner.targets.simulated.target import SimulatedTarget

if TYPE_CHECKING:
    from pathlib import Path

BUS = "0000:00:07.0"
THERMAL, POWER_CAP, IDLE = 0x20, 0x4, 0x1


class FakeNvml(types.ModuleType):
    """The calls that `dyno._nvml` makes; what it answers is set from outside."""

    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM, NVML_CLOCK_MEM = 0, 1, 2
    NVML_PCIE_UTIL_TX_BYTES, NVML_PCIE_UTIL_RX_BYTES = 0, 1

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.open = 0
        self.reasons = IDLE
        self.temperature = 50
        self.pids = [os.getpid()]
        self.deaf = False
        self.used: int | None = None  # bytes of 80 GB; None: it does not tell
        self.link = {0: 0, 1: 0}  # KB/s out of the GPU and into it
        self.asked_link = 0

    def nvmlInit(self) -> None:
        if self.deaf:
            raise self.NVMLError("driver not loaded")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByPciBusId(self, bus: str) -> str:
        if bus != BUS:
            raise self.NVMLError("not found")
        return "handle"

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> int:
        return 700_000

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return 412_300

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        if self.used is None:
            raise self.NVMLError("not supported")
        return types.SimpleNamespace(used=self.used, total=80_000_000_000)

    def nvmlDeviceGetPcieThroughput(self, handle: str, kind: int) -> int:
        self.asked_link += 1
        return self.link[kind]

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        return [types.SimpleNamespace(pid=p) for p in self.pids]

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        return self.temperature

    def nvmlDeviceGetClockInfo(self, handle: str, clock: int) -> int:
        return 1200 if self.reasons & THERMAL else 1980

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return self.reasons


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    made = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", made)
    return made


class _Engine(InlineExecutor):
    """Throttles the GPU during the measurements that are counted off in `hot`."""

    def __init__(self, nvml: FakeNvml, hot: set[int], reason: int = THERMAL) -> None:
        super().__init__(SimulatedTarget("saturating", 3))
        self.nvml = nvml
        self.hot = hot
        self.reason = reason
        self.measurements = 0

    def measurement(self, *args: Any, **kwargs: Any) -> Measurement:
        self.measurements += 1
        measurement = super().measurement(*args, **kwargs)
        if self.measurements not in self.hot:
            self.nvml.reasons, self.nvml.temperature = IDLE, 60
            return measurement
        self.nvml.reasons, self.nvml.temperature = self.reason, 88
        slow = tuple(
            dataclasses.replace(s, seconds=1.5 * s.seconds, clock_seconds=1.5 * s.clock_seconds)
            for s in measurement.samples
        )
        return dataclasses.replace(measurement, samples=slow)


def _measurement(
    nvml: FakeNvml, hot: set[int], reason: int = THERMAL
) -> tuple[Measurement, Recorder, _Engine, list[Any]]:
    engine, seen = _Engine(nvml, hot, reason), []
    with GpuWatch(BUS, period=60.0) as watch:

        def cool(seconds: float) -> None:
            seen.append(("sleep", seconds))
            nvml.reasons, nvml.temperature = IDLE, 60

        nvml.temperature = 60
        recorder = Recorder(engine, WORKLOAD, virtual_time=True, watch=watch, sleep=cool)
        recorder.on_note = lambda kind, data: seen.append((kind, dict(data)))
        measurement = recorder.measurement("v", Configuration({}), ["pp"], MeasurementPolicy(), process=0)
    assert nvml.open == 0
    return measurement, recorder, engine, seen


def test_a_throttled_window_is_dropped_counted_and_measured_again(nvml: FakeNvml) -> None:
    clean, *_ = _measurement(nvml, set())
    measurement, recorder, engine, seen = _measurement(nvml, {1})
    assert measurement == clean
    assert engine.measurements == 2
    assert recorder.conditions.to_dict() == {
        "throttled": 1,
        "other_processes": 0,
        "temperature_c": [60, 60],
        "sm_mhz": [1980, 1980],
        "power_limit_w": 700.0,
    }
    notes = [data["message"] for kind, data in seen if kind == "throttled"]
    assert len(notes) == 1
    assert "thermal limit" in notes[0]
    assert ("sleep", COOLING[0]) in seen


def test_a_gpu_that_stays_throttled_is_measured_as_it_is(nvml: FakeNvml) -> None:
    measurement, recorder, engine, seen = _measurement(nvml, set(range(1, 10)))
    assert engine.measurements == 1 + len(COOLING)
    assert measurement.status is TrialStatus.OK
    assert recorder.conditions.throttled == len(COOLING)
    assert "measures it as it is" in [data["message"] for kind, data in seen if kind == "throttled"][-1]


def test_a_gpu_that_stays_throttled_is_not_waited_for_at_every_visit(nvml: FakeNvml) -> None:
    engine, pauses = _Engine(nvml, {1, 2, 3, 4, 6}), []

    def wait(seconds: float) -> None:
        pauses.append(seconds)
        nvml.reasons = IDLE

    with GpuWatch(BUS, period=60.0) as watch:
        recorder = Recorder(engine, WORKLOAD, virtual_time=True, watch=watch, sleep=wait)
        for key in ("stays", "still hot", "recovers", "hot again", "over"):
            nvml.reasons = IDLE
            recorder.measurement(key, Configuration({}), ["pp"], MeasurementPolicy(), process=0)
    # Three tries, one, one that is clean, and after that it is worth waiting again.
    assert engine.measurements == 3 + 1 + 1 + 2 + 1
    assert pauses == [*COOLING, COOLING[0]]


def test_a_power_limit_that_is_reached_drops_nothing(nvml: FakeNvml) -> None:
    _, recorder, engine, _ = _measurement(nvml, {1}, reason=POWER_CAP)
    assert engine.measurements == 1
    assert recorder.conditions.throttled == 0


def test_another_process_is_said_once_and_stands_in_the_evidence(nvml: FakeNvml) -> None:
    nvml.pids = [os.getpid(), os.getppid()]
    with GpuWatch(BUS, period=60.0) as watch:
        said: list[str] = []
        recorder = Recorder(_Engine(nvml, set()), WORKLOAD, virtual_time=True, watch=watch)
        recorder.on_note = lambda kind, data: said.append(data["message"]) if kind == "company" else None
        for key in ("a", "b"):
            recorder.measurement(key, Configuration({}), ["pp"], MeasurementPolicy(), process=0)
    assert len(said) == 1
    assert str(os.getppid()) in said[0]
    assert recorder.conditions.to_dict()["other_processes"] == 1


def test_readings_go_on_while_a_visit_runs(nvml: FakeNvml) -> None:
    """Throttled only in the middle: neither the first nor the last reading shows it."""
    with GpuWatch(BUS, period=0.001) as watch, watch.window() as window:
        before = window.readings
        nvml.reasons = THERMAL
        while window.readings < before + 3:
            pass
        nvml.reasons = IDLE
    assert window.throttled == "thermal limit"


@pytest.mark.parametrize("how", ["deaf", "absent", "unknown"])
def test_without_nvml_nothing_is_watched(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    nvml.deaf = how == "deaf"
    if how == "absent":
        monkeypatch.setitem(sys.modules, "pynvml", None)
        assert "nvidia-ml-py" in _nvml.why_not()
    engine = _Engine(nvml, {1})
    with GpuWatch("0000:99:00.0" if how == "unknown" else BUS) as watch:
        recorder = Recorder(engine, WORKLOAD, virtual_time=True, watch=watch)
        assert (
            recorder.measurement("v", Configuration({}), ["pp"], MeasurementPolicy(), process=0).status
            is TrialStatus.OK
        )
    assert recorder.conditions.to_dict() == {}


def test_a_throttled_tune_proves_the_same_and_resumes_with_its_counts(nvml: FakeNvml, tmp_path: Path) -> None:
    def tune(hot: set[int], past: Any = (), book: journal.Journal | None = None) -> Tune:
        engine = _Engine(nvml, hot)
        space = SimulatedTarget("saturating", 3).surface.space()
        with GpuWatch(BUS, period=60.0) as watch:
            recorder = Recorder(
                engine, WORKLOAD, journal=book, past=past, identity=space.identity, virtual_time=True,
                watch=watch, sleep=lambda seconds: setattr(nvml, "reasons", IDLE),
            )  # fmt: skip
            made = Tune(recorder, space, Options(WORKLOAD, seed=3, max_trials=10, rounds=2, max_rounds=2))
            made.run()
        return made

    quiet = tune(set()).outcome()
    with journal.Journal(tmp_path / "j") as book:
        hot = tune({2, 9, 17, 25}, book=book).outcome()
    assert hot.conditions["throttled"] == 4
    assert {**hot.to_dict(), "conditions": None} == {**quiet.to_dict(), "conditions": None}
    resumed = tune(set(), past=journal.load(tmp_path / "j").records).outcome()
    assert resumed.to_dict() == hot.to_dict()
    profile = profile_of(resumed, SimulatedTarget("saturating", 3).describe(), *_made())
    assert profile.evidence is not None
    assert profile.evidence.environment is not None
    assert profile.evidence.environment.throttled == 4
    assert profiles.loads_profile(profiles.dumps_profile(profile)) == profile


def _made() -> Any:
    import datetime

    from dyno_tuner.output.emit import Made

    return Made(WORKLOAD, 3, "", "0" * 64, "m", datetime.date(2026, 1, 1)), {}


def test_the_first_load_of_a_file_never_decides() -> None:
    """Ten times slower from a cold page cache, in every sample: the result is the same to the last bit."""

    class Cold(InlineExecutor):
        measurements = 0

        def measurement(self, *args: Any, **kwargs: Any) -> Measurement:
            measurement = super().measurement(*args, **kwargs)
            self.measurements += 1
            if self.measurements > 1:
                return measurement
            slow = [dataclasses.replace(s, seconds=10 * s.seconds) for s in measurement.samples]
            return dataclasses.replace(measurement, samples=tuple(slow))

    outcomes = []
    for kind in (InlineExecutor, Cold):
        target = SimulatedTarget("saturating", 3)
        space = target.surface.space()
        recorder = Recorder(kind(target), WORKLOAD, identity=space.identity, virtual_time=True)
        options = Options(WORKLOAD, seed=3, max_trials=10, rounds=2, max_rounds=2)
        outcomes.append(Tune(recorder, space, options).run().to_dict())
    assert outcomes[0] == outcomes[1]


def test_the_live_view_shows_clocks_and_temperature(
    nvml: FakeNvml, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, _, seen = _measurement(nvml, {1})
    progress = Progress("m", None)
    for kind, data in seen:
        if kind != "sleep":
            progress.note(kind, data)
    assert progress._gpu == "60 °C, 1980 to 1980 MHz, 412 of 700 W, 1 throttled measurements dropped"
    assert "thermal limit" in capsys.readouterr().err


def test_ops_timed_alone_are_watched(nvml: FakeNvml) -> None:
    """Times of a throttled GPU are dropped, taken again, and found again in the journal."""

    class Ops(_Engine):
        calls = 0

        def time_ops(self, *args: Any) -> list[list[float]]:
            self.calls += 1
            self.nvml.reasons = THERMAL if self.calls == 1 else IDLE
            return [[2.0 if self.calls == 1 else 1.0]]

    engine, pauses = Ops(nvml, set()), []
    with GpuWatch(BUS, period=60.0) as watch:

        def cool(seconds: float) -> None:
            pauses.append(seconds)
            nvml.reasons = IDLE

        recorder = Recorder(engine, WORKLOAD, virtual_time=True, watch=watch, sleep=cool)
        op = KernelOp("matmul", "m1", 1, 1, {"variant": "a"}, ({"variant": "a"},), "tg")
        assert recorder.time_ops("k", op, [{"variant": "a"}], threads=1, seconds=0.1, process=0) == [[1.0]]
    assert (engine.calls, pauses) == (2, [COOLING[0]])
    assert recorder.conditions.to_dict()["throttled"] == 1


def test_ab_watches_the_gpu(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, tiny_dir: Path) -> None:
    """The third process is slowed by heat and measured again; another process on the GPU is said."""
    from dyno_tuner.cli import ab_command
    from dyno_tuner.cli.commands import app
    from typer.testing import CliRunner

    runs = 0

    class Side:
        kind = "dyno"

        def __init__(self) -> None:
            self.facts: dict[str, Any] = {"engine": "dyno", "settings": {}}

        def run(self, workload: Any) -> Run:
            nonlocal runs
            runs += 1
            nvml.temperature = 50 + runs
            nvml.reasons = THERMAL if runs == 3 else IDLE
            rate = 50.0 if runs == 3 else 100.0
            return Run({"pp": (rate,) * 3, "tg": (rate,) * 3})

        def close(self) -> None:
            """Nothing to close."""

    nvml.pids = [os.getpid(), os.getppid()]
    monkeypatch.setattr(machine_monitor, "SPILL_READINGS", 2)
    # As with a side whose plan keeps experts on the CPU.
    nvml.used, nvml.link = 79_000_000_000, {0: 0, 1: 11_000_000}
    monkeypatch.setattr(ab_command, "make_side", lambda *given: Side())
    monkeypatch.setattr(ab_command, "gpu_bus", lambda number: BUS)
    monkeypatch.setattr(ab_command.time, "sleep", lambda seconds: setattr(nvml, "reasons", IDLE))
    words = ["ab", "default", "default", "-m", str(tiny_dir / "qwen3moe-tiny.gguf"), "--gpu", "0",
             "--rounds", "2", "--no-answers"]  # fmt: skip
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0, shown.output
    assert runs == 1 + 2 * 4 + 1  # the first load, two rounds, and one again
    assert "thermal limit" in shown.output
    assert f"({os.getppid()}" in shown.output
    assert (
        "The GPU: 50 to 60 °C, 1980 MHz, 1 throttled measurements repeated, 1 other processes" in shown.output
    )
    assert "no difference" in shown.output
    assert "memory is full" not in shown.output
    assert nvml.open == 0


def test_builds_may_keep_weights_on_the_host(
    nvml: FakeNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Side:
        kind, facts = "dyno", None

        def run(self, workload: Workload) -> Run:
            return Run(dict.fromkeys(workload.metrics, (100.0, 100.0)))

        def close(self) -> None:
            """Nothing to close."""

    monkeypatch.setattr(machine_monitor, "SPILL_READINGS", 2)
    monkeypatch.setattr(RealBench, "_side", lambda *given: Side())
    nvml.used, nvml.link = 79_000_000_000, {0: 0, 1: 11_000_000}
    said: list[str] = []
    bench = RealBench(
        "dyno", "m.gguf", Workload(pp=8, tg=4), 0, {}, 2, 0.01, 60.0, 0, tmp_path / "log", BUS, said.append
    )
    built = Built("default", "", 1.0, 1.0, 1, 1, 1)
    assert bench.compare(built, built, {}, {}, None, answers=False).rounds == 2
    assert len(said) == 2, said
    assert all(line.startswith("round ") for line in said)


def test_a_gpu_that_spills_into_host_memory_is_said_and_counted(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_monitor, "SPILL_READINGS", 2)  # before and after the measurement
    nvml.used, nvml.link = 79_000_000_000, {0: 1_000_000, 1: 11_000_000}
    _, recorder, _, seen = _measurement(nvml, set())
    said = [data["message"] for kind, data in seen if kind == "spill"]
    assert len(said) == 1
    assert "memory is full and 12.0 GB/s cross its link" in said[0]
    assert "is in host memory" in said[0]
    told = recorder.conditions.to_dict()
    assert told["spilled"] == 1
    assert profiles.Environment(**told).spilled == 1


@pytest.mark.parametrize(("used", "rate"), [(40_000_000_000, 11_000_000), (79_500_000_000, 4_000)])
def test_a_full_memory_or_a_busy_link_alone_is_no_spill(nvml: FakeNvml, used: int, rate: int) -> None:
    nvml.used, nvml.link = used, {0: rate, 1: rate}
    _, recorder, _, seen = _measurement(nvml, set())
    assert not [kind for kind, _ in seen if kind == "spill"]
    assert "spilled" not in recorder.conditions.to_dict()
    assert bool(nvml.asked_link) == (used > 79_000_000_000), "the link is asked only if memory is full"


def test_what_crosses_by_a_plan_is_no_spill(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_monitor, "SPILL_READINGS", 2)
    nvml.used, nvml.link = 79_000_000_000, {0: 0, 1: 11_000_000}
    for planned in (False, True):
        with Machine(BUS, host_weights=planned) as machine, machine.window() as window:
            pass
        assert window.spilled is not planned


@pytest.mark.parametrize("planned", [False, True])
def test_a_node_of_a_cluster_knows_of_weights_on_the_host(
    nvml: FakeNvml, planned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The executor here asks, and the host there watches."""
    monkeypatch.setattr(machine_monitor, "SPILL_READINGS", 2)
    nvml.used, nvml.link = 79_000_000_000, {0: 0, 1: 11_000_000}
    host = ray_workers._Host("simulated", {"surface": "saturating", "seed": 3}, None)
    executor = ray_workers.RayExecutor(None, "simulated", {}, ray_workers.Needs(), "node 1")
    executor._actor = host
    limits = {"device": 1 << 30} if planned else {}
    first = dataclasses.replace(SimulatedTarget("saturating", 3).describe(), limits=limits)

    def answer(method: str, seconds: float, *arguments: Any) -> Any:
        return first if method == "describe" else getattr(host, method)(*arguments)

    monkeypatch.setattr(executor, "_answer", answer)
    try:
        executor.describe()
        with executor.watch(BUS).window() as window:
            pass
    finally:
        host.close()
    assert window.readings == 2
    assert window.spilled is not planned


@pytest.mark.parametrize(
    ("rates", "most"),
    [
        ([9000.0], 0.0),  # one reading of 20 ms
        ([9000.0, 9000.0, 9000.0, 2.0, 9000.0], 2.0),  # the last weights while the memory is full already
        ([9000.0, 9000.0, None, 9000.0, 9000.0], 0.0),  # the memory was not full in between
        ([2.0, 9000.0, 8000.0, 8500.0, 7000.0, 2.0], 7000.0),
        ([600.0] * 4 + [9000.0] * 3, 600.0),
        ([40.0] * 12, 40.0),
    ],
)
def test_a_spill_is_several_readings_in_a_row(rates: list[float | None], most: float) -> None:
    window = machine_monitor.Window()
    for rate in rates:
        window.add({"throttle_reasons": 0, "link_mb_s": rate})
    assert machine_monitor.SPILL_READINGS == 4
    assert window.link_mb_s == most
    assert window.spilled == (most >= machine_monitor.SPILL_MB_S)


def test_spills_of_several_gpus_add_up() -> None:
    parts = [Conditions(), Conditions()]
    for part in parts:
        part.add({"throttle_reasons": 0, "others": [], "power_limit_w": None, "dropped": 0, "spilled": True})
    assert Conditions.of(parts).to_dict()["spilled"] == 2
