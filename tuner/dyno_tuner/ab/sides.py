"""The sides A and B that a user names: a profile, a folder of binaries, a build or commit of dyno, or
`default`."""

from __future__ import annotations

import enum
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dyno import profiles

from ..core.errors import TuneError
from ..core.recorded_command import held_with
from ..output.emit import incumbent_settings
from ..targets import declared
from ..targets.ggml.export import binaries_folder, tuned_with
from ..targets.ggml.installation import engine_in
from .dyno_side import DynoSide
from .ggml_side import GgmlSide
from .revision import build, commit_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .run import Side


@dataclass
class Given:
    """The options of both sides."""

    model: str
    gpu: int | None = None
    text: str | None = None
    deadline: float = 600.0
    log: str | None = None  # file for the standard error of other engines
    binaries: Path | None = None  # for profiles of other engines
    repository: Path = field(default_factory=Path.cwd)
    defines: Sequence[str] = ()  # of CMake, for commits
    command: Sequence[str] = ()  # flags for the binaries of both sides
    settings: dict[str, Any] = field(default_factory=dict)  # of dyno, for both sides
    force: bool = False  # takes profiles of dyno that belong to another model


class Kind(enum.Enum):
    """The kind of a side."""

    BINARIES = "binaries of another engine"
    FOREIGN_PROFILE = "a profile of another engine"
    PROFILE = "a profile of dyno"
    BUILD = "a build of dyno"
    COMMIT = "a commit of dyno"


FOREIGN = frozenset({Kind.BINARIES, Kind.FOREIGN_PROFILE})
DYNO = frozenset(Kind) - FOREIGN


def kind_of(word: str) -> Kind:
    """The kind of a side, by its name only. A name that is neither a file nor a folder counts as a commit."""
    path = Path(word)
    if word != "default" and path.suffix in (".yaml", ".yml"):
        other = path.is_file() and declared(profiles.load_profile(path).match.engine.name).foreign
        return Kind.FOREIGN_PROFILE if other else Kind.PROFILE
    if path.exists() and _engine_of(path) is not None:
        return Kind.BINARIES
    return Kind.BUILD if word == "default" or path.exists() else Kind.COMMIT


def _engine_of(path: Path) -> str | None:
    return engine_in(path.parent if path.name.startswith("llama-") and path.is_file() else path)


def make_side(
    name: str, word: str, given: Given, own: str, say: Callable[[str], None], profile: Path | None = None
) -> Side:
    """The side that a word of the command line names.

    Args:
        name: "A" or "B".
        word: The word of the user.
        own: Further flags for the binaries of this side, as one word.
        profile: Profile for a build or commit of dyno.

    Raises:
        TuneError: The word names nothing that can be run. The message says what is accepted.
    """
    try:
        flags = [*given.command, *shlex.split(own)]
    except ValueError as error:
        raise TuneError(f"side {name}: {own!r}: {error}; check the quotes") from error
    path = Path(word)
    if word != "default" and path.suffix in (".yaml", ".yml"):
        return _profile(name, path, given, flags, own)
    if path.exists() and (found := _engine_of(path)) is not None:
        binaries = path.parent if path.is_file() else path
        return GgmlSide(name, found, given.model, str(binaries), command=flags, gpu=given.gpu,
                        text=given.text, deadline=given.deadline, log=given.log)  # fmt: skip
    package = _package(name, word, path, given, say)
    if flags and own:
        raise TuneError(f"side {name}: {own!r} are flags of other engines' binaries, but {word} is dyno")
    return DynoSide(name, given.model, build=package, profile=profile, settings=given.settings, gpu=given.gpu,
                    deadline=given.deadline, force=given.force)  # fmt: skip


def _profile(name: str, path: Path, given: Given, flags: list[str], own: str) -> Side:
    profile = profiles.load_profile(path)
    engine = profile.match.engine.name
    if not declared(engine).foreign:
        if own:
            raise TuneError(
                f"side {name}: {own!r} are flags of other engines' binaries, but {path} is a profile of dyno"
            )
        return DynoSide(name, given.model, profile=path.absolute(), settings=given.settings, gpu=given.gpu,
                        deadline=given.deadline, force=given.force)  # fmt: skip
    command = tuned_with(profile)[2]
    try:
        binaries = binaries_folder(path, profile, str(given.binaries) if given.binaries is not None else None)
    except TuneError as error:
        raise TuneError(f"side {name}: {error}") from error
    settings = {**held_with(profile), **incumbent_settings(profile)}
    at_default = [n for n, e in profile.settings.items() if not isinstance(e, profiles.SettingEntry)]
    return GgmlSide(name, engine, given.model, binaries, command=[*command, *flags], settings=settings,
                    gpu=given.gpu, text=given.text, deadline=given.deadline, log=given.log,
                    at_default=at_default)  # fmt: skip


def _package(name: str, word: str, path: Path, given: Given, say: Callable[[str], None]) -> Path | None:
    """The folder to import dyno from; None for this build."""
    if word == "default":
        return None
    for place in (path, path / "python"):
        if path.is_dir() and (place / "dyno" / "__init__.py").is_file():
            if not any((place / "dyno").glob("_core*.so")) and not any((place / "dyno").glob("_core*.pyd")):
                raise TuneError(
                    f"side {name}: {place / 'dyno'} has no compiled dyno._core; build it, or name a commit"
                )
            return place.absolute()
    if path.exists():
        raise TuneError(
            f"side {name}: {word} is neither a profile (.yaml) nor a folder with dyno or llama-bench"
        )
    commit = commit_of(word, given.repository)
    if commit is None:
        raise TuneError(
            f"side {name}: {word!r} is neither a file, nor a folder, nor a commit in {given.repository}; "
            "give a profile, the folder of llama-bench, a folder with a build of dyno, a commit, or `default`"
        )
    return build(commit, given.repository, given.defines, say)
