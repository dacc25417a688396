"""The cache of answers of the exact path, for later tunes and workers.

The answers depend on the file, the passages, the code of the exact path and the device, but on nothing that
is tuned. Computing them took 45 of the 100 seconds of a tune (gpt-oss-20b on an H200). All verdicts on
configurations depend on them. So a file is used only if it is exactly as this module writes it: a regular
file of the user, with the right key, the right shapes, a valid checksum and finite values. Otherwise the
answers are computed again, and a line on the logger `dyno.tuner` names the file and the reason.

A file is one line of JSON (the key and a SHA-256), followed by the arrays of each group: logits [scored,
vocabulary] as f32 and, for a mixture of experts, the experts [MoE layers, tokens, used] as i32.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import stat
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from dyno._home import own_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from .answers import Group

    Exact = tuple[list[NDArray[np.float32]], list[NDArray[np.int32] | None]]

MOST_BYTES = 2 << 30  # limit for all files; the least recently used one is removed first
MOST_FILES = 1000
WORTH_SECONDS = 2.0  # answers that take less time are not stored
SUFFIX = ".answers"
_FORMAT = 2
_HEADER_BYTES = 1 << 16  # limit for the first line; with a dozen groups it has 3 KiB
_PIECES, _PIECE = 256, 1 << 16  # number and size of the pieces of a model file that are read for its key
_log = logging.getLogger("dyno.tuner")


class Unsound(Exception):
    """The error that a file is not usable. The message has the reason."""


@dataclass(frozen=True, slots=True)
class Key:
    """The key of answers: everything that they depend on, including their shapes."""

    format: int
    model: str
    """Digest of the model's files."""
    engine: str
    """Digest of the compiled module, the facts of the device and the settings of the exact path."""
    vocabulary: int
    experts: tuple[int, int, int]
    """Numbers of MoE layers, experts, and used experts per token; zeros if the model has none."""
    groups: tuple[tuple[int, int, int, int, str], ...]
    """For each group: batch size, `every`, number of tokens, number of scored positions, and digest of the
    tokens."""

    @property
    def name(self) -> str:
        """The name of the file."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest() + SUFFIX

    def shapes(self) -> Iterator[tuple[tuple[int, int], tuple[int, int, int] | None]]:
        """For each group: the shape of the logits and, if there are any, of the experts."""
        layers, _, used = self.experts
        for _, _, tokens, scored, _ in self.groups:
            yield (scored, self.vocabulary), (layers, tokens, used) if layers else None

    def difference(self, found: object) -> str:
        """The reason why a header does not belong to this key; empty if it does."""
        if not isinstance(found, dict):
            return "its first line is not a header"
        wanted = json.loads(json.dumps(asdict(self)))
        what = {"model": "another model file", "experts": "other experts", "groups": "other prompts"}
        other = next((k for k, v in wanted.items() if found.get(k) != v), None)
        return f"it is of {what.get(other, f'another {other}')}" if other else ""


def folder() -> Path | None:
    """`$XDG_CACHE_HOME/dyno/answers`, by default `~/.cache/dyno/answers`; None if no home folder is known."""
    try:
        return own_folder("CACHE") / "answers"
    except RuntimeError:
        return None


def key_of(
    model: str, asked: Sequence[Group], code: str, facts: Mapping[str, Any], *,
    vocabulary: int, experts: tuple[int, int, int],
) -> Key:  # fmt: skip
    """The key of the stored answers of a model.

    Args:
        model: Path of the GGUF file, or of the first of several.
        code: Path of the compiled module.
        facts: Facts of the device, and the settings of the exact path.
        vocabulary: Number of logits of a token.
        experts: Numbers of MoE layers, experts and used experts; zeros for a dense model.

    Raises:
        OSError: A file cannot be read.
    """
    files = hashlib.sha256()
    for part in _parts(Path(model)):
        files.update(_digest_of(part))
    engine = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode())
    with open(code, "rb") as file:
        engine.update(hashlib.file_digest(file, "sha256").digest())
    groups = tuple(
        (
            g.size, g.every, len(g.tokens), len(g.scored()),
            hashlib.sha256(np.ascontiguousarray(g.tokens, dtype="<i4").tobytes()).hexdigest(),
        )
        for g in asked
    )  # fmt: skip
    return Key(_FORMAT, files.hexdigest(), engine.hexdigest(), vocabulary, experts, groups)


def _parts(model: Path) -> list[Path]:
    """All files of a split model."""
    found = re.fullmatch(r"(.*-)\d{5}(-of-\d{5}\.gguf)", model.name)
    if not found:
        return [model]
    pattern = re.compile(re.escape(found[1]) + r"\d{5}" + re.escape(found[2]))
    return sorted(p for p in model.parent.iterdir() if pattern.fullmatch(p.name))


def _digest_of(path: Path) -> bytes:
    """A digest of size, modification time, the beginning (usually all metadata) and pieces throughout the
    file. Reading 60 GB completely would take as long as computing the answers."""
    facts = path.stat()
    digest = hashlib.sha256(f"{facts.st_size} {facts.st_mtime_ns}".encode())
    with path.open("rb") as file:
        for n in range(_PIECES):
            file.seek(max(0, (facts.st_size - _PIECE) * n // max(1, _PIECES - 1)))
            digest.update(file.read(_PIECE))
    return digest.digest()


def load(file: Path, key: Key) -> Exact | None:
    """The answers of `key`; None if there is no file, or, with a line in the log, if it is not usable."""
    try:
        # Links are not followed, and a pipe without a writer does not block.
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            facts = os.fstat(descriptor)
            if reason := _distrust(facts):
                raise Unsound(reason)
            with os.fdopen(descriptor, "rb", closefd=False) as stream:
                found = _read(stream, facts.st_size, key)
            with contextlib.suppress(OSError):
                os.utime(descriptor)  # mark as recently used
        finally:
            os.close(descriptor)
        return found
    except FileNotFoundError:
        return None
    except Unsound as error:
        reason = str(error)
    except OSError as error:
        reason = "it is a symbolic link" if error.errno == errno.ELOOP else str(error.strerror or error)
    _log.warning("%s: %s; computing the exact answers again", ascii(str(file))[1:-1], reason)
    return None


def _distrust(facts: os.stat_result) -> str:
    """The reason why a file must not be read at all; empty if it may."""
    if not stat.S_ISREG(facts.st_mode):
        return "it is not a regular file"
    if facts.st_uid != os.geteuid():
        return f"it is owned by user {facts.st_uid}, not by user {os.geteuid()}"
    if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to it (mode {stat.S_IMODE(facts.st_mode):04o})"
    return ""


def _read(stream: IO[bytes], size: int, key: Key) -> Exact:
    """Read a file. Raises Unsound, OSError."""
    first = stream.readline(_HEADER_BYTES)
    header: Any = None
    with contextlib.suppress(ValueError, RecursionError):  # it is then not a header
        header = json.loads(first) if first.endswith(b"\n") else None
    if reason := key.difference(header):
        raise Unsound(reason)
    # The key gives all sizes, so that the file cannot decide how much memory is allocated.
    wanted = sum(_bytes(shape) for pair in key.shapes() for shape in pair if shape is not None)
    left = size - len(first)
    if left != wanted:
        raise Unsound(f"it holds {left} bytes of answers, not {wanted}")
    digest = hashlib.sha256()
    logits: list[NDArray[np.float32]] = []
    routing: list[NDArray[np.int32] | None] = []
    for shape, of_experts in key.shapes():
        logits.append(_array(stream, shape, np.dtype("<f4"), digest))
        routing.append(_array(stream, of_experts, np.dtype("<i4"), digest) if of_experts else None)
    if digest.hexdigest() != header.get("sha256"):
        raise Unsound("its checksum is wrong")
    if reason := flaw((logits, routing), key):
        raise Unsound(reason)
    return logits, routing


def _bytes(shape: Sequence[int]) -> int:
    total = 4
    for n in shape:
        total *= n
    return total


def _array(stream: IO[bytes], shape: tuple[int, ...], kind: np.dtype[Any], digest: Any) -> NDArray[Any]:
    data = bytearray(_bytes(shape))
    at = 0
    while at < len(data):
        count = stream.readinto(memoryview(data)[at:])  # type: ignore[attr-defined]
        if not count:
            raise Unsound("the file became shorter while it was read")
        at += count
    digest.update(data)
    return np.frombuffer(data, dtype=kind).reshape(shape)


def flaw(answers: Exact, key: Key) -> str:
    """The reason why answers do not match `key`; empty if they do."""
    logits, routing = answers
    wanted = list(key.shapes())
    if len(logits) != len(wanted) or len(routing) != len(wanted):
        return f"it holds {len(logits)} groups, not {len(wanted)}"
    for (shape, of_experts), rows, chosen in zip(wanted, logits, routing, strict=True):
        if rows.shape != shape or (None if chosen is None else chosen.shape) != of_experts:
            found = rows.shape, None if chosen is None else chosen.shape
            return f"it holds shapes {found}, not {(shape, of_experts)}"
        if not np.isfinite(rows).all():
            return "a logit in it is not finite"
        if chosen is not None and chosen.size and not 0 <= chosen.min() <= chosen.max() < key.experts[1]:
            return f"an expert in it is not one of {key.experts[1]}"
    return ""


def save(file: Path, key: Key, answers: Exact) -> None:
    """Save answers completely or not at all, readable only by this user. Raises OSError with the name of the
    file, which a failed write lacks."""
    arrays: list[NDArray[Any]] = []
    for rows, chosen in zip(*answers, strict=True):
        arrays.append(np.ascontiguousarray(rows, dtype="<f4"))
        if chosen is not None:
            arrays.append(np.ascontiguousarray(chosen, dtype="<i4"))
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(array.data)
    header = {**asdict(key), "sha256": digest.hexdigest()}
    descriptor, partial = tempfile.mkstemp(f"{SUFFIX}.new", f"{file.stem}-", file.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(json.dumps(header, sort_keys=True).encode() + b"\n")
            for array in arrays:
                stream.write(array.data)
        os.replace(partial, file)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = partial
        raise


def keep(where: Path, key: Key, answers: Exact) -> None:
    """Store answers for the next tune. If there is no room, it computes them again."""
    if sum(a.nbytes for part in answers for a in part if a is not None) > MOST_BYTES:
        return
    with contextlib.suppress(OSError):
        where.mkdir(parents=True, exist_ok=True, mode=0o700)
        if stat.S_IMODE(where.stat().st_mode) & 0o077:
            where.chmod(0o700)  # an earlier version may have created it
        save(where / key.name, key, answers)
        _make_room(where)


def _make_room(where: Path) -> None:
    left = MOST_BYTES
    for number, (_, size, path) in enumerate(sorted(_found(where), reverse=True)):
        left -= size
        if left < 0 or number >= MOST_FILES:
            path.unlink()


def _found(where: Path) -> Iterator[tuple[int, int, Path]]:
    """The time of last use, the size and the path of each file."""
    # Files of an earlier version, and incomplete files after a kill, need room, too.
    for pattern in (f"*{SUFFIX}", f"*{SUFFIX}.new", "*.npz"):
        for path in where.glob(pattern):
            with contextlib.suppress(OSError):  # another tune may have just removed it
                facts = path.lstat()
                if not stat.S_ISDIR(facts.st_mode):
                    yield facts.st_mtime_ns, facts.st_size, path
