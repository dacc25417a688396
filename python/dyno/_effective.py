"""The value of each setting, and its origin: an argument of the call, else the profile, else the built-in
default."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dyno.errors import PlanError
from dyno.settings import DefaultsFor, engine_defaults, settings_for, unknown_setting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from dyno.settings import Setting, SettingValue

__all__ = ["EffectiveSettings", "check_arguments", "resolve", "usable_cores"]


_CHANGED_BY = {"session": "set", "context": "set_context"}
"""The method of an open engine that changes settings of a kind, by kind."""


class EffectiveSettings(dict[str, Any]):
    """The settings in force by name, with the origin of each value in `origins`.

    An origin is `default`, `argument`, or the place in a profile (`file.yaml:12`).
    """

    def __init__(self, values: Mapping[str, Any], origins: Mapping[str, str]) -> None:
        super().__init__(values)
        self.origins: dict[str, str] = dict(origins)

    def of_kind(self, device_kind: str, kind: str) -> dict[str, Any]:
        """The settings of one kind (`load`, `context`, `session`) that act on a device."""
        return {s.name: self[s.name] for s in settings_for(device_kind) if s.kind == kind}


def usable_cores() -> int:
    """Number of CPU cores that this process may use: the minimum of affinity, CPU quota and
    OMP_NUM_THREADS."""
    from dyno import _core

    return int(_core.cpu_limits()["cores"])


def check_arguments(
    arguments: Mapping[str, object],
    device_kind: str,
    kinds: Iterable[str] = ("load", "context", "session", "scheduler"),
) -> dict[str, SettingValue]:
    """Check arguments of a call, and return them as settings.

    Args:
        arguments: Values by name of setting.
        device_kind: `cpu` or `cuda`.
        kinds: Kinds of setting that the call accepts.

    Raises:
        PlanError: An unknown name (with the nearest one), an impossible value, or a setting of another kind.
    """
    known: dict[str, Setting] = {s.name: s for s in settings_for(device_kind)}
    checked: dict[str, Any] = {}
    for name, value in arguments.items():
        setting = known.get(name)
        if setting is None:
            raise PlanError(f"[settings] {unknown_setting(name, device_kind)}")
        if setting.kind not in kinds:
            call = _CHANGED_BY.get(setting.kind)
            instead = (
                f"call {call}({name}={value!r})"
                if call is not None
                else f"it cannot change while the engine is open; open the engine with {name}={value!r}"
            )
            raise PlanError(f"[settings] {name!r} is a {setting.kind} setting: {instead}")
        if isinstance(value, (tuple, set, frozenset)):
            value = list(value)
        why = setting.problem(value)
        if why is not None:
            raise PlanError(f"[settings] {name}: {why}")
        checked[name] = value
    return checked


def resolve(
    arguments: Mapping[str, SettingValue],
    profile: Mapping[str, tuple[SettingValue, str]],
    device_kind: str,
    n_ctx_train: int,
    latent_cache: bool = False,
    compute_capability: int = 0,
    dense_quantised: bool = False,
    ubatch: Callable[[Mapping[str, Any]], int] | None = None,
    sequences: int = 1,
) -> EffectiveSettings:
    """Every setting of a device with its value and origin.

    Args:
        arguments: Checked values of the caller.
        profile: Value and origin by name, from the profile in force.
        device_kind: `cpu` or `cuda`.
        n_ctx_train: Context length that the model was made for, in tokens.
        latent_cache: Whether the KV cache holds the latents of multi-head latent attention.
        compute_capability: Of the GPU, times ten; 0 on a CPU.
        dense_quantised: Whether the model has no experts, and most of its weights are quantised.
        ubatch: Computes the default u-batch from the load and context settings, if it depends on them.
        sequences: Default number of sequences.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    threads = arguments.get("threads")
    # The order of the table matters: the defaults of the cache types depend on `numerics`, which comes first.
    for setting in settings_for(device_kind):
        name = setting.name
        if name in arguments:
            values[name], origins[name] = arguments[name], "argument"
        elif name in profile:
            values[name], origins[name] = profile[name]
        else:
            wanted = {"ubatch": ubatch(values)} if name == "ubatch" and ubatch is not None else {}
            given = DefaultsFor(
                **wanted,
                cores=usable_cores(),
                n_ctx_train=n_ctx_train,
                numerics=str(values.get("numerics", "default")),
                threads=threads if isinstance(threads, int) else None,
                latent_cache=latent_cache,
                compute_capability=compute_capability,
                dense_quantised=dense_quantised,
                sequences=sequences,
                cuda_graphs=bool(engine_defaults().get("cuda_graphs", True)),
            )
            values[name], origins[name] = setting.default_value(given), "default"
    return EffectiveSettings(values, origins)
