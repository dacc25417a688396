"""From a profile to the settings and kernels for the runtime. Groups of entries fall back as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dyno.errors import ProfileError
from dyno.profiles.schema import KernelEntry, Profile, SettingEntry, kernel_path, setting_path

if TYPE_CHECKING:
    from dyno.settings import SettingValue

KernelEntryTuple = tuple[str, str, dict[str, str | int], str]
"""Op key, range of tokens, configuration and origin, as `dyno._core.Session` takes them."""


@dataclass(frozen=True, slots=True)
class Effective:
    """The part of a profile that remains after rejections."""

    settings: dict[str, SettingValue]
    """Values by name. Settings that are missing here run with the engine's default."""
    kernels: list[KernelEntryTuple]
    lines: list[str]
    """One line for each entry that fell back to the default, with the reason."""


def kernel_entries(
    profile: Profile, rejected: Mapping[str, str] | Iterable[str] = ()
) -> list[KernelEntryTuple]:
    """The kernel configurations of a profile for `dyno._core.Session`, each with its line in the file.

    Args:
        profile: The profile.
        rejected: As in `effective`.

    Returns:
        Tuples of op key, tokens such as "m1-8", {"variant": ..., parameter: value}, and origin such as
        "h200.yaml:12". Entries that are `default` are left out.
    """
    return effective(profile, rejected).kernels


def effective_settings(
    profile: Profile,
    rejected: Mapping[str, str] | Iterable[str] = (),
    overrides: Mapping[str, SettingValue] | None = None,
    *,
    require: bool = False,
) -> tuple[dict[str, SettingValue], list[str]]:
    """The settings of a profile without rejected entries and their groups, with a line for each one that fell
    back."""
    result = effective(profile, rejected, overrides, require=require)
    return result.settings, result.lines


def effective(
    profile: Profile,
    rejected: Mapping[str, str] | Iterable[str] = (),
    overrides: Mapping[str, SettingValue] | None = None,
    *,
    require: bool = False,
) -> Effective:
    """The part of a profile that can be used.

    Entries of one `group` were measured together, and gain only together. If one is rejected, or the caller
    sets it to another value, all of them fall back to the engine's default.

    Args:
        profile: the profile.
        rejected: Entries that cannot be used, by path (`settings.ubatch`, `kernels.<op key>.<tokens>`) or,
            for a setting, by name. A mapping also has the reasons.
        overrides: Settings of the caller. They override the profile and are not in the result.
        require: Whether a rejected entry is an error (`--require-profile`).

    Raises:
        ProfileError: An entry is rejected, with `require`.
        ValueError: `rejected` names an entry that the profile does not have.
    """
    entries = dict(profile.entries())
    fallen = _normalised(rejected, entries)
    if require and fallen:
        told = "; ".join(f"{path}: {reason}" for path, reason in fallen.items())
        raise ProfileError(
            f"[profile] {profile.origin()}: a profile is required, but this one cannot be used completely: "
            f"{told}"
        )
    for path, reason in _of_groups(entries, fallen, overrides or {}).items():
        fallen.setdefault(path, reason)
    lines = [
        f"{profile.origin(*_keys(profile, path))}: {path}: engine default instead of "
        f"{_shown(entries[path])}: {reason}"
        for path, reason in fallen.items()
    ]
    settings = {
        name: entry.value
        for name, entry in profile.settings.items()
        if isinstance(entry, SettingEntry)
        and setting_path(name) not in fallen
        and name not in (overrides or {})
    }
    kernels = [
        (key, tokens, dict(entry.config), profile.origin("kernels", key, tokens))
        for key, ranges in profile.kernels.items()
        for tokens, entry in ranges.items()
        if isinstance(entry, KernelEntry) and kernel_path(key, tokens) not in fallen
    ]
    return Effective(settings, kernels, lines)


def rejections(report: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Path and reason of each rejected entry of a `dyno._core.Session.kernel_report()`."""
    return {
        kernel_path(row["key"], row["tokens"]): str(row["reason"])
        for row in report
        if row["status"] == "rejected"
    }


def _normalised(
    rejected: Mapping[str, str] | Iterable[str], entries: Mapping[str, SettingEntry | KernelEntry]
) -> dict[str, str]:
    reasons = dict(rejected) if isinstance(rejected, Mapping) else {path: "rejected" for path in rejected}
    result = {}
    for path, reason in reasons.items():
        full = path if path in entries else setting_path(path)
        if full not in entries:
            raise ValueError(f"{path!r} is not an entry of the profile")
        result[full] = reason
    return result


def _of_groups(
    entries: Mapping[str, SettingEntry | KernelEntry],
    fallen: Mapping[str, str],
    overrides: Mapping[str, SettingValue],
) -> dict[str, str]:
    """Entries of groups in which an entry was rejected, or set by the caller to another value."""
    broken: dict[str, str] = {}
    for path, entry in entries.items():
        if entry.group is None:
            continue
        name = path.removeprefix("settings.")
        if path in fallen:
            broken.setdefault(entry.group, f"its group {entry.group} falls back with {path}")
        elif isinstance(entry, SettingEntry) and name in overrides and overrides[name] != entry.value:
            broken.setdefault(
                entry.group,
                f"its group {entry.group} was measured with {name} {entry.value}, "
                f"the caller set {overrides[name]}",
            )
    return {
        path: broken[entry.group]
        for path, entry in entries.items()
        if entry.group in broken and path.removeprefix("settings.") not in overrides
    }


def _keys(profile: Profile, path: str) -> tuple[str, ...]:
    if path.startswith("settings."):
        return ("settings", path.removeprefix("settings."))
    for key, ranges in profile.kernels.items():
        for tokens in ranges:
            if kernel_path(key, tokens) == path:
                return ("kernels", key, tokens)
    return ()


def _shown(entry: SettingEntry | KernelEntry) -> str:
    if isinstance(entry, SettingEntry):
        return str(entry.value)
    params = "".join(f" {name}={value}" for name, value in entry.params.items())
    return entry.variant + params
