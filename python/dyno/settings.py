"""The table of all settings of the runtime.

`Engine`, the command line, the knobs of the tuner, the validation of profiles and the reference page use
`SETTINGS`. A name that is not listed here does not exist. Kernel configurations are not settings. They are
named by op key, and the op families validate them.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

from dyno._setting import ENGINES, DefaultsFor, Setting, SettingValue, closest, suggestion
from dyno._settings_table import KV_TYPES, OFFLOAD_OPS, TABLE

if TYPE_CHECKING:
    from collections.abc import Mapping

SETTINGS: Final[Mapping[str, Setting]] = {setting.name: setting for setting in TABLE}
"""All settings by name, in the order of the reference page: load, context, session, other engines."""

if len(SETTINGS) != len(TABLE):  # a duplicate would silently hide a row
    raise RuntimeError("dyno/_settings_table.py names a setting twice")


def settings_for(device_kind: str | None = None, engine: str = "dyno") -> list[Setting]:
    """The settings that have an effect in an engine on a kind of device (None: on any), in the order of the
    table.

    For dyno, these are the rows that the compiled engine or the scheduler reads. Other rows have no effect.
    """
    return [
        setting
        for setting in SETTINGS.values()
        if engine in setting.engines
        and applies_on(setting, device_kind, engine)
        and (engine != "dyno" or setting.kind == "scheduler" or setting.name in engine_defaults())
    ]


@functools.cache
def engine_defaults() -> Mapping[str, SettingValue]:
    """All settings of the compiled engine with its own defaults (0 or `auto`: the engine decides)."""
    from dyno import _core

    return {
        name: value
        for kind, settings in _core.known_settings().items()
        for name, value in settings.items()
        if (kind, name) != ("load", "device")  # a separate argument
    }


def applies_on(setting: Setting, device_kind: str | None, engine: str = "dyno") -> bool:
    """Whether a setting can have an effect on a kind of device (None: on any)."""
    return engine != "dyno" or device_kind is None or device_kind in setting.devices


def has_latent_cache(model: Mapping[str, Any]) -> bool:
    """Whether a model (described by `dyno._core.describe_model`) uses multi-head latent attention."""
    return any(layer["attention"]["kind"] == "mla" for layer in model["layers"])


def is_dense_quantised(model: Mapping[str, Any]) -> bool:
    """Whether a model has no experts and most of its weights are quantised.

    Args:
        model: The description of `dyno._core.describe_model()`.
    """
    floats = sum(share for name, share in model["types"].items() if name in ("f32", "f16", "bf16"))
    return int(model["moe_layers"]) == 0 and floats < 0.5


def unknown_setting(name: str, device_kind: str | None = None, engine: str = "dyno") -> str:
    """The message for a name that is not in `settings_for`: the reason, and a similar valid name."""
    known = [setting.name for setting in settings_for(device_kind, engine)]
    if name in SETTINGS:
        setting = SETTINGS[name]
        if engine not in setting.engines:
            return f"{name!r} is a setting of {', '.join(sorted(setting.engines))}, not of {engine}"
        if applies_on(setting, device_kind, engine):
            return f"{name!r} does not exist in this version of {engine}"
        return (
            f"{name!r} has no effect on a {device_kind} device (only on {', '.join(sorted(setting.devices))})"
        )
    page = "docs/user/profile-reference.md describes"
    where = f"{page} the valid names"
    if engine == "dyno":
        where = f"`dyno explain plan MODEL` prints the valid names, and {page} them"
    return f"unknown setting {name!r}; {suggestion(name, known, where)}"


__all__ = [
    "ENGINES",
    "KV_TYPES",
    "OFFLOAD_OPS",
    "SETTINGS",
    "DefaultsFor",
    "Setting",
    "SettingValue",
    "applies_on",
    "closest",
    "engine_defaults",
    "has_latent_cache",
    "is_dense_quantised",
    "settings_for",
    "suggestion",
    "unknown_setting",
]
