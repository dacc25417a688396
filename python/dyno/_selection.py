"""The selection of a profile for a model and a machine, and the check of its entries."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dyno import profiles
from dyno._placement import NOWHERE_ELSE
from dyno.errors import OutOfMemoryError, PlanError, ProfileError
from dyno.settings import settings_for, unknown_setting

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dyno import _core
    from dyno.profiles import MatchResult, Profile
    from dyno.profiles.apply import KernelEntryTuple
    from dyno.settings import SettingValue

_log = logging.getLogger("dyno.profiles")
# A logger of its own, because the command line prints these lines itself.
_match_log = logging.getLogger("dyno.profiles.match")


@dataclass
class Selection:
    """A found profile, with the entries that are left after checks."""

    match: MatchResult
    arguments: Mapping[str, SettingValue]
    """Settings of the caller, which override the profile."""
    require: bool
    """Whether a rejected entry is an error."""
    memory_bytes: int = 0
    """Total memory of the device in bytes."""
    unchecked: list[str] = field(default_factory=list)
    """Entries that apply only if the plan shows that they fit."""
    other_memory: bool = False
    """Whether the profile was measured on another chip, or with another size of memory."""
    settings: dict[str, tuple[SettingValue, str]] = field(default_factory=dict)
    """Settings of the profile: value and origin (`file.yaml:12`) by name."""
    kernels: list[KernelEntryTuple] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    """One line for each entry that fell back to the default, with the reason."""
    _rejected: dict[str, str] = field(default_factory=dict)

    def reject(self, reasons: Mapping[str, str]) -> bool:
        """Remove entries, together with their groups. Returns whether anything changed.

        Raises:
            ProfileError: A profile is required and can't be used whole.
        """
        profile = self.match.profile
        news = {path: why for path, why in reasons.items() if path not in self._rejected}
        if profile is None or (self._rejected and not news):
            return False
        self._rejected |= news
        before = (self.settings, self.kernels)
        found = profiles.effective(profile, self._rejected, self.arguments, require=self.require)
        self.settings = {
            name: (value, profile.origin("settings", name)) for name, value in found.settings.items()
        }
        self.kernels = found.kernels
        self.lines = found.lines
        return before != (self.settings, self.kernels)

    def explain(self, error: PlanError) -> None:
        """Name the profile if its own placement does not fit this machine.

        Raises:
            ProfileError: This machine does not support the placement of the profile.
        """
        placing = [name for name in NOWHERE_ELSE if name in self.settings]
        if not placing or not str(error).startswith("[placement]"):
            return
        entries = ", ".join(
            f"{name}: {self.settings[name][0]} ({self.settings[name][1]})" for name in placing
        )
        raise ProfileError(
            f"[profile] the placement of the profile does not fit this machine: {entries}: {error}. Place "
            "the weights by an option, as --n-cpu-moe N, change the profile, or run with --no-profile"
        ) from error

    def report(self) -> None:
        """Warn once of the entries that fell back to the default."""
        for line in self.lines:
            _log.warning("%s", line)


def identities(
    file: _core.Gguf | str, model: Mapping[str, Any], device: Mapping[str, Any]
) -> tuple[Any, Any, Any]:
    """The identities of device, model and engine, as they stand in profiles.

    Args:
        file: The GGUF file: a `_core.Gguf`, or its path.
        model: Its description.
        device: Properties of the device.
    """
    from dyno import _core

    opened = _core.Gguf(file) if isinstance(file, str) else file
    name = {"general.name": opened.get("general.name")}
    return (
        profiles.device_from_info(device),
        profiles.model_from_description(model, weights=profiles.weights_kind(name)),
        profiles.engine_from_build(_core.build_info()),
    )


def select(
    file: _core.Gguf | str,
    model: Mapping[str, Any],
    profile: str | os.PathLike[str] | Profile | None,
    arguments: Mapping[str, SettingValue],
    device_info: Mapping[str, Any],
    *,
    require: bool,
    force: bool = False,
) -> Selection:
    """Find the profile for a file on this machine, and remove the entries that can't be used here.

    Args:
        file: The GGUF file: a `_core.Gguf`, or its path.
        model: Its description.
        profile: `auto`, a path, a profile, or None for no profile.
        arguments: Settings of the caller.
        device_info: Properties of the device that the model will run on.
        require: Whether anything but a complete exact match is an error.
        force: Whether to take the named profile even if it belongs to another model.

    Raises:
        ProfileError: The named file can't be read or belongs to another model, `force` is given without a
        file, or `require` is given and no exact match exists.
    """
    if not isinstance(profile, (str, os.PathLike, profiles.Profile, type(None))) or profile == "":
        raise ProfileError(
            f"[profile] profile is {profile!r:.60}; expected 'auto', the path of a profile, or None for no "
            "profile"
        )
    device, identity, engine = identities(file, model, device_info)
    if force and (profile is None or profile == "auto"):
        raise ProfileError("[profile] force_profile needs a profile; give its file as the argument profile")
    if profile == "auto" and arguments.get("numerics") == "exact":
        # The reference that others are compared with must not depend on the files in a folder.
        profile = None
    match = profiles.find_profile(device, identity, engine, profile=profile, require=require, any_model=force)
    selection = Selection(match, arguments, require, int(device_info["memory_bytes"]))
    if match.profile is None:
        _match_log.info("%s", match.headline)
        return selection
    level = _match_log.info if match.level is profiles.Level.EXACT else _match_log.warning
    level("%s", match.headline)
    if match.profile.disturbed:
        _log.warning(
            "profile %s: other programs disturbed its measurements (tune --force), so %s; tune again when "
            "no other program runs",
            match.profile.source.path if match.profile.source else match.profile.label,
            "its gains are not proven" if any(match.profile.entries()) else "it may lack gains",
        )
    decisions = profiles.decide(match.profile, match.level, device)
    known = {setting.name for setting in settings_for(device.kind)}
    unknown = {
        profiles.setting_path(name): unknown_setting(name, device.kind)
        for name, entry in match.profile.settings.items()
        if isinstance(entry, profiles.SettingEntry) and name not in known
    }
    selection.reject({d.path: d.reason for d in decisions if d.action == "reject"} | unknown)
    selection.unchecked = [d.path for d in decisions if d.action == "fit_check"]
    selection.other_memory = match.level is profiles.Level.NEAREST or "memory" in match.properties
    ubatch = profiles.setting_path("ubatch")
    beside_cpu = device.kind == "cuda" or bool(getattr(device, "virtual", None))
    if match.level is profiles.Level.EXACT and beside_cpu and ubatch in dict(match.profile.entries()):
        # With a longer context than the measured one, its memory may lack for weights.
        selection.unchecked = [ubatch]
    return selection


def open_session(
    selection: Selection, new_session: Callable[[bool], _core.Session]
) -> tuple[_core.Session, list[dict[str, str]]]:
    """Open a session with all entries of the profile that this machine supports.

    Entries are checked with sessions that only plan, so the weights are read only once.

    Args:
        selection: The selection so far. Entries that do not fit or are not supported are removed from it.
        new_session: Opens a session with the current settings and kernels of `selection`; with True, one that
        only plans.

    Returns:
        The session, and the rows of its kernel report that were rejected.

    Raises:
        PlanError, OutOfMemoryError: It does not fit even without the profile's entries.
        ProfileError: A profile is required and can't be used whole.
    """
    rejected = _settle(selection, new_session)
    while True:
        try:
            return new_session(False), rejected
        except OutOfMemoryError as error:  # of a device that reports free memory only at load
            if not selection.unchecked:
                raise
            _reject_unchecked(selection, str(error))


def _settle(selection: Selection, new_session: Callable[[bool], _core.Session]) -> list[dict[str, str]]:
    """Remove entries that this machine does not support, and return the rejected rows of the kernel
    report."""
    while True:
        try:
            session = new_session(True)
        except PlanError as error:
            if not selection.unchecked or _plan_without(selection, new_session) is None:
                selection.explain(error)
                raise
            _reject_unchecked(selection, str(error))
            continue
        wanted, limit = _main_bytes(session.plan)
        memory = limit or selection.memory_bytes
        if selection.unchecked and wanted > memory:
            _reject_unchecked(selection, f"the plan needs {wanted >> 20} MiB of {memory >> 20} MiB")
            continue
        if (
            selection.unchecked
            and _is_moved(session.plan)
            and _moves_weights(selection, session, new_session)
        ):
            _reject_unchecked(selection, f"weights would leave {session.plan['devices'][0]['name']} for it")
            continue
        rejected = [row for row in session.kernel_report() if row["status"] == "rejected"]
        if rejected:
            kernels = selection.kernels
            selection.reject(profiles.rejections(rejected))  # groups are rejected as a whole
            # The engine itself falls back for these, and gives the reason with the op.
            gone = {(row["key"], row["tokens"]) for row in rejected}
            selection.kernels += [entry for entry in kernels if (entry[0], entry[1]) in gone]
        return rejected


def _main_bytes(plan: Mapping[str, Any]) -> tuple[int, int]:
    """Bytes that a plan needs on its main device, and the limit of a virtual device (0: no limit)."""
    main = plan["devices"][0]
    parts = ("weights_bytes", "kv_bytes", "state_bytes", "arena_bytes", "stream_bytes")
    limit = int(main["memory_limit"])
    # The threads of a virtual device have their scratch outside it. Automatic placement does not count it.
    scratch = 0 if limit else int(plan["scratch_bytes"])
    return scratch + sum(int(main[part]) for part in parts), limit


def _is_moved(plan: Mapping[str, Any]) -> bool:
    """Whether the plan keeps weights on the CPU because the model does not fit its main device."""
    return bool(plan["placement"]["note"])


def _moves_weights(
    selection: Selection, session: _core.Session, new_session: Callable[[bool], _core.Session]
) -> bool:
    """Whether unchecked entries move weights to the CPU.

    If the model does not fit its main device without them either, they may move more of it on the measured
    device only. How much a larger u-batch may displace depends on its memory and link.
    """
    without = _plan_without(selection, new_session)
    if without is None:
        return False
    if not _is_moved(without):
        return True
    kept, usual = (int(plan["devices"][0]["weights_bytes"]) for plan in (session.plan, without))
    return selection.other_memory and kept < usual


def _plan_without(
    selection: Selection, new_session: Callable[[bool], _core.Session]
) -> Mapping[str, Any] | None:
    """The plan if no unchecked entry applies; None if there is no such plan."""
    settings = selection.settings
    unchecked = set(selection.unchecked)
    selection.settings = {n: v for n, v in settings.items() if profiles.setting_path(n) not in unchecked}
    try:
        return new_session(True).plan
    except (PlanError, OutOfMemoryError):
        return None
    finally:
        selection.settings = settings


def _reject_unchecked(selection: Selection, why: str) -> None:
    """Remove the entries that were measured under other conditions and do not fit here."""
    paths, selection.unchecked = selection.unchecked, []
    selection.reject({path: f"does not fit here: {why}" for path in paths})
