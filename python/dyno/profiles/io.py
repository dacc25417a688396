"""Reading and writing of profile files, with one line per error and atomic writes."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from dyno._wrong_values import has_plain_words, not_given, plain_words
from dyno.errors import ProfileError
from dyno.profiles import _yaml
from dyno.profiles._fields import clean_text
from dyno.profiles.schema import Profile, Source

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pydantic_core import ErrorDetails

MAX_PROBLEMS = 100
FLOW_WIDTH = 150
"""A map that fits on one line of this many columns is written on one line."""
MAX_COMMENT = 300
"""Maximum length of a comment in characters. Longer ones are cut. The whole command, for example, is in
`provenance`."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem of a file."""

    file: str
    line: int | None
    where: str
    """Path of the key, e.g. `settings.ubatch.value`; empty for the file as a whole."""
    message: str
    level: Literal["error", "warning", "note"] = "error"

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        where = f"{self.where}: " if self.where else ""
        prefix = "" if self.level == "error" else f"{self.level}: "
        return f"{place}: {prefix}{where}{self.message}"


# ---- Reading ----


def load_profile(path: str | os.PathLike[str]) -> Profile:
    """Read and validate a profile.

    Raises:
        ProfileError: The file cannot be read, is not YAML, or is not a profile. The message is one line with
            file, line, key and problem and, for an unknown key, the most similar valid one.
    """
    return _validated(_read(Path(path)), str(path))


def load_readable(path: str | os.PathLike[str]) -> tuple[Profile, dict[str, str]]:
    """A profile without its wrong entries, with the problem of each wrong entry by its path
    (`settings.ubach`).

    Raises:
        ProfileError: As in `load_profile`, for problems outside of entries.
    """
    name, text = str(path), _read(Path(path))
    wrong: dict[str, str] = {}
    with contextlib.suppress(_yaml.YamlProblem):
        data, lines = _yaml.parse(text)
        while isinstance(data, dict):
            try:
                return Profile.model_validate(data).with_source(Source(name, lines)), wrong
            except ValidationError as error:
                found = _take_out(data, error)
                if not found:
                    break
                wrong |= found
    return _validated(text, name), wrong


def _take_out(data: Mapping[str, Any], error: ValidationError) -> dict[str, str]:
    """Remove the entries that `error` concerns from the data, and return their problems; empty if `error`
    concerns something else."""
    wrong: dict[str, str] = {}
    found = error.errors(include_url=False)
    for item in reversed(found):  # so that removing an item moves no item that is removed later
        place = tuple(str(step) for step in item["loc"] if not _is_step(str(step)))
        depth = {"settings": 2, "kernels": 3}.get(place[0] if place else "", 0)
        keys = place[: depth or None]
        entries: Any = data
        for key in keys[:-1]:
            entries = entries.get(key) if isinstance(entries, dict) else None
        if len(keys) == 3 and isinstance(entries, list):
            wrong[".".join(keys)] = f"{_message(item)}: {_printable(str(entries.pop(int(keys[-1]))))}"
            continue
        if not depth or len(keys) < 2 or not isinstance(entries, dict):
            return {}
        if keys[-1] in entries:
            del entries[keys[-1]]
        elif ".".join(keys) not in wrong:
            return {}
        wrong.setdefault(".".join(keys), _message(item))
    return dict(reversed(wrong.items()))


def loads_profile(text: str, name: str = "<text>") -> Profile:
    """Read and validate the text of a profile. `name` stands for the file in messages."""
    return _validated(text, name)


def file_problems(path: str | os.PathLike[str]) -> tuple[Profile | None, list[Problem]]:
    """Read a file, and return all its problems instead of raising at the first one."""
    try:
        text = _read(Path(path))
    except ProfileError as error:
        message = str(error).removeprefix(f"[profile] {path}: ")
        return None, [Problem(str(path), None, "", message)]
    return _problems(text, str(path))


