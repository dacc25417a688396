"""`.ci/run` with a `make` that only writes its targets down: their order, and what a failure ends."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BESIDE = ("lint", "cuda-check")
STAGES = (*BESIDE, "test-together", "test-clusters", "sanitize", "test-builds", "test-alone", "fuzz")

# The CUDA check of this `make` ends after the foreground has begun its last stage beside it.
MAKE = """#!/bin/sh
echo "$1" >>"$LOG"
case $1 in
  cuda-check)
    seconds=0
    until grep -qx "${UNTIL:-test-builds}" "$LOG" || [ $seconds -ge 300 ]; do
      seconds=$((seconds + 1))
      sleep 1
    done
    echo "a line of the second lane" ;;
  "$WAITS") until grep -qx cuda-check "$LOG"; do sleep 0.1; done ;;
esac
echo "end of $1" >>"$LOG"
[ "$1" != "$FAILS" ]
"""


def run(folder: Path, **variables: str) -> tuple[int, str, list[str]]:
    """Exit status, printed lines and targets of a run."""
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", folder / ".ci" / "run")
    (folder / "bin").mkdir()
    (folder / "bin" / "make").write_text(MAKE)
    (folder / "bin" / "make").chmod(0o755)
    log = folder / "log"
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONS"}
    done = subprocess.run(
        ["bash", str(folder / ".ci" / "run")],
        env={**kept, "PATH": path, "LOG": str(log), **variables},
        capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr, log.read_text().splitlines()


def test_the_check_of_cuda_runs_beside_builds_and_ends_before_what_runs_alone(tmp_path: Path) -> None:
    code, printed, log = run(tmp_path)
    assert code == 0, printed
    assert "a line of the second lane" in printed
    assert set(STAGES) <= set(log)
    for beside in BESIDE:
        assert log.index(f"end of {beside}") < log.index("test-alone") < log.index("fuzz")
    assert log.index("test-builds") < log.index("end of cuda-check")


@pytest.mark.parametrize(
    "target",
    ["lint", "cuda-check", "test-together", "test-clusters", "sanitize", "test-builds", "test-alone", "fuzz"],
)
def test_a_stage_that_fails_fails_the_run(tmp_path: Path, target: str) -> None:
    code, printed, log = run(tmp_path, FAILS=target)
    assert code != 0, printed
    assert "fuzz" not in log or target == "fuzz", "nothing follows a failure"


def test_a_failure_ends_the_second_lane_and_prints_its_lines(tmp_path: Path) -> None:
    code, _, log = run(tmp_path, FAILS="test-together", WAITS="test-together", UNTIL="nothing")
    assert code != 0
    assert "end of lint" in log
    assert "cuda-check" in log
    assert "end of cuda-check" not in log
