"""Speed of a mixture of experts that is larger than the GPU's memory, beside other engines.

    python benchmarks/vram_limits.py model.gguf --threads 16 --vram 8,12,16,24 --json out.json \\
        --peer "llama.cpp=llama.cpp/build/bin/llama-bench -fa 1" \\
        --peer "ik_llama.cpp=ik_llama.cpp/build/bin/llama-bench -fa 1 -fmoe 1"

dyno places the weights by itself (`--vram`). The other engines have no such limit, so the script searches
the smallest N of their `--n-cpu-moe N` that stays within it. The driver's count of the memory in use decides
that: its peak, read every 20 ms, less the count before the start. The peak of dyno is written as well. A
limit of 0 means: all experts in host memory. Each engine is a process of its own. The cells are two prompts
and 64 generated tokens. The u-batch of the other engines is the longer prompt; with a shorter one they have
room for more experts. Every sample is kept, and the median counts. --dyno adds further rows with options of
`dyno bench`.
"""

from __future__ import annotations

import argparse
import collections
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from dyno import _core
from gpu_processes import GIB, add_options, device_name, run


def expert_layers(model: str) -> tuple[int, float]:
    """Number of layers with experts, and GiB of the experts of one of them."""
    sizes: dict[str, int] = collections.defaultdict(int)
    for tensor in _core.Gguf(model).tensors():
        if "_exps" in tensor["name"]:
            sizes[tensor["name"].split(".")[1]] += tensor["nbytes"]
    if not sizes:
        raise SystemExit(f"error: {model} has no experts; give a mixture of experts")
    return len(sizes), max(sizes.values()) / GIB


def dyno_row(args: argparse.Namespace, limit: float, options: str) -> dict[str, Any]:
    """dyno with a limit of `limit` GiB, or with all experts on the CPU if it is 0."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "dyno",
        "bench",
        "--model",
        args.model,
        "--device",
        f"cuda:{args.gpu}",
    ]
    command += ["--no-profile", "-o", "json", "-t", str(args.threads), "-r", str(args.repetitions)]
    command += ["-p", args.prompts, "-n", "64", "-b", args.prompts.split(",")[-1]]
    command += [f"--vram={limit:g}GiB"] if limit else ["--cpu-moe"]
    return run(args, command + shlex.split(options))


def peer_row(
    args: argparse.Namespace, limit: float, words: str, known: dict[int, dict[str, Any]]
) -> dict[str, Any]:
    """Another engine with the smallest N of `--n-cpu-moe N` that stays within `limit` GiB.

    Args:
        limit: GiB; 0 means all experts on the CPU.
        words: command of its llama-bench, with flags.
        known: rows by N that were measured already; grows.
    """
    layers, gib = expert_layers(args.model)

    def at(count: int) -> dict[str, Any]:
        if count not in known:
            command = [
                *shlex.split(words),
                "-m",
                args.model,
                "-ngl",
                "99",
                "-t",
                str(args.threads),
                "-o",
                "json",
            ]
            command += ["-p", args.prompts, "-n", "64", "-r", str(args.repetitions)]
            command += ["-ub", args.prompts.split(",")[-1], "-b", args.prompts.split(",")[-1]]
            known[count] = {**run(args, [*command, "--n-cpu-moe", str(count)]), "n_cpu_moe": count}
        return known[count]

    row = at(layers)
    if not limit or "error" in row:
        return row
    count = layers - max(0, min(layers, int((limit - row["peak_gib"]) / gib)))
    row = at(count)
    while count < layers and ("error" in row or row["peak_gib"] > limit):
        count += 1
        row = at(count)
    while count > 0 and row["peak_gib"] + gib <= limit:
        further = at(count - 1)
        if "error" in further or further["peak_gib"] > limit:
            break
        row, count = further, count - 1
    return row if row.get("peak_gib", 0) <= limit else {**row, "error": f"does not fit into {limit:g} GiB"}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    add_options(parser)
    parser.add_argument("--vram", default="0,8,12,16,24", help="GiB (default %(default)s)")
    parser.add_argument("--dyno", action="append", default=[], metavar="NAME=OPTIONS", help="a further row")
    args = parser.parse_args()
    result: dict[str, Any] = {
        "device": device_name(args.gpu),
        "model": Path(args.model).stem,
        "threads": args.threads,
        "limits": {},
    }
    ours = {"dyno": "", **dict(row.split("=", 1) for row in args.dyno)}
    others: dict[str, str] = dict(row.split("=", 1) for row in args.peer)
    known: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in others}
    for limit in map(float, args.vram.split(",")):
        rows = result["limits"][f"{limit:g}"] = {}
        for engine, words in (ours | others).items():
            if engine in ours:
                row = dyno_row(args, limit, words)
            else:
                row = peer_row(args, limit, words, known[engine])
            rows[engine] = row
            cells = " ".join(
                f"{cell} {values['median']:,.0f}" for cell, values in row.get("cells", {}).items()
            )
            where = f" n_cpu_moe {row['n_cpu_moe']}" if "n_cpu_moe" in row else ""
            print(
                f"{limit:g} GiB {engine}:{where} {cells} peak {row.get('peak_gib')} GiB,"
                f" {row.get('seconds')} s"
                f" {row.get('error', '')}",
                flush=True,
            )
            if args.json:
                args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
