"""One tune on several devices of one kind, with workers of the simulated engine standing for the devices."""

from __future__ import annotations

import concurrent.futures
import os
import random
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest
from conftest_tuner import WORKLOAD
from dyno import profiles
from dyno.devices import Device
from dyno_tuner.cli.commands import app
from dyno_tuner.core.errors import Interrupted, TuneError
from dyno_tuner.core.options import Options
from dyno_tuner.core.protocol import Workload
from dyno_tuner.execution.device_pool import DevicePool, PoolMember
from dyno_tuner.execution.inline_executor import InlineExecutor
from dyno_tuner.execution.worker import WorkerExecutor
from dyno_tuner.output.html_report import write_report
from dyno_tuner.output.html_report.analyse import trials
from dyno_tuner.output.html_report.read import read
from dyno_tuner.record import journal
from dyno_tuner.run.session import Request, Result, run
from dyno_tuner.targets.simulated.target import SimulatedTarget
from real_faults import patient
from typer.testing import CliRunner
from waiting import LONG

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dyno_tuner.core.protocol import Measurement

OPTIONS = {"max_trials": 25, "rounds": 2, "max_rounds": 2}


def journal_path(out: Path, device: int) -> Path:
    first = journal.of_profile(out)
    return journal.of_device(first, device) if device else first


def _tune(
    folder: Path, executors: Sequence[Any], surface: str = "saturating", seed: int = 4, **options: Any
) -> Result:
    given = Options(WORKLOAD, seed=seed, **{**OPTIONS, **options})
    request = Request("simulated", given, out=folder / "p.yaml", resume=True, quiet=True)
    space = SimulatedTarget(surface, seed).surface.space()
    return run(request, executors[0], space, executors[1:])


def _devices(count: int, surface: str = "saturating", seed: int = 4) -> list[InlineExecutor]:
    return [InlineExecutor(SimulatedTarget(surface, seed)) for _ in range(count)]


def _operations(path: Path) -> list[dict[str, Any]]:
    return [r for r in journal.load(path).records if "op" in r]


def test_all_devices_search_and_the_first_confirms(tmp_path: Path) -> None:
    result = _tune(tmp_path, _devices(3))
    assert [e.name for e in result.outcome.entries]
    first, *others = ([r["key"] for r in _operations(journal_path(result.path, n))] for n in range(3))
    searched = [k for keys in (first, *others) for k in keys if k.startswith("screen/t")]
    assert len(searched) == len(set(searched))  # nothing was tried twice
    once = {int(k.removeprefix("screen/t")) for k in searched if "/again" not in k}
    assert once >= set(range(1, 25))
    # The first device tries the points beside the winner.
    assert {f"screen/t{n}" for n in once if n >= 25} <= set(first)
    for keys in others:
        assert sum(k.startswith("screen/t") for k in keys) == 8
        assert {k.split("/")[0] for k in keys} <= {"screen", "quality"}
    assert {"aa", "quality", "screen"} < {k.split("/")[0] for k in first}
    profile = profiles.load_profile(result.path)
    assert any(isinstance(e, profiles.SettingEntry) for e in profile.settings.values())


def test_three_devices_try_more_in_the_same_time(tmp_path: Path) -> None:
    counts = []
    for number in (1, 3):
        folder = tmp_path / str(number)
        folder.mkdir()
        result = _tune(folder, _devices(number), budget=300.0, max_trials=400, patience=400)
        assert result.outcome.seconds <= 330
        counts.append(result.outcome.trials)
    assert counts[1] > 1.7 * counts[0]  # of three: all wait for the slowest, and blocks are repeated


class _Meeting(InlineExecutor):
    """Waits in its first measurement of the screen until every device is in one."""

    barrier: threading.Barrier

    def measurement(self, *args: Any) -> Measurement:
        if args[4].key == "screen/b0/before":
            self.barrier.wait(LONG)
        return super().measurement(*args)


def test_devices_work_at_the_same_time(tmp_path: Path) -> None:
    devices = [_Meeting(SimulatedTarget("saturating", 4)) for _ in range(3)]
    _Meeting.barrier = threading.Barrier(3)
    assert _tune(tmp_path, devices).outcome.status == "complete"


def test_a_crash_costs_one_trial_on_one_device(tmp_path: Path) -> None:
    """Real processes that really crash, hang and run out of memory."""
    options = {"surface": "faulty", "seed": 4, "real_faults": True}
    devices = [patient(WorkerExecutor("simulated", options)) for _ in range(3)]
    try:
        result = _tune(tmp_path, devices, "faulty")
    finally:
        for device in devices:
            device.close()
    failed = {str(f.status) for f in result.outcome.failures}
    assert failed & {"crash", "oom", "timeout"}
    assert result.outcome.trials >= 25  # what is tried beside the winner comes on top
    assert result.outcome.status == "complete"


