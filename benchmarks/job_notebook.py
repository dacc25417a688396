"""The results of a job until now, in a file, so that the job can be measured in pieces."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from dyno.bench import machine_facts
from dyno.profiles.io import write_atomically

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path


class Stopped(Exception):
    """The time of this piece has ended."""


class Notebook:
    """The results of a job until now, in a file from which the next piece goes on.

    Args:
        path: of the file; None: in memory alone.
        end: `time.monotonic()` after which nothing more is measured.
        options: what the results depend on beside the machine: the budget of the tune, and force.

    Raises:
        SystemExit: the file is of another machine, build or options.
    """

    def __init__(self, path: Path | None, end: float, options: Mapping[str, Any]) -> None:
        self._path, self._end = path, end
        facts = machine_facts("cpu")
        here = {name: facts[name] for name in ("cpu_info", "build_version")} | dict(options)
        self._data: dict[str, Any] = {"of": here, "seconds": {}, "results": {}}
        if path is not None and path.exists():
            self._data = json.loads(path.read_text())
            if self._data["of"] != here:
                raise SystemExit(
                    f"{path} is of {self._data['of']}, and this is {here}; remove it to begin anew"
                )

    def once(self, key: str, measure: Callable[[], Any], seconds: float = 0.0) -> Any:
        """The result that the file has for a key, or else that of `measure`, which is written down.

        Args:
            key: of the result; its first word names the phase.
            measure: gives the result.
            seconds: that `measure` takes at least; it does not begin if fewer are left.

        Raises:
            Stopped: the time has ended or does not suffice, and the file has no result.
        """
        results, taken = self._data["results"], self._data["seconds"]
        if key not in results:
            begun = time.monotonic()
            if begun + seconds >= self._end:
                raise Stopped(key)
            results[key] = measure()
            phase = key.partition("/")[0]
            taken[phase] = taken.get(phase, 0.0) + time.monotonic() - begun
            if self._path is not None:
                write_atomically(self._path, json.dumps(self._data).encode())
        return results[key]

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of all pieces by phase, the first word of a key."""
        return {phase: round(seconds, 1) for phase, seconds in self._data["seconds"].items()}

    def close(self) -> None:
        """The job has ended: the file is not needed any more."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
