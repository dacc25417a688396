from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from dyno import profiles
from dyno_tuner.core.errors import JournalError
from dyno_tuner.core.protocol import Configuration, OpContext, Quality, Workload
from dyno_tuner.execution.inline_executor import InlineExecutor
from dyno_tuner.record import journal
from dyno_tuner.record.recorder import Recorder
from dyno_tuner.run.session import Request, run
from dyno_tuner.run.tune import Options, Tune
from dyno_tuner.targets.simulated.target import SimulatedTarget
from waiting import until

SCRIPT = Path(__file__).parents[1] / "simulated_run.py"
WORKLOAD = Workload(pp=64, tg=8)


def _start(folder: Path, surface: str, how: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), str(folder), surface, "5", how],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True,
    )  # fmt: skip


def _complete(folder: Path, surface: str, how: str) -> dict[str, Any]:
    process = _start(folder, surface, how)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    return json.loads(out)


def _until_it_gets_on(process: subprocess.Popen[str], book: Path, before: int) -> None:
    until(lambda: process.poll() is not None or len(_operations(book)) > before)


def _operations(path: Path) -> list[str]:
    return [r["key"] for r in journal.load(path).records if "op" in r] if path.exists() else []


def test_killed_with_its_worker_a_run_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """At any moment of the clock; fifty moments of a run without a worker are in `test_faults`."""
    how = "worker"
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    expected = _complete(straight, "faulty", how)
    rng = random.Random(11)
    book = broken / "profile.yaml.journal.jsonl"
    seen: list[str] = []
    kills = 0
    while kills < 3:
        before = len(_operations(book))
        process = _start(broken, "faulty", how)
        # Let it get somewhere first, then kill it at any moment.
        _until_it_gets_on(process, book, before)
        time.sleep(rng.uniform(0.0, 0.25))
        with contextlib.suppress(ProcessLookupError):  # it may just have ended by itself
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        kills += 1
        now = _operations(book)
        assert now[: len(seen)] == seen  # no completed record is lost
        seen = now
        if process.returncode == 0:
            break
    assert _complete(broken, "faulty", how) == expected
    keys = _operations(book)
    assert len(keys) == len(set(keys))  # nothing was measured twice
    assert sorted(keys) == sorted(_operations(straight / "profile.yaml.journal.jsonl"))


def _session(folder: Path, surface: str = "saturating", seed: int = 5, **options: Any) -> Any:
    target = SimulatedTarget(surface, seed)
    given = {"max_trials": 12, "rounds": 2, "max_rounds": 2, **options}
    request = Request(
        "simulated", Options(WORKLOAD, seed=seed, **given), out=folder / "p.yaml", resume=True, quiet=True
    )
    return run(request, InlineExecutor(target), target.surface.space())


def test_a_cut_journal_gives_the_same_profile(tmp_path: Path) -> None:
    first = _session(tmp_path)
    data = first.journal.read_bytes()
    rng = random.Random(2)
    for cut in [0, 1, *(rng.randrange(len(data)) for _ in range(2)), len(data) - 1]:
        first.journal.write_bytes(data[:cut])
        first.path.unlink()  # it would be an incumbent where the journal's first line is lost
        again = _session(tmp_path)
        assert again.outcome.to_dict() == first.outcome.to_dict(), cut
        assert again.profile.settings == first.profile.settings


