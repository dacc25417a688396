"""Steps of several sequences on this CPU, by two builds of dyno in turn.

    python benchmarks/batches_before_after.py OLD/python NEW/python --model a.gguf --sequences 1,4,8,16,32 \
        --types q4_0,q6_k --tokens 1,8,16 --isas avx512_vnni,avx2 --json out.json

OLD/python and NEW/python are folders with the package `dyno` and its compiled module. Each round starts a
process of each build, and the order alternates. A step is measured in CPU seconds of the process, so that
other programs hardly change it. Each process reports the lower quartile of its steps. With --types, the
default configurations of single products are timed as well, and each process reports their fastest launch. A
ratio is old over new, of the medians of the rounds for steps, and of the fastest rounds for products.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import dyno
import numpy as np
from dyno import Engine, _core

FLOATS = ("f32", "f16", "bf16")
PRODUCTS = (("matmul", 2048, 1024), ("up_gate", 1024, 1024))  # family, n, k


def integers(text: str) -> list[int]:
    """Parse a list such as 1,8,32."""
    return [int(part) for part in text.split(",")]


def steps(args: argparse.Namespace) -> dict[str, float]:
    """CPU seconds of a step, by sequences: the lower quartile of `--steps` steps."""
    random = np.random.default_rng(args.seed)
    found = {}
    threads = {"threads": args.threads, "threads_batch": args.threads}
    ctx = args.depth + args.steps + 32
    with Engine(args.model, "cpu", ctx=ctx, profile=None, **threads) as engine:
        for count in args.sequences:
            engine.set_context(sequences=count)
            for slot in range(count):
                tokens = random.integers(0, 1000, args.depth, dtype=np.int32)
                engine.logits_batch({slot: tokens}, rows="none")
            samples = []
            for row in random.integers(0, 1000, (args.steps, count, 1), dtype=np.int32):
                begun = time.process_time_ns()
                engine.logits_batch(dict(enumerate(row)), reset=False, rows="last")
                samples.append((time.process_time_ns() - begun) / 1e9)
            found[str(count)] = statistics.quantiles(samples, n=4)[0]
    return found


def products(args: argparse.Namespace) -> dict[str, float]:
    """Seconds of the fastest launch of each product's default configuration."""
    device = next(found for found in _core.devices() if found["kind"] == "cpu")
    device = {name: value for name, value in device.items() if name != "ordinal"}
    found = {}
    for isa in args.isas or [str(device["isa"])]:
        for type_name in args.types:
            for family, n, k in PRODUCTS:
                for m in args.tokens:
                    is_float = type_name in FLOATS
                    desc = {"type": type_name, "m": m, "n": n, "k": k}
                    desc |= {"layout": "plain", "act": "f32"} if is_float else {"layout": "x16", "act": "q8"}
                    desc |= {"activation": "silu"} if family == "up_gate" else {}
                    samples = _core.ops.time(
                        family, desc, _core.ops.default_config(family, desc, {**device, "isa": isa}),
                        threads=args.threads, min_seconds=args.seconds, rotate_bytes=args.rotate << 20,
                        seed=args.seed, isa=isa,
                    )  # fmt: skip
                    found[f"{isa} {family} {type_name} n={n} k={k} tokens={m}"] = min(samples)
    return found


def child(build: str, argv: list[str]) -> dict[str, dict[str, float]]:
    """Run the measurements in a process that imports dyno from `build`."""
    environment = os.environ | {"PYTHONPATH": build}
    command = [sys.executable, "-P", __file__, build, build, *argv, "--measure"]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, dict[str, float]] = json.loads(done.stdout)
    return found


def compare(rounds: list[dict[str, dict[str, dict[str, float]]]], kind: str) -> list[dict[str, Any]]:
    """One row per measurement, with the samples of all rounds."""
    rows = []
    centre = statistics.median if kind == "steps" else min
    for name in rounds[0]["old"].get(kind, {}):
        old, new = ([one[build][kind][name] for one in rounds] for build in ("old", "new"))
        row = {"name": name, "old_us": round(1e6 * centre(old), 1), "new_us": round(1e6 * centre(new), 1)}
        row["ratio"] = round(centre(old) / centre(new), 3)
        row |= {
            f"{build}_samples_us": [round(1e6 * x, 1) for x in of]
            for build, of in (("old", old), ("new", new))
        }
        rows.append(row)
        rate = f"{int(name) / centre(new):9.1f} tokens/s" if kind == "steps" else ""
        print(f"{name:50} {row['old_us']:10.1f} {row['new_us']:10.1f} {row['ratio']:7.3f} {rate}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", help="folder with the package dyno")
    parser.add_argument("new")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--sequences", type=integers, default=[1, 2, 4, 8, 12, 16, 24, 32])
    parser.add_argument("--depth", type=int, default=16, help="tokens of each sequence before")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--types", type=lambda text: text.split(","), default=[])
    parser.add_argument("--tokens", type=integers, default=[1, 4, 8, 16, 32])
    parser.add_argument(
        "--isas", type=lambda text: text.split(","), default=[], help="default: that of this CPU"
    )
    parser.add_argument("--seconds", type=float, default=0.02, help="at least, for each product")
    parser.add_argument("--rotate", type=int, default=64, help="MiB of weights to rotate through")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--note", default="", help="about the machine or the builds, for the JSON")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        where = Path(dyno.__file__).resolve()
        if not where.is_relative_to(Path(args.old).resolve()):
            parser.error(f"dyno comes from {where.parent}, not from {args.old}")
        found = {"steps": steps(args)} if args.model else {}
        print(json.dumps(found | ({"products": products(args)} if args.types else {})))
        return
    if not args.model and not args.types:
        parser.error("there is nothing to measure; give --model FILE or --types q4_0,…")
    rounds = []
    for index in range(args.rounds):
        order = ("old", "new") if index % 2 == 0 else ("new", "old")
        rounds.append({build: child(getattr(args, build), sys.argv[3:]) for build in order})
    print(f"{'sequences, or product':50} {'old µs':>10} {'new µs':>10} {'old/new':>7}")
    result: dict[str, Any] = {kind: compare(rounds, kind) for kind in ("steps", "products")}
    if args.json:
        machine = _core.cpu_info()
        about = {
            "command": ["python", "benchmarks/batches_before_after.py", "OLD", "NEW", *sys.argv[3:]],
            "date": time.strftime("%Y-%m-%d"), "note": args.note,
            "machine": {"cpu": machine["name"], **machine},
        }  # fmt: skip
        args.json.write_text(json.dumps(about | result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