def test_workers_outlive_the_step_that_started_them(tmp_path: Path) -> None:
    """A child that asks to be killed with its parent is killed when the thread ends that has started it."""
    options = {"surface": "saturating", "seed": 4}
    devices = [patient(WorkerExecutor("simulated", options)) for _ in range(3)]
    try:
        result = _tune(tmp_path, devices)
        assert [d.starts for d in devices[1:]] == [2, 2]  # to describe the device, and to search
    finally:
        for device in devices:
            device.close()
    for number in range(3):
        statuses = {r["result"].get("status", "ok") for r in _operations(journal_path(result.path, number))}
        assert statuses == {"ok"}


def _cut(path: Path, rng: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: rng.randrange(len(data))])


def test_cut_journals_give_the_same_profile(tmp_path: Path) -> None:
    first = _tune(tmp_path, _devices(3))
    paths = [journal_path(first.path, n) for n in range(3)]
    whole = [p.read_bytes() for p in paths]
    rng = random.Random(1)
    for cut in (0, 1, 2, (1, 2), (0, 1, 2)):
        for path, data in zip(paths, whole, strict=True):
            path.write_bytes(data)
        for number in (cut,) if isinstance(cut, int) else cut:
            _cut(paths[number], rng)
        first.path.unlink()
        again = _tune(tmp_path, _devices(3))
        assert again.outcome.to_dict() == first.outcome.to_dict(), cut
        assert again.profile.settings == first.profile.settings


def test_journals_of_two_runs_are_not_mixed(tmp_path: Path) -> None:
    """All else in their first lines is equal."""
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
        _tune(folder, _devices(2))
    heads = [journal.load(journal_path(one / "p.yaml", n)).records[0] for n in range(2)]
    assert heads[0]["id"] == heads[1]["id"]
    strange = journal_path(two / "p.yaml", 1)
    strange.write_bytes(journal_path(one / "p.yaml", 1).read_bytes())
    assert read(journal.of_profile(two / "p.yaml")).absent == [strange.name]
    _tune(two, _devices(2))
    assert strange.with_name(f"{strange.name}.1").exists()
    assert read(journal.of_profile(two / "p.yaml")).absent == []


