"""The tunes of this machine, read from their journals."""

from __future__ import annotations

import datetime
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from . import journal
from .errors import JournalError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

RUN = "dyno-tune-1"


@dataclass(frozen=True)
class Past:
    """One journal."""

    path: str
    date: str  # of the last record, ISO 8601 in UTC
    model: str
    workload: str
    status: str  # complete | budget | unfinished (interrupted or killed; --resume continues) | unreadable
    gain: dict[str, float]  # by metric; empty where every entry is the default
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def read(path: Path) -> Past | None:
    """None for a file that is no journal of a tune."""
    try:
        records = journal.load(path).records
        modified = path.stat().st_mtime
    except (JournalError, OSError) as error:
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
        datetime.datetime.fromtimestamp(modified, datetime.UTC).isoformat(timespec="seconds"),
        str(head.get("label") or shape),
        ",".join(f"{k}={v}" for k, v in work.items()),
        str(outcome.get("status", "unfinished")),
        {m: float(g["ratio"]) for m, g in (outcome.get("gain") or {}).items()},
        round(float(outcome.get("seconds", last)), 1),
    )


def history(folders: Sequence[Path]) -> list[Past]:
    """The journals in and below `folders`, the newest first; those kept aside (`….jsonl.1`) too."""
    found: dict[Path, Past] = {}
    for folder in folders:
        for path in sorted(folder.rglob("*.journal.jsonl*")):
            past = read(path) if path.is_file() else None
            if past is not None:
                found[path.resolve()] = past
    return sorted(found.values(), key=lambda p: (p.date, p.path), reverse=True)
