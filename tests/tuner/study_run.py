"""One tune of the simulated engine as a process of its own, which joins a study.

`study_run.py FOLDER SEED STORAGE [CORES]`: waits before its search until there is a file FOLDER/../go; prints
the outcome as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from dyno_tuner.core.errors import TuneError
from dyno_tuner.core.options import Options
from dyno_tuner.core.protocol import Workload
from dyno_tuner.execution.inline_executor import InlineExecutor
from dyno_tuner.run.session import Request, run
from dyno_tuner.targets.simulated.target import SimulatedTarget


class _Waiting(InlineExecutor):
    """Begins its search when all are there, and takes real time for a measurement, so that tunes overlap."""

    go: Path

    def measurement(self, *args):  # type: ignore[no-untyped-def]
        if args[4].key.startswith("screen/"):
            while not self.go.exists():
                time.sleep(0.01)
            time.sleep(0.02)
        return super().measurement(*args)


def main() -> None:
    folder, seed, storage = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    cores = int(sys.argv[4]) if len(sys.argv) > 4 else 8
    folder.mkdir(parents=True, exist_ok=True)
    target = SimulatedTarget("saturating", seed, device={"cores": cores})
    options = Options(Workload(64, 8), seed=7, max_trials=13, rounds=2, max_rounds=2)
    request = Request("simulated", options, out=folder / "p.yaml", quiet=True, storage=storage)
    executor = _Waiting(target)
    executor.go = folder.parent / "go"
    try:
        print(json.dumps(run(request, executor, target.surface.space()).outcome.to_dict()))
    except TuneError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
