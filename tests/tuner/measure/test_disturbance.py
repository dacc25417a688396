"""If others use the machine during a measurement, it is made again, and no profile rests on it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from dyno import profiles
from dyno._selection import select
from dyno_tuner.core.errors import DisturbedError, TuneError
from dyno_tuner.core.options import MeasurementPolicy
from dyno_tuner.core.protocol import Configuration, Measurement, TrialStatus, Workload
from dyno_tuner.execution.inline_executor import InlineExecutor
from dyno_tuner.measure import cpu_monitor, environment
from dyno_tuner.measure.cpu_monitor import CpuWatch, Load
from dyno_tuner.measure.environment import busy
from dyno_tuner.measure.machine_monitor import REST, Careful, Conditions, Window, patience_of
from dyno_tuner.record import journal
from dyno_tuner.record.recorder import Recorder
from dyno_tuner.run.session import Request, run
from dyno_tuner.run.tune import Options
from dyno_tuner.run.verify import UNCLEAR, verify
from dyno_tuner.targets.simulated.target import SimulatedTarget
from waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


WORKLOAD = Workload(pp=64, tg=8)
BUSY = Load(needed=2.0, seconds=1.0, others=1.0, busiest=["cc1plus (4711): 1.0"])
CALM = Load(needed=2.0, seconds=1.0, others=0.01)


@pytest.fixture(autouse=True)
def quiet_machine() -> None:
    """Nothing is overridden here: these tests are about what disturbs."""


# ---- the figures


@pytest.mark.parametrize(
    ("load", "said"),
    [
        (CALM, ""),
        (BUSY, "other programs use 1 of 2 cores (cc1plus (4711): 1.0)"),
        (Load(2.0, seconds=1.0, others=0.4), "0.4 of 2 cores (their names are not visible from here)"),
        (Load(2.0, seconds=1.0, others=0.05, steal=0.3), "the hypervisor takes 0.3 of 2 cores (steal time)"),
        (Load(2.0, seconds=0.1, others=0.3), ""),  # three ticks of the kernel's clock
        (Load(2.0, spare=14.0, seconds=1.0, others=13.9), ""),  # others' cores are not needed
        (Load(2.0, spare=14.0, seconds=1.0, others=15.0), "15 of 16 cores"),
        (
            Load(2.0, seconds=1.0, throttled=0.3),
            "other programs in the control group used up the CPU quota for 30% of the time",
        ),
        (Load(2.0, seconds=1.0, stopped={"python (7)"}), "python (7) stopped during the measurement"),
    ],
)
def test_a_load_says_who_disturbs(load: Load, said: str) -> None:
    assert (said in load.disturbed) if said else load.disturbed == ""


class _Kernel:
    """A `/proc` and a control group whose counters a test sets; seconds."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "proc" / "self").mkdir(parents=True)
        self.count(busy=0.0)

    def count(self, busy: float, steal: float = 0.0) -> None:
        tick = os.sysconf("SC_CLK_TCK")
        cpu = min(os.sched_getaffinity(0))
        rows = [
            "cpu  9 9 9 9 9 9 9 9 0 0",
            f"cpu{cpu} {round(busy * tick)} 0 0 5 5 7 7 {round(steal * tick)} 0 0",
            "cpu9999 100000 0 0 0 0 0 0 0 0 0",  # none that this process may use
        ]
        (self.root / "proc" / "stat").write_text("\n".join(rows) + "\n")

    def process(
        self, pid: int, parent: int, used: float, ended: float = 0.0, name: str = "python",
        cpu: int | None = None,
    ) -> None:  # fmt: skip
        cpu = min(os.sched_getaffinity(0)) if cpu is None else cpu
        tick = os.sysconf("SC_CLK_TCK")
        folder = self.root / "proc" / str(pid)
        folder.mkdir(exist_ok=True)
        zeros = " ".join("0" * 9)
        times = f"{round(used * tick)} 0 {round(ended * tick)} 0"
        rest = " ".join("0" * 21)
        (folder / "stat").write_text(f"{pid} ({name}) S {parent} {zeros} {times} {rest} {cpu} 0\n")

    def quota(self, cpus: float, version: int = 2) -> Path:
        """Its folder."""
        groups = {2: "0::/box\n", 1: "3:cpu,cpuacct:/box\n"}[version]
        (self.root / "proc" / "self" / "cgroup").write_text(groups)
        folder = self.root / "sys" / "fs" / "cgroup" / ("box" if version == 2 else "cpu,cpuacct/box")
        folder.mkdir(parents=True)
        if version == 2:
            (folder / "cpu.max").write_text(f"{round(cpus * 100000)} 100000\n")
        else:
            (folder / "cpu.cfs_quota_us").write_text(f"{round(cpus * 100000)}\n")
            (folder / "cpu.cfs_period_us").write_text("100000\n")
        return folder


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Kernel:
    made = _Kernel(tmp_path)
    made.process(os.getpid(), 1, used=0.0)
    clock = iter([100.0, 102.0])  # both readings of a window
    monkeypatch.setattr(cpu_monitor, "time", type("Clock", (), {"monotonic": lambda: next(clock, 102.0)}))
    return made


