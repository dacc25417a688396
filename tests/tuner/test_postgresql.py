"""The study in a real PostgreSQL server, which these tests start for themselves and stop again."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import optuna
import pytest
from dyno_tuner import journal
from dyno_tuner.errors import TuneError
from dyno_tuner.inline import InlineExecutor
from dyno_tuner.options import Options
from dyno_tuner.session import Request, run
from dyno_tuner.target import Workload
from dyno_tuner.targets.simulated import SimulatedTarget

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
            yield f"postgresql+psycopg2://tuner@/postgres?host={folder}"
        finally:
            do(BINARIES / "pg_ctl", "-D", data, "-m", "immediate", "-w", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _tune(out: Path, seed: int, storage: str) -> Path:
    target = SimulatedTarget("saturating", seed)
    options = Options(Workload(64, 8), seed=seed, max_trials=8, rounds=2, max_rounds=2)
    request = Request("simulated", options, out=out, quiet=True, storage=storage)
    return run(request, InlineExecutor(target), target.surface.space()).journal


def test_trials_of_two_runs_are_in_one_database(tmp_path: Path, server: str) -> None:
    journals = [_tune(tmp_path / f"{seed}.yaml", seed, server) for seed in (0, 1)]
    names = optuna.get_all_study_names(storage=server)
    assert len(names) == 2
    for name, path in zip(sorted(names), journals, strict=True):
        study = optuna.load_study(study_name=name, storage=server)
        trials = {r["number"] for r in journal.load(path).records if r.get("note") == "trial"}
        assert len(study.trials) == len(trials) > 0
        assert study.best_value is not None


def test_a_database_that_is_not_there_is_said(tmp_path: Path, server: str) -> None:
    with pytest.raises(TuneError, match=r"storage .* database .nowhere. does not exist"):
        _tune(tmp_path / "p.yaml", 0, server.replace("/postgres?", "/nowhere?"))
