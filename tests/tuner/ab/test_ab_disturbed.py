"""`tune ab` on a machine that others use: it stops, or with `--force` marks its result."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from dyno_tuner.cli import ab_command
from dyno_tuner.cli.commands import app
from dyno_tuner.core.errors import TuneError
from dyno_tuner.measure.cpu_monitor import Load
from fake_engines import fake
from typer.testing import CliRunner

if TYPE_CHECKING:
    from pathlib import Path

BUSY = "other programs use 1 of 2 cores (cc1plus (4711): 1.0)"


def _ab(folder: Path, tiny_dir: Path, *options: str) -> tuple[int, str, BaseException | None]:
    side = str(fake(folder / "b", "llama.cpp-0c1e570"))
    model = str(next(iter(sorted(tiny_dir.glob("*qwen3moe*.gguf")))))
    words = ["ab", side, side, "-m", model, "--workload", "pp=64,tg=8", "--rounds", "2", "-q", *options]
    done = CliRunner().invoke(app, words)
    return done.exit_code, done.stdout, done.exception


def test_a_machine_that_does_not_come_to_rest_ends_the_comparison(
    tmp_path: Path, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Load, "disturbed", BUSY)
    monkeypatch.setattr(ab_command, "PATIENCE", 0.0)
    _, _, error = _ab(tmp_path, tiny_dir, "--no-answers")
    assert isinstance(error, TuneError)
    assert "cc1plus" in str(error)
    assert "compare beside them with --force" in str(error)


@pytest.mark.parametrize("others", [BUSY, ""])
def test_force_compares_in_spite_of_it_and_marks_what_it_says(
    others: str, tmp_path: Path, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Load, "disturbed", others)
    table = tmp_path / "table.md"
    code, text, error = _ab(
        tmp_path, tiny_dir, "--force", "--json", "--flags-b", "-ub 64", "--out", str(table)
    )
    assert code == 0, error
    told = json.loads(text)
    assert told["verdict"] == "faster"
    assert told["disturbed"] is bool(others)
    assert told["machine"].get("disturbed") is (True if others else None)
    marked = "Others used the CPUs during runs that count (--force): the verdicts are not proven."
    assert (marked in table.read_text()) is bool(others)
