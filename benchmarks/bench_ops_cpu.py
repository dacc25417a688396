"""Times the default configuration of the matrix product families on this CPU, by weight type and tokens.

    python benchmarks/bench_ops_cpu.py                                  # all types, 1 to 512 tokens
    python benchmarks/bench_ops_cpu.py --types q4_0,q6_k --tokens 512 --layout plain
    python benchmarks/bench_ops_cpu.py --best --json rates.json         # the fastest candidate

GB/s counts weights, activations and results; GOP/s counts multiplications and additions. The fastest launch
is reported, because other programs on the machine only slow launches down. --json keeps all samples. Weights
are rotated through --rotate MiB, so that they come from memory as they do in a model.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from dyno import _core

QUANTISED = "q4_0,q4_1,q5_0,q5_1,q8_0,q2_k,q3_k,q4_k,q5_k,q6_k,iq4_nl,iq4_xs,mxfp4"
FLOATS = ("f32", "f16", "bf16")


def describe(config: dict[str, Any]) -> str:
    return " ".join([str(config["variant"]), *(f"{k}={v}" for k, v in config.items() if k != "variant")])


def desc_of(family: str, type_name: str, m: int, args: argparse.Namespace) -> dict[str, Any]:
    is_float = type_name in FLOATS
    desc: dict[str, Any] = {"type": type_name, "m": m, "n": args.n, "k": args.k}
    desc["layout"] = "plain" if is_float else args.layout
    desc["act"] = "f32" if is_float or args.exact else "q8"
    if family in ("up_gate", "moe_up_gate"):
        desc["activation"] = "silu"
    if family in ("matmul_id", "moe_up_gate"):
        desc |= {"experts": args.experts, "used": args.used}
    return desc


def time_config(
    family: str, desc: dict[str, Any], config: dict[str, Any], threads: int, args: argparse.Namespace
) -> dict[str, Any]:
    samples = _core.ops.time(
        family, desc, config, threads=threads, min_seconds=args.seconds,
        rotate_bytes=args.rotate << 20, seed=args.seed,
    )  # fmt: skip
    moved, flops = _core.ops.cost(family, desc)
    fastest = min(samples)
    return {
        "key": _core.ops.op_key(family, desc), "tokens": desc["m"], "threads": threads, "config": config,
        "fastest_us": fastest * 1e6, "median_us": statistics.median(samples) * 1e6,
        "gb_per_s": moved / fastest / 1e9, "gop_per_s": flops / fastest / 1e9,
        "samples_us": [s * 1e6 for s in samples],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    families = ["matmul", "matmul_id", "up_gate", "moe_up_gate"]
    parser.add_argument("--family", default="matmul", choices=families)
    parser.add_argument("--types", default=f"{QUANTISED},{','.join(FLOATS)}")
    parser.add_argument("--tokens", default="1,8,64,512")
    parser.add_argument("--threads", default="1")
    parser.add_argument("-n", type=int, default=3072, help="weight rows")
    parser.add_argument("-k", type=int, default=1024, help="values in a weight row")
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--used", type=int, default=4)
    parser.add_argument("--layout", default="x16", choices=["plain", "x16"])
    parser.add_argument("--exact", action="store_true", help="f32 activations for quantised weights too")
    parser.add_argument("--best", action="store_true", help="time every candidate and show the fastest")
    parser.add_argument("--seconds", type=float, default=0.2, help="at least, for each configuration")
    parser.add_argument("--rotate", type=int, default=256, help="MiB of weights to rotate through")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    results = []
    print("type     tokens threads  fastest µs  median µs    GB/s    GOP/s  config")
    for type_name in args.types.split(","):
        for m in map(int, args.tokens.split(",")):
            desc = desc_of(args.family, type_name, m, args)
            default = _core.ops.default_config(args.family, desc)
            configs = _core.ops.candidates(args.family, desc) if args.best else [default]
            for threads in map(int, args.threads.split(",")):
                rows = [time_config(args.family, desc, config, threads, args) for config in configs]
                results += rows
                row = min(rows, key=lambda r: float(r["fastest_us"]))
                mark = " (default)" if row["config"] == default else ""
                print(
                    f"{type_name:8} {m:6} {threads:7} {row['fastest_us']:11.1f} {row['median_us']:10.1f}"
                    f" {row['gb_per_s']:7.2f} {row['gop_per_s']:8.1f}  {describe(row['config'])}{mark}",
                    flush=True,
                )
    if args.json:
        machine = _core.cpu_info()
        args.json.write_text(json.dumps({"machine": machine, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
