"""The decision whether a new profile replaces an older one, and the files of both.

A short tune proves little. Its result must not overwrite a profile that a long one has proven.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dyno import profiles
from dyno.errors import ProfileError
from dyno.profiles.io import write_atomically

from .emit import GENERATED

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

NEW = ".new"
"""Suffix for a result that must not replace the profile. The runtime only searches `.yaml`."""


@dataclass(frozen=True)
class Written:
    """The path of a written profile, and a message if an older one was there."""

    path: Path
    line: str = ""


def proven(profile: profiles.Profile) -> int:
    """The number of settings and kernels in a profile with a measured gain, in words."""
    entries = [*profile.settings.values(), *(e for by in profile.kernels.values() for e in by.values())]
    return sum(not isinstance(entry, str) and entry.ratio is not None for entry in entries)


def has_less_evidence(new: profiles.Profile, old: profiles.Profile) -> bool:
    """Whether `new` proves less than `old` for the same device, model and engine.

    If `old` belongs to anything else, its evidence does not hold here, so the answer is no. One exception:
    `new` settles nothing, and `old` is a proven profile of a similar device, which the runtime would take.
    """
    match = new.match
    level = profiles.compare(old.match, match.device, match.model, match.engine).level
    if level is not profiles.Level.EXACT:
        near = level in (profiles.Level.SAME_DEVICE, profiles.Level.NEAREST)
        return near and new.settles_nothing and old.proven
    if new.disturbed and old.proven:
        return True
    here, there = proven(new), proven(old)
    complete = _status(new) == "complete"
    if here == 0 and there == 0 and not complete:
        return _status(old) == "complete" or len(new.settings) < len(old.settings)
    return here < there and (here == 0 or not complete)


def _status(profile: profiles.Profile) -> str | None:
    return profile.provenance.status if profile.provenance else None


def is_continued(old: profiles.Profile, journal: bytes) -> bool:
    """Whether `old` was written by an earlier part of the run that `journal` records.

    A journal only grows, so the checksum in the profile is the checksum of its first lines.
    """
    recorded = old.evidence.journal if old.evidence else None
    if not recorded:
        return False
    digest = hashlib.sha256()
    for line in journal.splitlines(keepends=True):
        digest.update(line)
        if recorded == f"sha256:{digest.hexdigest()}":
            return True
    return False


def free_name(path: Path) -> Path:
    """`path` with the first unused number: `p.yaml.1`, then `p.yaml.2`."""
    number = 1
    while (aside := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return aside


def write(new: profiles.Profile, out: Path, journal: bytes, comments: Sequence[str] = ()) -> Written:
    """Write `new` to `out`, or next to it if the profile there has more evidence.

    A replaced profile is kept under another name, and so is a file that people have edited. If the profiles
    are equal, the file is unchanged, with its comments.

    Args:
        journal: The bytes of the journal behind `new`.
        comments: Comment lines at the top of the file.

    Raises:
        ProfileError: A file cannot be written. The older profile is then unchanged.
    """
    try:
        before = out.read_bytes()
    except FileNotFoundError:
        profiles.save_profile(new, out, comments)
        return Written(out)
    except OSError as error:
        return _beside(new, out, comments, f"{out} cannot be read ({error.strerror}), so it stays")
    try:
        old: profiles.Profile | None = profiles.load_profile(out)
    except ProfileError:  # a damaged file has no evidence, but is kept
        old = None
    same_run = old is not None and is_continued(old, journal)
    if old is not None and not same_run and has_less_evidence(new, old):
        return _beside(new, out, comments, f"{out} stays: {_why(new, old)}")
    if old is not None and profiles.dumps_profile(old) == profiles.dumps_profile(new):
        return Written(out)
    equal = old is not None and (old.settings, old.kernels) == (new.settings, new.kernels)
    if old is not None and same_run and equal and not _edited(before, old):
        profiles.save_profile(new, out, comments)
        return Written(out)
    aside = free_name(out)
    write_atomically(aside, before)  # a copy, so that there is a profile at any moment
    profiles.save_profile(new, out, comments)
    return Written(out, f"the profile of an earlier run is kept as {aside}")


def _edited(text: bytes, profile: profiles.Profile) -> bool:
    """Whether the file of a profile has more than a tune writes, such as comments of people."""
    lines = [line.removeprefix("# ") for line in text.decode().splitlines() if line.startswith("# ")]
    own = [line for line in lines if line.startswith(GENERATED)]
    return profiles.dumps_profile(profile, own).encode() != text


def _beside(new: profiles.Profile, out: Path, comments: Sequence[str], why: str) -> Written:
    path = out.with_name(out.name + NEW)
    remedy = "tune again when no other program runs" if new.disturbed else "give a longer --budget"
    profiles.save_profile(new, path, comments)
    return Written(path, f"{why}; the new result is in {path}: {remedy}, or move it to {out} yourself")


def _why(new: profiles.Profile, old: profiles.Profile) -> str:
    """The evidence of `old` that `new` lacks."""
    if new.disturbed and old.proven:
        return "its gains are proven, and other programs disturbed this tune"
    if count := proven(old):
        entries = f"{count} proven entr{'y' if count == 1 else 'ies'}"
        return f"it has {entries}, and this tune has {proven(new) or 'none'}"
    if _status(old) == "complete":
        return "it has no proven entry but ran to its end, and this tune has none"
    return f"it has tried {len(old.settings)} settings, and this tune {len(new.settings)}"
