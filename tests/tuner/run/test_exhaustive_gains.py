"""The comparison with an exhaustive run can be measured in pieces."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

from exhaustive_gains import Bench, Notebook, Stopped, beside, sweep  # noqa: E402

OPTIONS = {"force": False, "budget": 120.0}


def test_a_piece_goes_on_where_the_one_before_has_stopped(tmp_path: Path) -> None:
    path = tmp_path / "x.model.0.part.json"
    first = Notebook(path, math.inf, OPTIONS)
    assert first.once("looks/pp/a/b", lambda: [1.01, 0.98]) == [1.01, 0.98]
    first.once("tune", lambda: {"profile": {"settings": {}, "kernels": []}})
    over = Notebook(path, -math.inf, OPTIONS)
    assert over.once("looks/pp/a/b", lambda: pytest.fail("measured again")) == [1.01, 0.98]
    assert over.once("tune", lambda: pytest.fail("measured again"))["profile"]["kernels"] == []
    assert set(over.seconds) == {"looks", "tune"}
    with pytest.raises(Stopped, match="judge/pp"):
        over.once("judge/pp", lambda: pytest.fail("measured although the time has ended"))
    over.close()
    assert not path.exists()


def test_a_tune_begins_only_if_its_budget_is_left() -> None:
    notebook = Notebook(None, time.monotonic() + 100.0, OPTIONS)
    with pytest.raises(Stopped, match="tune"):
        notebook.once("tune", lambda: pytest.fail("begun, and the end of the piece cuts it"), 120.0)
    assert notebook.once("judge/pp", lambda: 1.0, 20.0) == 1.0


def test_a_failure_leaves_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "part.json"
    notebook = Notebook(path, math.inf, OPTIONS)
    notebook.once("looks/pp/a/b", lambda: [1.0])
    with pytest.raises(ZeroDivisionError):
        notebook.once("tune", lambda: 1 // 0)
    assert set(json.loads(path.read_text())["results"]) == {"looks/pp/a/b"}


def test_pieces_of_another_machine_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "part.json"
    Notebook(path, math.inf, OPTIONS).once("looks/pp/a/b", lambda: [1.0])
    data = json.loads(path.read_text())
    data["of"]["cpu_info"] = "another CPU"
    path.write_text(json.dumps(data))
    with pytest.raises(SystemExit, match="another CPU"):
        Notebook(path, math.inf, OPTIONS)


@pytest.mark.parametrize("other", [{"force": True}, {"budget": 60.0}])
def test_pieces_of_other_options_are_refused(tmp_path: Path, other: dict[str, Any]) -> None:
    path = tmp_path / "part.json"
    Notebook(path, math.inf, OPTIONS).once("tune", lambda: {"gain": 1.1})
    (name,) = other
    with pytest.raises(
        SystemExit, match=f"'{name}': {OPTIONS[name]}.* and this is .*'{name}': {other[name]}"
    ):
        Notebook(path, math.inf, {**OPTIONS, **other})


@pytest.mark.parametrize("other", [{"force": True}, {"budget": 60.0}])
def test_jobs_of_other_options_are_refused(tmp_path: Path, other: dict[str, Any]) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps({**OPTIONS, "jobs": []}))
    args = argparse.Namespace(json=path, lanes=["0"], models=[], seeds=0, **{**OPTIONS, **other})
    with pytest.raises(SystemExit, match=r"x\.json is of --budget 120\.0, force False; give the same"):
        sweep(args)


def test_the_result_says_what_ran_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    alone, busy = argparse.Namespace(beside=""), argparse.Namespace(beside="a test suite")
    assert beside([[4, 5]], alone) == "one job at a time, on 2 CPUs of a machine with 16 CPUs"
    assert beside([[0, 1], [2, 3]], busy) == (
        "2 jobs at a time, each on 2 CPUs of a machine with 16 CPUs; beside them: a test suite"
    )


def test_what_seems_best_gets_further_looks() -> None:
    """One look errs by tens of percent on a busy machine, so a single lucky one must not decide."""
    lucky, good = {"c3": 1.6}, {"c7": 1.08}
    seen: list[tuple[str, int]] = []

    class Looking(Bench):
        def __init__(self) -> None:
            """No engine."""

        def _looks_of(self, changes: Any, metric: str, phase: str) -> list[float]:
            seen.append((phase, len(changes)))
            luck = lucky if phase == "looks" else {}
            return [{**luck, **good}.get(name, 1.0) for name, _, _ in changes]

    changes: Any = [(f"c{i}", None, ("pp",)) for i in range(40)]
    found = Looking().looks(changes, "pp")
    assert seen == [("looks", 40), ("looks1", 10), ("looks2", 10)]
    assert (found[3], found[7]) == (1.0, 1.08)
    assert len(found) == 40