def test_the_load_of_others_is_that_of_the_cpus_without_this_run(kernel: _Kernel) -> None:
    """The workers of this run, and what their ended children used, are no others."""
    kernel.process(90001, os.getpid(), used=5.0)
    kernel.process(90002, 1, used=7.0, name="cc1plus")
    kernel.process(90003, 1, used=7.0, name="elsewhere", cpu=9999)
    kernel.count(busy=12.0, steal=1.0)
    with CpuWatch(root=str(kernel.root), period=60.0).window() as load:
        kernel.process(90001, os.getpid(), used=5.5, ended=0.3)
        kernel.process(90002, 1, used=8.2, name="cc1plus")
        kernel.process(90003, 1, used=9.0, name="elsewhere", cpu=9999)
        kernel.count(busy=14.0, steal=1.1)
    assert load.seconds == pytest.approx(2.0)
    assert load.others == pytest.approx((2.0 - 0.8) / 2)
    assert load.steal == pytest.approx(0.05)
    assert load.busiest == ["cc1plus (90002): 0.6"]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("used", "counts"), [(1.0, False), (1.95, True)])
def test_a_quota_that_others_use_up_disturbs(
    kernel: _Kernel, version: int, used: float, counts: bool
) -> None:
    """A run that uses up its quota by itself has too many threads for it: that is its speed."""
    folder = kernel.quota(1.0, version)

    def waited(seconds: float) -> str:
        if version == 2:
            return f"usage_usec 5\nnr_throttled 3\nthrottled_usec {round(seconds * 1e6)}\n"
        return f"nr_periods 9\nnr_throttled 3\nthrottled_time {round(seconds * 1e9)}\n"

    (folder / "cpu.stat").write_text(waited(3.0))
    with CpuWatch(root=str(kernel.root), period=60.0).window() as load:
        (folder / "cpu.stat").write_text(waited(3.6))
        kernel.process(os.getpid(), 1, used=used)
        kernel.count(busy=used)
    assert load.needed == pytest.approx(1.0)
    assert load.throttled == pytest.approx(0.0 if counts else 0.3)
    assert bool(load.disturbed) is not counts


def test_a_quota_that_changes_during_a_run_disturbs(kernel: _Kernel) -> None:
    watch = CpuWatch(root=str(kernel.root), period=60.0)
    kernel.quota(1.5)
    with watch.window() as load:
        pass
    assert "quota has changed from 0 to 1.5 CPUs" in load.disturbed


BURN = "import time\nend = time.monotonic() + 600\nwhile time.monotonic() < end: pass"