def test_a_second_ctrl_c_leaves_nothing_running(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes while the devices are being stopped; the first one is what is raised in the end."""
    stopped = threading.Event()
    ended = threading.Event()

    class Stopping:
        now = 0.0
        asked = 0

        def follow(self, first: object) -> None: ...

        def stop(self) -> None:
            Stopping.asked += 1
            if Stopping.asked == 1:
                raise KeyboardInterrupt
            stopped.set()

    def work(member: PoolMember) -> None:
        assert stopped.wait(LONG)
        ended.set()

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt("first")

    pool = DevicePool([PoolMember(n, str(n), Stopping()) for n in range(2)])  # type: ignore[arg-type]
    monkeypatch.setattr(pool, "_wait", interrupted)
    with pytest.raises(KeyboardInterrupt, match="first"):
        pool.together(work)
    assert ended.is_set()


def test_ctrl_c_while_devices_are_being_started_ends_those_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    told = threading.Event()
    real = concurrent.futures.ThreadPoolExecutor.submit
    submitted = 0

    class Stopping:
        now = 0.0

        def follow(self, first: object) -> None: ...

        def stop(self) -> None:
            told.set()

    def submit(pool: Any, *args: Any) -> Any:
        nonlocal submitted
        submitted += 1
        if submitted == 2:
            raise KeyboardInterrupt
        return real(pool, *args)

    pool = DevicePool([PoolMember(n, str(n), Stopping()) for n in range(3)])  # type: ignore[arg-type]
    monkeypatch.setattr(concurrent.futures.ThreadPoolExecutor, "submit", submit)
    ended: list[bool] = []
    with pytest.raises(KeyboardInterrupt):
        pool.together(lambda member: ended.append(told.wait(LONG)))
    assert ended == [True]


def test_a_journal_of_two_devices_is_not_continued_on_three(tmp_path: Path) -> None:
    _tune(tmp_path, _devices(2))
    with pytest.raises(TuneError, match="another devices"):
        _tune(tmp_path, _devices(3))


class _Interrupted(InlineExecutor):
    """Presses Ctrl-C in its third trial and does not come back before it is told to."""

    def __init__(self, target: Any) -> None:
        super().__init__(target)
        self.told = threading.Event()
        self.trials = 0

    def measurement(self, *args: Any) -> Measurement:
        self.trials += args[4].key.startswith("screen/t")
        if self.trials == 3:
            os.kill(os.getpid(), signal.SIGINT)
            assert self.told.wait(LONG)
        return super().measurement(*args)

    def abort(self) -> None:
        self.told.set()


def test_ctrl_c_ends_all_devices_and_resumes_to_the_same(tmp_path: Path) -> None:
    straight, broken = tmp_path / "a", tmp_path / "b"
    straight.mkdir()
    broken.mkdir()
    expected = _tune(straight, _devices(3))
    devices = _devices(3)
    devices[1] = _Interrupted(SimulatedTarget("saturating", 4))
    with pytest.raises(Interrupted, match="no profile was written"):
        _tune(broken, devices)
    trials = [r for r in _operations(journal_path(broken / "p.yaml", 1)) if r["key"].startswith("screen/t")]
    assert [r["result"]["status"] for r in trials] == ["ok", "ok"]  # what was given up is not there
    assert _tune(broken, _devices(3)).outcome.to_dict() == expected.outcome.to_dict()


def test_an_error_on_one_device_ends_the_run(tmp_path: Path) -> None:
    class Lost(InlineExecutor):
        def measurement(self, *args: Any) -> Measurement:
            raise TuneError("the device is lost")

    with pytest.raises(TuneError, match="the device is lost"):
        _tune(tmp_path, [*_devices(2), Lost(SimulatedTarget("saturating", 4))])


@pytest.mark.parametrize(
    ("device", "said"),
    [({"cores": 6}, "cores"), ({"isa": "avx2"}, "instruction set"), ({"memory_mib": 2048}, "memory")],
)
def test_devices_of_two_kinds_are_refused(tmp_path: Path, device: dict[str, Any], said: str) -> None:
    other = InlineExecutor(SimulatedTarget("saturating", 4, device=device))
    with pytest.raises(TuneError, match=f"(?i)device 2 is another kind of device than .*{said}"):
        _tune(tmp_path, [*_devices(1), other])
    assert list(tmp_path.iterdir()) == []  # and nothing was begun


def test_the_report_knows_the_trials_of_all_devices(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    result = _tune(tmp_path, _devices(3))
    assert "3 devices" in write_report(result.journal).read_text(encoding="utf-8")
    found = read(result.journal)
    journals = [_operations(journal_path(result.path, n)) for n in range(3)]
    of = [n for n, ops in enumerate(journals) for r in ops if r["key"].startswith("screen/t")]
    assert set(of) == {0, 1, 2}
    seen = [s.device for s in found.measurements if s.key.startswith("screen/t")]
    assert sorted(seen) == sorted(of)
    assert len(trials(found)) == result.outcome.trials - 1  # the default is no trial of the search


def test_two_workers_of_the_real_engine(tmp_path: Path, tiny_dir: Path) -> None:
    """Both on the CPU, in place of two GPUs."""
    options = Options(Workload(32, 4), max_trials=9, rounds=2, max_rounds=2, aa_processes=2)
    model = str(tiny_dir / "qwen3moe-tiny.gguf")
    request = Request(
        model, options, "cpu", ("cpu",), tmp_path / "p.yaml", quiet=True, ctx=64, deadline_floor=300.0
    )
    result = run(request)
    assert result.outcome.status == "complete"
    both = [_operations(journal_path(result.path, n)) for n in range(2)]
    assert [sum(r["key"].startswith("screen/t") for r in ops) >= 3 for ops in both] == [True, True]
    assert {r["result"]["status"] for ops in both for r in ops if r["op"] == "visit"} == {"ok"}


def test_the_command_asks_for_all_gpus(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Request] = []

    def capture(request: Request) -> None:
        asked.append(request)
        raise TuneError("enough")

    monkeypatch.setattr("dyno_tuner.run.session.run", capture)
    monkeypatch.setattr(
        "dyno.devices.resolve_device", lambda name, virtual=(): Device(name, {"kind": "cuda"})
    )
    model = str(tiny_dir / "qwen3moe-tiny.gguf")
    for flags, devices in (
        (["--gpu", "2,0,1"], ["cuda:2", "cuda:0", "cuda:1"]),
        (["--gpu", "1", "--device", "cuda:1"], ["cuda:1"]),
    ):
        CliRunner().invoke(app, ["-m", model, *flags])
        request = asked.pop()
        assert [request.device, *request.others] == devices
        assert str(request.options.workload) == "pp=4096,tg=128,depth=0"
