"""Two profiles side by side: do two tunes agree?"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dyno import profiles

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
    return " ".join(f"{k}={v}" for k, v in entry.config.items())


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


def compare_profiles(first: Path, second: Path) -> list[Row]:
    """Raises ProfileError for a file that is no profile."""
    a, b = profiles.load_profile(first), profiles.load_profile(second)
    margin = max(_margin(a), _margin(b))
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
        # What one tune had no time for runs the default, as what it looked at and left alone does.
        same = shown[0] == shown[1] or set(shown) == {"default", ABSENT}
        verdict = "equal" if same else "tie" if _tie(x, y, margin) else "differs"
        rows.append(Row(entry, *shown, verdict))
    return rows