def _seconds(pid: int) -> float:
    """CPU time of a process so far."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def _busy_seconds() -> float:
    """CPU time that all CPUs of the machine have spent on work so far."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split()[1:11])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def test_a_real_busy_process_of_somebody_else_counts_and_an_own_one_does_not() -> None:
    """The shell that starts it ends at once, so that it does not descend from this process."""
    started = subprocess.run(
        ["sh", "-c", '"$@" >/dev/null 2>&1 & echo $!', "sh", sys.executable, "-c", BURN],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    pid = int(started.stdout)
    own = subprocess.Popen([sys.executable, "-c", BURN])
    # Each bound holds however late this process looks: the first two figures are of a time within the window,
    # and the third one is of a time around it.
    try:
        before_all = _busy_seconds()
        with CpuWatch().window() as load:
            before, before_own = _seconds(pid), _seconds(own.pid)
            until(lambda: _seconds(pid) - before > 1 and _seconds(own.pid) - before_own > 1)
            used, used_own = _seconds(pid) - before, _seconds(own.pid) - before_own
        busy = _busy_seconds() - before_all
    finally:
        os.kill(pid, signal.SIGKILL)
        own.kill()
        own.wait()
    # The watch itself reads the CPUs and the processes one after the other.
    assert load.others * load.seconds >= 0.5 * used
    assert load.others * load.seconds <= busy - 0.5 * used_own
    assert not any(f"({own.pid})" in name for name in load.busiest)


def test_a_child_that_was_stopped_for_a_moment_is_told() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as child:
        try:
            watch = CpuWatch(period=60.0)
            with watch.window() as load:
                child.send_signal(signal.SIGSTOP)
                os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
                child.send_signal(signal.SIGCONT)
                os.waitid(os.P_PID, child.pid, os.WCONTINUED | os.WNOWAIT)
            assert any(f"({child.pid})" in name for name in load.stopped)
            assert "stopped during the measurement" in load.disturbed
            with watch.window() as next_one:
                pass
            assert not next_one.stopped
        finally:
            child.kill()


# ---- what becomes of a measurement


class _Scripted:
    """A watch with given windows, of measurements and of waits; the last one of each repeats."""

    def __init__(self, windows: list[Load], waits: list[Load]) -> None:
        self.windows = windows
        self.waits = waits
        self.measured = False

    @contextlib.contextmanager
    def window(self) -> Iterator[Window]:
        window = Window()
        self.measured = False
        yield window
        script = self.windows if self.measured else self.waits
        window.load = script.pop(0) if len(script) > 1 else script[0]


class _Setup:
    def __init__(
        self, windows: list[Load], waits: list[Load] | None = None, patience: float | None = 10.0,
        left: float = 1e9,
    ) -> None:  # fmt: skip
        self.watch = _Scripted(windows, waits or [CALM])
        self.notes: list[str] = []
        self.messages: list[str] = []
        self.slept = 0.0
        self.made = 0
        self.careful = Careful(self.watch, self._note, lambda seen: None, self._sleep, patience, lambda: left)

    def _note(self, kind: str, **data: Any) -> None:
        self.notes.append(kind)
        self.messages.append(data["message"])

    def _sleep(self, seconds: float) -> None:
        self.slept += seconds

    def _work(self) -> int:
        self.made += 1
        self.watch.measured = True
        return self.made

    def measure(self, good: Callable[[int], bool] = lambda found: True) -> tuple[int, dict[str, Any]]:
        return self.careful.measure("key", self._work, good)


def test_one_discarded_measurement_is_counted_as_one() -> None:
    setup = _Setup([BUSY, CALM])
    setup.measure()
    assert setup.messages[1].startswith("1 measurement was discarded: ")


def test_a_disturbed_measurement_is_made_again() -> None:
    setup = _Setup([BUSY, BUSY, CALM])
    found, seen = setup.measure()
    assert found == 3
    assert seen["cpu"]["dropped"] == 2
    assert "disturbed" not in seen["cpu"]
    assert setup.slept == pytest.approx(2 * REST)
    assert setup.notes == ["waiting", "disturbed"]  # once, not per repetition
    assert [("cc1plus" in message) for message in setup.messages] == [False, True]
    assert "2 measurements were discarded" in setup.messages[1]
    conditions = Conditions()
    conditions.add_load(seen["cpu"])
    assert conditions.to_dict() == {"repeated": 2}


def test_a_machine_that_does_not_come_to_rest_ends_the_run() -> None:
    setup = _Setup([BUSY], [BUSY])
    with pytest.raises(
        DisturbedError, match=r"did not become quiet in [0-9]+ s: other programs use 1 of 2 .*cc1plus"
    ):
        setup.measure()
    assert setup.made == 1
    assert setup.slept == pytest.approx(10.0, abs=REST)
    assert setup.messages == ["waiting for the machine to become quiet, at most 10 s"], (
        "the error alone names who disturbs"
    )


def test_bursts_that_always_return_end_the_run_as_well() -> None:
    """The wait always ends, and the next measurement is disturbed again."""
    setup = _Setup([BUSY], [CALM], patience=0.0)
    with pytest.raises(DisturbedError):
        setup.measure()
    assert setup.messages == [], "there was no time to wait"


def test_force_measures_in_spite_of_it_and_marks_the_profile() -> None:
    setup = _Setup([BUSY, CALM], patience=None)
    found, seen = setup.measure()
    assert (found, setup.slept) == (1, 0.0)
    assert "cc1plus" in seen["cpu"]["disturbed"]
    conditions = Conditions()
    conditions.add_load(seen["cpu"])
    assert conditions.to_dict() == {"disturbed": True}
    profiles.Environment(**conditions.to_dict())


def test_nobody_waits_longer_than_the_budget_lasts() -> None:
    setup = _Setup([BUSY], [BUSY], left=2.0)
    with pytest.raises(DisturbedError):
        setup.measure()
    assert setup.slept == pytest.approx(2.0, abs=REST)


def test_a_failure_is_not_repeated() -> None:
    setup = _Setup([BUSY])
    found, seen = setup.measure(good=lambda found: False)
    assert found == 1
    assert "dropped" not in seen["cpu"]


@pytest.mark.parametrize(("budget", "seconds"), [(None, 30.0), (600.0, 30.0), (60.0, 15.0), (8.0, 5.0)])
def test_patience_is_a_part_of_the_budget(budget: float | None, seconds: float) -> None:
    assert patience_of(budget) == seconds


# ---- in a run


class _Engine(InlineExecutor):
    """A simulated engine that others disturb from measurement `first` to `last`.

    It then has half its speed or, with another `status`, ends at its deadline.
    """

    def __init__(self, first: int, last: float, status: TrialStatus = TrialStatus.OK, seed: int = 3) -> None:
        super().__init__(SimulatedTarget("saturating", seed))
        self.measurements = 0
        self.first, self.last, self.status = first, last, status

    @property
    def disturbed(self) -> bool:
        return self.first <= self.measurements <= self.last

    def measurement(self, *args: Any, **kwargs: Any) -> Measurement:
        self.measurements += 1
        measurement = super().measurement(*args, **kwargs)
        if not self.disturbed:
            return measurement
        if self.status is not TrialStatus.OK:
            return Measurement(self.status, message="too late", seconds=measurement.seconds)
        slow = tuple(
            dataclasses.replace(s, seconds=2 * s.seconds, clock_seconds=2 * s.clock_seconds)
            for s in measurement.samples
        )
        return dataclasses.replace(measurement, samples=slow)

    def watch(self, pci_bus_id: str | None) -> _EngineWatch:
        return _EngineWatch(self)


class _EngineWatch:
    def __init__(self, engine: _Engine) -> None:
        self.engine = engine

    def __enter__(self) -> _EngineWatch:
        return self

    def __exit__(self, *args: object) -> None:
        """Nothing is held."""

    @contextlib.contextmanager
    def window(self) -> Iterator[Window]:
        window = Window(load=dataclasses.replace(CALM))
        before = self.engine.measurements
        yield window
        if self.engine.disturbed:
            window.load = dataclasses.replace(BUSY)
        if self.engine.measurements == before and self.engine.last != float("inf"):
            window.load = dataclasses.replace(CALM)  # a wait


def _recorder(
    engine: _Engine, tmp_path: Path, past: list[dict[str, Any]] | None = None, **options: Any
) -> Recorder:
    return Recorder(
        engine, WORKLOAD, journal=journal.Journal(tmp_path / "j.jsonl"), past=past or (), virtual_time=True,
        watch=engine.watch(None), sleep=lambda seconds: None, **options,
    )  # fmt: skip


@pytest.mark.parametrize("status", [TrialStatus.OK, TrialStatus.TIMEOUT])
def test_what_a_disturbed_visit_showed_is_forgotten(status: TrialStatus, tmp_path: Path) -> None:
    """Neither its speed counts nor that it ended at its deadline."""
    engine, quiet = _Engine(1, 2, status), _Engine(0, 0)
    measurement = _recorder(engine, tmp_path).measurement(
        "v", Configuration({}), ["pp"], MeasurementPolicy(), process=0
    )
    (tmp_path / "quiet").mkdir()
    alone = _recorder(quiet, tmp_path / "quiet").measurement(
        "v", Configuration({}), ["pp"], MeasurementPolicy(), process=0
    )
    assert engine.measurements == 3
    assert measurement.status is TrialStatus.OK
    assert max(measurement.rates("pp").values()) < 1.5 * max(alone.rates("pp").values())
    assert min(measurement.rates("pp").values()) > 0.75 * min(alone.rates("pp").values())


def test_a_resumed_run_knows_what_was_dropped_without_measuring(tmp_path: Path) -> None:
    first = _recorder(_Engine(1, 2), tmp_path)
    first.measurement("v", Configuration({}), ["pp"], MeasurementPolicy(), process=0)
    records = journal.load(tmp_path / "j.jsonl").records
    again = _Engine(0, 0)
    (tmp_path / "again").mkdir()
    second = _recorder(again, tmp_path / "again", records)
    second.measurement("v", Configuration({}), ["pp"], MeasurementPolicy(), process=0)
    assert again.measurements == 0
    assert second.conditions.to_dict() == first.conditions.to_dict() == {"repeated": 2}
    assert second.lost == first.lost > 0
    assert second.useful == second.now - second.lost


def _tune(engine: _Engine, out: Path, *, force: bool = False, resume: bool = False) -> Any:
    options = Options(WORKLOAD, seed=3, max_trials=12, rounds=2, max_rounds=2, budget=500.0)
    request = Request("simulated", options, out=out, quiet=True, force=force, resume=resume)
    return run(request, engine, engine._target.surface.space())


@pytest.fixture
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dyno_tuner.measure.machine_monitor.REST", 1e-3)
    monkeypatch.setattr("dyno_tuner.run.session.patience_of", lambda budget: 0.01)


@pytest.mark.usefixtures("no_waits")
def test_a_tune_on_a_busy_machine_stops_and_names_who_uses_it(tmp_path: Path) -> None:
    out = tmp_path / "p.yaml"
    with pytest.raises(TuneError, match=r"did not become quiet.*cc1plus \(4711\).*--resume.*--force"):
        _tune(_Engine(6, float("inf")), out)
    assert not out.exists()


@pytest.mark.usefixtures("no_waits")
def test_a_stopped_tune_goes_on_when_the_machine_is_quiet(tmp_path: Path) -> None:
    out = tmp_path / "p.yaml"
    with pytest.raises(TuneError):
        _tune(_Engine(20, float("inf")), out)
    straight = _tune(_Engine(0, 0), tmp_path / "straight.yaml")
    resumed = _tune(_Engine(0, 0), out, resume=True)
    assert resumed.outcome.settings == straight.outcome.settings
    assert resumed.outcome.entries == straight.outcome.entries
    assert straight.outcome.entries


@pytest.mark.usefixtures("no_waits")
def test_a_forced_profile_is_marked_and_the_runtime_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "p.yaml"
    _tune(_Engine(1, float("inf")), out, force=True)
    assert "disturbed: true" in out.read_text()
    profile = profiles.load_profile(out)
    assert profile.disturbed
    device = profile.match.device.model_dump(mode="json")
    identities = (profile.match.device, profile.match.model, profile.match.engine)
    text = yaml.safe_load(out.read_text())
    without = tmp_path / "without.yaml"
    without.write_text(yaml.safe_dump({**text, "settings": {}, "kernels": {}}))
    for file, told in ((out, "its gains are not proven"), (without, "it may lack gains")):
        caplog.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("dyno._selection.identities", lambda *given: identities)
            with caplog.at_level("WARNING", "dyno.profiles"):
                select("x.gguf", {}, str(file), {}, {**device, "memory_bytes": 1 << 34}, require=False)
        (line,) = [m for m in caplog.messages if "other programs disturbed its measurements" in m]
        assert str(file) in line
        assert told in line


@pytest.mark.usefixtures("no_waits")
def test_verify_never_keeps_an_entry_of_a_disturbed_profile(tmp_path: Path) -> None:
    out = tmp_path / "p.yaml"
    result = _tune(_Engine(0, 0), out)
    assert result.outcome.entries
    space = SimulatedTarget("saturating", 3).surface.space()
    knobs = {k.name: k for k in space.knobs}

    def verdicts() -> set[str]:
        engine = _Engine(0, 0)
        found, _ = verify(
            out, "simulated", budget=None, quiet=True, executor=engine, knob=lambda n, v, d: knobs[n]
        )
        return {v.verdict for v in found}

    honest = verdicts()
    assert "keep" in honest
    text = out.read_text()
    assert "evidence:\n" in text
    out.write_text(text.replace("evidence:\n", "evidence:\n  environment:\n    disturbed: true\n", 1))
    marked = verdicts()
    assert "keep" not in marked
    assert UNCLEAR in marked


@pytest.mark.parametrize(
    ("others", "named"), [(0.0, ""), (0.7, "this machine is busy (other programs use 0.7 of")]
)
def test_a_busy_machine_is_named_by_a_measurement(
    others: float, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load average of a run that has just ended was once reported as the load of others."""
    monkeypatch.setattr(os, "getloadavg", lambda: (7.25, 1.0, 1.0))

    class Watch:
        @contextlib.contextmanager
        def window(self) -> Iterator[Load]:
            yield Load(needed=2.0, seconds=0.4, others=others)

    monkeypatch.setattr(environment, "CpuWatch", Watch)
    warning = busy(0.0)
    assert named in warning if named else not warning
    seen = environment.look_around("m.gguf", SimulatedTarget("saturating").describe())
    assert named in seen.busy if named else not seen.busy
    assert not any("busy" in line for line in seen.warnings)
    if named:
        assert not any("compute" in line for line in seen.warnings), "these processes are named already"
