"""Times the configurations of single ops on this machine.

    python benchmarks/bench_op.py "attention heads=16 kv_heads=8 dk=128 dv=128 k=f16 v=f16" --tokens 1,512
    python benchmarks/bench_op.py "matmul q4_0 n=4096 k=2048 layout=x16 act=q8" --threads 1,2 --cold

Each row is one configuration: the median of its launches, the middle half of them, the rates that follow from
the op's cost (for attention with --depth, from the keys that are really there) and how it compares with the
default.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from dyno import _core

# Enough to leave every cache of today's CPUs cold.
COLD_BYTES = 512 << 20


def work(family: str, desc: dict[str, Any], depth: int) -> tuple[float, float]:
    """(bytes, floating-point operations) of a launch; the op's cost knows nothing of the depth."""
    bytes_moved, flops = _core.ops.cost(family, desc)
    if family != "attention" or depth == 0:
        return bytes_moved, flops
    empty = _core.ops.cost(family, {**desc, "m": 1})
    one_key = empty[1]
    # A cost of one token and no history: q and out, and one key and value.
    key_bytes = empty[0] - 4.0 * desc["heads"] * (desc["dk"] + desc["dv"])
    return bytes_moved + depth * key_bytes, flops + depth * desc["m"] * one_key


def measure(
    family: str, desc: dict[str, Any], config: dict[str, Any], threads: int, args: argparse.Namespace
) -> dict[str, Any]:
    """One row of the table."""
    samples = _core.ops.time(
        family,
        desc,
        config,
        threads=threads,
        min_seconds=args.seconds,
        rotate_bytes=COLD_BYTES if args.cold else 0,
        depth=args.depth,
        isa=args.isa,
    )
    median = statistics.median(samples)
    low, _, high = statistics.quantiles(samples, n=4)
    bytes_moved, flops = work(family, desc, args.depth)
    return {
        "key": _core.ops.op_key(family, desc),
        "tokens": desc["m"],
        "depth": args.depth,
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
    """A list such as 1,8,512."""
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
    parser.add_argument("--isa", default="auto", help="auto, portable, avx2 or avx512_vnni")
    parser.add_argument("--seconds", type=float, default=0.3, help="least time of launches per row")
    parser.add_argument(
        "--cold", action="store_true", help=f"rotate through {COLD_BYTES >> 20} MiB of arguments"
    )
    parser.add_argument("--json", type=Path, help="write all rows there")
    return parser.parse_args()


def print_table(rows: list[dict[str, Any]], default: dict[str, Any]) -> None:
    """Rows of one op, compared with its default configuration."""
    base = next(row["median_us"] for row in rows if row["config"] == default)
    for row in rows:
        name = " ".join(str(value) for value in row["config"].values())
        low, high = row["quartiles_us"]
        cells = [
            f"  {name:<28}{row['median_us']:>11.1f} us  [{low:.1f}, {high:.1f}]",
            f"{row['gflops_per_s']:>9.1f} GFLOP/s{row['gbytes_per_s']:>8.1f} GB/s",
            f"{base / row['median_us']:>7.2f} x default",
            "  <- default" if row["config"] == default else "",
        ]
        print("".join(cells))


def main() -> None:
    """Prints one table for each key, number of tokens and number of threads."""
    args = parse_args()
    rows: list[dict[str, Any]] = []
    for key in args.keys:
        for tokens in args.tokens:
            family, desc = _core.ops.parse_key(key, tokens)
            configs = _core.ops.candidates(family, desc)
            for threads in args.threads:
                print(f"\n{key}: {tokens} tokens, depth {args.depth}, {threads} threads, {args.isa}")
                table = [measure(family, desc, config, threads, args) for config in configs]
                print_table(table, _core.ops.default_config(family, desc))
                rows += table
    if args.json is not None:
        report = {"command": sys.argv[1:], "cpu": _core.cpu_info(), "build": _core.build_info(), "rows": rows}
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
