"""A whole session on a simulated engine, as a process of its own: `simulated_run.py FOLDER SURFACE SEED HOW`.

HOW is `inline` or `worker`; an existing journal is continued. Prints the outcome as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dyno_tuner.core.protocol import Workload
from dyno_tuner.execution.inline_executor import InlineExecutor
from dyno_tuner.execution.worker import WorkerExecutor
from dyno_tuner.run.session import Request, run
from dyno_tuner.run.tune import Options
from dyno_tuner.targets.simulated.target import SimulatedTarget
from real_faults import patient


def main() -> None:
    folder, surface, seed, how = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
    target = SimulatedTarget(surface, seed)
    workload = Workload(pp=64, tg=8)
    options = Options(workload, seed=seed, max_trials=12, rounds=2, max_rounds=2)
    request = Request("simulated", options, out=folder / "profile.yaml", resume=True, quiet=True)
    if how == "inline":
        result = run(request, InlineExecutor(target), target.surface.space())
    else:
        faults = {"surface": surface, "seed": seed, "real_faults": True}
        executor = patient(WorkerExecutor("simulated", faults))
        try:
            result = run(request, executor, target.surface.space())
        finally:
            executor.close()
    print(json.dumps(result.outcome.to_dict()))


if __name__ == "__main__":
    main()
