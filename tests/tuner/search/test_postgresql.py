"""The study in a real PostgreSQL server, which these tests start for themselves and stop again."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
import pytest
import studies
from dyno_tuner.record import journal
from dyno_tuner.search.shared_study import with_driver
from dyno_tuner.targets.simulated.target import SimulatedTarget

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("psycopg2", reason="no driver: pip install psycopg2-binary")


def _binaries() -> Path | None:
    """The folder of the server's programs; distributions keep them off the path."""
    found = shutil.which("initdb")
    folders = [Path(found).parent] if found else sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    return next((f for f in reversed(folders) if (f / "pg_ctl").exists()), None)


BINARIES = _binaries()
pytestmark = pytest.mark.skipif(BINARIES is None, reason="no PostgreSQL server is installed")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """URL of a server of its own, reached by a socket in a folder of its own. It refuses to run as root."""
    assert BINARIES is not None
    user = "postgres" if os.geteuid() == 0 else None
    folder = Path(tempfile.mkdtemp(prefix="dyno-pg-"))
    try:
        if user is not None:
            shutil.chown(folder, user)
        data = folder / "data"

        def do(*words: object) -> None:
            subprocess.run(
                [str(w) for w in words], check=True, user=user, cwd=folder, stdout=subprocess.DEVNULL,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip

        do(BINARIES / "initdb", "-D", data, "-U", "tuner", "--auth=trust", "--no-sync", "-E", "UTF8")
        options = f"-k {folder} -c listen_addresses= -c fsync=off"
        do(BINARIES / "pg_ctl", "-D", data, "-o", options, "-l", folder / "log", "-w", "start")
        try:
            yield f"postgresql://tuner@/postgres?host={folder}"
        finally:
            do(BINARIES / "pg_ctl", "-D", data, "-m", "immediate", "-w", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _start(folder: Path, seed: int, storage: str, *more: object) -> subprocess.Popen[str]:
    words = [sys.executable, Path(__file__).parents[1] / "study_run.py", folder, seed, storage, *more]
    return subprocess.Popen(
        [str(w) for w in words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )  # fmt: skip


def _end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=240)
    finally:
        process.kill()
    return process.returncode, out, err


def _noted(folder: Path, kind: str) -> list[dict[str, Any]]:
    path = journal.of_profile(folder / "p.yaml")
    records = journal.load(path).records if path.exists() else []
    return [r for r in records if r.get("note") == kind]


def _words(settings: Any) -> str:
    return " ".join(sorted(f"{k}={v}" for k, v in settings.items()))


def test_two_tunes_at_once_share_a_study_and_a_third_machine_is_refused(tmp_path: Path, server: str) -> None:
    """Two processes of the same seed: they would try the very same points, were it not for the study."""
    folders = [tmp_path / "a", tmp_path / "b"]
    running = [_start(folder, seed, server) for seed, folder in enumerate(folders)]
    end = time.monotonic() + 120
    while not all(_noted(folder, "joined") for folder in folders) and time.monotonic() < end:
        assert all(process.poll() is None for process in running), [_end(p) for p in running]
        time.sleep(0.05)
    other = _end(_start(tmp_path / "c", 2, server, 6))
    (tmp_path / "go").touch()
    ended = [_end(process) for process in running]
    for code, _, err in ended:
        assert code == 0, err
    assert other[0] == 1
    assert "cannot join" in other[2]
    assert "cores" in other[2]
    assert not _noted(tmp_path / "c", "trial")

    tried = [[_words(note["settings"]) for note in _noted(folder, "trial")] for folder in folders]
    assert all(len(t) >= 12 for t in tried)
    assert not set(tried[0]) & set(tried[1])

    # Each named the database as its own tools do, without a driver.
    assert server.startswith("postgresql://")
    storage = studies.storage(with_driver(server))
    (name,) = optuna.get_all_study_names(storage)
    study = optuna.load_study(study_name=name, storage=storage)
    complete = [t for t in study.trials if t.state.name == "COMPLETE"]
    assert len(complete) == 2 + len(tried[0]) + len(tried[1])
    machines = {t.user_attrs["dyno_machine"] for t in complete}
    assert len(machines) == 2
    # They overlapped: neither had ended its search when the other began its own.
    spans = [[t.number for t in complete if t.user_attrs["dyno_machine"] == m][1:] for m in machines]
    assert max(min(s) for s in spans) < min(max(s) for s in spans)
    for folder, mine, theirs in zip(folders, tried, reversed(tried), strict=True):
        told, ratios, finalists = _what_was_known(folder)
        assert told
        assert told <= set(theirs)
        assert set(ratios) <= {*mine, *theirs}
        assert max(ratios, key=lambda words: ratios[words]) in finalists  # whoever has found it
    target = SimulatedTarget("saturating", 0)
    truth = target.surface.truth
    scores = [truth(json.loads(out)["settings"]) for _, out, _ in ended]
    assert min(scores) > truth({k.name: k.default for k in target.knobs()}) + 0.05


def _what_was_known(folder: Path) -> tuple[set[str], dict[str, float], set[str]]:
    """When a tune chose its finalists: what it had heard of the other's results, the ratio of every point
    that either had measured, and the finalists."""
    told: set[str] = set()
    ratios: dict[str, float] = {}
    for record in journal.load(journal.of_profile(folder / "p.yaml")).records:
        if record.get("note") == "finalists":
            return told, ratios, {_words(s) for s in record["settings"]}
        if record.get("note") == "trial" and record["ratio"] is not None:
            ratios[_words(record["settings"])] = record["ratio"]
        for row in record.get("result", {}).get("news", []):
            if row["state"] == "ok":
                words = _words(row["params"])
                told.add(words)
                ratios[words] = row["ratio"]
    raise AssertionError(f"{folder}: no finalists")


def test_a_database_that_is_not_there_is_said(tmp_path: Path, server: str) -> None:
    code, _, err = _end(_start(tmp_path / "p", 0, server.replace("/postgres?", "/nowhere?")))
    assert code == 1
    assert re.search(r"storage .* database .nowhere. does not exist", err)
