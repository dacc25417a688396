"""The tuner's statistics against known truth: null, harm, repeatability, regret, drift, thresholds.

    python benchmarks/tuner_statistics.py --seeds 100 --out benchmarks/results/tuner_statistics.json

Every figure comes from whole tunes of the simulated engine (`dyno_tuner.targets.simulated`) except regret,
which is of the search alone, and thresholds. Runs in as many processes as there are cores.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import json
import math
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from dyno_tuner.inline import InlineExecutor
from dyno_tuner.ledger import Ledger
from dyno_tuner.samplers import SAMPLERS, Observation
from dyno_tuner.stats import keyed_rng
from dyno_tuner.target import Workload
from dyno_tuner.targets.simulated import SimulatedTarget, SimulationNoise
from dyno_tuner.targets.surfaces import REGRET_SURFACES, SURFACES
from dyno_tuner.thresholds import Verdict, solve
from dyno_tuner.tune import Options, Tune

WORKLOAD = Workload(pp=64, tg=8)
TWO_PERCENT = -math.log(0.98)


def _tune(surface: str, seed: int, noise: SimulationNoise | None = None) -> dict[str, Any]:
    """One whole tune, with what its settings are truly worth."""
    made = SURFACES[surface]()
    space = made.space()
    ledger = Ledger(
        InlineExecutor(SimulatedTarget(made, seed, noise)),
        WORKLOAD,
        identity=space.identity,
        virtual_time=True,
    )
    trials = max(15, len(space) // 10)
    options = Options(WORKLOAD, seed=seed, weights=dict(made.weights), max_trials=trials)
    outcome = Tune(ledger, space, options).run()
    truth = made.truth(outcome.settings)
    entries = {
        e.name: truth - made.truth({**outcome.settings, e.name: e.default}) for e in outcome.entries
    }  # true log gain of every entry
    return {
        "settings": outcome.settings,
        "entries": entries,
        "margin": max(outcome.margin.values()),
        "truth": truth,
        "seconds": outcome.seconds,
        "voided": outcome.voided,
    }


def null(seed: int) -> dict[str, Any]:
    return {"changed": len(_tune("null", seed)["entries"])}


def pair(surface: str, seed: int) -> dict[str, Any]:
    """Two tunes of one surface: harm of either and agreement of both."""
    made = SURFACES[surface]()
    a, b = _tune(surface, 2 * seed), _tune(surface, 2 * seed + 1)
    margin = max(a["margin"], b["margin"])
    agree = equal = 0
    for name, value in b["settings"].items():
        equal += value == a["settings"][name]
        swapped = {**a["settings"], name: value}
        agree += abs(made.truth(swapped) - a["truth"]) <= margin
    harmful = sum(gain < -math.log1p(run["margin"]) for run in (a, b) for gain in run["entries"].values())
    slower = sum(gain < 0 for run in (a, b) for gain in run["entries"].values())
    optimum = max(made.truth(made.space().settings(p)) for p in made.space().points())
    return {
        "entries": len(a["settings"]),
        "equal": equal,
        "agree": agree,
        "written": len(a["entries"]) + len(b["entries"]),
        "harmful": harmful,
        "slower": slower,
        "regret": [optimum - a["truth"], optimum - b["truth"]],
        "margin": margin,
    }


def search(surface: str, sampler: str, seed: int) -> dict[str, Any]:
    """Regret of the search alone: the point with the best noisy score."""
    made = SURFACES[surface]()
    space = made.space()
    default = made.truth(space.settings(space.default))
    optimum = max(made.truth(space.settings(p)) for p in space.points()) - default
    evaluations = 60 if len(space) >= 4000 else max(15, len(space) // 10)
    proposer = SAMPLERS[sampler](space)
    history = [Observation(space.default, 0.0, 0.006)]
    truths = {space.default: 0.0}
    while len(history) < evaluations:
        point = proposer.propose(history, (seed, len(history)))
        if point is None:
            break
        truth = made.truth(space.settings(point)) - default
        truths[point] = truth
        noise = 0.006 * float(keyed_rng("noise", seed, len(history)).standard_normal())
        history.append(Observation(point, None if truth == -math.inf else truth + noise, 0.006))
    best = max((o for o in history if o.score is not None), key=lambda o: o.score or 0.0)
    return {"regret": optimum - truths[best.point], "evaluations": evaluations, "points": len(space)}


def drift(seed: int) -> dict[str, Any]:
    still = _tune("saturating", seed)
    creeping = _tune("saturating", seed, SimulationNoise(drift=0.1, drift_seconds=200.0))
    return {"lost": still["truth"] - creeping["truth"], "margin": max(still["margin"], creeping["margin"])}


def threshold(seed: int) -> dict[str, Any]:
    grid = [1 << p for p in range(11)]
    rng = np.random.default_rng(seed)
    crossing = 0.5 + seed % 10
    found = solve(grid, lambda i, n: (0.12 * (crossing - i) + 0.02 * rng.standard_normal(), 0.02))
    tie = solve(grid, lambda i, n: (0.002 * rng.standard_normal(), 0.002))
    return {
        "within_one_step": found.verdict is Verdict.CROSSING and abs(found.below - math.ceil(crossing)) <= 1,
        "measurements": found.measurements,
        "tie_is_a_tie": tie.verdict is Verdict.TIE,
    }


def _call(task: tuple[Any, ...]) -> dict[str, Any]:
    return globals()[task[0]](*task[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--samplers", default="guided,tpe,random,coordinate")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    seeds = range(arguments.seeds)
    pairs = range(max(1, arguments.seeds // 2))
    tasks: list[tuple[Any, ...]] = [
        *(("null", s) for s in seeds),
        *(("pair", n, s) for n in ("saturating", "interaction") for s in pairs),
        *(("drift", s) for s in pairs),
        *(("threshold", s) for s in seeds),
        *(
            ("search", n, sampler, s)
            for n in (*REGRET_SURFACES, "wide")
            for sampler in arguments.samplers.split(",")
            for s in seeds
        ),
    ]
    begun = time.time()
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(_call, tasks, chunksize=4))
    grouped: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for task, result in zip(tasks, results, strict=True):
        grouped.setdefault(task[:-1], []).append(result)
    report: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "seeds": arguments.seeds,
        "seconds": round(time.time() - begun),
        "null": {"tunes": len(seeds), "changed": sum(r["changed"] > 0 for r in grouped[("null",)])},
        "drift": {
            "tunes": len(grouped[("drift",)]),
            "winner_kept": sum(r["lost"] <= r["margin"] for r in grouped[("drift",)]),
        },
        "thresholds": {
            "runs": len(seeds),
            "within_one_step": sum(r["within_one_step"] for r in grouped[("threshold",)]),
            "ties_called": sum(r["tie_is_a_tie"] for r in grouped[("threshold",)]),
            "measurements_max": max(r["measurements"] for r in grouped[("threshold",)]),
        },
        "tunes": {},
        "regret": {},
    }
    for key, rows in grouped.items():
        if key[0] == "pair":
            report["tunes"][key[1]] = {
                "tunes": 2 * len(rows),
                "entries_agree": sum(r["agree"] for r in rows) / sum(r["entries"] for r in rows),
                "entries_equal": sum(r["equal"] for r in rows) / sum(r["entries"] for r in rows),
                "written": sum(r["written"] for r in rows),
                "harmful": sum(r["harmful"] for r in rows),
                "truly_slower_at_all": sum(r["slower"] for r in rows),
                "regret_median": statistics.median(x for r in rows for x in r["regret"]),
                "margin_median": statistics.median(r["margin"] for r in rows),
            }
        if key[0] == "search":
            regrets = [r["regret"] for r in rows]
            report["regret"].setdefault(key[1], {})[key[2]] = {
                "points": rows[0]["points"],
                "evaluations": rows[0]["evaluations"],
                "within_2pct": sum(x <= TWO_PERCENT for x in regrets) / len(regrets),
                "median": statistics.median(regrets),
                "p90": float(np.quantile(regrets, 0.9)),
            }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
