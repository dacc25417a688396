"""Profiles as text: a description of one, and the differences between two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dyno.profiles.io import to_dict
from dyno.profiles.schema import KernelEntry, Profile, SettingEntry

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


def describe(profile: Profile) -> list[str]:
    """A description of a profile in lines: its label, device, model and gains, then each entry that differs
    from the default, and the names of the others."""
    device, model, engine = profile.match.device, profile.match.model, profile.match.engine
    if device.kind == "cuda":
        chip = f"cuda, compute capability {device.compute_capability}, {device.sm_count} SMs"
    else:
        chip = f"cpu, {device.isa}, {device.cores} cores"
    experts = f", {model.experts_used} of {model.experts} experts" if model.experts else ""
    types = " ".join(f"{name} {_share(share)}" for name, share in model.types.items())
    synthetic = ", synthetic weights" if model.weights == "synthetic" else ""
    revision = "" if engine.ops_revision is None else f", ops revision {engine.ops_revision}"
    lines = [
        profile.label,
        f"  device  {chip}, {device.memory_mib} MiB",
        f"  model   {model.architecture}, {model.layers} x {model.embedding}{experts}; {types}{synthetic}",
        f"  engine  {engine.name} {engine.version}{revision}",
    ]
    gains = profile.evidence.gain if profile.evidence else {}
    if profile.evidence and profile.evidence.objective:
        lines.append(f"  objective: {profile.evidence.objective}")
    if profile.evidence and profile.evidence.memory_mib:
        before, after = profile.evidence.memory_mib
        lines.append(f"  memory: {after:g} MiB (default {before:g} MiB)")
    for metric, gain in gains.items():
        interval = f" (95 % {gain.ci95[0]:g} to {gain.ci95[1]:g})" if gain.ci95 else ""
        untouched = ", moved by no entry" if gain.untouched else ""
        of = " tokens per joule" if profile.evidence and profile.evidence.objective == "energy" else ""
        lines.append(f"  gain {metric}: {gain.ratio:g} x{of}{interval}{untouched}")
    return [*lines, *_entries(profile)]


def _share(share: float) -> str:
    return "<1%" if share < 0.005 else f"{share:.0%}"


def _entries(profile: Profile) -> list[str]:
    lines = [f"  {name}: {_entry(e)}" for name, e in profile.settings.items() if not isinstance(e, str)]
    usual = 0
    for key, ranges in profile.kernels.items():
        for tokens, kernel in ranges.items():
            if isinstance(kernel, str):
                usual += 1
            else:
                lines.append(f"  {key} {tokens}: {_entry(kernel)}")
    if not lines:
        return ["  every entry is the engine's default"]
    if settings := [name for name, entry in profile.settings.items() if isinstance(entry, str)]:
        lines.append(f"  default: {', '.join(settings)}")
    if usual:
        lines.append(f"  default: {usual} kernel{'s' if usual > 1 else ''}")
    return lines


def _entry(entry: SettingEntry | KernelEntry | str) -> str:
    if isinstance(entry, str):
        return "default"
    if isinstance(entry, SettingEntry):
        text = _plain(entry.value)
        if entry.default is not None:
            text += f" (default {_plain(entry.default)})"
    else:
        text = " ".join([entry.variant, *(f"{name}={value}" for name, value in entry.params.items())])
    if entry.ratio is not None:
        text += f", {entry.ratio:g} x"
    if entry.group is not None:
        text += f", group {entry.group}"
    return text


@dataclass(frozen=True, slots=True)
class Change:
    """One difference between two profiles."""

    path: str
    before: str | None
    """Value in the first profile; None: only the second one has it."""
    after: str | None
    """Value in the second profile; None: only the first one has it."""

    def __str__(self) -> str:
        return f"{self.path}: {self.before or '(none)'} -> {self.after or '(none)'}"


def diff(before: Profile, after: Profile) -> list[Change]:
    """The differences between two profiles, in reading order. Entries are compared as a whole, everything
    else key by key.

    Example:
        >>> for change in diff(yesterday, today):  # doctest: +SKIP
        ...     print(change)
        settings.ubatch: 2048 (default 512), 1.4 x -> 4096 (default 512), 1.64 x
    """
    first, second = dict(_rows(before)), dict(_rows(after))
    return [
        Change(path, first.get(path), second.get(path))
        for path in _merged(list(first), list(second))
        if first.get(path) != second.get(path)
    ]


def _rows(profile: Profile) -> Iterator[tuple[str, str]]:
    data = to_dict(profile)
    for part in ("label", "match"):
        yield from _leaves(part, data[part])
    for name, setting in profile.settings.items():
        yield f"settings.{name}", _entry(setting)
    for key, ranges in profile.kernels.items():
        for tokens, kernel in ranges.items():
            yield f"kernels.{key}.{tokens}", _entry(kernel)
    for part in ("evidence", "provenance"):
        if part in data:
            yield from _leaves(part, data[part])


def _leaves(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(f"{path}.{key}", item)
    else:
        yield path, _plain(value)


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return "[" + ", ".join(_plain(item) for item in value) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _merged(first: list[str], second: list[str]) -> list[str]:
    """Both lists merged in order. An item of only the second list follows its predecessor there."""
    merged = list(first)
    place: Mapping[str, None] = dict.fromkeys(first)
    position = 0
    for path in second:
        if path in place:
            position = merged.index(path) + 1
        else:
            merged.insert(position, path)
            position += 1
    return merged
