"""The worth of budgets of minutes on a machine whose processes load a model for seconds, as on a GPU.

    python benchmarks/tuner_budgets.py --json benchmarks/results/tuner_budgets.json

Simulated engines whose truth is known: prompts of 0.15 s, generation of 0.1 s, 0.5, 2 or 4 s until a process
has started, settings that gain 15 to 35 % and kernels that gain 2 and 3 %. For each of ten budgets from 60 to
280 s the JSON counts tunes that wrote no setting, how far tunes ended from the optimum (log), kernels and
entries that are truly slower than their default by more than the margin, and the largest share of a budget.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import itertools
import json
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tuner_experiments as experiments
from dyno_tuner.core.options import Options
from dyno_tuner.core.workload import Workload
from dyno_tuner.execution.inline_executor import InlineExecutor
from dyno_tuner.record.recorder import Recorder
from dyno_tuner.run.tune import Tune
from dyno_tuner.targets.simulated.surfaces import SimulatedOp, with_ops
from dyno_tuner.targets.simulated.target import SimulatedTarget, SimulationNoise

if TYPE_CHECKING:
    from dyno_tuner.core.protocol import Configuration, OpContext
    from dyno_tuner.targets.simulated.surfaces import Surface

SURFACES = ("saturating", "crossover", "interaction", "wide")
STARTS = (0.5, 2.0, 4.0)
BUDGETS = (60, 75, 90, 110, 130, 150, 180, 210, 240, 280)
NOISE = SimulationNoise(within=0.001, process=0.002, layout=0.0005, outliers=0.002)
OPS = (
    SimulatedOp("matmul a", "tg", 1.3, lambda settings: {"tg": 1.02}),
    SimulatedOp("matmul b", "pp", 1.2, lambda settings: {"pp": 1.03}),
)


class SlowToStart(SimulatedTarget):
    """A process loads for `start` seconds before its first measurement."""

    def __init__(self, surface: Surface, seed: int, start: float) -> None:
        super().__init__(surface, seed, NOISE)
        self._start = start

    def apply(self, configuration: Configuration, context: OpContext) -> None:
        fresh = context.process != self._context.process
        super().apply(configuration, context)
        if fresh:
            self._pass(self._start)


def tune(name: str, start: float, budget: float, seed: int) -> dict[str, Any]:
    """Run one tune and compare its result with the truth."""
    truth = with_ops(experiments.ALL[name](), *OPS)
    space = truth.space()
    rates = truth.rates({k.name: k.default for k in truth.knobs})
    workload = Workload(pp=round(0.15 * rates["pp"]), tg=round(0.1 * rates["tg"]))
    executor = InlineExecutor(SlowToStart(truth, seed, start))
    recorder = Recorder(executor, workload, identity=space.identity, virtual_time=True)
    options = Options(
        workload, seed=seed, weights=dict(truth.weights), budget=budget, kernels=True, max_trials=400
    )
    found = Tune(recorder, space, options).run()
    whole = truth.truth(found.settings)
    left_out = {e.name: truth.truth({**found.settings, e.name: e.default}) for e in found.entries}
    margin = math.log1p(max(found.margin.values(), default=0.01))
    return {
        "lost": not found.entries,
        "regret": experiments.optimum(truth) - whole,
        "kernels": len(found.kernels),
        "slower": sum(without - whole > margin for without in left_out.values()),
        "share": found.seconds / budget,
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "tunes": len(rows),
        "no_setting_written": sum(r["lost"] for r in rows),
        "regret_mean": sum(r["regret"] for r in rows) / len(rows),
        "kernels": sum(r["kernels"] for r in rows),
        "entries_truly_slower": sum(r["slower"] for r in rows),
        "largest_share_of_budget": max(r["share"] for r in rows),
    }


def main() -> int:
    """Exit code 1 where an entry was truly slower, or a budget exceeded by more than a tenth."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="tunes that run at the same time")
    parser.add_argument("--commit", default="", help="of this source, for the JSON")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    by_budget: dict[int, list[dict[str, Any]]] = {}
    tasks = list(itertools.product(SURFACES, STARTS, range(args.seeds)))
    with concurrent.futures.ProcessPoolExecutor(args.jobs) as pool:
        # Time is simulated, so parallel tunes do not disturb each other.
        pending = {
            b: [pool.submit(tune, name, start, float(b), seed) for name, start, seed in tasks]
            for b in BUDGETS
        }
        for budget, futures in pending.items():
            by_budget[budget] = [future.result() for future in futures]
            print(budget, summary(by_budget[budget]), flush=True)
    whole = summary([row for rows in by_budget.values() for row in rows])
    report = {
        "command": "python benchmarks/tuner_budgets.py " + " ".join(map(os.path.basename, sys.argv[1:])),
        "commit": args.commit,
        "noise": dataclasses.asdict(NOISE),
        "all": whole,
        "by_budget": {str(budget): summary(rows) for budget, rows in by_budget.items()},
    }
    args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if whole["entries_truly_slower"] or whole["largest_share_of_budget"] > 1.1 else 0


if __name__ == "__main__":
    sys.exit(main())
