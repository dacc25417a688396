"""What people see while a tune runs."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from conftest_tuner import WORKLOAD
from dyno_tuner.inline import InlineExecutor
from dyno_tuner.ledger import Ledger
from dyno_tuner.progress import Progress
from dyno_tuner.targets.simulated import SimulatedTarget
from dyno_tuner.tune import Options, Tune
from rich.console import Console

if TYPE_CHECKING:
    import pytest


def _shown(progress: Progress) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(progress._view())
    return out.getvalue()


def _trial(progress: Progress, number: int, ratio: float) -> None:
    interval = [ratio - 0.01, ratio + 0.01]
    progress.note(
        "trial",
        {"number": number, "settings": {"ubatch": number}, "status": "ok", "ratio": ratio, "ci95": interval},
    )


def _finalist(progress: Progress, ubatch: int, ratio: float, beats: bool) -> None:
    interval = [ratio - 0.01, ratio + 0.01]
    progress.note(
        "finalist",
        {"settings": {"ubatch": ubatch}, "ratio": ratio, "ci95": interval, "beats": beats, "rounds": 4},
    )


def test_nothing_slower_than_the_default_is_the_best_so_far() -> None:
    progress = Progress("m", None, quiet=True)
    assert "1.000 × default   the default itself" in _shown(progress)
    _trial(progress, 1, 0.761)
    assert "1.000 × default   the default itself" in _shown(progress)
    _trial(progress, 2, 1.05)
    _trial(progress, 3, 1.02)
    assert "1.050 × default   [1.040, 1.060]   ubatch=2, not confirmed" in _shown(progress)


def test_only_what_beats_the_default_is_confirmed() -> None:
    progress = Progress("m", None, quiet=True)
    _finalist(progress, 64, 1.02, beats=False)
    assert "confirmed" not in _shown(progress)
    for ubatch, ratio, beats in ((128, 1.07, True), (256, 1.05, True), (512, 1.2, False)):
        _finalist(progress, ubatch, ratio, beats)
    assert "1.070 × [1.060, 1.080]   ubatch=128" in _shown(progress)


def test_a_finalist_that_is_slower_somewhere_says_where(capsys: pytest.CaptureFixture[str]) -> None:
    """1.08 × as a mean that is not taken is no riddle."""
    progress = Progress("m", None)
    interval = {"ratio": 1.076, "ci95": [1.067, 1.086], "beats": False, "rounds": 4}
    progress.note("finalist", {"settings": {"cpu_repack": False}, **interval, "harmed": {"tg": 0.9534}})
    progress.note("finalist", {"settings": {"ubatch": 64}, **interval, "harmed": {}})
    said = capsys.readouterr().err + capsys.readouterr().out
    assert "cpu_repack=False: 1.076 × [1.067, 1.086], slower at tg: 0.953 ×" in said
    assert "ubatch=64: 1.076 × [1.067, 1.086], does not beat the default" in said


def test_a_tune_shows_trials_with_intervals(capsys: pytest.CaptureFixture[str]) -> None:
    """On a terminal and elsewhere: the interval that the noise of visits leaves of one ratio."""
    target = SimulatedTarget("saturating", 3)
    space = target.surface.space()
    ledger = Ledger(InlineExecutor(target), WORKLOAD, identity=space.identity, virtual_time=True)
    notes: list[dict[str, Any]] = []
    progress = Progress("m", None)

    def note(kind: str, data: Any) -> None:
        progress.note(kind, data)
        if kind == "trial" and data["ratio"] is not None:
            notes.append(data)

    ledger.on_note = note
    Tune(ledger, space, Options(WORKLOAD, seed=3, max_trials=10, rounds=2, max_rounds=2)).run()
    assert notes
    for data in notes:
        low, high = data["ci95"]
        assert low < data["ratio"] < high < 1.2 * low
    best = max(notes, key=lambda n: n["ratio"])
    low, high = best["ci95"]
    assert f"{best['ratio']:.3f} × [{low:.3f}, {high:.3f}]" in capsys.readouterr().err
