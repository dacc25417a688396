"""A file with the results of a job so far, so that the job can be measured in pieces."""

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
    """An error: the time of this piece has ended."""


class Notebook:
    """The results of a job so far, in a file from which the next piece continues.

    Args:
        path: path of the file; None: in memory only.
        end: `time.monotonic()` after which nothing more is measured.
        options: options on which the results depend, beside the machine: the budget of the tune, and force.

    Raises:
        SystemExit: the file belongs to another machine, build or options.
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
        """The result in the file for a key. If there is none, the result of `measure`, which is then stored.

        Args:
            key: key of the result; its first word names the phase.
            measure: function that returns the result.
            seconds: minimum time of `measure` in seconds; it does not begin if less is left.

        Raises:
            Stopped: the file has no result, and the remaining time is too short.
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
        """Remove the file, because the job has ended."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
