"""The tunes of this machine, from their journals."""

from __future__ import annotations

import datetime
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dyno import profiles
from dyno.errors import ProfileError

from ..core.errors import JournalError
from . import journal
from .validation import check_outline

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

RUN = "dyno-tune-1"


@dataclass(frozen=True)
class Past:
    """A past tune, from its journal."""

    path: str
    date: str  # time of the last record in UTC, ISO 8601; or the date of its profile, or empty
    model: str
    workload: str
    status: str
    """complete | budget | unproven | unfinished (interrupted or killed; --resume continues) | unreadable"""
    gain: dict[str, float]  # by metric; empty if all entries are the default
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def read(path: Path) -> Past | None:
    """Read a journal; None if the file is not a journal of a tune."""
    try:
        records = journal.load(path).records
        check_outline(path, records)
    except JournalError as error:
        return Past(str(path), "", "", "", f"unreadable: {error}", {}, 0.0)
    head = next((r for r in records if r.get("run") == RUN), None)
    if head is None:
        return None
    outcome: dict[str, Any] = next((r for r in reversed(records) if r.get("note") == "outcome"), {})
    model = (head.get("identity") or {}).get("model") or {}
    types = ", ".join(sorted(model.get("types") or {}, key=lambda t: -model["types"][t])[:2])
    shape = f"{model.get('architecture', '?')} {model.get('layers', '?')} layers {types}".strip()
    work = head.get("workload") or {}
    last = max((float(r["t"]) for r in records if "op" in r and "t" in r), default=0.0)
    return Past(
        str(path),
        _ended(records) or _day_of_profile(path),
        str(head.get("label") or shape),
        ",".join(f"{k}={v}" for k, v in work.items()),
        str(outcome.get("status", "unfinished")),
        {m: float(g["ratio"]) for m, g in (outcome.get("gain") or {}).items()},
        round(float(outcome.get("seconds", last)), 1),
    )


def _ended(records: Sequence[Mapping[str, Any]]) -> str:
    """The time at which the last operation ended, from the times in the journal. The date of the file means
    nothing, because it may be copied or unpacked. Empty if the journal has no times."""
    begun, at, now = None, 0.0, 0.0
    for record in records:
        if "op" in record and "t" in record:
            now = float(record["t"])
        elif record.get("note") == "begun":
            begun, at = datetime.datetime.fromisoformat(str(record["date"])), now
    if begun is None:
        return ""
    return (begun + datetime.timedelta(seconds=now - at)).isoformat(timespec="seconds")


def _day_of_profile(path: Path) -> str:
    """The date of the profile next to a journal, if the same run wrote it; else empty."""
    beside = path.with_name(journal.unpacked_name(path).partition(journal.SUFFIX)[0])
    try:
        found = profiles.load_profile(beside)
    except ProfileError:
        return ""
    written = found.evidence is not None and found.evidence.journal == f"sha256:{journal.sha256(path)}"
    return str(found.provenance.date or "") if written and found.provenance else ""


def history(folders: Sequence[Path]) -> list[Past]:
    """The journals in and below `folders`, the newest first, including older ones (`….jsonl.1`)."""
    found: dict[Path, Past] = {}
    for folder in folders:
        for path in sorted(folder.rglob("*.journal.jsonl*")):
            past = read(path) if path.is_file() else None
            if past is not None:
                found[path.resolve()] = past
    return sorted(found.values(), key=lambda p: (p.date, p.path), reverse=True)
