"""The commands that read files of tunes: `tune diff`, `tune report` and `tune history`."""

from __future__ import annotations

import json
import sys
from pathlib import Path  # noqa: TC003  (typer reads annotations when the command runs)
from typing import Annotated

import typer
from dyno._shell import escaped

from ..core.errors import TuneError
from . import options as o  # noqa: TC001  (typer reads annotations when the command runs)


def diff(
    first: Annotated[Path, typer.Argument(help="First profile.")],
    second: Annotated[Path, typer.Argument(help="Second profile.")],
    every: Annotated[bool, typer.Option("--all", help="Also print the entries that are equal.")] = False,
    as_json: o.Json = False,
) -> None:
    """Compare two profiles entry by entry, and print the entries that differ. The exit code is 1 if the
    profiles disagree."""
    from ..output.diff import apart, compare_profiles

    rows = compare_profiles(first, second)
    differs = apart(first, second)
    if differs:
        more = f"; {len(differs) - 3} more differences" if len(differs) > 3 else ""
        why = "; ".join(differs[:3])
        print(
            f"tune: {first} and {second} are not for the same model and device: {why}{more}", file=sys.stderr
        )
    if as_json:
        print(json.dumps([row.to_dict() for row in rows]))
    else:
        for row in rows:
            if every or row.verdict != "equal":
                print(f"{row.verdict:<9} {row.entry}: {row.first} | {row.second}")
        same = sum(row.verdict != "differs" for row in rows)
        print(f"{same} of {len(rows)} entries agree")
    if any(row.verdict == "differs" for row in rows):
        raise typer.Exit(1)


def report(
    journal: Annotated[
        Path, typer.Argument(help="Journal of a tune: PROFILE.journal.jsonl, or compressed as .gz.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="HTML file to write. Default: a file beside the journal.")
    ] = None,
) -> None:
    """Write a self-contained HTML page about a complete or interrupted run. Needs gguf-dyno[report]."""
    from ..output.html_report import write_report

    print(f"report: {write_report(journal, out)}")


def history(
    folder: Annotated[
        list[Path] | None, typer.Argument(help="Folders with journals. Default: your profile folder.")
    ] = None,
    as_json: o.Json = False,
) -> None:
    """List the tunes of this machine, newest first."""
    from dyno import profiles

    from ..record.history import history as read

    folders = folder or [profiles.user_folder()]
    absent = [str(f) for f in folder or [] if not f.is_dir()]
    if absent:
        raise TuneError(f"history: {absent[0]} is not a folder")
    rows = read(folders)
    if as_json:
        print(json.dumps([row.to_dict() for row in rows]))
        return
    if not rows:
        print(f"there are no journals in {escaped(', '.join(map(str, folders)))}")
        if not folder:
            print("A tune with --out keeps its journal beside its profile: tune history FOLDER")
    for row in rows:
        gain = " ".join(f"{m} {r:.3f}×" for m, r in row.gain.items()) or "-"
        date = row.date[:16] or "no date"
        shown = f"{date:<16}  {row.status:<10}  {gain:<22}  {row.seconds:>6.0f} s  {row.model}"
        print(escaped(shown))
        print(escaped(f"{'':<16}  {row.path}"))
