"""The search for a profile: in the layers shipped < site < user, with the best match level first.

A profile belongs to its model, so the search only takes profiles of the same model. If the caller names a
file, that file is taken, and the folders do not matter. If the named file was made for another model, that is
an error unless the caller forces it.

A profile proves nothing if it has no entries and was measured on a disturbed machine. So it never hides a
proven profile of a less similar device or a lower layer.
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dyno._home import own_folder
from dyno.errors import ProfileError
from dyno.profiles.io import load_profile
from dyno.profiles.match import MIN_SCORE, Comparison, Level, MatchResult, score

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dyno.profiles.identity import CpuDevice, CudaDevice, EngineIdentity, ModelIdentity
    from dyno.profiles.schema import Profile

SITE_FOLDER = Path("/etc/dyno/profiles")
MAX_FILES = 2000
"""Maximum number of files in a folder of profiles."""

_log = logging.getLogger("dyno.profiles")


@dataclass(frozen=True, slots=True)
class Layer:
    """A folder of profiles. At the same match level, later layers of a list win over earlier ones."""

    name: str
    folder: Path


@dataclass(frozen=True, slots=True)
class Found:
    """A profile that was found in a layer."""

    profile: Profile
    path: str
    layer: str
    rank: int
    """Position of the layer. The highest one wins."""


def shipped_folder() -> Path:
    """The folder of the shipped profiles: next to this package if it is installed, `profiles/` in a source
    tree."""
    package = Path(__file__).resolve().parent
    source = package.parents[2] / "profiles"
    if (source / "profile.schema.json").is_file() and (package.parents[2] / "pyproject.toml").is_file():
        return source
    return package


def user_folder() -> Path:
    """The user's folder, in which `tune` writes: `$XDG_CONFIG_HOME/dyno/profiles`, by default
    `~/.config/dyno/profiles`.

    Raises:
        ProfileError: Neither XDG_CONFIG_HOME nor a home folder is known.
    """
    try:
        return own_folder("CONFIG") / "profiles"
    except RuntimeError as error:
        raise ProfileError("[profile] no home folder is known; set HOME or XDG_CONFIG_HOME") from error


def default_path(device: CpuDevice | CudaDevice, model: ModelIdentity, engine: EngineIdentity) -> Path:
    """The file that `tune` writes by default: one for each device, model and engine.

    Raises:
        ProfileError: No home folder is known.
    """
    chip = _cpu_name(device) if device.kind == "cpu" else _cuda_name(device)
    main_type = max(model.types, key=lambda name: model.types[name])
    shape = f"{model.architecture}-{model.layers}x{model.embedding}-{main_type}-{model.shapes or 'shapes'}"
    kind = "-synthetic" if model.weights == "synthetic" else ""
    name = f"{engine.name}-{chip}-{shape}{kind}.yaml"
    return user_folder() / re.sub(r"[^A-Za-z0-9_.-]+", "-", name).lstrip(".")


def _cpu_name(device: CpuDevice) -> str:
    virtual = f"-virtual-{device.virtual}" if device.virtual else ""
    return f"cpu-{device.isa}-{device.cores}c{virtual}"


def _cuda_name(device: CudaDevice) -> str:
    limit = f"-{device.power_limit_w:g}w" if device.power_limit_w is not None else ""
    return f"cuda-{device.compute_capability}-{device.sm_count}sm-{device.memory_mib}mib{limit}"


def default_layers() -> list[Layer]:
    """The layers shipped, site (`/etc/dyno/profiles`, or `$DYNO_SITE_PROFILES`) and user, in ascending
    precedence."""
    site = os.environ.get("DYNO_SITE_PROFILES")
    layers = [Layer("shipped", shipped_folder()), Layer("site", Path(site) if site else SITE_FOLDER)]
    try:
        layers.append(Layer("user", user_folder()))
    except ProfileError as error:
        _log.warning("%s; the user's profiles are not searched", error)
    return layers


def profile_files(layer: Layer) -> list[Path]:
    """The `.yaml` files of a layer in stable order; empty if the folder does not exist.

    Raises:
        ProfileError: The folder cannot be read, or has more than `MAX_FILES` files.
    """
    try:
        names = sorted(name for name in os.listdir(layer.folder) if name.endswith((".yaml", ".yml")))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise ProfileError(f"[profile] {layer.folder}: cannot be read: {error.strerror}") from error
    if len(names) > MAX_FILES:
        raise ProfileError(f"[profile] {layer.folder}: {len(names)} files; at most {MAX_FILES} are searched")
    return [layer.folder / name for name in names if not name.startswith(".")]


def scan(layers: Sequence[Layer], warn: Callable[[str], None]) -> list[Found]:
    """All readable profiles of the layers. Each unreadable file causes one warning."""
    found = []
    for rank, layer in enumerate(layers):
        try:
            paths = profile_files(layer)
        except ProfileError as error:
            warn(f"{error}; ignored")
            continue
        for path in paths:
            try:
                found.append(Found(load_profile(path), str(path), layer.name, rank))
            except ProfileError as error:
                warn(f"{error}; file ignored")
    return found


def find_profile(
    device: CpuDevice | CudaDevice,
    model: ModelIdentity,
    engine: EngineIdentity,
    *,
    profile: Literal["auto"] | str | os.PathLike[str] | Profile | None = "auto",
    require: bool = False,
    any_model: bool = False,
    layers: Sequence[Layer] | None = None,
    warn: Callable[[str], None] | None = None,
) -> MatchResult:
    """Find the profile for a device, a model and an engine, with the steps of the search.

    Args:
        device: The device that the model will run on.
        model: The model.
        engine: The engine.
        profile: "auto" searches the layers. A path or a profile is taken as it is, unless it is for another
            kind of device, engine or model. None takes the engine's defaults.
        any_model: Whether to accept a profile of another model: the named one (`--force-profile`), or with
            "auto" the most similar one if no profile belongs to this model.
        require: Whether anything but an exact match is an error (`--require-profile`).
        layers: Folders in ascending precedence; None: shipped, site and user.
        warn: Receives a line for each file that cannot be read; None: the logger `dyno.profiles`.

    Raises:
        ProfileError: The file named by `profile` cannot be read or belongs to another model, or `require` is
            given and there is no exact match.

    Example:
        >>> result = find_profile(device, model, engine)  # doctest: +SKIP
        >>> print(result.headline)  # doctest: +SKIP
        profile: h200.yaml (exact match)
    """
    warnings: list[str] = []

    def tell(line: str) -> None:
        warnings.append(line)
        (warn or _warn_by_log)(line)

    if profile is None:
        candidates: list[Found] = []
        chain = ["profile: switched off by the caller"]
    elif profile == "auto":
        candidates = scan(default_layers() if layers is None else layers, tell)
        chain = []
    else:
        candidates = [_named(profile)]
        chain = []
        if not any_model:
            _check_model(candidates[0], device, model, engine)
    result = _choose(
        candidates, device, model, engine, chain, warnings,
        named=profile != "auto", any_model=any_model, require=require,
    )  # fmt: skip
    if result.profile is None and profile not in (None, "auto"):
        tell(f"[profile] {candidates[0].path} is not used: {'; '.join(result.reasons)}")
    if require and result.level is not Level.EXACT:
        broken = f"; {len(warnings)} files could not be used: {'; '.join(warnings)}" if warnings else ""
        raise ProfileError(
            f"[profile] a profile is required and none matches exactly: {'; '.join(result.chain)}{broken}; "
            "run `tune` for this model on this device, or leave out --require-profile (require_profile=True)"
        )
    return result


def _check_model(
    item: Found, device: CpuDevice | CudaDevice, model: ModelIdentity, engine: EngineIdentity
) -> None:
    """Refuse a named profile that belongs to another model.

    Raises:
        ProfileError: It does. The message names the differences.
    """
    differences = score(item.profile, device, model, engine).other_model
    if differences:
        raise ProfileError(
            f"[profile] {item.path} belongs to another model: {'; '.join(differences)}; leave it out to run "
            "with the engine's defaults, or use it anyway with --force-profile (force_profile=True)"
        )


_MOST_REASONS = 5
"""Differences that a line about the profile of another model lists."""


def _warn_by_log(line: str) -> None:
    _log.warning("%s", line)


def _named(profile: str | os.PathLike[str] | Profile) -> Found:
    if isinstance(profile, str | os.PathLike):
        return Found(load_profile(profile), os.fspath(profile), "--profile", 0)
    return Found(profile, profile.source.path if profile.source else profile.label, "--profile", 0)


def _choose(
    candidates: Sequence[Found],
    device: CpuDevice | CudaDevice,
    model: ModelIdentity,
    engine: EngineIdentity,
    chain: list[str],
    warnings: list[str],
    *,
    named: bool,
    any_model: bool,
    require: bool,
) -> MatchResult:
    compared = [(score(item.profile, device, model, engine), item) for item in candidates]
    usable = [pair for pair in compared if pair[0].level is not Level.DEFAULT]
    switched_off = bool(chain)  # there is then no level to explain
    levels = [Level.EXACT, Level.SAME_DEVICE, Level.NEAREST]
    if any_model:
        levels.append(Level.OTHER_MODEL)
    if _has_proven(usable, [Level.EXACT] if require else levels):
        for _, item in [pair for pair in usable if pair[1].profile.settles_nothing]:
            chain.append(
                f"passed over: {item.path} (it has no entry and was measured on a disturbed machine)"
            )
        usable = [pair for pair in usable if not pair[1].profile.settles_nothing]
    for level in () if switched_off else levels:
        fitting = sorted((pair for pair in usable if pair[0].level is level), key=_precedence, reverse=True)
        if level in (Level.NEAREST, Level.OTHER_MODEL) and not named:
            near = [pair for pair in fitting if pair[0].score >= MIN_SCORE]
            if fitting and not near:
                best, item = fitting[0]
                chain.append(
                    f"{level.describe(device.kind)}: none (best is {item.path} with score {best.score:.2f}, "
                    f"below {MIN_SCORE:.2f})"
                )
                continue
            fitting = near
        name = level.describe(device.kind)
        if level is Level.OTHER_MODEL and not fitting:
            continue
        if not fitting:
            chain.append(f"{name}: none{_why_none(level, usable, compared)}")
            continue
        best, item = fitting[0]
        others = f"; {len(fitting) - 1} more at this level" if len(fitting) > 1 else ""
        points = "" if level is Level.EXACT else f", score {best.score:.2f}"
        chain.append(f"{name}: {item.path} ({item.layer}{points}{others})")
        return MatchResult(
            profile=item.profile,
            path=item.path,
            layer=item.layer,
            level=level,
            score=best.score,
            reasons=list(best.reasons),
            chain=chain,
            kind=device.kind,
            warnings=warnings,
            properties=list(best.properties),
        )
    if not switched_off and not any_model:
        other_models = sum(pair[0].level is Level.OTHER_MODEL for pair in usable)
        if other_models:
            chain.append(f"profiles of other models: {other_models}; they are used only if forced")
    chain.append("engine default")
    reasons = list(compared[0][0].reasons) if len(compared) == 1 else []
    return MatchResult(
        profile=None,
        path=None,
        layer=None,
        level=Level.DEFAULT,
        score=0.0,
        reasons=reasons,
        chain=chain,
        kind=device.kind,
        warnings=warnings,
        switched_off=switched_off,
    )


def _has_proven(usable: Sequence[tuple[Comparison, Found]], levels: Sequence[Level]) -> bool:
    """Whether a proven profile fits at one of `levels`."""
    return any(
        item.profile.proven
        and found.level in levels
        and (found.level not in (Level.NEAREST, Level.OTHER_MODEL) or found.score >= MIN_SCORE)
        for found, item in usable
    )


def _precedence(pair: tuple[Comparison, Found]) -> tuple[int, float, str, str]:
    """The order within one level: by layer, then score, then newest date, then name, so that the order is
    total."""
    comparison, item = pair
    provenance = item.profile.provenance
    return item.rank, comparison.score, provenance.date if provenance else "", item.path


def _why_none(
    level: Level, usable: Sequence[tuple[Comparison, Found]], compared: Sequence[tuple[Comparison, Found]]
) -> str:
    if not compared:
        return " (no profiles found)" if level is Level.EXACT else ""
    if not usable:
        if level is not Level.EXACT:
            return ""
        return f" (none of {len(compared)} profiles is for this kind of device and engine)"
    if level is not Level.EXACT:
        return ""
    best, item = max(usable, key=lambda pair: (pair[0].level, *_precedence(pair)))
    if "architecture" in best.properties:  # then everything differs, and nobody compares them
        return ""
    reasons = list(best.reasons)
    if len(reasons) > _MOST_REASONS and best.other_model:
        reasons[_MOST_REASONS:] = [f"and {len(reasons) - _MOST_REASONS} more"]
    return f" (best is {item.path}: {'; '.join(reasons)})"
