"""The match of a profile with a device, a model and an engine: a level, the differences, and a score for
similar devices.

A profile belongs to its model. A profile with another architecture, other shapes or other types is taken only
if the caller forces it. For the same model, the levels are:

Exact: the same kind of device, compute capability, SM count and power limit (on a CPU: instruction set, cores
and cache sizes), memory within 2 %, and the same engine and ops revision. A profile that was measured on
synthetic weights is never exact for a real model. Below that: the same compute capability and SM count (on a
CPU: instruction set and cores), then the most similar device by score. A profile for another kind of device
or engine never matches.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Literal, NamedTuple

from dyno.profiles.identity import CPU_ISAS, CpuDevice, CudaDevice, EngineIdentity, ModelIdentity
from dyno.profiles.schema import KernelEntry, Match, Profile, SettingEntry, setting_path
from dyno.settings import SETTINGS

if TYPE_CHECKING:
    from collections.abc import Iterator

MEMORY_TOLERANCE = 0.02
TYPE_SHARE_TOLERANCE = 0.015
"""Tolerance for shares of weight types, which are written with two digits."""
MIN_SCORE = 0.3
"""Least score of a profile that the search takes. A less similar one must be named by the caller."""


_PLACING = ("placement", "cpu_moe", "n_cpu_moe", "n_gpu_layers")
"""Settings that place weights. With more memory, more of the model fits on the device."""


class Level(IntEnum):
    """The levels of a match, worst first."""

    DEFAULT = 0
    """No profile, so the engine's defaults apply."""
    OTHER_MODEL = 1
    """A profile of another model, which is used only if the caller forces it."""
    NEAREST = 2
    """The same model on the most similar device by score."""
    SAME_DEVICE = 3
    """The same model, with the same compute capability and SM count, or the same instruction set and
    cores."""
    EXACT = 4
    """All compared properties are the same."""

    def describe(self, kind: str) -> str:
        """The level in words, for a kind of device."""
        same = "instruction set and cores" if kind == "cpu" else "compute capability and SM count"
        return {
            Level.DEFAULT: "engine default",
            Level.OTHER_MODEL: "another model, forced",
            Level.NEAREST: "nearest device",
            Level.SAME_DEVICE: f"same {same}",
            Level.EXACT: "exact match",
        }[self]


class Difference(NamedTuple):
    """A property that differs between a profile and this machine, model or engine."""

    name: str
    """Name of the property, such as `L2 cache`."""
    text: str
    """Text with both values, such as `L2 cache 2048 KiB, here 1024 KiB`."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of a profile with a machine and a model."""

    level: Level
    """`DEFAULT` if the profile cannot be used at all."""
    score: float
    """Similarity from 0 to 1, which ranks profiles of one level."""
    reasons: tuple[str, ...]
    """Differences, in words; empty for an exact match."""
    other_model: tuple[str, ...] = ()
    """Differences of the models only; empty if the profile belongs to this model."""
    properties: tuple[str, ...] = ()
    """Names of the properties that differ."""


@dataclass(frozen=True, slots=True)
class MatchResult:
    """The result of the search: the profile that the runtime takes, and the reason."""

    profile: Profile | None
    """The profile; None: the engine's defaults."""
    path: str | None
    layer: str | None
    """Layer of the profile: shipped, site, user, or --profile."""
    level: Level
    score: float
    reasons: list[str]
    """Differences from an exact match, with values."""
    chain: list[str]
    """The levels of the search down to the one that was taken, one line each, for people."""
    kind: str = "cpu"
    """Kind of the device of the search."""
    warnings: list[str] = field(default_factory=list)
    """One line for each file that could not be read."""
    switched_off: bool = False
    """Whether the caller requested the engine's defaults."""
    properties: list[str] = field(default_factory=list)
    """Names of the properties that differ from an exact match."""

    @property
    def headline(self) -> str:
        """The line that the runtime prints, such as `profile: NAME.yaml (exact match)`. If several properties
        differ, it has only their names. `chain` has the values."""
        if self.profile is None:
            return f"profile: none{' (switched off)' if self.switched_off else ' for this model and device'}"
        how = self.level.describe(self.kind)
        named = ", ".join(self.properties) if len(self.reasons) > 1 else "".join(self.reasons)
        differs = f"; differs: {named}" if named else ""
        name = os.path.basename(self.path) if self.path else self.profile.label
        return f"profile: {name} ({how}{differs})"


# ---- Comparing ----


