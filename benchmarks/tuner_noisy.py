"""Whether a tune with a budget writes a large gain on a noisy machine: a margin over 10 % proves nothing.

    python benchmarks/tuner_noisy.py --json benchmarks/results/tuner_noisy.json

A simulated engine with three settings, of which each makes prompts or generation faster by the same factor;
samples of 0.2 s, and 0.7 s until a process has started. Its noise is chosen so that the margin after four
rounds is 5, 10 or 20 %. For each noise, gain and budget the JSON counts tunes that wrote a setting and tunes
that wrote all three, and the true gain of the profiles (geometric mean). A gain of 1 counts false entries.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

from dyno_tuner.core.options import Options
from dyno_tuner.core.workload import Workload
from dyno_tuner.execution.inline_executor import InlineExecutor
from dyno_tuner.record.recorder import Recorder
from dyno_tuner.run.tune import Tune
from dyno_tuner.space.knobs import Fidelity, Kind, Knob
from dyno_tuner.targets.simulated.surfaces import Surface
from dyno_tuner.targets.simulated.target import SimulationNoise
from tuner_budgets import SlowToStart

MARGINS = (0.05, 0.10, 0.20)  # after ROUNDS rounds
ROUNDS = 4
GAINS = (1.0, 1.3, 2.0)
BUDGETS = (60.0, 120.0, 240.0)  # seconds
START = 0.7
SAMPLE = 0.2
BETWEEN = 0.3  # share of the variance between processes
SAMPLES = 3  # samples per measurement
PP, TG = frozenset({"pp"}), frozenset({"tg"})


def surface(gain: float) -> Surface:
    """An engine whose defaults are slow: each of its settings makes what it moves faster by `gain`."""
    knobs = (
        Knob("ubatch", (32, 64, 128, 256), 32, moves=PP, fidelity=Fidelity.ROUNDING),
        Knob("threads", (1, 2), 1, Kind.LOAD, TG),
        Knob("threads_batch", (1, 2), 1, Kind.LOAD, PP),
    )

    def rates(settings: Any) -> dict[str, float]:
        batch = gain ** (math.log2(settings["ubatch"] / 32) / 3)
        prompts = batch * (gain if settings["threads_batch"] == 2 else 1.0)
        return {"pp": 400 * prompts, "tg": 60 * (gain if settings["threads"] == 2 else 1.0)}

    return Surface("slow defaults", knobs, rates)


def noise(margin: float) -> SimulationNoise:
    """The noise that gives a margin after ROUNDS rounds; see `Noise.margin`."""
    sigma = margin / (2 * 1.96) * math.sqrt(ROUNDS)
    between = sigma * math.sqrt(BETWEEN / 2)
    within = sigma * math.sqrt((1 - BETWEEN) * SAMPLES)
    return SimulationNoise(within=within, process=between, layout=between, outliers=0.02)


class Noisy(SlowToStart):
    """A process loads for START seconds, and its samples are noisy."""

    def __init__(self, truth: Surface, seed: int, margin: float) -> None:
        super().__init__(truth, seed, START)
        self.noise = noise(margin)


def tune(task: tuple[float, float, float, int]) -> dict[str, Any]:
    """Run one tune and compare its result with the truth."""
    gain, margin, budget, seed = task
    truth = surface(gain)
    space = truth.space()
    rates = truth.rates({k.name: k.default for k in truth.knobs})
    workload = Workload(pp=round(SAMPLE * rates["pp"]), tg=round(SAMPLE * rates["tg"]))
    executor = Noisy(truth, seed, margin)
    recorder = Recorder(InlineExecutor(executor), workload, identity=space.identity, virtual_time=True)
    options = Options(
        workload, seed=seed, weights=dict(truth.weights), budget=budget, max_trials=400, check=False
    )
    found = Tune(recorder, space, options).run()
    return {
        "entries": len(found.entries),
        "gain": truth.truth(found.settings) - truth.truth(found.defaults),
        "share": found.seconds / budget,
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "tunes": len(rows),
        "wrote_a_setting": sum(r["entries"] > 0 for r in rows),
        "wrote_all": sum(r["entries"] == 3 for r in rows),
        "true_gain": round(math.exp(sum(r["gain"] for r in rows) / len(rows)), 3),
        "largest_share_of_budget": round(max(r["share"] for r in rows), 3),
    }


def main() -> int:
    """Exit code 1 if an entry is false."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--commit", default="", help="of this source, for the JSON")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    cells = list(itertools.product(GAINS, MARGINS, BUDGETS))
    with concurrent.futures.ProcessPoolExecutor(args.jobs) as pool:
        pending = [[pool.submit(tune, (*cell, seed)) for seed in range(args.seeds)] for cell in cells]
        for (gain, margin, budget), futures in zip(cells, pending, strict=True):
            found = summary([future.result() for future in futures])
            rows.append({"gain": gain, "margin": margin, "budget": budget, **found})
            print(rows[-1], flush=True)
    report = {
        "command": "python benchmarks/tuner_noisy.py " + " ".join(map(os.path.basename, sys.argv[1:])),
        "commit": args.commit, "rows": rows,
    }  # fmt: skip
    args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if any(r["wrote_a_setting"] for r in rows if r["gain"] == 1.0) else 0


if __name__ == "__main__":
    sys.exit(main())
