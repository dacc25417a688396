"""Times the configurations of single ops on this machine.

    python benchmarks/bench_op.py "attention heads=16 kv_heads=8 dk=128 dv=128 k=f16 v=f16" --tokens 1,512
    python benchmarks/bench_op.py "matmul q4_0 n=4096 k=2048 layout=x16 act=q8" --threads 1,2 --cold
    python benchmarks/bench_op.py "matmul q4_k n=4096 k=4096 layout=gpu" --device cuda:0 --tokens 16,32 \
        --cold --variants wgmma --best 5

Each row is one configuration: the median of its launches, the middle half of them, the rates that follow from
the op's cost (for attention with --depth, from the keys that are really there), on the CPU the share of the
rate at which as many threads copy memory, and how it compares with the default. On a GPU the launches replay
from a graph, one behind the other, as in a model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from dyno import _core, _rates

# Larger than the caches of today's CPUs.
COLD_MIB = 512


def work(family: str, desc: dict[str, Any], depth: int) -> tuple[float, float]:
    """(bytes, floating-point operations) of a launch. The op's own cost ignores the depth."""
    bytes_moved, flops = _core.ops.cost(family, desc)
    if family != "attention" or depth == 0:
        return bytes_moved, flops
    empty = _core.ops.cost(family, {**desc, "m": 1})
    one_key = empty[1]
    # A cost of one token and no history: q and out, and one key and value.
    key_bytes = empty[0] - 4.0 * desc["heads"] * (desc["dk"] + desc["dv"])
    return bytes_moved + depth * key_bytes, flops + depth * desc["m"] * one_key


def configurations(family: str, desc: dict[str, Any], args: argparse.Namespace) -> list[dict[str, Any]]:
    """The default first, then the candidates whose variant the command line wants."""
    device = None
    if args.device != "cpu":
        gpus = [found for found in _core.devices() if found["kind"] == "cuda"]
        gpu = gpus[int(args.device.removeprefix("cuda:"))]
        device = {key: value for key, value in gpu.items() if key != "ordinal"}
    default = _core.ops.default_config(family, desc, device)
    wanted = [c for c in _core.ops.candidates(family, desc, device) if c["variant"].startswith(args.variants)]
    return [default, *(c for c in wanted if c != default)]


def measure(
    family: str, desc: dict[str, Any], configs: list[dict[str, Any]], threads: int, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """The rows of a table, without configurations that the device refuses."""
    measured = _core.ops.time_configs(
        family,
        desc,
        configs,
        threads=threads,
        min_seconds=args.seconds,
        rotate_bytes=args.cold << 20,
        depth=args.depth,
        absent=args.absent,
        isa=args.isa,
        device=args.device,
    )
    return [
        figures(family, desc, config, samples, threads, args)
        for config, samples in zip(configs, measured, strict=True)
        if samples
    ]


def figures(
    family: str,
    desc: dict[str, Any],
    config: dict[str, Any],
    samples: list[float],
    threads: int,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """One row."""
    median = statistics.median(samples)
    low, _, high = statistics.quantiles(samples, n=4)
    share = 1 - args.absent
    bytes_moved, flops = (share * part for part in work(family, desc, args.depth))
    return {
        "key": _core.ops.op_key(family, desc),
        "tokens": desc["m"],
        "depth": args.depth,
        "absent": args.absent,
        "threads": threads,
        "isa": args.isa,
        "cold": args.cold,
        "config": config,
        "launches": len(samples),
        "median_us": median * 1e6,
        "quartiles_us": [low * 1e6, high * 1e6],
        "gbytes_per_s": bytes_moved / median / 1e9,
        "gflops_per_s": flops / median / 1e9,
    }


def integers(text: str) -> list[int]:
    """Parse a list such as 1,8,512."""
    return [int(part) for part in text.split(",")]


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("keys", nargs="+", help="op keys as `dyno explain ops` and profiles show them")
    parser.add_argument("--tokens", type=integers, default=[1, 512])
    parser.add_argument("--threads", type=integers, default=[1])
    parser.add_argument("--depth", type=int, default=0, help="positions in the cache before the batch")
    parser.add_argument(
        "--absent", type=float, default=0, help="share of rows of experts that another device multiplies"
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda:N")
    parser.add_argument("--variants", default="", help="only those whose name begins so, and the default")
    parser.add_argument("--best", type=int, help="print no more than so many rows, and the default's")
    parser.add_argument("--isa", default="auto", help="auto, portable, avx2 or avx512_vnni")
    parser.add_argument("--seconds", type=float, default=0.3, help="least time of launches per row")
    parser.add_argument(
        "--cold",
        type=int,
        nargs="?",
        const=COLD_MIB,
        default=0,
        metavar="MIB",
        help=f"rotate through so many MiB of arguments, {COLD_MIB} unless given",
    )
    parser.add_argument("--json", type=Path, help="write all rows there")
    return parser.parse_args()


def print_table(
    rows: list[dict[str, Any]], default: dict[str, Any], best: int | None, copy: float | None
) -> None:
    """Rows of one op, compared with its default configuration and with a copy of `copy` GB/s; with `best` the
    fastest of them."""
    base = next(row["median_us"] for row in rows if row["config"] == default)
    if best is not None:
        fastest = sorted(rows, key=lambda row: float(row["median_us"]))[:best]
        rows = [row for row in rows if row in fastest or row["config"] == default]
        rows.sort(key=lambda row: float(row["median_us"]))
    for row in rows:
        name = " ".join(str(value) for value in row["config"].values())
        low, high = row["quartiles_us"]
        cells = [
            f"  {name:<28}{row['median_us']:>11.1f} us  [{low:.1f}, {high:.1f}]",
            f"{row['gflops_per_s']:>9.1f} GFLOP/s{row['gbytes_per_s']:>8.1f} GB/s",
            f"{100 * row['gbytes_per_s'] / copy:>6.0f} % of a copy" if copy else "",
            f"{base / row['median_us']:>7.2f} x default",
            "  <- default" if row["config"] == default else "",
        ]
        print("".join(cells))


def main() -> None:
    """Prints one table for each key, number of tokens and number of threads."""
    args = parse_args()
    rows: list[dict[str, Any]] = []
    copies = {n: _rates.cpu_memory(n) for n in args.threads} if args.device == "cpu" else {}
    for threads, rate in copies.items():
        print(f"{threads} threads copy {rate:.1f} GB/s, read and written")
    for key in args.keys:
        for tokens in args.tokens:
            family, desc = _core.ops.parse_key(key, tokens)
            configs = configurations(family, desc, args)
            for threads in args.threads:
                where = f"{threads} threads, {args.isa}" if args.device == "cpu" else args.device
                print(f"\n{key}: {tokens} tokens, depth {args.depth}, {where}", flush=True)
                table = measure(family, desc, configs, threads, args)
                print_table(table, configs[0], args.best, copies.get(threads))
                rows += table
    if args.json is not None:
        report = {
            "command": sys.argv[1:],
            "cpu": _core.cpu_info(),
            "build": _core.build_info(),
            "copy_gbytes_per_s": copies,
            "rows": rows,
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