def compare(
    match: Match, device: CpuDevice | CudaDevice, model: ModelIdentity, engine: EngineIdentity
) -> Comparison:
    """Compare the `match` of a profile with a device, a model and an engine."""
    there = match.device
    if there.kind != device.kind:
        return Comparison(Level.DEFAULT, 0.0, (f"it is for {there.kind} devices, here {device.kind}",))
    virtual = [getattr(one, "virtual", None) for one in (there, device)]
    if virtual[0] != virtual[1]:
        words = [f"a virtual device ({one})" if one else "a real device" for one in virtual]
        return Comparison(Level.DEFAULT, 0.0, (f"it is for {words[0]}, here {words[1]}",))
    if match.engine.name != engine.name:
        return Comparison(Level.DEFAULT, 0.0, (f"it is for {match.engine.name}, here {engine.name}",))
    chip = list(_chip_differences(there, device))
    model_differences = list(_model_differences(match.model, model))
    differences = [
        *model_differences,
        *chip,
        *_device_differences(there, device),
        *_engine_differences(match.engine, engine),
    ]
    if match.model.weights == "synthetic" and model.weights == "real":
        differences.append(Difference("weights", "measured on synthetic weights"))
    level = Level.NEAREST if chip else Level.SAME_DEVICE if differences else Level.EXACT
    if model_differences:
        level = Level.OTHER_MODEL
    return Comparison(
        level,
        1.0 if level is Level.EXACT else _model_likeness(match.model, model),
        tuple(one.text for one in differences),
        tuple(one.text for one in model_differences),
        tuple(dict.fromkeys(one.name for one in differences)),
    )


def _chip_differences(there: CpuDevice | CudaDevice, here: CpuDevice | CudaDevice) -> Iterator[Difference]:
    if isinstance(there, CudaDevice) and isinstance(here, CudaDevice):
        yield from _unequal("compute capability", there.compute_capability, here.compute_capability)
        yield from _unequal("SMs", there.sm_count, here.sm_count)
    elif isinstance(there, CpuDevice) and isinstance(here, CpuDevice):
        yield from _unequal("instruction set", there.isa, here.isa)
        yield from _unequal("cores", there.cores, here.cores)


def _device_differences(there: CpuDevice | CudaDevice, here: CpuDevice | CudaDevice) -> Iterator[Difference]:
    if abs(there.memory_mib - here.memory_mib) > MEMORY_TOLERANCE * there.memory_mib:
        yield from _unequal("memory", there.memory_mib, here.memory_mib, " MiB")
    if isinstance(there, CudaDevice) and isinstance(here, CudaDevice):
        yield from _unequal("power limit", there.power_limit_w, here.power_limit_w, " W")
    elif isinstance(there, CpuDevice) and isinstance(here, CpuDevice):
        for key, name in (("l1d_kib", "L1 cache"), ("l2_kib", "L2 cache"), ("l3_kib", "L3 cache")):
            yield from _unequal_if_known(name, getattr(there, key), getattr(here, key), " KiB")


def _model_differences(there: ModelIdentity, here: ModelIdentity) -> Iterator[Difference]:
    for name in ("architecture", "layers", "embedding", "experts", "experts_used"):
        yield from _unequal(name, getattr(there, name), getattr(here, name))
    for name in ("feed_forward", "expert_feed_forward", "heads", "kv_heads", "vocab", "shapes"):
        yield from _unequal_if_known(name, getattr(there, name), getattr(here, name))
    for name in dict.fromkeys([*there.types, *here.types]):
        a, b = there.types.get(name, 0.0), here.types.get(name, 0.0)
        if abs(a - b) > TYPE_SHARE_TOLERANCE:
            yield Difference("weight types", f"share of {name} {a:.2f}, here {b:.2f}")


def _engine_differences(there: EngineIdentity, here: EngineIdentity) -> Iterator[Difference]:
    yield from _unequal("ops revision", there.ops_revision, here.ops_revision)
    if there.name != "dyno":  # kernels of other engines have no revision
        yield from _unequal("version", there.version, here.version)


def _unequal(name: str, there: object, here: object, unit: str = "") -> Iterator[Difference]:
    if there != here:
        yield Difference(name, f"{name} {_show(there, unit)}, here {_show(here, unit)}")


def _unequal_if_known(name: str, there: object, here: object, unit: str = "") -> Iterator[Difference]:
    """The difference of a property that a hand-written profile may leave out."""
    if there is not None and here is not None:
        yield from _unequal(name, there, here, unit)


def _show(value: object, unit: str) -> str:
    if value is None:
        return "unknown"
    return f"{value:g}{unit}" if isinstance(value, float) else f"{value}{unit}"


# ---- Scoring ----


