"""Comparison of two profiles: do two tunes agree?"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dyno import profiles

from ..core.protocol import kind_of, settings_text

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path


ABSENT = "(absent)"


@dataclass(frozen=True)
class Row:
    """One entry in both profiles."""

    entry: str
    first: str
    second: str
    verdict: str  # "equal", "tie" (they differ by less than the margin) or "differs"

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


def _shown(entry: Any) -> str:
    if entry is None:
        return ABSENT
    if isinstance(entry, str):
        return entry
    if isinstance(entry, profiles.SettingEntry):
        return str(entry.value)
    return settings_text(entry.config)


def _margin(profile: profiles.Profile, moves: Collection[str]) -> float:
    """The margin that an entry had to exceed: the largest margin of the measures that it affects. Older
    profiles only have the largest one of all measures.

    Args: `moves`: `pp`, `tg`; empty: unknown."""
    noise = profile.evidence.noise if profile.evidence else None
    if noise is None:
        return 0.01
    own = [x for measure, x in noise.by_measure.items() if not moves or kind_of(measure) in moves]
    return max(own, default=noise.margin)


def _moves(entry: Any) -> set[str]:
    """The kinds of measures that an entry affects; empty for a default."""
    if entry is None or isinstance(entry, str):
        return set()
    if isinstance(entry, profiles.SettingEntry):
        return {str(m) for m in entry.moves}
    group = str(entry.group or "")
    return {group.removeprefix("kernels_")} if group.startswith("kernels_") else set()


def _tie(a: Any, b: Any, margin: float) -> bool:
    """Whether two entries tie: one kept the default, and the other gained no more than the noise allows to
    overlook."""
    changed = [e for e in (a, b) if not isinstance(e, str) and e is not None]
    if len(changed) != 1 or changed[0].ratio is None:
        return False
    low = changed[0].ci95[0] if changed[0].ci95 else changed[0].ratio
    return bool(low < 1 + margin)


def _gained(entry: Any) -> tuple[float, float] | None:
    """Log gain of the group of an entry, and half of its interval; None if it was not measured."""
    if entry.ratio is None or not entry.ci95:
        return None
    low, high = entry.ci95
    return math.log(entry.ratio), math.log(max(high / entry.ratio, entry.ratio / low))


def _groups(profile: profiles.Profile) -> dict[str, tuple[tuple[float, float], set[str]]]:
    """The gains of groups of entries that were confirmed together, and the kinds of measures that they
    affect."""
    kernels = [entry for of in profile.kernels.values() for entry in of.values()]
    found: dict[str, tuple[tuple[float, float], set[str]]] = {}
    for entry in (*profile.settings.values(), *kernels):
        if not isinstance(entry, str) and entry.group and (gained := _gained(entry)):
            _, moves = found.get(entry.group, (gained, set()))
            found[entry.group] = gained, moves | _moves(entry)
    return found


def _same_worth(a: tuple[float, float], b: tuple[float, float], margin: float) -> bool:
    """Whether two independent estimates differ by less than the margin, considering their intervals."""
    return abs(a[0] - b[0]) + math.hypot(a[1], b[1]) < math.log1p(margin)


def _workload(profile: profiles.Profile) -> Any:
    return profile.evidence.workload if profile.evidence else None


def apart(first: Path, second: Path) -> list[str]:
    """The differences between the machines, models and engines of two profiles; empty if there are none.

    Raises:
        ProfileError: A file is not a profile.
    """
    a, b = profiles.load_profile(first).match, profiles.load_profile(second).match
    found = profiles.compare(a, b.device, b.model, b.engine)
    return [] if found.level is profiles.Level.EXACT else list(found.reasons)


def compare_profiles(first: Path, second: Path) -> list[Row]:
    """The entries of both profiles, in the order of the first one.

    Entries that were confirmed as one group have a common gain. If the groups of both profiles gained the
    same on the same workload, within the margin, the entries in which the groups differ are ties.

    Raises:
        ProfileError: A file is not a profile.
    """
    a, b = profiles.load_profile(first), profiles.load_profile(second)

    def margin(moves: Collection[str]) -> float:
        return max(_margin(a, moves), _margin(b, moves))

    groups_a, groups_b = _groups(a), _groups(b)
    alike = set()
    for name in groups_a.keys() & groups_b.keys():
        (gain_a, moves_a), (gain_b, moves_b) = groups_a[name], groups_b[name]
        if _workload(a) == _workload(b) and _same_worth(gain_a, gain_b, margin(moves_a | moves_b)):
            alike.add(name)
    entries: dict[str, tuple[Any, Any]] = {}
    for name in {**a.settings, **b.settings}:
        entries[f"settings.{name}"] = (a.settings.get(name), b.settings.get(name))
    for key in {**a.kernels, **b.kernels}:
        there, here = a.kernels.get(key, {}), b.kernels.get(key, {})
        for tokens in {**there, **here}:
            entries[f"kernels.{key}.{tokens}"] = (there.get(tokens), here.get(tokens))
    rows = []
    for entry, (x, y) in entries.items():
        shown = _shown(x), _shown(y)
        # A setting that a tune had no time for runs at its default, like a setting that the tune tried and
        # left unchanged.
        same = shown[0] == shown[1] or set(shown) == {"default", ABSENT}
        of = {e.group for e in (x, y) if e is not None and not isinstance(e, str)}
        tie = _tie(x, y, margin(_moves(x) | _moves(y))) or (bool(of) and of <= alike)
        verdict = "equal" if same else "tie" if tie else "differs"
        rows.append(Row(entry, *shown, verdict))
    return rows
