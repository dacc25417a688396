"""Whether a tune with room for 30 measurements writes what one of ten minutes writes.

    python benchmarks/tuner_short.py --json benchmarks/results/tuner_short.json

Simulated engines whose truth is known: prompts of 0.6 s, generation of 0.5 s, and 4 s until a process has
started.
A budget of 30 measurements is 30 times what a measurement of the default takes in the long tune. The short
tune writes as much if its settings are truly no slower than those of the long one by more than the margin of
either; `best` counts the same against the optimum. `kernels` repeats all with two kernels that gain 2 and 3
%.

`recorded` has no simulated engine but sweeps that were recorded on real machines, with their noise. There a
short tune writes as much if the recorded rate of its settings is within 2 % of the long one's.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import search_visits
import tuner_experiments as experiments
from dyno_tuner.core.options import Options
from dyno_tuner.core.workload import Workload
from dyno_tuner.execution.inline_executor import InlineExecutor
from dyno_tuner.record.recorder import Recorder
from dyno_tuner.run.tune import Tune
from dyno_tuner.targets.simulated.surfaces import with_ops
from tuner_budgets import OPS, SlowToStart

if TYPE_CHECKING:
    from dyno_tuner.core.outcome import Outcome
    from dyno_tuner.targets.simulated.surfaces import Surface

SURFACES = ("saturating", "crossover", "cliff", "interaction", "wide")
START = 4.0  # seconds
LONG = 600.0
VISITS = 30
AIM = 0.9
WITHIN = 0.98  # share of the long tune's rate, on a recorded sweep


def tune(truth: Surface, budget: float, seed: int, kernels: bool) -> tuple[Outcome, float]:
    """What one tune found, and seconds of a measurement of the default."""
    rates = truth.rates({k.name: k.default for k in truth.knobs})
    workload = Workload(pp=round(0.6 * rates["pp"]), tg=round(0.5 * rates["tg"]))
    space = truth.space()
    executor = InlineExecutor(SlowToStart(truth, seed, START))
    recorder = Recorder(executor, workload, identity=space.identity, virtual_time=True)
    options = Options(
        workload, seed=seed, weights=dict(truth.weights), budget=budget, kernels=kernels, max_trials=400
    )
    run = Tune(recorder, space, options)
    return run.run(), run.context.budget.measurement_cost


def pair(name: str, seed: int, kernels: bool) -> dict[str, Any]:
    """A long and a short tune of one engine, with different noise."""
    truth = experiments.ALL[name]()
    truth = with_ops(truth, *OPS) if kernels else truth
    long, measurement = tune(truth, LONG, 2 * seed, kernels)
    short, _ = tune(truth, VISITS * measurement, 2 * seed + 1, kernels)
    margin = math.log1p(max(*short.margin.values(), *long.margin.values()))
    worth = {k: truth.truth(o.settings) for k, o in (("long", long), ("short", short))}
    best = experiments.optimum(truth)
    return {
        "budget": VISITS * measurement,
        "as_good": worth["short"] >= worth["long"] - margin,
        "best": worth["short"] >= best - margin,
        "long_best": worth["long"] >= best - margin,
        "lost": not short.entries and bool(long.entries),
        "equal": short.settings == long.settings,
        "regret": {k: best - w for k, w in worth.items()},
        "margin": margin,
        "kernels": [len(short.kernels), len(long.kernels)],
        "slower": sum(
            truth.truth({**o.settings, e.name: e.default}) - truth.truth(o.settings) > margin
            for o in (short, long) for e in o.entries
        ),
    }  # fmt: skip


def recorded_tune(of: tuple[str, str, str, int], budget: float, seed: int) -> tuple[Outcome, float, float]:
    """What one tune of a recorded sweep found, its true rate, and seconds of a measurement of the default."""
    target = search_visits.target_of(*of, seed)
    space, workload = target.space(), target.workload()
    recorder = Recorder(InlineExecutor(target), workload, identity=space.identity, virtual_time=True)
    options = Options(workload, seed=seed, budget=budget, max_trials=400, check=False)
    run = Tune(recorder, space, options)
    found = run.run()
    return found, target.rate(found.settings), run.context.budget.measurement_cost


def recorded_pair(task: tuple[tuple[str, str, str, int], int]) -> dict[str, Any]:
    """A long and a short tune of one recorded sweep, with different orders of the records."""
    of, seed = task
    long, long_rate, visit = recorded_tune(of, LONG, 2 * seed)
    short, short_rate, _ = recorded_tune(of, VISITS * visit, 2 * seed + 1)
    best = search_visits.target_of(*of).best_code()
    return {
        "budget": VISITS * visit,
        "as_good": short_rate >= WITHIN * long_rate,
        "best": short_rate >= WITHIN * best,
        "long_best": long_rate >= WITHIN * best,
        "lost": not short.entries and bool(long.entries),
        "equal": short.settings == long.settings,
        "regret": {"short": math.log(best / short_rate), "long": math.log(best / long_rate)},
        "margin": math.log1p(max(*short.margin.values(), *long.margin.values())),
        "kernels": [0, 0],
        "slower": sum(
            search_visits.target_of(*of).rate({**o.settings, e.name: e.default}) > rate / WITHIN
            for o, rate in ((short, short_rate), (long, long_rate)) for e in o.entries
        ),
    }  # fmt: skip


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    count = len(rows)
    shares = ("as_good", "best", "long_best", "lost", "equal")
    return {
        "pairs": count,
        **{key: sum(r[key] for r in rows) / count for key in shares},
        "regret_mean": {k: sum(r["regret"][k] for r in rows) / count for k in ("short", "long")},
        "margin_mean": sum(r["margin"] for r in rows) / count,
        "budget_mean": sum(r["budget"] for r in rows) / count,
        "kernels": [sum(r["kernels"][i] for r in rows) for i in (0, 1)],
        "entries_truly_slower": sum(r["slower"] for r in rows),
    }


def _table(kind: str, parts: str, found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """The summary of all pairs of a kind, and of each surface or sweep; printed, too."""
    by_part = {name: summary(rows) for name, rows in found.items()}
    for name, part in by_part.items():
        print(kind, name, part, flush=True)
    return {"all": summary([row for rows in found.values() for row in rows]), parts: by_part}


def main() -> int:
    """Exit code 1 where fewer than nine in ten short tunes write as much, or an entry was truly slower."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--commit", default="", help="of this source, for the JSON")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    report: dict[str, Any] = {
        "command": "python benchmarks/tuner_short.py " + " ".join(map(os.path.basename, sys.argv[1:])),
        "commit": args.commit, "visits": VISITS, "aim": AIM,
    }  # fmt: skip
    seeds = range(args.seeds)
    with concurrent.futures.ProcessPoolExecutor(args.jobs) as pool:
        simulated = {
            (kernels, name): [pool.submit(pair, name, seed, kernels) for seed in seeds]
            for kernels in (False, True)
            for name in SURFACES
        }
        recorded = {
            of: [pool.submit(recorded_pair, (of, seed)) for seed in seeds] for of in search_visits.workloads()
        }
        for kernels in (False, True):
            kind = "kernels" if kernels else "settings"
            found = {name: [f.result() for f in simulated[kernels, name]] for name in SURFACES}
            report[kind] = _table(kind, "by_surface", found)
        found = {
            f"{Path(of[0]).name} {of[1]} {of[2]}{of[3]}": [f.result() for f in futures]
            for of, futures in recorded.items()
        }
        report["recorded"] = _table("recorded", "by_sweep", found)
    args.json.write_text(json.dumps(report, indent=1) + "\n")
    alls = [report[k]["all"] for k in ("settings", "kernels", "recorded")]
    print(alls)
    return 1 if any(a["as_good"] < AIM or a["entries_truly_slower"] for a in alls) else 0


if __name__ == "__main__":
    sys.exit(main())
