"""What goes wrong around a tune: kills, a full disk, clocks that jump, journals that are damaged."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from dyno import profiles
from dyno_tuner.core.errors import JournalError, TuneError
from dyno_tuner.core.options import MeasurementPolicy
from dyno_tuner.core.protocol import Configuration, Measurement, Quality, TrialStatus, Workload
from dyno_tuner.execution import worker
from dyno_tuner.execution.inline_executor import InlineExecutor
from dyno_tuner.record import clocks, journal
from dyno_tuner.record.recorder import Recorder
from dyno_tuner.run.session import Request, run
from dyno_tuner.run.tune import Options, Tune
from dyno_tuner.targets.simulated.surfaces import SURFACES
from dyno_tuner.targets.simulated.target import SimulatedTarget

if TYPE_CHECKING:
    from collections.abc import Iterator

KILLED = Path(__file__).parents[1] / "killed_run.py"
WORKLOAD = Workload(pp=64, tg=8)


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


def _killed(folder: Path, seed: int, kills: int, surface: str = "faulty") -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(KILLED), str(folder), surface, str(seed), str(kills)],
        capture_output=True, text=True, env=_environment(), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["outcome"] is not None, done.stderr
    return found


def _proven(path: Path) -> dict[str, Any]:
    """Everything of a profile but what names this very run."""
    profile = profiles.load_profile(path).model_dump(mode="json")
    del profile["evidence"]["journal"], profile["provenance"]["date"]
    return profile


def test_kills_while_kernels_are_screened_in_place_change_no_entry(tmp_path: Path) -> None:
    straight = _killed(tmp_path / "straight", 5, 0, "overlap")
    assert straight["outcome"]["kernels"]
    whole = (tmp_path / "straight" / "profile.yaml.journal.jsonl").read_bytes()
    (tmp_path / "broken").mkdir()
    begin = whole[: whole.index(b'"kernels/in_place/0"')].rindex(b"\n") + 1
    (tmp_path / "broken" / "profile.yaml.journal.jsonl").write_bytes(whole[:begin])
    broken = _killed(tmp_path / "broken", 5, 25, "overlap")
    assert sum(broken["kills"].values()) == 25
    assert broken["lost"] == 0
    assert broken["outcome"] == straight["outcome"]
    assert _proven(tmp_path / "broken" / "profile.yaml") == _proven(tmp_path / "straight" / "profile.yaml")


def test_fifty_kills_lose_no_record_and_change_no_entry(tmp_path: Path) -> None:
    straight = _killed(tmp_path / "straight", 5, 0)
    broken = _killed(tmp_path / "broken", 5, 50)
    assert sum(broken["kills"].values()) == 50
    assert set(broken["kills"]) == {"before", "torn", "unflushed", "flushed", "measuring", "profile"}
    assert broken["lost"] == 0
    assert broken["outcome"] == straight["outcome"]
    assert straight["outcome"]["entries"], "a profile of defaults alone would prove nothing"
    assert _proven(tmp_path / "broken" / "profile.yaml") == _proven(tmp_path / "straight" / "profile.yaml")
    book = journal.load(tmp_path / "broken" / "profile.yaml.journal.jsonl")
    operations = [json.dumps([r["op"], r["key"], r["config"], r["args"]]) for r in book.records if "op" in r]
    assert len(operations) == len(set(operations))  # nothing was measured twice


def _session(
    folder: Path, executor: InlineExecutor | None = None, *, resume: bool = True, seed: int = 5
) -> Any:
    target = SimulatedTarget("saturating", seed)
    options = Options(WORKLOAD, seed=seed, max_trials=8, rounds=2, max_rounds=2)
    request = Request("simulated", options, out=folder / "p.yaml", resume=resume, quiet=True)
    return run(request, executor or InlineExecutor(target), target.surface.space())


def test_a_journal_cut_anywhere_resumes_to_the_same_profile(tmp_path: Path) -> None:
    first = _session(tmp_path)
    expected = _proven(first.path)
    data = first.journal.read_bytes()
    ends = [i for i, byte in enumerate(data) if byte == 0x0A]
    rng = random.Random(3)
    cuts = [c for end in rng.sample(ends, 4) for c in (end, end + 1, end + 2)]
    cuts += [rng.randrange(len(data)) for _ in range(12)]
    for cut in cuts:
        first.journal.write_bytes(data[:cut])
        first.path.unlink()  # it would be an incumbent where the journal's first line is lost
        again = _session(tmp_path)
        assert again.outcome.to_dict() == first.outcome.to_dict(), cut
        assert _proven(again.path) == expected, cut


def test_records_of_a_run_that_cannot_be_told_are_not_used(tmp_path: Path) -> None:
    """A damaged first line, and a run with another seed: what the old one measured is none of its own."""
    clean = tmp_path / "clean"
    clean.mkdir()
    expected = _session(clean, seed=6).outcome.to_dict()
    first = _session(tmp_path)
    data = bytearray(first.journal.read_bytes())
    data[60] ^= 0x01
    first.journal.write_bytes(bytes(data))
    first.path.unlink()
    assert _session(tmp_path, seed=6).outcome.to_dict() == expected
    assert (tmp_path / "p.yaml.journal.jsonl.1").read_bytes() == bytes(data)  # kept, for whoever can use it
    first.path.unlink()
    assert _session(tmp_path, seed=6).outcome.to_dict() == expected


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up_at_any_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    straight = tmp_path / "straight"
    straight.mkdir()
    expected = _session(straight)
    records = len(journal.load(expected.journal).records)
    book = tmp_path / "p.yaml.journal.jsonl"
    write = os.write
    kept: list[dict[str, Any]] = []
    for room in (0, 1, records // 3, records // 3):
        left = [room]

        def full(fd: int, data: bytes, left: list[int] = left) -> int:
            if os.fstat(fd).st_ino != (book.stat().st_ino if book.exists() else -1):
                return write(fd, data)
            left[0] -= 1
            if left[0] >= 0:
                return write(fd, data)
            if left[0] == -1:
                return write(fd, data[: len(data) // 2])  # a full disk takes what still fits
            raise OSError(code, os.strerror(code))

        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            with pytest.raises(JournalError, match=r"disk is full.*--resume") as caught:
                _session(tmp_path)
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "p.yaml").exists()
        loaded = journal.load(book)
        assert loaded.damaged == 0
        assert loaded.records[: len(kept)] == kept
        assert len(loaded.records) == len(kept) + room
        kept = loaded.records
    assert _session(tmp_path).outcome.to_dict() == expected.outcome.to_dict()


def test_a_disk_that_is_full_when_the_profile_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = _session(tmp_path)
    old = first.path.read_bytes()
    first.journal.unlink()  # a second tune, beside the profile of the first

    def full(*arguments: Any, **named: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "mkstemp", full)
        with pytest.raises(TuneError, match=r"No space left.*--resume") as caught:
            _session(tmp_path)
    assert "\n" not in str(caught.value)
    assert first.path.read_bytes() == old
    size = first.journal.stat().st_size
    again = _session(tmp_path)
    assert first.journal.stat().st_size == size  # every measurement was there
    assert again.outcome.status == "complete"


def test_no_room_for_scratch_files_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **named: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.raises(TuneError, match=r"No space left.*TMPDIR"):
        _session(tmp_path)


def test_a_wall_clock_that_jumps_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    straight, jumping = tmp_path / "straight", tmp_path / "jumping"
    straight.mkdir()
    jumping.mkdir()
    expected = _session(straight).outcome.to_dict()
    rng = random.Random(1)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + rng.uniform(-1e6, 1e6))
    assert _session(jumping).outcome.to_dict() == expected


class _Engine(InlineExecutor):
    """Runs a step beside every measurement and answers with what was asked for."""

    def __init__(self, step: Any = None, status: TrialStatus = TrialStatus.OK) -> None:
        super().__init__(SimulatedTarget("null", 1))
        self.step = step
        self.status = status
        self.measurements = 0

    def measurement(self, *args: Any, **kwargs: Any) -> Measurement:
        self.measurements += 1
        if self.step is not None:
            self.step()
        return Measurement(self.status, message="scripted", seconds=0.1)

    def quality(self, *args: Any, **kwargs: Any) -> Quality:
        return Quality(self.status, message="scripted")


def test_a_clock_that_was_set_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    offset = [0.0]
    real = time.time
    monkeypatch.setattr(clocks.time, "time", lambda: real() + offset[0])

    def set_clock() -> None:
        offset[0] -= 3600

    seen: list[tuple[str, Any]] = []
    for step in (None, set_clock):
        recorder = Recorder(_Engine(step), WORKLOAD)
        recorder.on_note = lambda kind, data: seen.append((kind, data["message"]))
        recorder.measurement("a", Configuration({}), ["pp"], MeasurementPolicy(), process=0)
        assert 0 <= recorder.now < 600  # the budget is not taken from the clock that was set
    assert [kind for kind, _ in seen] == ["clock"]
    assert "-3600 s" in seen[0][1]


class _Comparing(_Engine):
    """Writes down how long each comparison of answers might have taken."""

    def __init__(self) -> None:
        super().__init__()
        self.deadlines: list[float] = []

    def measurement(self, *args: Any, **kwargs: Any) -> Measurement:
        self.deadlines.append(args[5])
        return super().measurement(*args, **kwargs)

    def quality(self, configuration: Configuration, context: Any, deadline: float) -> Quality:
        self.deadlines.append(deadline)
        return super().quality(configuration, context, deadline)


def test_the_exact_answers_have_time_that_speed_does_not_decide() -> None:
    """A default of a tenth of a second says nothing about a path that is a hundred times slower."""
    engine = _Comparing()
    recorder = Recorder(engine, WORKLOAD)
    recorder.expected_measurement = 0.1
    for key in ("first", "second"):
        recorder.quality(key, Configuration({}), process=0)
    assert engine.deadlines[0] >= 600.0
    assert engine.deadlines[1] < 60.0
    within = _Comparing()
    recorder = Recorder(within, WORKLOAD, limit=100.0)
    recorder.quality("first", Configuration({}), process=0)
    assert 90.0 < within.deadlines[0] <= 100.0  # the budget still ends it


def test_what_hangs_is_ended_with_the_budget() -> None:
    """Engines that load a model for every measurement are given minutes, but not more than there are."""
    engine = _Comparing()
    recorder = Recorder(engine, WORKLOAD, deadline_floor=120.0, budget=30.0)
    policy = MeasurementPolicy()
    recorder.measurement("first", Configuration({}), ["pp"], policy, process=0, baseline=True)
    recorder.quality("exact", Configuration({}), process=0)
    recorder.expected_measurement = 0.3
    recorder.measurement("default", Configuration({}), ["pp"], policy, process=0, baseline=True)
    recorder.measurement("trial", Configuration({"a": 1}), ["pp"], policy, process=0)
    recorder.quality("answers", Configuration({"a": 1}), process=0)
    first, exact, default, trial, answers = engine.deadlines
    assert max(first, trial, answers) <= 1.05 * 30.0
    assert default == 120.0  # without it a run cannot go on
    assert exact >= 600.0


class _Late(_Engine):
    """Takes what it may where that is little."""

    def measurement(self, *args: Any, **kwargs: Any) -> Measurement:
        self.measurements += 1
        if args[5] < 60.0:
            return Measurement(TrialStatus.TIMEOUT, message="scripted", seconds=args[5])
        return Measurement(TrialStatus.OK, seconds=1.0)

    def quality(self, *args: Any, **kwargs: Any) -> Quality:
        return Quality(TrialStatus.TIMEOUT if args[2] < 60.0 else TrialStatus.OK, message="scripted")


def test_what_the_budget_cut_short_is_tried_again_after_resume_with_more(tmp_path: Path) -> None:
    """It did not kill the worker: nobody knows how long it would have taken."""
    late = Configuration({"a": 1})
    with journal.Journal(tmp_path / "j") as book:
        recorder = Recorder(_Late(), WORKLOAD, journal=book, deadline_floor=120.0, budget=30.0)
        recorder.quality("exact", Configuration({}), process=0)
        recorder.expected_measurement = 0.3
        measurement = recorder.measurement("trial", late, ["pp"], MeasurementPolicy(), process=0)
        assert (measurement.status, recorder.killed(late)) == (TrialStatus.TIMEOUT, False)
        assert recorder.quality("answers", late, process=0).status is TrialStatus.TIMEOUT
        assert recorder.was_cut("trial")
        assert recorder.was_cut("answers")
    records = journal.load(tmp_path / "j").records
    for budget, status in ((600.0, TrialStatus.OK), (None, TrialStatus.OK)):
        resumed = Recorder(_Late(), WORKLOAD, past=records, deadline_floor=120.0, budget=budget)
        resumed.quality("exact", Configuration({}), process=0)
        assert resumed.replayed == 1
        assert resumed.measurement("trial", late, ["pp"], MeasurementPolicy(), process=0).status is status
        assert not resumed.was_cut("trial")


class _Endless(_Engine):
    """A measurement takes longer than it may."""

    def measurement(self, *args: Any, **kwargs: Any) -> Measurement:
        self.measurements += 1
        time.sleep(0.6)
        return Measurement(TrialStatus.TIMEOUT, message="scripted", seconds=0.6)


def test_a_default_that_takes_longer_than_the_budget_is_told_and_nothing_is_written() -> None:
    engine = _Endless()
    space = SURFACES["saturating"]().space()
    recorder = Recorder(engine, WORKLOAD, identity=space.identity, budget=0.5)
    told: list[tuple[str, Any]] = []
    recorder.on_note = lambda kind, data: told.append((kind, data))
    outcome = Tune(recorder, space, Options(WORKLOAD, budget=0.5)).run()
    assert (outcome.status, outcome.entries, engine.measurements) == ("budget", [], 1)
    assert any(kind == "too_short" and "longer --budget" in data["message"] for kind, data in told)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[worker.Worker, list[float]]]:
    """A worker, and the seconds by which the clock of its caller is ahead."""
    made = worker.Worker("simulated", {"surface": "null"})
    ahead, real_clock = [0.0], time.monotonic
    monkeypatch.setattr(worker.time, "monotonic", lambda: real_clock() + ahead[0])
    yield made, ahead
    monkeypatch.undo()  # or the worker would be killed instead of closed
    made.close()


def test_a_pause_of_the_machine_is_not_the_workers_fault(
    late: tuple[worker.Worker, list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour passes on the monotonic clock inside one wait of a second: a process that was stopped."""
    made, ahead = late
    real_select = worker.select.select

    def paused(*arguments: Any) -> Any:
        if not ahead[0]:
            ahead[0] = 3600.0
            return [], [], []
        return real_select(*arguments)

    monkeypatch.setattr(worker.select, "select", paused)
    assert made.call("describe", {}, 60.0).value["target"] == "simulated"
    assert ahead[0]


