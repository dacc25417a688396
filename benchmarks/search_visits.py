"""How near the best of a recorded sweep a search is after so many measurements, over seeds.

    python benchmarks/search_visits.py --json benchmarks/results/search_visits.json

The search alone is replayed: the default against itself, then blocks of trials. Thresholds are searched like
other settings, not solved first. A measurement is one that tries a configuration; the default is none of
them. What counts after n measurements is the true rate (the median of all warm samples of that code) of the
trial that the search itself holds for best. `near` repeats this with the best settings of another model of
the same file as an incumbent: a profile of the machine's earlier tunes, of another model.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import math
import os
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dyno_tuner.core.options import Options
from dyno_tuner.execution.inline_executor import InlineExecutor
from dyno_tuner.record.recorder import Recorder
from dyno_tuner.run.tune import Tune
from dyno_tuner.space.search_space import Space
from dyno_tuner.targets.replay.target import ReplayTarget, load_sweep

if TYPE_CHECKING:
    from dyno_tuner.core.protocol import Value

ROOT = Path(__file__).resolve().parents[1]
SWEEPS = (
    "tests/data/replay/ik-h200-qwen3moe-30b-a3b.jsonl",
    "benchmarks/results/sweep_h200.jsonl.gz",
    "benchmarks/results/sweep_cpu_xeon.jsonl.gz",
)
VISITS = 12
WANTED = 8  # measurements after which the aim has to hold
WITHIN = 0.98
AIM = 0.95  # of the seeds
LEAST = 6  # kinds of code that a sweep has to hold for a search to be one
Task = tuple[str, str, str, int, bool, int]  # file, model, metric, tokens, near, seed


def target_of(file: str, model: str, metric: str, tokens: int, seed: int = 0) -> ReplayTarget:
    return ReplayTarget(load_sweep(ROOT / file, None, model), metric, tokens, seed)


def space_of(target: ReplayTarget) -> Space:
    """All bounds are settings like others, so that the search alone is seen."""
    space = target.space()
    knobs = tuple(replace(k, threshold_of=None) for k in space.knobs)
    return Space(knobs, listed=list(space.points()))


def others_best(file: str, model: str, metric: str, tokens: int) -> dict[str, Value] | None:
    """The best settings of the next other model of the file; None where there is none."""
    models = list(load_sweep(ROOT / file).models)
    for other in (*models[models.index(model) + 1 :], *models[: models.index(model)]):
        if other.split("-")[0] != model.split("-")[0]:
            return target_of(file, other, metric, tokens).best()[0]
    return None


def search(task: Task) -> list[float]:
    """Rate / best rate of what the search holds for best, after 0, 1, … measurements."""
    file, model, metric, tokens, near, seed = task
    target = target_of(file, model, metric, tokens, seed)
    space, workload = space_of(target), target.workload()
    recorder = Recorder(InlineExecutor(target), workload, identity=space.identity, virtual_time=True)
    options = Options(workload, seed=seed, max_trials=VISITS + 1, patience=VISITS + 1, check=False)
    incumbent = others_best(file, model, metric, tokens) if near else None
    tune = Tune(recorder, space, options, incumbents=[incumbent] if incumbent else [])
    tune._measure_noise()
    tune._run_screen()
    best, held = -math.inf, 0.0
    found: list[float] = []
    for trial in tune.trials:
        if trial.log_ratio is not None and trial.log_ratio > best:
            best, held = trial.log_ratio, target.rate(space.settings(trial.point))
        found.append(held / target.best_code())
    return found + [found[-1]] * (VISITS + 1 - len(found))


def workloads() -> list[tuple[str, str, str, int]]:
    found = []
    for file in SWEEPS:
        for model in load_sweep(ROOT / file).models:
            for metric, tokens, depth in load_sweep(ROOT / file, None, model).workloads():
                if depth == 0 and target_of(file, model, metric, tokens).classes >= LEAST:
                    found.append((file, model, metric, tokens))
    return found


def summary(runs: list[list[float]]) -> dict[str, Any]:
    by_measurement = list(zip(*runs, strict=True))
    return {
        "runs": len(runs),
        "within_2pct_by_visit": [round(sum(r >= WITHIN for r in v) / len(v), 4) for v in by_measurement],
        "regret_mean_by_visit": [round(statistics.fmean(-math.log(r) for r in v), 5) for v in by_measurement],
        "regret_p95_by_visit": [
            round(sorted(-math.log(r) for r in v)[int(0.95 * len(v))], 5) for v in by_measurement
        ],
    }  # fmt: skip


def main() -> int:
    """Exit code 1 where fewer than 95 % of the seeds of some sweep are within 2 % after 8 measurements."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--commit", default="", help="of this source, for the JSON")
    parser.add_argument("--before", type=Path, help="JSON of an earlier source, to print beside this one")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    before = json.loads(args.before.read_text())["sweeps"] if args.before else {}
    report: dict[str, Any] = {
        "command": "python benchmarks/search_visits.py " + " ".join(map(os.path.basename, sys.argv[1:])),
        "commit": args.commit, "seeds": args.seeds, "visits": WANTED, "sweeps": {},
    }  # fmt: skip
    with concurrent.futures.ProcessPoolExecutor(args.jobs) as pool:
        for near in (False, True):
            for of in workloads():
                if near and others_best(*of) is None:
                    continue
                runs = list(pool.map(search, [(*of, near, seed) for seed in range(args.seeds)], chunksize=5))
                name = f"{Path(of[0]).name} {of[1]} {of[2]}{of[3]}" + (" near" if near else "")
                report["sweeps"][name] = said = summary(runs)
                was = before.get(name, {}).get("within_2pct_by_visit")
                shown = f"{name:84} {said['within_2pct_by_visit'][WANTED]:.2f}"
                print(shown + (f" (before {was[WANTED]:.2f})" if was else ""), flush=True)
    reached = [s["within_2pct_by_visit"][WANTED] for s in report["sweeps"].values()]
    report["sweeps_that_reach_the_aim"] = sum(r >= AIM for r in reached)
    report["of"] = len(reached)
    report["within_2pct_mean"] = statistics.fmean(reached)
    report["regret_mean_by_visit"] = [
        statistics.fmean(s["regret_mean_by_visit"][v] for s in report["sweeps"].values())
        for v in range(VISITS + 1)
    ]
    args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(
        report["sweeps_that_reach_the_aim"],
        "of",
        report["of"],
        [round(r, 4) for r in report["regret_mean_by_visit"]],
    )
    return 0 if min(reached) >= AIM else 1


if __name__ == "__main__":
    sys.exit(main())