def _read(path: Path) -> str:
    try:
        # Without O_NONBLOCK, opening a pipe would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            os.close(descriptor)
            kind = "this is a folder; give a .yaml file in it" if stat.S_ISDIR(mode) else "not a regular file"
            raise ProfileError(f"[profile] {path}: {kind}")
        with open(descriptor, "rb") as file:
            data = file.read(_yaml.MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ProfileError(f"[profile] {path}: cannot be read: {why}") from error
    if len(data) > _yaml.MAX_BYTES:
        raise ProfileError(f"[profile] {path}: larger than {_yaml.MAX_BYTES} bytes, the limit for a profile")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ProfileError(f"[profile] {path}: not UTF-8 text (byte {error.start})") from error


def _validated(text: str, name: str) -> Profile:
    profile, problems = _problems(text, name)
    if profile is None:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ProfileError(f"[profile] {problems[0]}{more}")
    return profile


def _problems(text: str, name: str) -> tuple[Profile | None, list[Problem]]:
    try:
        data, lines = _yaml.parse(text)
    except _yaml.YamlProblem as error:
        return None, [Problem(name, error.line, "", error.message)]
    if not isinstance(data, dict):
        return None, [Problem(name, 1, "", "not a map of keys; a profile starts with 'schema: 1'")]
    try:
        profile = Profile.model_validate(data)
    except ValidationError as error:
        return None, _translate(error, name, lines)
    return profile.with_source(Source(name, lines)), []


def _translate(error: ValidationError, name: str, lines: Mapping[tuple[str, ...], int]) -> list[Problem]:
    found: list[Problem] = []
    for item in error.errors(include_url=False):
        # Tags of unions and internal steps of pydantic are in angle or square brackets.
        path = tuple(str(step) for step in item["loc"] if not _is_step(str(step)))
        path = _known_prefix(path, lines) if lines else path
        line = next((lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in lines), None)
        problem = Problem(name, line, _printable(".".join(path)), _message(item))
        if problem not in found:
            found.append(problem)
    found.sort(key=lambda problem: problem.line or 0)
    return found[:MAX_PROBLEMS]


def _printable(text: str) -> str:
    """A key in a form that is safe to print on one line of a terminal, even from a hostile file."""
    shown = text if text.isprintable() else repr(text)[1:-1]
    return shown if len(shown) <= 160 else shown[:157] + "..."


_UNION_STEPS = frozenset({"bool", "int", "float", "str", "literal['default']", "list[constrained-str]"})


def _is_step(step: str) -> bool:
    return (step.startswith("<") and step.endswith(">")) or step == "[key]"


def _known_prefix(path: tuple[str, ...], lines: Mapping[tuple[str, ...], int]) -> tuple[str, ...]:
    """Remove the parts that pydantic appends for members of a union (`value.bool`, `value.list[...]`)."""
    if path in lines or not path:
        return path
    last = path[-1]
    union = last in _UNION_STEPS or "[" in last or "-" in last
    return _known_prefix(path[:-1], lines) if union else path


def _message(item: ErrorDetails) -> str:
    if item["type"] == "missing":
        return "missing"
    text = plain_words(item, mapping="a map")
    if has_plain_words(item):  # other messages name the value themselves
        text += not_given(item, mapping="a map")
    return " ".join(text.split())


# ---- Writing ----


def to_dict(profile: Profile) -> dict[str, Any]:
    """The profile as plain data in the order of a file: changes before defaults, and no empty maps."""
    data = profile.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=False)
    for name in ("settings", "kernels"):
        data[name] = dict(sorted(data[name].items(), key=lambda item: _stays_default(item[1])))
        if not data[name]:
            del data[name]
    if "kernels" in data:
        data["kernels"] = _listed(data["kernels"])
    for entry in data.get("settings", {}).values():
        if isinstance(entry, dict):
            _shorten(entry, "moves")
    workload = data.get("evidence", {}).get("workload", {})
    for key in ("pp", "tg", "depth"):
        _shorten(workload, key)
    if not workload.get("weights", True):
        del workload["weights"]
    noise = data.get("evidence", {}).get("noise", {})
    if not noise.get("by_measure", True):
        del noise["by_measure"]
    for name in ("evidence", "provenance"):
        if name in data:
            data[name] = {key: value for key, value in data[name].items() if value not in ({}, [])}
    engine = data["match"]["engine"]
    if not engine.get("build", True):
        del engine["build"]
    return data


