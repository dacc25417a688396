"""Answers of the exact path, kept from one tune to the next.

They depend on the file, the passages, the exact path's own code and the device, and on nothing that is tuned;
to compute them took 45 of the 100 seconds of a tune (gpt-oss-20b on an H200). The key holds all of that, so
what is found is what would be computed. A file that is not whole, or not to be read or written, counts as
none: it is computed then.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from .answers import Group

    Exact = tuple[list[NDArray[np.float32]], list[NDArray[np.int32] | None]]

MOST_BYTES = 2 << 30  # of all that are kept; the one used longest ago goes first
WORTH_SECONDS = 2.0  # what takes less is computed again
_FORMAT = 1
_PIECES, _PIECE = 256, 1 << 16  # of a model file that are read for its key


def folder() -> Path | None:
    """`$XDG_CACHE_HOME/dyno/answers`, by default `~/.cache/dyno/answers`; None where no home is known."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "dyno" / "answers"
    except RuntimeError:
        return None


def key_of(model: str, asked: Sequence[Group], code: str, facts: Mapping[str, Any]) -> str:
    """Args:
        model: path of the GGUF file, or of the first of several.
        code: path of the compiled module.
        facts: of the device, and the settings of the exact path.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.sha256(json.dumps([_FORMAT, facts], sort_keys=True, default=str).encode())
    for part in _parts(Path(model)):
        digest.update(_digest_of(part))
    with open(code, "rb") as file:
        digest.update(hashlib.file_digest(file, "sha256").digest())
    for group in asked:
        digest.update(f"{group.name} {group.size} {group.every} {len(group.tokens)}".encode())
        digest.update(np.ascontiguousarray(group.tokens).tobytes())
    return digest.hexdigest()


def _parts(model: Path) -> list[Path]:
    """All files of a model that is split."""
    found = re.fullmatch(r"(.*-)\d{5}(-of-\d{5}\.gguf)", model.name)
    if not found:
        return [model]
    pattern = re.compile(re.escape(found[1]) + r"\d{5}" + re.escape(found[2]))
    return sorted(p for p in model.parent.iterdir() if pattern.fullmatch(p.name))


def _digest_of(path: Path) -> bytes:
    """Of size, time of change, the beginning (all metadata, most often) and pieces throughout: to read
    a file of 60 GB whole takes as long as what is to be saved."""
    stat = path.stat()
    digest = hashlib.sha256(f"{stat.st_size} {stat.st_mtime_ns}".encode())
    with path.open("rb") as file:
        for n in range(_PIECES):
            file.seek(max(0, (stat.st_size - _PIECE) * n // max(1, _PIECES - 1)))
            digest.update(file.read(_PIECE))
    return digest.digest()


def load(file: Path) -> Exact | None:
    """None where there are none, or none that are whole."""
    try:
        # Reading checks the sum of every member.
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as data:
            count = int(data["count"])
            logits = [np.asarray(data[f"logits{i}"]) for i in range(count)]
            routing = [data.get(f"routing{i}") for i in range(count)]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    with contextlib.suppress(OSError):
        os.utime(file)  # used just now
    return logits, routing


def save(file: Path, answers: Exact) -> None:
    """Whole or not at all. Raises OSError, with the file's name: a write that fails does not say it."""
    arrays: dict[str, Any] = {"count": np.int64(len(answers[0]))}
    for i, (logits, chosen) in enumerate(zip(*answers, strict=True)):
        arrays[f"logits{i}"] = logits
        if chosen is not None:
            arrays[f"routing{i}"] = chosen
    partial = file.with_name(f"{file.stem}-{os.getpid()}.npz")
    try:
        np.savez(partial, **arrays)
        os.replace(partial, file)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(partial)
        raise


def keep(where: Path, key: str, answers: Exact) -> None:
    """For the next tune; where there is no room, it computes them again."""
    if sum(a.nbytes for part in answers for a in part if a is not None) > MOST_BYTES:
        return
    with contextlib.suppress(OSError):
        where.mkdir(parents=True, exist_ok=True)
        save(where / f"{key}.npz", answers)
        _make_room(where)


def _make_room(where: Path) -> None:
    left = MOST_BYTES
    for _, size, path in sorted(_found(where), reverse=True):
        left -= size
        if left < 0:
            path.unlink()


def _found(where: Path) -> Iterator[tuple[int, int, Path]]:
    """When each was used last, its bytes, its path."""
    for path in where.glob("*.npz"):
        with contextlib.suppress(OSError):  # another tune may have removed it just now
            stat = path.stat()
            yield stat.st_mtime_ns, stat.st_size, path
