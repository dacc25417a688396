"""`benchmarks/compare_statistics.py`: a row that is worse than its interval fails."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[3]
RESULT = ROOT / "benchmarks" / "results" / "tuner_statistics.json"


def better(report: Any) -> None:
    report["regret"]["rugged"]["coordinate"]["within_2pct"] = 0.9


def a_little_worse(report: Any) -> None:
    report["tunes"]["saturating default"]["intervals_hold_truth"] -= 1


def harmful(report: Any) -> None:
    report["tunes"]["saturating default"]["harmful"] = 20


def changed(report: Any) -> None:
    report["null"]["noisy"]["changed"] = 15


def less_often_found(report: Any) -> None:
    report["regret"]["wide"]["guided"]["within_2pct"] -= 0.2


def missing(report: Any) -> None:
    del report["null"]["noisy"]


@pytest.mark.parametrize("edit", [better, a_little_worse])
def test_rows_within_their_intervals_pass(tmp_path: Path, edit: Callable[[Any], None]) -> None:
    code, output = compared(tmp_path, edit)
    assert code == 0, output
    assert "0 worse or missing" in output


@pytest.mark.parametrize("edit", [harmful, changed, less_often_found, missing])
def test_rows_beyond_their_intervals_fail(tmp_path: Path, edit: Callable[[Any], None]) -> None:
    code, output = compared(tmp_path, edit)
    assert code == 1
    assert "WORSE" in output or "MISSING" in output
    assert "1 worse or missing" in output or edit is missing


def compared(tmp_path: Path, edit: Callable[[Any], None]) -> tuple[int, str]:
    report = copy.deepcopy(json.loads(RESULT.read_text(encoding="utf-8")))
    edit(report)
    new = tmp_path / "new.json"
    new.write_text(json.dumps(report), encoding="utf-8")
    script = str(ROOT / "benchmarks" / "compare_statistics.py")
    command = [sys.executable, script, str(RESULT), str(new)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr
