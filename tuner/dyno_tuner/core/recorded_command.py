"""The command that made a profile, as the profile records it, and the settings that it held fixed."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from dyno.settings import SETTINGS

from .errors import TuneError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dyno import profiles

    from .protocol import Value

__all__ = ["held_pairs", "held_with", "recorded", "values_of"]


def recorded(profile: profiles.Profile) -> tuple[list[str], list[str]]:
    """The command that made a profile: its own words, and the words after `--`."""
    try:
        words = shlex.split(profile.provenance.command or "") if profile.provenance else []
    except ValueError:
        words = []  # the profile is not from this tuner
    cut = words.index("--") if "--" in words else len(words)
    return words[:cut], words[cut + 1 :]


def values_of(words: Sequence[str], *names: str) -> list[str]:
    """Values of an option under any of its names, in order."""
    found: list[str] = []
    for n, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in names and (equals or n + 1 < len(words)):
            found.append(value if equals else words[n + 1])
    return found


def held_pairs(profile: profiles.Profile) -> list[str]:
    """The pairs `NAME=VALUE` that `--set` held fixed while the profile was tuned."""
    pairs = values_of(recorded(profile)[0], "--set")
    return [pair for pair in pairs if "=" in pair and pair.partition("=")[0] in SETTINGS]


def held_with(profile: profiles.Profile) -> dict[str, Value]:
    """Settings that `--set` held fixed while the profile was tuned. Raises TuneError for an invalid value."""
    held: dict[str, Value] = {}
    for pair in held_pairs(profile):
        name, _, text = pair.partition("=")
        try:
            value = SETTINGS[name].parse(text, profile.match.engine.name)
        except ValueError as error:
            raise TuneError(f"the command that made the profile: --set {pair}: {error}") from error
        held[name] = ",".join(value) if isinstance(value, list) else value
    return held
