"""Speed of whole models on one device, in the cells of common comparisons.

    python benchmarks/bench_models.py a.gguf b.gguf … --peers benchmarks/peers_h200.json --json out.json

For every model: a prompt of 4096 tokens at u-batches of 128 to 4096, and 128 generated tokens at depth 0 and
4096. All samples are kept and the median is reported. Before the samples, a cell runs untimed until two runs
agree. In `--peers`, a model has the name of its file without `.gguf`. With --per-op the ops of a prompt and
of a token follow.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from dyno import Engine, _core, bench, bench_ops

UBATCHES = (128, 256, 512, 1024, 2048, 4096)
DEPTHS = (0, 4096)


def cells_of(args: argparse.Namespace) -> list[bench.BenchCase]:
    """The grid of one model; u-batches are session settings, so the model is loaded once."""
    found = [
        bench.BenchCase(args.prompt, 0, 0, args.prompt, (("ubatch", ubatch),)) for ubatch in args.ubatches
    ]
    return found + [bench.BenchCase(0, args.generate, depth, args.prompt) for depth in args.depths]


def name_of(case: bench.BenchCase) -> str:
    """`pp4096 ub512`, `tg128`, `tg128 d4096`."""
    if case.n_prompt:
        return f"pp{case.n_prompt} ub{dict(case.settings)['ubatch']}"
    return f"tg{case.n_gen}" + (f" d{case.depth}" if case.depth else "")


def measure(path: Path, args: argparse.Namespace, peaks: dict[str, float]) -> dict[str, Any]:
    """All cells of one model."""
    grid = cells_of(args)
    ctx = max(case.positions for case in grid)
    begun = time.perf_counter()
    row: dict[str, Any] = {"model": path.stem, **bench.model_facts(str(path)), "model_filename": path.name}
    with Engine(path, args.device, profile=None, ctx=ctx, **dict(args.set)) as engine:
        row["load_seconds"] = round(time.perf_counter() - begun, 2)
        row["settings"] = dict(engine.settings)
        row["memory_bytes"] = engine.plan["total_bytes"]
        row["cells"] = {}
        for case in grid:
            before = {name: engine.settings[name] for name, _ in case.settings}
            engine.set(**dict(case.settings))
            result = bench._measure(engine, case, args.repetitions, args.seed, True, lambda note: None)
            engine.set(**before)
            cell = {
                "median": round(statistics.median(result.samples_ts), 2),
                "samples": [round(rate, 2) for rate in result.samples_ts],
                "warm_up_runs": result.warm_up_runs,
            }
            row["cells"][name_of(case)] = cell
            print(f"{path.stem:28} {name_of(case):16} {cell['median']:>12,.1f}", flush=True)
        if args.per_op:
            row["per_op"] = []
            for ubatch in (512, max(args.ubatches)):
                engine.set(ubatch=ubatch)
                case = bench.BenchCase(args.prompt, 0, 0, args.prompt)
                found = bench_ops.measure(engine, case, peaks, repetitions=3, seed=args.seed)
                row["per_op"].append(rounded({**found.to_dict(), "ubatch": ubatch}))
            for depth in args.depths:
                case = bench.BenchCase(0, 8, depth, args.prompt)
                found = bench_ops.measure(engine, case, peaks, repetitions=3, seed=args.seed)
                row["per_op"].append(rounded({**found.to_dict(), "ubatch": ubatch}))
    return row


def rounded(value: Any) -> Any:
    """A number rounded to four digits, more than the precision of the clocks."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


def compare(row: dict[str, Any], peers: dict[str, Any]) -> None:
    """Add the best peer's figure and the ratio to each cell that the peers have."""
    theirs = peers.get("models", {}).get(row["model"], {})
    for name, cell in row["cells"].items():
        rates = {engine: cells[name] for engine, cells in theirs.items() if name in cells}
        if rates:
            cell["best_peer"] = max(rates.values())
            cell["ratio"] = round(cell["median"] / cell["best_peer"], 3)


def commit() -> str:
    """The commit of the sources; empty outside of a clone."""
    done = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip()


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a row for each model, a column for each cell; the ratio to the best peer in brackets."""
    names = list(rows[0]["cells"])
    lines = ["| model | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for row in rows:
        texts = []
        for name in names:
            cell = row["cells"][name]
            ratio = f" ({cell['ratio']:.2f}x)" if "ratio" in cell else ""
            texts.append(f"{cell['median']:,.0f}{ratio}")
        lines.append(f"| {row['model']} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def integers(text: str) -> list[int]:
    """Parse a list such as 128,512."""
    return [int(part) for part in text.split(",")]


def setting(text: str) -> tuple[str, Any]:
    """NAME=VALUE of `dyno.settings`."""
    from dyno.settings import SETTINGS

    name, _, value = text.partition("=")
    if name not in SETTINGS:
        raise argparse.ArgumentTypeError(f"no setting {name!r}")
    return name, SETTINGS[name].parse(value)


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", type=Path, help="GGUF files")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda:N")
    parser.add_argument("-p", "--prompt", type=int, default=4096)
    parser.add_argument("-n", "--generate", type=int, default=128)
    parser.add_argument("--ubatches", type=integers, default=list(UBATCHES))
    parser.add_argument("--depths", type=integers, default=list(DEPTHS))
    parser.add_argument("-r", "--repetitions", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", type=setting, action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument(
        "--peers", type=Path, help="figures of other engines: {models: {name: {engine: {cell: t/s}}}}"
    )
    parser.add_argument("--per-op", action="store_true", help="also time every op")
    parser.add_argument("--commit", default="", help="of the sources, where this is no clone")
    parser.add_argument("--json", type=Path, help="write everything there, after every model")
    return parser.parse_args()


def main() -> int:
    """Exit code 1 where a model could not be measured."""
    args = parse_args()
    peers = json.loads(args.peers.read_text()) if args.peers else {}
    machine = bench.machine_facts(args.device)
    with Engine(args.models[0], args.device, profile=None, plan_only=True) as engine:
        device = engine.device
        name = engine.device_info["name"]
    peaks = bench_ops.peaks_of(device)
    report: dict[str, Any] = {
        "command": "python benchmarks/bench_models.py " + " ".join(os.path.basename(a) for a in sys.argv[1:]),
        "device": name,
        "commit": args.commit or commit(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "os": platform.platform(),
        "cpu": _core.cpu_info()["name"],
        "machine": machine,
        "peaks": {key: round(value, 1) for key, value in peaks.items()},
        "peers": {key: value for key, value in peers.items() if key != "models"},
        "models": [],
        "failed": {},
    }
    for path in args.models:
        try:
            row = measure(path, args, peaks)
        except Exception as error:  # a failed model must not stop the others
            print(f"{path.stem}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            report["failed"][path.stem] = f"{type(error).__name__}: {error}"
        else:
            compare(row, peers)
            report["models"].append(row)
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n")
    if report["models"]:
        print(table(report["models"]))
    return 1 if report["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
