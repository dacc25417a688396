"""Scratch files go, also those of a process that was killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from dyno_tuner.core.scratch import scratch_folder

HOLD = """
import sys, time
from dyno_tuner.core.scratch import scratch_folder
with scratch_folder("dyno-test-") as folder:
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def test_it_goes_with_the_block(tmp_path: Path) -> None:
    with scratch_folder("dyno-test-") as folder:
        (Path(folder) / "exact.npz").write_bytes(b"x")
        assert Path(folder).parent == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_goes_with_the_next(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            left = Path(child.stdout.readline().strip())
            with scratch_folder("dyno-test-"):
                assert left.is_dir()  # its process lives
        finally:
            child.send_signal(signal.SIGKILL)
    assert left.is_dir()
    with scratch_folder("dyno-other-"):
        assert left.is_dir()
    with scratch_folder("dyno-test-"):
        assert not left.exists()


def test_what_nobody_has_locked_yet_stays(tmp_path: Path) -> None:
    young = tmp_path / "dyno-test-young"
    young.mkdir()
    (young / "held.new").touch()
    with scratch_folder("dyno-test-"):
        assert young.is_dir()
