from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from dyno_tuner.core.errors import TargetUnusable, TuneError
from dyno_tuner.core.options import MeasurementPolicy
from dyno_tuner.core.protocol import Configuration, OpContext, TrialStatus, Workload
from dyno_tuner.execution import worker
from dyno_tuner.execution.worker import Worker, WorkerDied, WorkerExecutor
from dyno_tuner.record import journal
from dyno_tuner.record.recorder import Recorder
from dyno_tuner.targets.simulated.surfaces import faulty
from waiting import until

OPTIONS = {"surface": "faulty", "seed": 1, "real_faults": True}
WORKLOAD = Workload(pp=64, tg=8)
DEFAULT = faulty().space().configuration(faulty().space().default)


def _measurement(
    executor: WorkerExecutor, configuration: Configuration, process: int = 0, deadline: float = 300.0
) -> Any:
    context = OpContext("k", process, 0.0)
    return executor.measurement(configuration, WORKLOAD, ["pp"], MeasurementPolicy(), context, deadline)


@pytest.fixture(scope="module")
def executor() -> Any:
    made = WorkerExecutor("simulated", OPTIONS)
    yield made
    made.close()


def test_describe_and_visit(executor: WorkerExecutor) -> None:
    assert executor.describe().target == "simulated"
    measurement = _measurement(executor, DEFAULT)
    assert measurement.status is TrialStatus.OK
    assert len(measurement.rates("pp")) == 3
    assert executor.quality(DEFAULT, OpContext("q"), 300.0).status is TrialStatus.OK


@pytest.mark.parametrize("inherited", [False, True])
def test_no_code_of_the_current_folder_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inherited: bool
) -> None:
    """A folder with a downloaded model may hold a numpy.py; `python -m` here puts the folder on the path."""
    mark = tmp_path / "executed"
    (tmp_path / "numpy.py").write_text(f"open({str(mark)!r}, 'w')\nraise SystemExit(3)\n")
    monkeypatch.chdir(tmp_path)
    if inherited:
        monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    made = Worker("simulated", OPTIONS)
    made.close()
    assert not mark.exists()


def _killed_at(monkeypatch: pytest.MonkeyPatch, starts: set[int]) -> list[int]:
    """Kills the workers of these starts (counted from 0) at once, as the kernel does when memory runs out."""
    counted: list[int] = []
    spawn = worker._spawn

    def start(command: list[str], **options: Any) -> Any:
        number = len(counted)
        counted.append(number)
        if number in starts:
            command = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
        return spawn(command, **options)

    monkeypatch.setattr(worker, "_spawn", start)
    return counted


def test_a_worker_killed_while_it_starts_is_started_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    counted = _killed_at(monkeypatch, {0, 1})
    made = WorkerExecutor("simulated", OPTIONS)
    assert made.describe().target == "simulated"
    made.close()
    assert len(counted) == 3
    assert caplog.text.count("killed from outside") == 2  # and each time it says so


def test_a_worker_killed_at_every_start_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = _killed_at(monkeypatch, set(range(9)))
    with pytest.raises(TargetUnusable, match=r"did not start \(oom\): the worker was killed from outside"):
        WorkerExecutor("simulated", OPTIONS).describe()
    assert len(counted) == 3


def test_a_worker_killed_while_it_describes_the_engine_is_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = WorkerExecutor("simulated", OPTIONS)
    call = Worker.call
    killed: list[int] = []

    def kill_first(self: Worker, method: str, arguments: Any, deadline: float) -> Any:
        if method == "describe" and not killed:
            killed.append(self.pid)
            os.kill(self.pid, signal.SIGKILL)
        return call(self, method, arguments, deadline)

    monkeypatch.setattr(Worker, "call", kill_first)
    assert made.describe().target == "simulated"
    made.close()
    assert len(killed) == 1


def test_a_worker_that_dies_costs_one_trial(executor: WorkerExecutor) -> None:
    for settings, status, words in (
        ({"ubatch": 32, "threads_batch": 6}, TrialStatus.CRASH, "SIGSEGV"),
        ({"ubatch": 4096}, TrialStatus.OOM, "out of memory"),
    ):
        measurement = _measurement(executor, DEFAULT.replace(**settings))
        assert measurement.status is status
        assert words in measurement.message
        assert _measurement(executor, DEFAULT).status is TrialStatus.OK


def test_a_worker_that_hangs_is_killed_at_its_deadline(executor: WorkerExecutor) -> None:
    _measurement(executor, DEFAULT)
    worker = executor._worker
    assert worker is not None
    measurement = _measurement(executor, DEFAULT.replace(cpu_isa="portable"), deadline=0.5)  # hangs for ever
    assert measurement.status is TrialStatus.TIMEOUT
    with pytest.raises(ProcessLookupError):
        os.kill(worker.pid, 0)


def test_a_new_process_number_is_a_new_process(executor: WorkerExecutor) -> None:
    _measurement(executor, DEFAULT, process=7)
    assert executor._worker is not None
    first = executor._worker.pid
    _measurement(executor, DEFAULT, process=7)
    assert executor._worker.pid == first
    _measurement(executor, DEFAULT, process=8)
    assert executor._worker.pid != first


def test_a_target_that_cannot_be_made_is_one_clear_line() -> None:
    with pytest.raises(TargetUnusable, match="no surface 'nowhere'"):
        WorkerExecutor("simulated", {"surface": "nowhere"}).describe()
    with pytest.raises(TargetUnusable, match="no target 'abacus'"):
        WorkerExecutor("abacus", {}).describe()