def test_a_longer_budget_compares_answers_as_the_run_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many tokens are scored depends on the budget, and two that are compared need the same ones."""
    seen: list[float | None] = []
    quality = SimulatedTarget.quality

    def recorded(self: SimulatedTarget, configuration: Configuration, context: OpContext) -> Quality:
        seen.append(context.budget)
        return quality(self, configuration, context)

    monkeypatch.setattr(SimulatedTarget, "quality", recorded)
    _session(tmp_path, budget=25.0)
    assert set(seen) == {25.0}
    begun = len(seen)
    _session(tmp_path, budget=120.0)
    assert len(seen) > begun, "nothing was left to be tried"
    assert set(seen) == {25.0}
    (tmp_path / "other").mkdir()
    _session(tmp_path / "other", budget=120.0)
    assert seen[-1] == 120.0


def test_a_finished_journal_is_replayed_without_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = _session(tmp_path)
    size = first.journal.stat().st_size

    def asked(*_: object) -> None:
        raise AssertionError("the engine was asked")

    for method in ("measurement", "quality"):
        monkeypatch.setattr(InlineExecutor, method, asked)
    again = _session(tmp_path)
    assert again.outcome.to_dict() == first.outcome.to_dict()
    assert first.journal.stat().st_size == size


def test_a_journal_of_something_else_is_refused(tmp_path: Path) -> None:
    _session(tmp_path)
    with pytest.raises(JournalError, match="another identity"):
        _session(tmp_path, surface="null")
    with pytest.raises(JournalError, match=r"another (seed|identity)"):
        _session(tmp_path, seed=6)


def test_without_resume_the_old_journal_is_kept(tmp_path: Path) -> None:
    first = _session(tmp_path)
    target = SimulatedTarget("saturating", 5)
    options = Options(WORKLOAD, seed=5, max_trials=12, rounds=2, max_rounds=2)
    request = Request("simulated", options, out=tmp_path / "p.yaml", quiet=True)
    run(request, InlineExecutor(target), target.surface.space())
    assert (tmp_path / "p.yaml.journal.jsonl.1").exists()
    assert first.journal.exists()


def test_the_profile_holds_every_searched_setting_and_its_proof(tmp_path: Path) -> None:
    result = _session(tmp_path, max_trials=24)
    profile = profiles.load_profile(tmp_path / "p.yaml")
    assert set(profile.settings) == {"ubatch", "threads", "threads_batch"}
    assert profile.evidence is not None
    assert profile.evidence.journal == f"sha256:{journal.sha256(result.journal)}"
    assert set(profile.evidence.baseline) == {"pp64", "tg8"}
    changed = {n: e for n, e in profile.settings.items() if e != "default"}
    assert changed, "the surface has gains of 17 % to find"
    for name, entry in changed.items():
        assert not isinstance(entry, str)
        assert entry.ratio is not None, name
        assert entry.ratio >= 1 + 0.01
        assert entry.ci95 is not None
        assert entry.ci95[0] > 1
        assert entry.n is not None
        assert entry.default == result.outcome.defaults[name]
    assert profile.provenance is not None
    assert profile.provenance.trials == result.outcome.trials


def test_a_previous_profile_races_as_an_incumbent(tmp_path: Path) -> None:
    _session(tmp_path, max_trials=24)
    (tmp_path / "p.yaml.journal.jsonl").unlink()
    result = _session(tmp_path, max_trials=3)
    assert result.outcome.entries  # three trials would not find it again
    notes = [r for r in journal.load(result.journal).records if r.get("note") == "trial"]
    assert notes[0]["ratio"] > 1.1


def test_what_killed_a_worker_is_never_tried_again(tmp_path: Path) -> None:
    """Neither in the run nor, from its journal, in the next one."""
    target = SimulatedTarget("faulty", 1)
    space = target.surface.space()
    asked: list[str] = []

    class Counting(InlineExecutor):
        def measurement(self, configuration: Any, *args: Any, **kwargs: Any) -> Any:
            asked.append(json.dumps(configuration.settings, sort_keys=True))
            return super().measurement(configuration, *args, **kwargs)

    path = tmp_path / "j"
    with journal.Journal(path) as book:
        recorder = Recorder(
            Counting(target), WORKLOAD, journal=book, identity=space.identity, virtual_time=True
        )
        Tune(recorder, space, Options(WORKLOAD, seed=1, max_trials=18, check=False)).run()
    killed = {
        json.dumps(r["config"]["settings"], sort_keys=True)
        for r in journal.load(path).records
        if r.get("op") == "visit" and r["result"]["status"] in ("crash", "oom", "timeout")
    }
    assert killed
    assert all(asked.count(k) == 1 for k in killed)
    asked.clear()
    past = journal.load(path).records
    # Another seed asks in another order; what killed is known all the same.
    recorder = Recorder(Counting(target), WORKLOAD, past=past, identity=space.identity, virtual_time=True)
    Tune(recorder, space, Options(WORKLOAD, seed=2, max_trials=18, check=False)).run()
    assert not killed & set(asked)


def test_a_full_disk_says_so_and_keeps_what_was_measured(tmp_path: Path) -> None:
    program = f"""
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
sys.argv = ["x", {str(tmp_path)!r}, "saturating", "5", "inline"]
sys.path.insert(0, {str(SCRIPT.parent)!r})
import simulated_run
from dyno_tuner.core.errors import TuneError
try:
    simulated_run.main()
except TuneError as error:
    print(error)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--resume" in done.stdout
    assert journal.load(tmp_path / "profile.yaml.journal.jsonl").records
    kept = _operations(tmp_path / "profile.yaml.journal.jsonl")
    _complete(tmp_path, "saturating", "inline")
    assert _operations(tmp_path / "profile.yaml.journal.jsonl")[: len(kept)] == kept
