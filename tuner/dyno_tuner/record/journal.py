"""The journal of a run: JSON Lines with one fsync per record, and a checksum in each line.

A line is `{"crc32":"<8 hex digits>","record":<JSON>}`. The checksum covers the text of the record. If the
file is cut at any byte, only the cut record is lost. A damaged line in the middle only loses that line. A
journal may be packed with gzip. It is then unpacked on reading, and its checksum is the one of the unpacked
bytes.
"""

from __future__ import annotations

import errno
import fcntl
import gzip
import hashlib
import json
import math
import os
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from ..core.errors import JournalError

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

SUFFIX = ".journal.jsonl"
PACKED_SUFFIX = ".gz"
MOST_BYTES = 1 << 30  # of an unpacked journal; a tune of several hours writes about ten MiB
MOST_DEVICES = 1000  # most devices of one search

_PACKED = b"\x1f\x8b"  # first bytes of gzip
_PREFIX = b'{"crc32":"'
_MIDDLE = b'","record":'
_SUFFIX = b"}"


def _finite(value: Any) -> Any:
    """A value for JSON, which has no NaN and no infinity. They are written as text that `float()` reads."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value


def encode(record: dict[str, Any]) -> bytes:
    """The line of a record, with its newline."""
    body = json.dumps(_finite(record), separators=(",", ":"), allow_nan=False, sort_keys=True).encode()
    return _PREFIX + f"{zlib.crc32(body):08x}".encode() + _MIDDLE + body + _SUFFIX + b"\n"


def decode(line: bytes) -> dict[str, Any] | None:
    """The record of a line without its newline; None if the line is not complete."""
    head = len(_PREFIX) + 8 + len(_MIDDLE)
    if not line.startswith(_PREFIX) or line[len(_PREFIX) + 8 : head] != _MIDDLE or not line.endswith(_SUFFIX):
        return None
    body = line[head : -len(_SUFFIX)]
    if line[len(_PREFIX) : len(_PREFIX) + 8] != f"{zlib.crc32(body):08x}".encode():
        return None
    try:
        record = json.loads(body)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


@dataclass(frozen=True)
class Loaded:
    """The records of a journal file."""

    records: list[dict[str, Any]]
    damaged: int  # number of incomplete lines
    torn: bool  # whether the last line has no newline


def _read(path: Path) -> bytes:
    """The bytes that the run wrote. Raises JournalError if the file cannot be read or unpacked."""
    try:
        data = path.read_bytes()
        if not data.startswith(_PACKED):
            return data
        with gzip.open(path) as packed:
            data = packed.read(MOST_BYTES + 1)  # a small file can unpack to more than the memory
        if len(data) > MOST_BYTES:
            raise JournalError(
                f"journal {path}: unpacks to more than {MOST_BYTES >> 20} MiB; unpack it first"
            )
        return data
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise JournalError(f"journal {path}: cannot be unpacked: {error}") from error
    except OSError as error:
        raise JournalError(f"journal {path}: cannot be read: {error.strerror}") from error


def load(path: Path) -> Loaded:
    """Read all complete records. Raises JournalError if the file cannot be read."""
    data = _read(path)
    lines = data.split(b"\n")
    torn = lines.pop() != b""
    if torn:
        lines.append(data[data.rfind(b"\n") + 1 :])
    records: list[dict[str, Any]] = []
    damaged = 0
    for line in lines:
        record = decode(line)
        if record is None:
            damaged += 1
        else:
            records.append(record)
    return Loaded(records, damaged, torn)


def of_profile(profile: Path) -> Path:
    """The journal of a profile."""
    return profile.with_name(profile.name + SUFFIX)


def of_device(path: Path, device: int) -> Path:
    """The journal of a further device in the search whose first journal is `path`."""
    return path.with_name(f"{unpacked_name(path).removesuffix(SUFFIX)}.device-{device}.jsonl")


def unpacked_name(path: Path) -> str:
    """The name of a journal without the suffix of packing."""
    return path.name.removesuffix(PACKED_SUFFIX)


def present(path: Path) -> Path | None:
    """The journal `path`, or a packed copy if it does not exist; None if there is neither."""
    packed = path.with_name(path.name + PACKED_SUFFIX)
    return next((p for p in (path, packed) if p.is_file()), None)


def sha256(path: Path) -> str:
    """SHA-256 of the unpacked journal. Raises JournalError if the file cannot be read."""
    return hashlib.sha256(_read(path)).hexdigest()


def check_free(path: Path) -> None:
    """Raises JournalError if another tune is writing to a journal."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise JournalError(f"journal {path}: cannot be read: {error.strerror}") from error
    try:
        _lock(descriptor, path)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> None:
    """Lock a journal, because two writers would record all operations twice. Raises JournalError."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise JournalError(
            f"journal {path}: another tune is writing to it; wait for its end, or give another --out"
        ) from error
    except OSError as error:
        # The file system has no locks, or (NFS) no locks for readers.
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EBADF):
            raise


class Journal:
    """A journal file. Each record is on disk when `append` returns.

    If a record could not be written completely (a full disk), it is removed, so that the file ends with a
    complete line. The owner holds a lock on the file, which the kernel releases however the owner ends.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                _lock(self._fd, path)
            except JournalError:
                self.close()
                raise
            self._end = os.fstat(self._fd).st_size
            if self._end and os.pread(self._fd, 1, self._end - 1) != b"\n":
                # A kill has cut the last line. A newline makes it a damaged line, and keeps later lines
                # complete.
                self._write(b"\n")
            directory = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        except OSError as error:
            raise JournalError(f"journal {path}: cannot be opened for writing: {error.strerror}") from error

    def append(self, record: dict[str, Any]) -> None:
        """Append a record. Raises JournalError if it cannot be written. Earlier records are unchanged."""
        self._write(encode(record))

    def _write(self, data: bytes) -> None:
        try:
            written = 0
            while written < len(data):
                written += os.write(self._fd, data[written:])
            os.fsync(self._fd)
            self._end += len(data)
        except OSError as error:
            try:
                os.ftruncate(self._fd, self._end)
            except OSError as second:
                error.add_note(f"and the partial line could not be removed: {second.strerror}")
            what = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else str(error.strerror)
            advice = "every earlier record is safe, continue with --resume when there is room"
            raise JournalError(f"journal {self.path}: {what}; {advice}") from error

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
