"""The journal of a run that may continue an earlier one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ..core.errors import JournalError
from ..core.options import SPEED
from ..core.protocol import counted
from ..record import journal

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ..output.progress import Progress

FORMAT = "dyno-tune-1"
"""Value of `run` in the first record."""


def check_header(found: Mapping[str, Any], wanted: Mapping[str, Any], path: Path) -> None:
    """Raises JournalError that names the first difference."""
    plain = json.loads(json.dumps(wanted))
    # Defaults for journals from before there were several devices or other objectives.
    found = {"devices": 1, "objective": SPEED, **found}
    for key, value in plain.items():
        # A run keeps the incumbents that it began with, because its own profile may have replaced theirs by
        # now.
        if key not in ("id", "tuner", "label", "incumbents", "budget") and found.get(key) != value:
            detail = ""
            if isinstance(value, dict) and isinstance(found.get(key), dict):
                names = [n for n in {**value, **found[key]} if value.get(n) != found[key].get(n)]
                detail = f" ({', '.join(names[:3])})"
            raise JournalError(
                f"journal {path} was written with another {key}{detail}, so it cannot be continued; "
                "leave out --resume to start again (the old journal is kept)"
            )


def open_journal(path: Path, head: dict[str, Any], resume: bool, progress: Progress) -> tuple[
    journal.Journal, list[dict[str, Any]], dict[str, Any]
]:  # fmt: skip
    """Open the journal. Returns it, the records to continue from and the first record. A journal that is not
    continued is moved aside. Raises JournalError, for example if another tune is writing to it."""
    past: list[dict[str, Any]] = []
    if path.exists():
        journal.check_free(path)
    if path.exists() and path.stat().st_size:
        if resume:
            loaded = journal.load(path)
            first = loaded.records[0] if loaded.records else {}
            if "device" in head and first.get("run") == FORMAT and first.get("id") != head.get("id"):
                progress.say(f"journal {path} belongs to another run: starting again")
                _move_aside(path, progress)
            elif first.get("run") == FORMAT:
                check_header(first, head, path)
                past, head = loaded.records, first
            elif loaded.records:
                # The damaged line said which run these measurements belong to, so none of them may be used.
                progress.say(
                    f"journal {path}: its first line is damaged, so it cannot be continued: starting again"
                )
                _move_aside(path, progress)
            if loaded.damaged:
                progress.say(f"journal {path}: {counted(loaded.damaged, 'damaged line')} left out")
        else:
            _move_aside(path, progress)
    elif resume:
        progress.say(f"no journal at {path}: starting without one")
    written = journal.Journal(path)
    if not any(r.get("run") == FORMAT for r in past):
        try:
            written.append(head)
        except JournalError:
            written.close()
            raise
    return written, past, head


def _move_aside(path: Path, progress: Progress) -> None:
    number = 1
    while (aside := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    try:
        path.rename(aside)
    except OSError as error:
        raise JournalError(f"journal {path}: cannot be moved to {aside}: {error.strerror}") from error
    progress.say(f"the journal of an earlier run is kept as {aside}")
