"""Speed of models that fit a GPU beside other engines: prompts, tokens, and steps of several sequences.

    python benchmarks/gpu_engines.py a.gguf b.gguf --json out.json \\
        --peer "llama.cpp=llama.cpp/build/bin/llama-bench -fa 1 -ub 2048" \\
        --peer "ik_llama.cpp=ik_llama.cpp/build/bin/llama-bench -fa 1 -fmoe 1 -ub 2048"
    python benchmarks/gpu_engines.py llama-8b.gguf --sequences 1,8,32,64 --json out.json \\
        --peer "llama.cpp=llama.cpp/build/bin/llama-batched-bench -fa on"

Each measurement is a new process, and each round begins with another engine. dyno runs with its defaults and
no profile. All samples of all rounds are kept, and the median counts. A cell is a prompt or generated tokens,
as llama-bench measures them: random tokens, no sampling.

--sequences measures steps instead, which append one random token to each of N sequences and copy all logits
to the host. Each sequence begins with --depth tokens. Then a peer is the command of its llama-batched-bench.
A peer that cannot open a file leaves an error in its place.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpu_processes import add_options, device_name, run

Row = dict[str, Any]


def dyno_cells(args: argparse.Namespace, model: str) -> Row:
    """Prompts and tokens of `dyno bench`."""
    command = [sys.executable, "-P", "-m", "dyno", "bench", "--model", model, "--device", f"cuda:{args.gpu}"]
    command += ["--no-profile", "-o", "json", "-t", str(args.threads), "-r", str(args.repetitions)]
    command += ["-p", args.prompts, "-n", str(args.tokens), "-b", args.prompts.split(",")[-1]]
    return run(args, command)


def peer_cells(args: argparse.Namespace, model: str, words: str) -> Row:
    """Prompts and tokens of another engine's llama-bench."""
    command = [*shlex.split(words), "-m", model, "-ngl", "99", "-t", str(args.threads), "-o", "json"]
    command += ["-p", args.prompts, "-n", str(args.tokens), "-r", str(args.repetitions)]
    return run(args, [*command, "-b", args.prompts.split(",")[-1]])


def called(args: argparse.Namespace, command: list[str]) -> tuple[Row, str]:
    """A row with the command, and with an error if it failed; what the command printed."""
    row: Row = {"command": shlex.join(command)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=args.timeout)
    except subprocess.TimeoutExpired:
        return {**row, "error": f"longer than {args.timeout} s"}, ""
    if done.returncode != 0:
        row["error"] = f"exit status {done.returncode}: {done.stderr[-600:]}"
    return row, done.stdout


def dyno_steps(args: argparse.Namespace, model: str) -> Row:
    """Steps of several sequences by bench_batches.py; tokens a second in all."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "steps.json"
        command = [sys.executable, "-P", str(Path(__file__).with_name("bench_batches.py")), model]
        command += ["--device", f"cuda:{args.gpu}", "--sequences", args.sequences, "--depth", str(args.depth)]
        command += ["--steps", str(args.tokens), "--ops", "0", "--json", str(out)]
        row, _ = called(args, command)
        if "error" not in row:
            cells = json.loads(out.read_text())["models"][0]["cells"]
            for count, cell in cells.items():
                name, values = f"steps of {count}", [cell["tokens_per_second"]]
                row.setdefault("cells", {})[name] = {"samples": values, "median": values[0]}
    return row


def peer_steps(args: argparse.Namespace, model: str, words: str) -> Row:
    """Steps of several sequences by another engine's llama-batched-bench; tokens a second in all."""
    most = max(map(int, args.sequences.split(",")))
    command = [*shlex.split(words), "-m", model, "-ngl", "99", "-t", str(args.threads)]
    command += ["-c", str(most * (args.depth + args.tokens)), "-b", "2048", "-ub", "512"]
    command += ["-npp", str(args.depth), "-ntg", str(args.tokens), "-npl", args.sequences]
    row, printed = called(args, command)
    for text in printed.splitlines():
        # | tokens before | tokens | sequences | … | tokens a second of the steps | … |
        columns = text.strip().strip("|").split("|")
        if len(columns) == 10 and columns[2].strip().isdigit():
            values = [float(columns[7])]
            row.setdefault("cells", {})[f"steps of {int(columns[2])}"] = {
                "samples": values,
                "median": values[0],
            }
    if "cells" not in row:
        row.setdefault("error", "printed no table")
    return row


def joined(rows: list[Row]) -> Row:
    """The rounds of one engine as one row: samples one after the other, and the median of all."""
    last = {key: value for key, value in rows[-1].items() if key != "cells"}
    names = [name for name in rows[0].get("cells", {}) if all(name in row.get("cells", {}) for row in rows)]
    for name in names:
        samples = [rate for row in rows for rate in row["cells"][name]["samples"]]
        last.setdefault("cells", {})[name] = {"samples": samples, "median": statistics.median(samples)}
    return last


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+")
    add_options(parser)
    parser.add_argument("--tokens", type=int, default=128, help="generated tokens, or steps")
    parser.add_argument("--sequences", help="measure steps of so many sequences, a list such as 1,8,32")
    parser.add_argument("--depth", type=int, default=128, help="tokens before, with --sequences")
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    peers: dict[str, str] = dict(row.split("=", 1) for row in args.peer)
    result: Row = {
        "command": shlex.join(["python", "benchmarks/gpu_engines.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "device": device_name(args.gpu),
        "cores": len(os.sched_getaffinity(0)),
        "threads": args.threads,
        "models": {},
    }
    engines = ["dyno", *peers]
    for model in args.models:
        rounds: dict[str, list[Row]] = {engine: [] for engine in engines}
        for turn in range(args.rounds):
            for engine in engines[turn % len(engines) :] + engines[: turn % len(engines)]:
                if engine == "dyno":
                    row = dyno_steps(args, model) if args.sequences else dyno_cells(args, model)
                else:
                    measure = peer_steps if args.sequences else peer_cells
                    row = measure(args, model, peers[engine])
                rounds[engine].append(row)
                cells = row.get("cells", {})
                rates = " ".join(f"{name} {cell['median']:,.0f}" for name, cell in cells.items())
                print(f"{Path(model).stem} {engine}: {rates} {row.get('error', '')}", flush=True)
                rows = {name: joined(each) for name, each in rounds.items() if each}
                result["models"][Path(model).stem] = rows
                if args.json:
                    args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
