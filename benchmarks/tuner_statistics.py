"""The tuner's statistics against known truth: null, harm, repeatability, regret, interactions, drift,
thresholds, budget, interrupts.

    python benchmarks/tuner_statistics.py --seeds 300 --out benchmarks/results/tuner_statistics.json

Beside the JSON file come its plots (.svg) and, while it runs, a file of the single results (.runs.jsonl) from
which a run that was stopped goes on. The experiments themselves are in `tuner_experiments.py`;
`compare_statistics.py` compares the result with an earlier one.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tuner_experiments as experiments
import tuner_plots as plots
from dyno_tuner.targets.simulated.surfaces import REGRET_SURFACES

PAIRS = (
    *((s, "default") for s in ("saturating", "crossover", "cliff", "rugged", "interaction", "wide")),
    *(("saturating", n) for n in ("quiet", "noisy", "processes", "throttle")),
    *(("interaction", n) for n in ("noisy", "processes")),
    ("trade", "default"), ("either", "default"), ("crumbs", "default"), ("harmful", "noisy"),
)  # fmt: skip
SIGMAS = (0.005, 0.02, 0.03)
Task = tuple[Any, ...]


def tasks(seeds: int) -> list[Task]:
    """All runs. Cheap and decisive ones come first, because the script can be stopped."""
    found: list[Task] = []
    for s in range(seeds):
        found += [("null", s, "default"), ("interrupt", s), *(("threshold", s, sigma) for sigma in SIGMAS)]
        found += [("search", surface, "guided", s) for surface in REGRET_SURFACES]
        # 300 seeds make 60 pairs of everything at the default noise and 20 of each other.
        found += [("pair", *p, s // 5) for p in PAIRS if s % (5 if p[1] == "default" else 15) == 0]
    for s in range(seeds):
        found += [("drift", s), ("budget", s)]
        found += [("null", s, n) for n in ("noisy", "processes", "throttle")] if 3 * s < seeds else []
    every = [("search", n, m, s) for s in range(seeds) for n in (*REGRET_SURFACES, "wide")
             for m in experiments.METHODS]  # fmt: skip
    return [*found, *(t for t in every if t[1] == "wide" or t[2] != "guided")]


def call(task: Task) -> dict[str, Any]:
    return dict(getattr(experiments, task[0])(*task[1:]))


def share(rows: list[dict[str, Any]], key: str) -> float:
    return sum(bool(r[key]) for r in rows) / len(rows)


def summary(results: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Args: `results`: rows by the task without its seed."""
    report: dict[str, Any] = {k: {} for k in ("null", "tunes", "interactions", "regret", "thresholds")}
    for key, rows in results.items():
        kind, *of = json.loads(key)
        if kind == "null":
            report["null"][of[0]] = {"tunes": len(rows), "changed": sum(r["changed"] > 0 for r in rows)}
        elif kind == "pair":
            report["tunes"][" ".join(of)] = _pairs(rows)
            if of[0] == "interaction":
                both = [{"ubatch", "threshold"} <= set(n) for r in rows for n in r["names_written"]]
                one = [len({"ubatch", "threshold"} & set(n)) == 1 for r in rows for n in r["names_written"]]
                report["interactions"][of[1]] = {
                    "tunes": len(both), "both_found": sum(both), "one_without_the_other": sum(one),
                }  # fmt: skip
        elif kind == "search":
            regrets = [r["regret"] for r in rows]
            report["regret"].setdefault(of[0], {})[of[1]] = {
                "points": rows[0]["points"],
                "evaluations": rows[0]["evaluations"],
                "runs": len(rows),
                "within_2pct": sum(x <= experiments.TWO_PERCENT for x in regrets) / len(rows),
                "median": statistics.median(regrets),
                "p90": float(np.quantile(regrets, 0.9)),
            }
        elif kind == "threshold":
            report["thresholds"][f"noise {of[0]}"] = {
                "runs": len(rows),
                "within_one_step": share(rows, "within_one_step"),
                "ties_called": share(rows, "tie_is_a_tie"),
                "measurements_max": max(r["measurements"] for r in rows),
            }
        elif kind == "drift":
            report["drift"] = {
                "tunes": len(rows), "same_winner": share(rows, "same"),
                "same_or_as_good": sum(r["lost"] <= r["margin"] for r in rows) / len(rows),
            }  # fmt: skip
        elif kind == "budget":
            report["budget"] = {
                "tunes": len(rows), "largest_share": max(r["share"] for r in rows),
                "within_10pct": sum(r["share"] <= 1.1 for r in rows) / len(rows),
                "harmful": sum(r["harmful"] for r in rows),
            }  # fmt: skip
        elif kind == "interrupt":
            report["interrupt"] = {
                "tunes": len(rows), "interrupted": sum(r["interrupted"] for r in rows),
                "valid": sum(r["valid"] for r in rows), "written": sum(r["written"] for r in rows),
                "harmful": sum(r["harmful"] for r in rows),
            }  # fmt: skip
    return report


def _pairs(rows: list[dict[str, Any]]) -> dict[str, Any]:
    names = sum(r["names"] for r in rows)
    return {
        "tunes": 2 * len(rows),
        "entries_agree": sum(r["agree"] for r in rows) / names,
        "entries_equal": sum(r["equal"] for r in rows) / names,
        "written": sum(r["written"] for r in rows),
        "harmful": sum(r["harmful"] for r in rows),
        "truly_slower_at_all": sum(r["slower"] for r in rows),
        "intervals": sum(r["intervals"] for r in rows),
        "intervals_hold_truth": sum(r["covered"] for r in rows),
        "regret_median": statistics.median(x for r in rows for x in r["regret"]),
        "regret_max": max(x for r in rows for x in r["regret"]),
        "margin_median": statistics.median(r["margin"] for r in rows),
        "seconds_median": statistics.median(x for r in rows for x in r["seconds"]),
    }


def _done(path: Path) -> dict[str, dict[str, Any]]:
    """Results by task. If a kill left an incomplete last line, it is removed from the file."""
    if not path.exists():
        return {}
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole, encoding="utf-8")
    return {json.dumps(row["task"]): row["result"] for row in map(json.loads, whole.splitlines())}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=300)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--report", action="store_true", help="only write what has been run so far")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    partial = arguments.out.with_suffix(".runs.jsonl")
    done = _done(partial)
    wanted = tasks(arguments.seeds)
    left = [t for t in wanted if json.dumps(t) not in done] if not arguments.report else []
    with partial.open("a") as out, concurrent.futures.ProcessPoolExecutor(arguments.jobs) as pool:
        for task, result in zip(left, pool.map(call, left, chunksize=8), strict=True):
            done[json.dumps(task)] = result
            out.write(json.dumps({"task": task, "result": result}) + "\n")
            out.flush()
    grouped: dict[str, list[dict[str, Any]]] = {}
    for task in (t for t in wanted if json.dumps(t) in done):
        seed = {"null": 1, "threshold": 1}.get(task[0], len(task) - 1)
        grouped.setdefault(json.dumps([*task[:seed], *task[seed + 1 :]]), []).append(done[json.dumps(task)])
    missing = sum(json.dumps(t) not in done for t in wanted)
    report = {
        "runs": len(wanted) - missing,
        "runs_missing": missing,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": "python " + " ".join(sys.argv),
        "seeds": arguments.seeds,
        **summary(grouped),
    }
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    plots.write(report, grouped, arguments.out)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
