"""`dyno profiles check` and `dyno profiles list`: the problems of a file, and the list of all files."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from dyno.errors import DynoError, ProfileError, UnsupportedError
from dyno.profiles._fields import parse_tokens
from dyno.profiles.identity import device_info
from dyno.profiles.io import Problem, file_problems, load_profile
from dyno.profiles.layers import default_layers, profile_files
from dyno.profiles.schema import KernelEntry, Profile, SettingEntry, kernel_path, setting_path
from dyno.settings import SETTINGS

MAX_UBATCH = SETTINGS["ubatch"].maximum
"""Largest number of tokens of an op, which limits open ranges."""

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence

    from dyno.profiles.layers import Layer


def check_file(path: str | os.PathLike[str]) -> list[Problem]:
    """All problems of a profile file, in file order.

    An error makes the file unusable, or rejects one of its entries. A warning points at an odd value. A note
    names a check that is not possible here. A file without errors can be checked in.
    """
    profile, problems = file_problems(path)
    if profile is not None:
        problems = [*_odd_entries(profile), *_kernel_problems(profile)]
    return problems


def has_errors(problems: Sequence[Problem]) -> bool:
    """Whether the problems include an error."""
    return any(problem.level == "error" for problem in problems)


def _problem(
    profile: Profile,
    keys: tuple[str, ...],
    where: str,
    message: str,
    level: Literal["error", "warning", "note"],
) -> Problem:
    source = profile.source
    file = source.path if source else profile.label
    return Problem(file, source.lines.get(keys) if source else None, where, message, level)


def _odd_entries(profile: Profile) -> Iterator[Problem]:
    groups: dict[str, list[str]] = {}
    for path, entry in profile.entries():
        if entry.group is not None:
            groups.setdefault(entry.group, []).append(path)
        if entry.ratio is not None and entry.ratio < 1:
            yield _problem(
                profile,
                _keys_of(profile, path),
                path,
                f"ratio {entry.ratio:g} is slower than the default",
                "warning",
            )
    for name, setting in profile.settings.items():
        if (
            isinstance(setting, SettingEntry)
            and setting.default is not None
            and setting.value == setting.default
        ):
            message = f"value {setting.value!r} is the default; write `default`"
            yield _problem(profile, ("settings", name), setting_path(name), message, "warning")
    for group, paths in groups.items():
        if len(paths) == 1:
            yield _problem(
                profile, _keys_of(profile, paths[0]), paths[0], f"is alone in group {group!r}", "warning"
            )


def _keys_of(profile: Profile, path: str) -> tuple[str, ...]:
    for key, ranges in profile.kernels.items():
        for tokens in ranges:
            if kernel_path(key, tokens) == path:
                return ("kernels", key, tokens)
    return ("settings", path.removeprefix("settings."))


# ---- Kernels against the op families ----


def _kernel_problems(profile: Profile) -> Iterator[Problem]:
    if not profile.kernels or profile.match.engine.name != "dyno":
        return
    try:
        core: Any = importlib.import_module("dyno._core")
    except ImportError as error:
        yield _problem(
            profile, ("kernels",), "kernels", f"not checked: no compiled engine here ({error})", "note"
        )
        return
    ops: Any = getattr(core, "ops", None)
    if ops is None:
        yield _problem(
            profile, ("kernels",), "kernels", "not checked: this engine was built without ops", "note"
        )
        return
    device = device_info(profile.match.device)
    for key, ranges in profile.kernels.items():
        for tokens, entry in ranges.items():
            level, why = _verdict(ops, key, tokens, entry, device)
            if why:
                yield _problem(profile, ("kernels", key, tokens), kernel_path(key, tokens), why, level)


def _verdict(
    ops: Any, key: str, tokens: str, entry: KernelEntry | str, device: dict[str, Any]
) -> tuple[Literal["error", "note"], str]:
    """The reason why a configuration cannot run an op, or cannot be checked; empty if it can run.

    Both ends of the token range are checked. The largest u-batch limits the upper one.
    """
    low, high = parse_tokens(tokens)
    for count in dict.fromkeys((low, max(low, min(high, MAX_UBATCH)))):
        try:
            family, desc = ops.parse_key(key, count)
            if not _has_variants(ops, family, device["kind"]):
                return "note", f"not checked: this build has no {family} kernels for {device['kind']} devices"
            if isinstance(entry, str):  # `default` still names an op that must exist
                continue
            ok, reason = ops.supports(family, desc, entry.config, device)
        except (DynoError, ValueError, KeyError, TypeError) as error:
            return "error", " ".join(str(error).split())
        if not ok:
            return "error", f"with {count} tokens: {reason}"
    return "note", ""


def _has_variants(ops: Any, family: str, kind: str) -> bool:
    try:
        return any(variant["device"] == kind for variant in ops.variants(family))
    except UnsupportedError:  # this build has no kernels of the family
        return False


# ---- Listing ----


@dataclass(frozen=True, slots=True)
class Listed:
    """A profile file in a layer."""

    path: str
    layer: str
    profile: Profile | None
    problem: str | None
    """The reason why it cannot be read, on one line."""


def list_profiles(layers: Sequence[Layer] | None = None) -> list[Listed]:
    """All profile files of the layers (None: shipped, site, user) in search order, including unreadable
    ones."""
    listed = []
    for layer in default_layers() if layers is None else layers:
        try:
            paths = profile_files(layer)
        except ProfileError as error:
            listed.append(Listed(str(layer.folder), layer.name, None, str(error)))
            continue
        for path in paths:
            try:
                listed.append(Listed(str(path), layer.name, load_profile(path), None))
            except ProfileError as error:
                listed.append(Listed(str(path), layer.name, None, str(error)))
    return listed
