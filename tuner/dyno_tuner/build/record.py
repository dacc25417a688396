"""The record of a run, with one line per result, so that a killed run continues where it was.

The file belongs to one command and one boot of the machine. It is removed when the run is done, because rates
of another day are not evidence.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import TuneError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def run_key(facts: Mapping[str, Any]) -> str:
    """The key of a run, from its facts and this boot of the machine."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError as error:
        raise TuneError(f"the start time of this system cannot be read: {error}") from error
    text = json.dumps([boot, facts], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Record:
    """Results by key, in a file that is flushed to disk after each result.

    Args:
        path: Path of the file. An incomplete last line is dropped.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, Any] = {}
        whole = 0
        if path.is_file():
            data = path.read_bytes()
            for line in data.splitlines(keepends=True):
                try:
                    row = json.loads(line)
                    self._known[row["key"]] = row["result"]
                except (ValueError, KeyError, TypeError):
                    break
                whole += len(line)
            if whole < len(data):
                os.truncate(path, whole)

    @property
    def size(self) -> int:
        return len(self._known)

    def once(self, key: str, make: Callable[[], Any]) -> Any:
        """The result of a key, from the file or made now and written."""
        if key not in self._known:
            self._known[key] = make()
            line = json.dumps({"key": key, "result": self._known[key]}) + "\n"
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab") as file:
                file.write(line.encode())
                file.flush()
                os.fsync(file.fileno())
        return self._known[key]

    def done(self) -> None:
        """End the run, so that the next one measures again."""
        self._path.unlink(missing_ok=True)
