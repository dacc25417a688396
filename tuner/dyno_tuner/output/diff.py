"""Two profiles side by side: do two tunes agree?"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dyno import profiles

from ..core.protocol import settings_text

if TYPE_CHECKING:
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


def _margin(profile: profiles.Profile) -> float:
    noise = profile.evidence.noise if profile.evidence else None
    return noise.margin if noise else 0.01


def _tie(a: Any, b: Any, margin: float) -> bool:
    """One of them kept the default and the other gained no more than the noise allows to overlook."""
    changed = [e for e in (a, b) if not isinstance(e, str) and e is not None]
    if len(changed) != 1 or changed[0].ratio is None:
        return False
    low = changed[0].ci95[0] if changed[0].ci95 else changed[0].ratio
    return bool(low < 1 + margin)


def _gained(entry: Any) -> tuple[float, float] | None:
    """Logarithm of what the entry's group gained, and half its interval; None where that was not measured."""
    if entry.ratio is None or not entry.ci95:
        return None
    low, high = entry.ci95
    return math.log(entry.ratio), math.log(max(high / entry.ratio, entry.ratio / low))


def _groups(profile: profiles.Profile) -> dict[str, tuple[float, float]]:
    """The gains of groups of entries that were confirmed as one."""
    kernels = [entry for of in profile.kernels.values() for entry in of.values()]
    found = {}
    for entry in (*profile.settings.values(), *kernels):
        if not isinstance(entry, str) and entry.group and (gained := _gained(entry)):
            found[entry.group] = gained
    return found


def _same_worth(a: tuple[float, float], b: tuple[float, float], margin: float) -> bool:
    """Two independent estimates that are less than the margin apart, their intervals considered."""
    return abs(a[0] - b[0]) + math.hypot(a[1], b[1]) < math.log1p(margin)


def _workload(profile: profiles.Profile) -> Any:
    return profile.evidence.workload if profile.evidence else None


def apart(first: Path, second: Path) -> list[str]:
    """The differences of what two profiles are for; empty if they match the same exactly.

    Raises:
        ProfileError: A file is not a profile.
    """
    a, b = profiles.load_profile(first).match, profiles.load_profile(second).match
    found = profiles.compare(a, b.device, b.model, b.engine)
    return [] if found.level is profiles.Level.EXACT else list(found.reasons)


def compare_profiles(first: Path, second: Path) -> list[Row]:
    """Entries of both, in the first one's order.

    Entries that were confirmed as one group have one gain together; where both profiles' groups gained the
    same on the same workload, give or take the margin, the entries in which the groups differ are ties.

    Raises:
        ProfileError: A file is not a profile.
    """
    a, b = profiles.load_profile(first), profiles.load_profile(second)
    margin = max(_margin(a), _margin(b))
    groups_a, groups_b = _groups(a), _groups(b)
    alike = {
        name
        for name in groups_a.keys() & groups_b.keys()
        if _workload(a) == _workload(b) and _same_worth(groups_a[name], groups_b[name], margin)
    }
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
        # A setting for which one tune had no time runs the default, as one does that it looked at and left
        # alone.
        same = shown[0] == shown[1] or set(shown) == {"default", ABSENT}
        of = {e.group for e in (x, y) if e is not None and not isinstance(e, str)}
        tie = _tie(x, y, margin) or (bool(of) and of <= alike)
        verdict = "equal" if same else "tie" if tie else "differs"
        rows.append(Row(entry, *shown, verdict))
    return rows