def score(
    profile: Profile, device: CpuDevice | CudaDevice, model: ModelIdentity, engine: EngineIdentity
) -> Comparison:
    """`compare` with a score, weighted by the properties that the entries of the profile depend on.

    For the same model, the score is the similarity of the devices: by bandwidth for the share of entries
    whose best value follows bandwidth, and by compute capability or instruction set for the others. For
    another model, the similarity of the models is half of the score.
    """
    found = compare(profile.match, device, model, engine)
    if found.level in (Level.DEFAULT, Level.EXACT):
        return found
    by_bandwidth = by_tile = 0
    for path, entry in profile.entries():
        if isinstance(entry, KernelEntry) or SETTINGS[path.removeprefix("settings.")].ranks_by != "bandwidth":
            by_tile += 1
        else:
            by_bandwidth += 1
    share = by_bandwidth / (by_bandwidth + by_tile) if by_bandwidth + by_tile else 0.5
    device_likeness = share * _bandwidth_likeness(profile.match.device, device) + (
        1 - share
    ) * _tile_likeness(profile.match.device, device)
    if found.other_model:
        device_likeness = 0.5 * found.score + 0.5 * device_likeness
    return dataclasses.replace(found, score=round(device_likeness, 4))


def _quotient(a: float | None, b: float | None) -> float:
    """The smaller of two numbers / the larger one; 0.5 if one is unknown."""
    if a is None or b is None:
        return 0.5
    return min(a, b) / max(a, b)


def _bandwidth_likeness(there: CpuDevice | CudaDevice, here: CpuDevice | CudaDevice) -> float:
    memory = _quotient(there.memory_gbps, here.memory_gbps)
    if isinstance(there, CudaDevice) and isinstance(here, CudaDevice):
        return 0.5 * memory + 0.5 * _quotient(there.pcie_gbps, here.pcie_gbps)
    return memory


def _tile_likeness(there: CpuDevice | CudaDevice, here: CpuDevice | CudaDevice) -> float:
    if isinstance(there, CudaDevice) and isinstance(here, CudaDevice):
        a, b = float(there.compute_capability), float(here.compute_capability)
        generations = abs(int(a) - int(b))
        family = 1.0 if a == b else 0.8 if generations == 0 else 0.8 / (1 + generations)
        return family * (0.7 + 0.3 * _quotient(there.sm_count, here.sm_count))
    if isinstance(there, CpuDevice) and isinstance(here, CpuDevice):
        steps = abs(CPU_ISAS.index(there.isa) - CPU_ISAS.index(here.isa))
        return float(0.4**steps * (0.7 + 0.3 * _quotient(there.cores, here.cores)))
    return 0.0


def _model_likeness(there: ModelIdentity, here: ModelIdentity) -> float:
    """Similarity of two models: 1 for the same architecture, shapes and types. Mixtures of experts and dense
    models have a low similarity."""
    types = sum(min(share, here.types.get(name, 0.0)) for name, share in there.types.items())
    kind = 1.0 if bool(there.experts) == bool(here.experts) else 0.0
    size = _quotient(there.embedding, here.embedding) * _quotient(there.layers, here.layers)
    architecture = 1.0 if there.architecture == here.architecture else 0.0
    return 0.3 * architecture + 0.3 * kind + 0.2 * min(types, 1.0) + 0.2 * size


# ---- Entries ----


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision on one entry of a matching profile."""

    path: str
    """`settings.<name>` or `kernels.<op key>.<tokens>`."""
    action: Literal["apply", "fit_check", "reject"]
    """`fit_check`: memory limits the value and it was measured elsewhere, so it applies only if the plan
    shows that it fits."""
    reason: str = ""


def decide(profile: Profile, level: Level, device: CpuDevice | CudaDevice) -> list[Decision]:
    """The entries that a profile that matches at `level` contributes. `supports` decides about kernels."""
    decisions = []
    for path, entry in profile.entries():
        decision = Decision(path, "apply")
        if level is not Level.EXACT and isinstance(entry, SettingEntry):
            decision = _decide_setting(path.removeprefix("settings."), entry, profile, device)
        decisions.append(decision)
    return decisions


def _decide_setting(
    name: str, entry: SettingEntry, profile: Profile, device: CpuDevice | CudaDevice
) -> Decision:
    setting = SETTINGS[name]
    path = setting_path(name)
    there = profile.match.device
    if name in _PLACING and abs(there.memory_mib - device.memory_mib) > MEMORY_TOLERANCE * there.memory_mib:
        return Decision(
            path, "reject", f"placed for {there.memory_mib} MiB of memory, here {device.memory_mib} MiB"
        )
    if setting.memory_bound:
        return Decision(path, "fit_check", "bounded by memory and not measured on this machine and model")
    if isinstance(there, CpuDevice) and isinstance(device, CpuDevice):
        if setting.ranks_by == "cores" and there.cores != device.cores:
            return Decision(path, "reject", f"measured with {there.cores} cores, here {device.cores}")
        if name == "cpu_isa" and entry.value in CPU_ISAS:
            wanted = CPU_ISAS.index(str(entry.value))
            if wanted > CPU_ISAS.index(device.isa):
                return Decision(
                    path, "reject", f"{entry.value} is more than the {device.isa} of this machine"
                )
    return Decision(path, "apply")
