"""Kills one tune over and over, at moments drawn by seed: `killed_run.py FOLDER SURFACE SEED KILLS`.

A moment is a place in the tuner's own steps and no time of a clock: so many records after the start, and
there before the record is written, in the middle of its bytes, before or after it is flushed, or while the
engine measures; at the end also while the profile is written. Every life is a fork of this process, which has
already imported everything, and ends by a real SIGKILL. What the journal holds is looked at after every kill.
Prints JSON: kills by place, how often a completed record was lost, and the outcome of the last life.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from dyno_tuner.core.protocol import Workload
from dyno_tuner.execution.inline_executor import InlineExecutor
from dyno_tuner.record import journal
from dyno_tuner.run.session import Request, run
from dyno_tuner.run.tune import Options
from dyno_tuner.targets.simulated.target import SimulatedTarget

PLACES = ("before", "torn", "unflushed", "flushed", "measuring", "profile")


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class _Mine(journal.Journal):
    """Dies at its `left`-th record, at `place`; tells its parent of every record that is complete."""

    left = 0
    place = ""
    cut = 0
    told = -1  # write end of a pipe

    def append(self, record: dict[str, Any]) -> None:
        cls = type(self)
        cls.left -= 1
        if cls.left == 0 and cls.place not in ("measuring", "profile"):
            data = journal.encode(record)
            if cls.place == "torn":
                os.write(self._fd, data[: 1 + cls.cut % (len(data) - 1)])
            elif cls.place in ("unflushed", "flushed"):
                os.write(self._fd, data)
                if cls.place == "flushed":
                    os.fsync(self._fd)
                    os.write(cls.told, b".")
            _die()
        super().append(record)
        os.write(cls.told, b".")


class _Dying(InlineExecutor):
    def measurement(self, *args: Any, **kwargs: Any) -> Any:
        measurement = super().measurement(*args, **kwargs)
        if _Mine.place == "measuring" and _Mine.left <= 1:
            _die()
        return measurement


def session(folder: Path, surface: str, seed: int) -> dict[str, Any]:
    target = SimulatedTarget(surface, seed)
    options = Options(
        Workload(pp=64, tg=8), seed=seed, max_trials=24, rounds=3, max_rounds=3,
        kernels=bool(target.surface.ops),
    )  # fmt: skip
    request = Request("simulated", options, out=folder / "profile.yaml", resume=True, quiet=True)
    result = run(request, _Dying(target), target.surface.space())
    return result.outcome.to_dict()


def live(folder: Path, surface: str, seed: int, left: int, place: str, cut: int) -> tuple[int, int]:
    """One life in a fork. Returns its wait status and how many records it has completed; an outcome goes to
    FOLDER/outcome.json."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            _Mine.left, _Mine.place, _Mine.cut, _Mine.told = left, place, cut, writing
            journal.Journal = _Mine  # type: ignore[misc]
            if place == "profile":
                os.replace = lambda *names: _die()
            (folder / "outcome.json").write_text(json.dumps(session(folder, surface, seed)))
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as told:
        completed = len(told.read())
    return os.waitpid(pid, 0)[1], completed


def main() -> None:
    folder, surface, seed, kills = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    folder.mkdir(parents=True, exist_ok=True)
    book = folder / "profile.yaml.journal.jsonl"
    rng = random.Random(seed)
    places: Counter[str] = Counter()
    lost = 0
    seen: list[dict[str, Any]] = []
    for number in range(kills):
        # The last one is hit at the very end, when all is measured and the profile is being written.
        place = "profile" if number == kills - 1 else rng.choice(PLACES[:-1])
        left = sys.maxsize if place == "profile" else rng.choice((1, 1, 2, 3))
        status, completed = live(folder, surface, seed, left, place, rng.randrange(1 << 16))
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
            break  # it came to its end, or failed: whoever reads the counts will see it
        places[place] += 1
        now = journal.load(book).records if book.exists() else []
        lost += now[: len(seen)] != seen or len(now) < len(seen) + completed
        seen = now
    status, _ = live(folder, surface, seed, 0, "", 0)
    outcome = json.loads((folder / "outcome.json").read_text()) if status == 0 else None
    print(json.dumps({"kills": dict(places), "lost": lost, "outcome": outcome}))


if __name__ == "__main__":
    main()