def test_an_answer_that_is_there_is_in_time(
    late: tuple[worker.Worker, list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Busy programs keep this process from looking until the deadline has passed."""
    made, ahead = late
    real_write = os.write

    def written(fd: int, data: bytes) -> int:
        count = real_write(fd, data)
        assert worker.select.select([made._from], [], [], 120.0)[0]
        ahead[0] = 100.0
        return count

    monkeypatch.setattr(worker.os, "write", written)
    assert made.call("describe", {}, 60.0).value["target"] == "simulated"
    assert ahead[0]


def test_what_killed_in_the_check_of_answers_is_not_tried_after_resume(tmp_path: Path) -> None:
    with journal.Journal(tmp_path / "j") as book:
        recorder = Recorder(_Engine(status=TrialStatus.CRASH), WORKLOAD, journal=book)
        recorder.quality("q", Configuration({"a": 1}), process=0)
    engine = _Engine()
    resumed = Recorder(engine, WORKLOAD, past=journal.load(tmp_path / "j").records)
    measurement = resumed.measurement(
        "other", Configuration({"a": 1}), ["pp"], MeasurementPolicy(), process=0
    )
    assert measurement.status is TrialStatus.CRASH
    assert "not tried again" in measurement.message
    assert engine.measurements == 0


def test_a_default_that_died_once_and_runs_is_forgiven(tmp_path: Path) -> None:
    """Somebody else's hand may kill a worker; the default's answers can be checked all the same."""
    engine = _Engine(status=TrialStatus.OOM)
    default = Configuration({"a": 0})
    with journal.Journal(tmp_path / "j") as book:
        recorder = Recorder(engine, WORKLOAD, journal=book)
        recorder.measurement("first", default, ["pp"], MeasurementPolicy(), process=0, baseline=True)
        engine.status = TrialStatus.OK
        recorder.measurement("retry", default, ["pp"], MeasurementPolicy(), process=1, baseline=True)
        assert recorder.quality("q", default, process=1).status is TrialStatus.OK
    resumed = Recorder(engine, WORKLOAD, past=journal.load(tmp_path / "j").records)
    assert resumed.quality("q2", default, process=1).status is TrialStatus.OK


def test_a_configuration_that_killed_is_forgiven_once(tmp_path: Path) -> None:
    engine, late = _Engine(status=TrialStatus.CRASH), Configuration({"a": 1})
    with journal.Journal(tmp_path / "j") as book:
        recorder = Recorder(engine, WORKLOAD, journal=book)

        def status(key: str) -> TrialStatus:
            return recorder.measurement(key, late, ["pp"], MeasurementPolicy(), process=0).status

        for key, measured in (("first", 1), ("second", 2), ("third", 2)):
            recorder.forgive(late)
            assert status(key) is TrialStatus.CRASH
            assert engine.measurements == measured
    resumed = Recorder(engine, WORKLOAD, past=journal.load(tmp_path / "j").records)
    assert resumed.killed(late)


def test_a_configuration_that_ran_since_is_forgiven_again() -> None:
    """Two kills that are apart: each has a second chance of its own, and two in a row have one."""
    engine, one = _Engine(), Configuration({"a": 1})
    recorder = Recorder(engine, WORKLOAD)
    crash, ok = TrialStatus.CRASH, TrialStatus.OK
    for key, given, measured in (
        ("check", crash, 1), ("check/retry", ok, 2), ("r1", crash, 3), ("r1/retry", ok, 4),
        ("r2", crash, 5), ("r2/retry", crash, 6), ("r3/retry", ok, 6),
    ):  # fmt: skip
        if key.endswith("/retry"):
            recorder.forgive(one)
        engine.status = given
        found = recorder.measurement(key, one, ["pp"], MeasurementPolicy(), process=0)
        assert engine.measurements == measured, key
        assert found.status is (crash if key == "r3/retry" else given), key


def test_time_does_not_run_back_where_an_operation_is_missing_in_a_journal() -> None:
    engine, keys = _Engine(), ("a", "b", "c", "d")

    def measured(recorder: Recorder, key: str) -> float:
        recorder.measurement(key, Configuration({}), ["pp"], MeasurementPolicy(), process=0)
        return recorder.now

    with pytest.MonkeyPatch.context() as patch:
        clock = [0.0]
        patch.setattr(time, "monotonic", lambda: clock[0])
        past: list[dict[str, Any]] = []
        first = Recorder(engine, WORKLOAD, journal=SimpleNamespace(append=past.append))  # type: ignore[arg-type]
        for key in keys:
            clock[0] += 100.0
            measured(first, key)
        resumed = Recorder(engine, WORKLOAD, past=[r for r in past if r.get("key") not in ("b", "d")])
        seconds = [measured(resumed, key) for key in keys]
    assert seconds == [0.0, 0.0, 200.0, 200.0]


def test_a_killed_tune_leaves_no_worker(tmp_path: Path) -> None:
    """Killed while its worker hangs, which no closed pipe would end."""
    program = """
import sys
from dyno_tuner.core.options import MeasurementPolicy
from dyno_tuner.core.protocol import Configuration, OpContext, Workload
from dyno_tuner.execution.worker import WorkerExecutor
executor = WorkerExecutor("simulated", {"surface": "faulty", "seed": 1, "real_faults": True})
executor.describe()
print(executor._worker.pid, flush=True)
hangs = Configuration({"cpu_isa": "portable"})
executor.visit(hangs, Workload(pp=64, tg=8), ["pp"], MeasurementPolicy(), OpContext("k"), 120.0)
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=_environment()
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    time.sleep(0.2)  # for the hang, if this machine is fast enough
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    end = time.monotonic() + 120
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (ProcessLookupError, FileNotFoundError):
            return
        if state == "Z":
            return  # dead; whoever inherited it has not looked yet
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("the worker outlived the tune")