def _stays_default(entry: Any) -> bool:
    """Whether an entry changes nothing: a setting at `default`, or an op with only `default` ranges."""
    if isinstance(entry, dict):
        return "value" not in entry and all(part == "default" for part in entry.values())
    return bool(entry == "default")


def _listed(kernels: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The kernels with unchanged ones in one list at the end, because a tune leaves about a hundred
    unchanged."""
    changed = {
        key: {tokens: entry for tokens, entry in ranges.items() if entry != "default"}
        for key, ranges in kernels.items()
    }
    stay = [
        f"{tokens} {key}"
        for key, ranges in kernels.items()
        for tokens in ranges
        if ranges[tokens] == "default"
    ]
    written: dict[str, Any] = {key: ranges for key, ranges in changed.items() if ranges}
    return written | ({"default": stay} if stay else {})


def _shorten(entry: dict[str, Any], key: str) -> None:
    """Write a list of one item as the item, and leave out an empty list."""
    value = entry.get(key)
    if value == []:
        del entry[key]
    elif isinstance(value, list) and len(value) == 1:
        entry[key] = value[0]


def dumps_profile(profile: Profile, comments: Sequence[str] = ()) -> str:
    """The YAML text of a profile, with one line per entry and a blank line before each section.

    Args:
        comments: Comment lines above the profile, for people. No program reads them.
    """
    out = [f"# {clean_text(line, MAX_COMMENT)}" for line in comments]
    for key, value in to_dict(profile).items():
        if isinstance(value, dict):
            out.extend(["", f"{key}:"])
            out.extend(_block(value, 1, spread=key in ("kernels",)))
        else:
            out.append(f"{key}: {_yaml.scalar(value)}")
    return "\n".join(out) + "\n"


def _block(value: Mapping[str, Any], depth: int, spread: bool = False) -> Iterator[str]:
    indent = "  " * depth
    keys = {key: _yaml.scalar(key, as_key=True) + ":" for key in value}
    width = min(max(map(len, keys.values()), default=0), 24)
    for key, item in value.items():
        line = f"{indent}{keys[key]:<{width}} {_yaml.flow(item)}"
        is_long = (
            isinstance(item, dict)
            and len(line) > FLOW_WIDTH
            and any(isinstance(v, dict) for v in item.values())
        )
        if isinstance(item, dict) and item and (spread or is_long):
            yield f"{indent}{keys[key]}"
            yield from _block(item, depth + 1)
        elif isinstance(item, list) and spread:
            yield f"{indent}{keys[key]}"
            yield from (f"{indent}  - {_yaml.scalar(each)}" for each in item)
        else:
            yield line


def save_profile(profile: Profile, path: str | os.PathLike[str], comments: Sequence[str] = ()) -> None:
    """Write a profile atomically: a reader sees the old file or the new one. Missing folders are created.

    Args:
        comments: As in `dumps_profile`.

    Raises:
        ProfileError: The file cannot be written (no space, no permission). An older file is then unchanged.
    """
    write_atomically(Path(path), dumps_profile(profile, comments).encode())


def write_atomically(path: Path, data: bytes, area: str = "profile") -> None:
    """Replace a file by a temporary one in the same folder, which is flushed to disk before the rename.

    Args:
        path: The file. A link stays a link.
        data: Its content.
        area: The word in brackets at the beginning of an error message.

    Raises:
        ProfileError: It cannot be written. An older file is then unchanged.
    """
    path = Path(os.path.realpath(path))  # a link stays a link
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), _mode_for(path))
            os.fsync(file.fileno())
        os.replace(temporary, path)
        temporary = None
        _sync_folder(path.parent)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        kept = "; the older file is unchanged" if path.exists() else ""
        full = (
            " (free some space or choose another place)" if getattr(error, "errno", 0) == errno.ENOSPC else ""
        )
        raise ProfileError(f"[{area}] {path}: cannot be written: {why}{full}{kept}") from error
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def _mode_for(path: Path) -> int:
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        mask = os.umask(0)
        os.umask(mask)
        return 0o666 & ~mask


def _sync_folder(folder: Path) -> None:
    """Make a rename durable. Some file systems do not support this for a folder, but the file itself is
    already safe."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
