"""The time of a server's step, by the number of sequences that it decodes together.

    python benchmarks/bench_batches.py a.gguf b.gguf … --sequences 1,2,4,8,16,32,64,128 --json out.json

Each step appends one random token to each sequence. It then samples one token per sequence on the device that
holds the logits, with separate sampling settings (`drawn`). Steps that copy all logits to the host are timed
as well. A row has the median over the steps, total tokens/s, and the time of the graph on the device, op by
op. The rest of a step is sampling or the copy of the logits, and host time. Each sequence begins with --depth
tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from dyno import Engine, bench

if TYPE_CHECKING:
    from collections.abc import Callable


def integers(text: str) -> list[int]:
    """Parse a list such as 1,8,32."""
    return [int(part) for part in text.split(",")]


def ops_of(engine: Engine, tokens: dict[int, Any], most: int) -> dict[str, Any]:
    """The graph of one step: microseconds in all and by op, the most expensive first."""
    batch = [(slot, np.asarray(row, np.int32)) for slot, row in tokens.items()]
    times = engine._open().time_ops(batch, rows="last", in_graph=True)
    times.sort(key=lambda row: -row["seconds"])
    rows = [[row["key"], row["count"], round(1e6 * row["seconds"], 1)] for row in times[:most]]
    return {"us": round(1e6 * sum(row["seconds"] for row in times), 1), "ops": rows}


def timed(step: Callable[[], object]) -> float:
    """The wall time of one step, in seconds."""
    begun = time.perf_counter()
    step()
    return time.perf_counter() - begun


def figures(samples: list[float], count: int) -> dict[str, Any]:
    """Median, quartiles and rate of the steps of `count` sequences."""
    median = statistics.median(samples)
    return {
        "step_us": round(1e6 * median, 1),
        "tokens_per_second": round(count / median, 1),
        "quartiles_us": [round(1e6 * q, 1) for q in statistics.quantiles(samples, n=4)],
    }


def measure(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one model with each number of sequences."""
    random = np.random.default_rng(args.seed)
    row: dict[str, Any] = {"model": path.stem, "depth": args.depth, "cells": {}}
    ctx = args.depth + 2 * (args.steps + args.warm_up) + 64
    with Engine(path, args.device, profile=args.profile, ctx=ctx, **dict(args.set)) as engine:
        vocabulary = int(engine.model["n_vocab"])
        for count in args.sequences:
            engine.set_context(sequences=count)
            for slot in range(count if args.depth else 0):
                tokens = random.integers(0, vocabulary, args.depth, dtype=np.int32)
                engine.logits_batch({slot: tokens}, rows="none")
            samples: dict[str, list[float]] = {"logits": [], "drawn": []}
            for step in range(args.steps + args.warm_up):
                step_tokens = random.integers(0, vocabulary, (count, 1), dtype=np.int32)
                inputs = dict(enumerate(step_tokens))
                draws = [(0.8, 40, 0.95, 0.05, float(u)) for u in random.random(count, np.float32)]
                to_host = timed(lambda i=inputs: engine.logits_batch(i, reset=False, rows="last"))
                drawn = timed(lambda i=inputs, d=draws: engine._open().decode_and_draw(list(i.items()), d))
                if step >= args.warm_up:
                    samples["logits"].append(to_host)
                    samples["drawn"].append(drawn)
            cell = {**figures(samples["logits"], count), "drawn": figures(samples["drawn"], count)}
            if engine.device != "cpu" and args.ops:
                cell["graph"] = ops_of(engine, dict(enumerate(step_tokens)), args.ops)
                cell["graph_tokens_per_second"] = round(1e6 * count / cell["graph"]["us"], 1)
            row["cells"][str(count)] = cell
            on_device = cell.get("graph_tokens_per_second", "")
            drawn_rate = cell["drawn"]["tokens_per_second"]
            print(path.stem, count, cell["tokens_per_second"], drawn_rate, on_device, flush=True)
    return row


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", type=Path, help="GGUF files")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda:N")
    parser.add_argument("--sequences", type=integers, default=[1, 2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--depth", type=int, default=128, help="tokens of each sequence before")
    parser.add_argument("--steps", type=int, default=32, help="timed")
    parser.add_argument("--warm-up", type=int, default=8, help="steps before them")
    parser.add_argument("--ops", type=int, default=12, help="write the most expensive ops; 0: time none")
    parser.add_argument("--profile", help="a profile's file; without one, none")
    parser.add_argument("--set", type=setting, action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write everything there, after every model")
    return parser.parse_args()


def setting(text: str) -> tuple[str, Any]:
    """NAME=VALUE of `dyno.settings`."""
    from dyno.settings import SETTINGS

    name, _, value = text.partition("=")
    if name not in SETTINGS:
        raise argparse.ArgumentTypeError(f"no setting {name!r}")
    return name, SETTINGS[name].parse(value)


def main() -> int:
    """Exit code 1 if a model could not be measured."""
    args = parse_args()
    report: dict[str, Any] = {
        "command": "python benchmarks/bench_batches.py " + " ".join(Path(a).name for a in sys.argv[1:]),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": bench.machine_facts(args.device),
        "models": [],
        "failed": {},
    }
    for path in args.models:
        try:
            report["models"].append(measure(path, args))
        except Exception as error:  # a failed model must not stop the others
            print(f"{path.stem}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            report["failed"][path.stem] = f"{type(error).__name__}: {error}"
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if report["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
