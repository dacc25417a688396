"""A log of the standard error of foreign engines, kept beside the journal."""

from __future__ import annotations

import datetime
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .process import Finished

_PER_RUN = 64 << 10  # characters; a crash is explained in the last lines
_LARGEST = 64 << 20  # bytes of the file, since a search may run for days


class RunLog:
    """A file with the standard error of every process.

    Args:
    path: file to append to. None: the last lines of a run go to standard output, which the worker keeps.
    """

    def __init__(self, path: str | None) -> None:
        self._path = Path(path) if path else None
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, command: Sequence[str], environment: Mapping[str, str | None], done: Finished) -> None:
        said = done.stderr[-_PER_RUN:]
        if said and self._path is None:
            print(said[-4000:], flush=True)
        if self._path is None or (self._path.exists() and self._path.stat().st_size > _LARGEST):
            return
        variables = [f"{n}={v}" for n, v in environment.items() if v is not None]
        line = shlex.join([*(["env", *variables] if variables else []), *command])
        when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"--- {when} {line}\n{said}\n--- exit code {done.code} after {done.seconds:.1f} s\n")
