"""The distance of a search from the best of a recorded sweep, by number of measurements and over seeds.

    python benchmarks/search_visits.py --json benchmarks/results/search_visits.json

The search alone is replayed: the default against itself, then blocks of trials. Thresholds are searched like
other settings, not solved first. A measurement is one that tries a configuration; the default is none of
them. What counts after n measurements is the true rate (the median of all warm samples of that code) of the
trial that the search itself holds for best. `near` repeats this with the best settings of another model of
the same file as an incumbent: a profile of the machine's earlier tunes, of another model.

If fewer seeds than wanted come within 2 %, `missed` lists what the search holds for best in the other ones:
its rate over the best one, and the 95 % interval of that ratio over the recorded processes (Welch).
`second_look` is the share of the seeds within 2 % if the two best trials are measured once more, in the same
process or in another one. `written` is the share of the seeds whose whole tune, with the eight measurements
and then the rounds of every tune, writes settings within 2 %.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import json
import math
import os
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import scipy.stats
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
    "benchmarks/results/sweep_h100.jsonl.gz",
    "benchmarks/results/sweep_cpu_xeon.jsonl.gz",
)
VISITS = 12
WANTED = 8  # measurements after which the goal must hold
WITHIN = 0.98
AIM = 0.95  # goal, as a share of the seeds
LEAST = 6  # minimum number of code paths in a sweep
Task = tuple[str, str, str, int, bool, int]  # file, model, metric, tokens, near, seed


def target_of(file: str, model: str, metric: str, tokens: int, seed: int = 0) -> ReplayTarget:
    return ReplayTarget(load_sweep(ROOT / file, None, model), metric, tokens, seed)


def space_of(target: ReplayTarget) -> Space:
    """The space with all bounds as plain settings, so that only the search counts."""
    space = target.space()
    knobs = tuple(replace(k, threshold_of=None) for k in space.knobs)
    return Space(knobs, listed=list(space.points()))


def others_best(file: str, model: str, metric: str, tokens: int) -> dict[str, Value] | None:
    """The best settings of the next model in the file; None without another model."""
    models = list(load_sweep(ROOT / file).models)
    for other in (*models[models.index(model) + 1 :], *models[: models.index(model)]):
        if other.split("-")[0] != model.split("-")[0]:
            return target_of(file, other, metric, tokens).best()[0]
    return None


def tune_of(task: Task, visits: int) -> tuple[ReplayTarget, Tune]:
    """A tune with `visits` measurements."""
    file, model, metric, tokens, near, seed = task
    target = target_of(file, model, metric, tokens, seed)
    space, workload = space_of(target), target.workload()
    recorder = Recorder(InlineExecutor(target), workload, identity=space.identity, virtual_time=True)
    options = Options(workload, seed=seed, max_trials=visits + 1, patience=visits + 1, check=False)
    incumbent = others_best(file, model, metric, tokens) if near else None
    return target, Tune(recorder, space, options, incumbents=[incumbent] if incumbent else [])


def search(task: Task) -> list[dict[str, Value]]:
    """The best settings according to the search, after 0, 1, … measurements."""
    _, tune = tune_of(task, VISITS)
    tune._measure_noise()
    tune._run_screen()
    best, held = -math.inf, tune.space.settings(tune.space.default)
    found: list[dict[str, Value]] = []
    for trial in tune.trials:
        if trial.log_ratio is not None and trial.log_ratio > best:
            best, held = trial.log_ratio, tune.space.settings(trial.point)
        found.append(held)
    return found + [found[-1]] * (VISITS + 1 - len(found))


def written(task: Task) -> bool:
    """Whether a whole tune that tries as many configurations as wanted writes settings within 2 %."""
    target, tune = tune_of(task, WANTED)
    return target.rate(tune.run().settings) >= WITHIN * target.best_code()


def second_look(task: Task, restart: bool) -> bool:
    """Whether the better one of the two best trials is within 2 %, if both are measured once more and the
    mean of both measurements counts.

    Args:
        restart: whether the second measurement is in another process.
    """
    target, tune = tune_of(task, WANTED)
    tune._measure_noise()
    tune._run_screen()
    context, process = tune.context, tune.context.processes.number + restart
    ran = [t for t in tune.trials if t.log_ratio is not None]
    worth: list[tuple[float, dict[str, Value]]] = []
    for number, trial in enumerate(sorted(ran, key=lambda t: -(t.log_ratio or 0.0))[:2]):
        settings = context.space.configuration(trial.point)
        again = context.measure_in(f"second/{number}", settings, process, baseline=False)
        rate = statistics.median(sample.rate for sample in again.samples)
        worth.append(((trial.log_ratio or 0.0) + math.log(rate), settings.settings))
    return target.rate(max(worth, key=lambda w: w[0])[1]) >= WITHIN * target.best_code()


def over_processes(first: list[float], second: list[float]) -> list[float] | None:
    """The 95 % interval of the ratio of two rates, from the rates of their processes; None with fewer than
    two processes."""
    if min(len(first), len(second)) < 2:
        return None
    a, b = ([math.log(rate) for rate in rates] for rates in (first, second))
    interval = scipy.stats.ttest_ind(a, b, equal_var=False).confidence_interval(0.95)
    return [round(math.exp(interval.low), 4), round(math.exp(interval.high), 4)]


def missed(target: ReplayTarget, held: list[dict[str, Value]]) -> list[dict[str, Any]]:
    """Final settings of the search outside of 2 %: the number of seeds of each, and how well the records
    distinguish them from the best."""
    best = target.best_code()
    counts = collections.Counter(json.dumps(s) for s in held if target.rate(s) < WITHIN * best)
    found = []
    for text, seeds in counts.most_common():
        settings = json.loads(text)
        rates, best_rates = target.process_rates(settings), target.process_rates()
        found.append({
            "settings": settings, "seeds": seeds, "ratio": round(target.rate(settings) / best, 5),
            "ci95": over_processes(rates, best_rates),
            "process_rates": rates, "best_process_rates": best_rates,
        })  # fmt: skip
    return found


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
                tasks = [(*of, near, seed) for seed in range(args.seeds)]
                held, target = list(pool.map(search, tasks, chunksize=5)), target_of(*of)
                best = target.best_code()
                name = f"{Path(of[0]).name} {of[1]} {of[2]}{of[3]}" + (" near" if near else "")
                report["sweeps"][name] = said = summary([[target.rate(s) / best for s in h] for h in held])
                if said["within_2pct_by_visit"][WANTED] < AIM:
                    said["missed"] = missed(target, [h[WANTED] for h in held])
                    said["second_look"], said["second_look_restarted"] = (
                        statistics.fmean(pool.map(second_look, tasks, [restart] * len(tasks), chunksize=5))
                        for restart in (False, True)
                    )
                    said["written"] = statistics.fmean(pool.map(written, tasks, chunksize=5))
                was = before.get(name, {}).get("within_2pct_by_visit")
                shown = f"{name:84} {said['within_2pct_by_visit'][WANTED]:.2f}"
                print(shown + (f" (before {was[WANTED]:.2f})" if was else ""), flush=True)
                for row in said.get("missed", []):
                    print(f"    {row}")
                for key in [k for k in ("second_look", "second_look_restarted", "written") if k in said]:
                    print(f"    {key}: {said[key]:.2f}", flush=True)
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
