"""Journals whose checksums hold and whose contents are odd: one line that names the file and the record."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from dyno_tuner.cli import commands
from dyno_tuner.core.errors import JournalError
from dyno_tuner.core.options import Options
from dyno_tuner.core.protocol import Workload
from dyno_tuner.execution.inline_executor import InlineExecutor
from dyno_tuner.output.html_report import page
from dyno_tuner.record import history, journal, validation
from dyno_tuner.run.session import Request, run
from dyno_tuner.targets.simulated.target import SimulatedTarget

if TYPE_CHECKING:
    from collections.abc import Callable

Record = dict[str, Any]


def tune(folder: Path, resume: bool) -> None:
    target = SimulatedTarget("saturating", 5)
    options = Options(Workload(pp=64, tg=8), seed=5, max_trials=4, rounds=2, max_rounds=2)
    request = Request(
        "simulated", options, out=folder / "p.yaml", resume=resume, quiet=True, deadline_floor=0.7
    )
    run(request, InlineExecutor(target), target.surface.space())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    folder = tmp_path_factory.mktemp("whole")
    tune(folder, resume=False)
    return journal.load(folder / "p.yaml.journal.jsonl").records


def written(folder: Path, found: list[Record]) -> Path:
    path = folder / "p.yaml.journal.jsonl"
    path.write_bytes(b"".join(journal.encode(r) for r in found))
    assert journal.load(path).damaged == 0
    return path


def first(found: list[Record], kind: str, name: str = "op") -> int:
    return next(n for n, r in enumerate(found) if r.get(name) == kind)


def change(kind: str, *path: Any, to: Any) -> Callable[[list[Record]], int]:
    """Puts a value into the first record of a kind and gives its number."""

    def apply(found: list[Record]) -> int:
        name = next(n for n in ("op", "note", "run") if any(r.get(n) == kind for r in found))
        number = first(found, kind, name)
        node: Any = found[number]
        for step in path[:-1]:
            node = node[step]
        if to is ...:
            del node[path[-1]]
        else:
            node[path[-1]] = to
        return number + 1

    return apply


RUN = "dyno-tune-1"
ODD: dict[str, tuple[Callable[[list[Record]], int], str]] = {
    "no result": (change("visit", "result", to=...), "it has no 'result'"),
    "a result that is none": (change("visit", "result", to=3), "result is 3, which is not of type dict"),
    "no samples": (change("visit", "result", "samples", to=...), "it has no 'samples'"),
    "half a sample": (change("visit", "result", "samples", 0, to=["pp"]), "list index out of range"),
    "a sample without time": (
        change("visit", "result", "samples", 0, 3, to=0.0),
        "a sample took 0.0 seconds",
    ),
    "a sample of no number": (
        change("visit", "result", "samples", 0, 3, to="nan"),
        "a sample took nan seconds",
    ),
    "tokens below zero": (change("visit", "result", "samples", 0, 2, to=-4), "a sample is of -4 tokens"),
    "samples of nothing": (change("visit", "result", "samples", to=[]), "it has no sample of "),
    "a status of its own": (
        change("visit", "result", "status", to="great"),
        "'great' is not a valid TrialStatus",
    ),
    "no settings": (change("visit", "config", to={}), "it has no 'settings'"),
    "a setting that is a list": (
        change("visit", "config", "settings", "ubatch", to=[1]),
        "ubatch is [1], which",
    ),
    "a value of no knob": (
        change("visit", "config", "settings", "ubatch", to=-77),
        "its configuration does not belong to this search",
    ),
    "a key of the wrong kind": (change("visit", "key", to=5), "key is 5, which is not of type str"),
    "no time": (change("visit", "t", to=...), "it has no 't'"),
    "a time of no number": (change("visit", "t", to="soon"), "t is 'soon', which is not a number"),
    "an endless time": (change("visit", "t", to=1e300), "t is 1e+300, which is out of range"),
    "half a quality": (change("quality", "result", "mean_kld", to=...), "it has no 'mean_kld'"),
    "a load that is none": (
        change("visit", "result", "cpu", to=[3]),
        "cpu is [3], which is not of type dict",
    ),
    "time that was lost for ever": (
        change("visit", "result", "cpu", to={"lost": 1e300}),
        "cpu.lost is 1e+300, which is out of range",
    ),
    "a distance of one figure": (
        change("visit", "result", "cpu", to={"between_ns": [[120.0]]}),
        "a distance between CPUs has 1 figures; expected 2",
    ),
    "a distance below zero": (
        change("visit", "result", "cpu", to={"nearest_ns": [-5.0, 120.0]}),
        "a distance between CPUs is -5.0, which is out of range",
    ),
    "no incumbents": (change(RUN, "incumbents", to=...), "it has no 'incumbents'"),
    "an incumbent that is a number": (
        change(RUN, "incumbents", to=[4]),
        "an incumbent is 4, which is not of type dict",
    ),
}


@pytest.mark.parametrize("odd", ODD)
def test_resume_names_the_file_and_the_record(odd: str, whole: list[Record], tmp_path: Path) -> None:
    found = copy.deepcopy(whole)
    apply, reason = ODD[odd]
    number = apply(found)
    path = written(tmp_path, found)
    before = path.read_bytes()
    with pytest.raises(JournalError) as caught:
        tune(tmp_path, resume=True)
    line = str(caught.value)
    assert line.startswith(f"journal {path}: record {number} (")
    assert reason in line
    assert "leave out --resume" in line
    assert "\n" not in line
    assert path.read_bytes() == before


def test_records_that_are_odd_only_together_are_one_line_too(
    whole: list[Record], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(tune: Any) -> None:
        tune.context.recorder.last = "aa/p1/v1"
        raise ZeroDivisionError("nothing to divide by")

    path = written(tmp_path, whole)
    monkeypatch.setattr("dyno_tuner.run.session.Tune.run", broken)
    with pytest.raises(JournalError) as caught:
        tune(tmp_path, resume=True)
    assert str(caught.value) == (
        f"journal {path}: the records up to 'aa/p1/v1' are inconsistent (ZeroDivisionError: "
        "'nothing to divide by'); leave out --resume to start again (the old journal is kept)"
    )


def test_a_fault_of_a_run_that_measures_is_no_fault_of_its_journal(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), validation.fitting(tmp_path, lambda: ""):
        raise ZeroDivisionError


OUTLINES: dict[str, tuple[Callable[[list[Record]], int], str]] = {
    "a time of no number": ODD["a time of no number"],
    "a beginning that is no date": (change("begun", "date", to="2026-99-99"), "month must be in 1..12"),
    "a gain that is not a number": (
        change("outcome", "gain", to={"pp": {"ratio": None}}),
        "gain.pp.ratio is None",
    ),
    "seconds that are none": (change("outcome", "seconds", to={}), "seconds is {}, which is not a number"),
    "no status": (change("outcome", "status", to=...), "status is None, which is not of type str"),
    "a workload that is a list": (
        change(RUN, "workload", to=[1]),
        "workload is [1], which is not of type dict",
    ),
    "types that are none": (
        change(RUN, "identity", "model", "types", to={"f16": "x"}),
        "the share of 'f16' is 'x'",
    ),
}


@pytest.mark.parametrize("odd", OUTLINES)
def test_history_lists_the_others_and_names_the_record(odd: str, whole: list[Record], tmp_path: Path) -> None:
    found = copy.deepcopy(whole)
    apply, reason = OUTLINES[odd]
    number = apply(found)
    (tmp_path / "sound").mkdir()
    written(tmp_path / "sound", whole)
    path = written(tmp_path, found)
    rows = {row.path: row for row in history.history([tmp_path])}
    assert len(rows) == 2
    assert rows[str(path)].status.startswith(f"unreadable: journal {path}: record {number} (")
    assert reason in rows[str(path)].status
    assert rows[str(tmp_path / "sound" / path.name)].status == "complete"


@pytest.mark.parametrize("odd", [o for o in ODD if "incumbent" not in o and o != "a value of no knob"])
def test_the_report_leaves_the_record_out_and_names_it(
    odd: str, whole: list[Record], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = copy.deepcopy(whole)
    apply, reason = ODD[odd]
    number = apply(found)
    path = written(tmp_path, found)
    assert "1 inconsistent record: not shown" in page.render(path)
    (line,) = [r.getMessage() for r in caplog.records]
    assert line.startswith(f"journal {path}: record {number} (")
    assert reason in line
    assert line.endswith("; the report leaves out 1 record")


def test_a_report_of_a_journal_that_says_no_noise(whole: list[Record], tmp_path: Path) -> None:
    found = copy.deepcopy(whole)
    change("noise", "within", to={})(found)
    assert "<main>" in page.render(written(tmp_path, found))


def test_every_shipped_journal_is_sound() -> None:
    paths = sorted((Path(__file__).parents[3] / "profiles").glob("*.journal.jsonl.gz"))
    assert paths
    for path in paths:
        found = journal.load(path).records
        validation.check_outline(path, found)
        for record in found:
            validation.flaw(record)


def test_control_characters_of_an_error_are_escaped(tmp_path: Path) -> None:
    """Of the command itself: a name that would colour the terminal, or hide what stands before it."""
    name = "a\x1b[31m\x07\x9b2J\u202ered\r.gguf"
    done = subprocess.run(
        [sys.executable, "-P", "-m", "dyno_tuner.entry", "--model", name],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "tune: model a\\x1b[31m\\x07\\x9b2J\\u202ered .gguf: the file does not exist\n"


def test_control_characters_of_a_journal_are_escaped(
    whole: list[Record], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = copy.deepcopy(whole)
    found[0]["label"] = "red\x1b[31m"
    written(tmp_path, found)
    commands.history([tmp_path])
    assert "red\\x1b[31m" in capsys.readouterr().out