def test_a_full_disk_is_told_with_the_file(tmp_path: Path) -> None:
    """In a process of its own, for it limits the size of the files that it writes."""
    script = f"""
import pathlib, resource, sys
import numpy as np
from dyno_tuner.execution import worker_main
from dyno_tuner.targets.dyno import kept_answers
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
def saves(target, request):
    key = kept_answers.Key(2, "", "", 100, (0, 0, 0), ((1, 1, 1000, 1000, ""),))
    answers = ([np.zeros((1000, 100), np.float32)], [None])
    kept_answers.save(pathlib.Path({str(tmp_path)!r}) / "exact.answers", key, answers)
def writes(target, request):
    with open({str(tmp_path / "x")!r}, "wb", buffering=0) as file:
        file.write(bytes(20000))
        file.write(bytes(1))
for worker_main._handle in (saves, writes):
    print(worker_main._answer(None, {{}})["message"])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    saved, written = done.stdout.splitlines()
    assert saved.startswith(f"{tmp_path}/exact-")
    assert saved.endswith(".answers.new: File too large; free space there or set TMPDIR")
    assert f"temporary files go to {tempfile.gettempdir()}" in written
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_worker_that_was_killed_from_outside() -> None:
    worker = Worker("simulated", OPTIONS)
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(WorkerDied) as caught:
        worker.call("describe", {}, 120.0)
    assert caught.value.status is TrialStatus.OOM
    with pytest.raises(WorkerDied):
        worker.call("describe", {}, 120.0)


def test_no_worker_outlives_its_parent(tmp_path: Path) -> None:
    program = f"""
import os, sys, time
from dyno_tuner.execution.worker import Worker
worker = Worker("simulated", {OPTIONS!r})
print(worker.pid, flush=True)
time.sleep(600)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    end = time.monotonic() + 120
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (ProcessLookupError, FileNotFoundError):
            return
        if state == "Z":
            return  # dead; whoever inherited it has not looked yet
        time.sleep(0.05)
    pytest.fail("the worker is still running")


def test_ctrl_c_while_a_child_starts_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither running nor as a zombie, and no pipe either."""
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def slow(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)  # the main thread has gone by now
        # A worker ends by itself if the other end of its pipe is closed; this one does not.
        kwargs["pass_fds"] = ()
        started.append(real([sys.executable, "-c", "import time; time.sleep(600)"], **kwargs))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", slow)
    monkeypatch.setattr("dyno_tuner.execution.worker._spawners", {})
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(KeyboardInterrupt):
        Worker("simulated", {"surface": "null"})
    until(lambda: started and started[0].returncode is not None)
    assert started[0].returncode == -signal.SIGKILL
    until(lambda: set(os.listdir("/proc/self/fd")) <= before)


# Stands for the module of a target: settings with `bad` take the device of its process.
_LOSING = """
import sys, types

def from_options(options):
    from dyno_tuner.core.errors import TargetLost
    from dyno_tuner.core.protocol import Sample
    from dyno_tuner.targets.simulated.target import SimulatedTarget

    class Losing(SimulatedTarget):
        lost = False
        def _ask(self, settings):
            self.lost = self.lost or settings.get("bad", False)
            if self.lost:
                raise TargetLost("cuda:0 is lost to this process: cudaErrorIllegalAddress")
        def apply(self, configuration, context):
            self._ask(configuration.settings)
        def measure(self, workload, metric, prompt):
            self._ask({})
            return Sample(metric, prompt, workload.tokens(metric), 1e-6, 1e-6)
        def quality(self, configuration, context):
            self._ask(configuration.settings)
            return super().quality(DEFAULT, context)
        def memory(self, settings):
            self._ask(settings)
            return 1
    from dyno_tuner.targets.simulated.surfaces import null
    space = null().space()
    DEFAULT = space.configuration(space.default)
    return Losing("null", 1)

sys.modules["dyno_tuner.targets.replay.target"] = types.SimpleNamespace(from_options=from_options)
"""


@pytest.fixture
def losing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "sitecustomize.py").write_text(_LOSING)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = WorkerExecutor("replay", {})
    yield made
    made.close()


def test_a_worker_that_loses_its_device_is_replaced(losing: WorkerExecutor, tmp_path: Path) -> None:
    """What a process without its GPU answers says nothing about the settings that come next."""
    good, bad = Configuration({"bad": False}), Configuration({"bad": True})
    assert _measurement(losing, good).status is TrialStatus.OK
    with journal.Journal(tmp_path / "j") as book:
        recorder = Recorder(losing, WORKLOAD, journal=book)
        measurement = recorder.measurement("first", bad, ["pp"], MeasurementPolicy(), process=0)
        assert measurement.status is TrialStatus.CRASH
        assert "cudaErrorIllegalAddress" in measurement.message
        starts = losing.starts
        assert (
            recorder.measurement("next", good, ["pp"], MeasurementPolicy(), process=0).status
            is TrialStatus.OK
        )
        assert losing.starts == starts + 1
        again = recorder.measurement("again", bad, ["pp"], MeasurementPolicy(), process=0)
        assert again.status is TrialStatus.CRASH
        assert "not tried again" in again.message
        assert losing.starts == starts + 1
    quality = losing.quality(bad, OpContext("q"), 300.0)
    assert quality.status is TrialStatus.CRASH
    assert losing.quality(good, OpContext("q"), 300.0).status is TrialStatus.OK
    with pytest.raises(TuneError, match="cudaErrorIllegalAddress"):
        losing.memory({"bad": True})
    assert losing.memory({}) == 1
