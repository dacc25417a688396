"""The journal: JSON Lines, one fsync per record, every line with a checksum of itself. It is the truth of a
run.

A line is `{"crc32":"<8 hex digits>","record":<JSON>}`; the checksum covers the text of the record. A cut at
any byte loses the record that was cut and none before it; a damaged line in the middle loses that line
alone. A journal that is kept may be packed with gzip; it is read as it was, and its checksum is that of the
unpacked bytes.
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
MOST_BYTES = 1 << 30  # of a packed journal; a tune of hours writes some ten MiB
MOST_DEVICES = 1000  # that work together

_PACKED = b"\x1f\x8b"  # how gzip begins
_PREFIX = b'{"crc32":"'
_MIDDLE = b'","record":'
_SUFFIX = b"}"


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they are written as the text that `float()` reads."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value


def encode(record: dict[str, Any]) -> bytes:
    """One line, with its newline."""
    body = json.dumps(_finite(record), separators=(",", ":"), allow_nan=False, sort_keys=True).encode()
    return _PREFIX + f"{zlib.crc32(body):08x}".encode() + _MIDDLE + body + _SUFFIX + b"\n"


def decode(line: bytes) -> dict[str, Any] | None:
    """The record of a line without its newline, or None if it is not whole."""
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
    damaged: int  # lines that were not whole
    torn: bool  # the last line has no newline


def _read(path: Path) -> bytes:
    """The bytes that the run wrote. Raises JournalError if the file cannot be read or unpacked."""
    try:
        data = path.read_bytes()
        if not data.startswith(_PACKED):
            return data
        with gzip.open(path) as packed:
            data = packed.read(MOST_BYTES + 1)  # a small file can unpack to more than there is memory
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
    """Reads what is whole. Raises JournalError if the file cannot be read."""
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
    """The journal beside a profile."""
    return profile.with_name(profile.name + SUFFIX)


def of_device(path: Path, device: int) -> Path:
    """The journal of a further device, which worked together with the one whose journal `path` is."""
    return path.with_name(f"{unpacked_name(path).removesuffix(SUFFIX)}.device-{device}.jsonl")


def unpacked_name(path: Path) -> str:
    """As the run named the file."""
    return path.name.removesuffix(PACKED_SUFFIX)


def present(path: Path) -> Path | None:
    """The journal `path`, or a packed copy where it is gone; None where there is neither."""
    packed = path.with_name(path.name + PACKED_SUFFIX)
    return next((p for p in (path, packed) if p.is_file()), None)


def sha256(path: Path) -> str:
    """Of what the run wrote, packed or not. Raises JournalError if the file cannot be read."""
    return hashlib.sha256(_read(path)).hexdigest()


def check_free(path: Path) -> None:
    """Raises JournalError where another tune writes to a journal."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise JournalError(f"journal {path}: cannot be read: {error.strerror}") from error
    try:
        _lock(descriptor, path)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> None:
    """Two writers would record every operation twice. Raises JournalError."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise JournalError(
            f"journal {path}: another tune is writing to it; wait for its end, or give another --out"
        ) from error
    except OSError as error:
        # A file system without locks, or (NFS) without one for whoever only reads.
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EBADF):
            raise


class Journal:
    """A file of records; each is on the disk when `append` returns.

    A record that could not be written whole (a full disk) is taken back, so that the file ends with a whole
    line. Whoever has it open holds a lock on it, which the kernel gives back however the holder ends.
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
                # A line was cut by a kill. Ending it makes it one damaged line and keeps what follows whole.
                self._write(b"\n")
            directory = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        except OSError as error:
            raise JournalError(f"journal {path}: cannot be opened for writing: {error.strerror}") from error

    def append(self, record: dict[str, Any]) -> None:
        """Raises JournalError if the record does not get to the disk; what was there before stays."""
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
