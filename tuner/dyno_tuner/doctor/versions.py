"""The version of the engine that a command line is for: known commits and their dates."""

from __future__ import annotations

import datetime
import re

from ..core.errors import TuneError
from .line import IK, MAIN, Version

# commit: (engine, date or None, description)
COMMITS: dict[str, tuple[str, str | None, str]] = {
    "7e5af2073": (IK, "2024-10-31", "MULTI_ADD in the op enum"),
    "b50efcc9d": (IK, "2025-02-23", "MOE_FUSED_UP_GATE in the op enum"),
    "633e0617b": (IK, "2025-08-15", "ADD_ID at op id 3 (gpt-oss)"),
    "fc06bc9": (IK, "2025-08-15", "PR 689: ADD_ID at op id 3"),
    "8de297b79": (IK, "2025-08-31", "FUSED_UP_GATE in the op enum"),
    "7a41b3b1f": (IK, "2025-10-19", "PR 840: -ser does nothing any more"),
    "41d6c42b9": (IK, None, "PR 863: fused MoE is the default"),
    "1c31b2538": (IK, "2025-11-07", "PR 913: mmq_id, SM count rounded up"),
    "a71934998": (IK, "2025-12-01", "-sm row removed"),
    "8337e4cd3": (IK, "2026-08-15", "the commit that the tables describe"),
    "0c1e57098": (MAIN, None, "the commit that the tables describe"),
}
REFERENCE = {IK: "8337e4cd3", MAIN: "0c1e57098"}


def commit_of(text: str) -> str | None:
    """The known commit that `text` names (at least seven hexadecimal digits; either may be shorter)."""
    if not re.fullmatch(r"[0-9a-f]{7,40}", text):
        return None
    return next((c for c in COMMITS if c.startswith(text) or text.startswith(c)), None)


def engine_of_version(text: str | None) -> str | None:
    """The engine that this commit belongs to; None for dates."""
    known = commit_of(text.lower()) if text else None
    return COMMITS[known][0] if known else None


def resolve_version(text: str | None, engine: str) -> Version:
    """The requested version. Raises TuneError if its date is unknown."""
    reference = REFERENCE[engine]
    if text is None:
        return Version(reference, None)
    if re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", text):
        try:
            date = datetime.date.fromisoformat(text)
        except ValueError as error:
            raise TuneError(f"--version {text}: not a date; write YYYY-MM-DD") from error
        day = COMMITS[reference][1]
        edge = datetime.date.fromisoformat(day) if day else None
        return Version(text, None if date == edge else date, edge is not None and date > edge)
    known = commit_of(text.lower())
    if known is None:
        raise TuneError(
            f"--version {text!r}: neither a date (YYYY-MM-DD) nor a commit in dyno's tables; give the "
            "date of the commit (git show -s --format=%cs COMMIT)"
        )
    owner, day, what = COMMITS[known]
    if owner != engine:
        raise TuneError(f"--version {text}: a commit of {owner}, but the engine is {engine}")
    if known == reference:
        return Version(known, None)
    if day is None:
        raise TuneError(
            f"--version {text} ({what}): dyno's tables have no date of this commit; give it as YYYY-MM-DD"
        )
    return Version(known, datetime.date.fromisoformat(day))
