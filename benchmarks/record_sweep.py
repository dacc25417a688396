"""Records prompts of several models by u-batch and by path of the products, as data for `tune replay`.

    python benchmarks/record_sweep.py a.gguf b-uniform.gguf … --device cuda:0 --out sweep.jsonl.gz
    python benchmarks/record_sweep.py a.gguf --device cpu --prompt 512 --ubatches 32 64 128 256 512 \
        --vary threads_batch=1,2 --vary cpu_repack=false,true --out sweep_cpu.jsonl.gz

For every model and every path (`mmq_max_tokens`, with experts `mmq_id_max_tokens`: 65536 for the quantised
kernels at every size, 0 for dequantised products) a fresh process of `dyno bench` measures a prompt at each
u-batch. `--vary` multiplies the paths by the values of a setting. Each round has one process per path, in
random order. So a drift of the machine does not look like a difference, and an interruption leaves about as
many processes of each path. One JSON line for each configuration and process, with the names of llama-bench
and all samples; the first of a process is cold. A file's name without `.gguf` is the name of the model, so
that files that differ in their routing alone are two.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import math
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dyno import _core
from dyno.devices import resolve_device

if TYPE_CHECKING:
    from collections.abc import Sequence

UBATCHES = (128, 256, 512, 1024, 2048, 4096)
PATHS = (65536, 0)


Value = int | bool | str
_T = TypeVar("_T")


def paths_of(model: Path, device: str, varied: dict[str, list[Value]]) -> list[dict[str, Value]]:
    """The settings of each path that a model can take, combined with the values of `varied`. A CPU has one
    path."""
    values: dict[str, list[Value]] = dict(varied)
    if resolve_device(device).kind == "cuda":
        values["mmq_max_tokens"] = list(PATHS)
        if _core.describe_model(str(model))["experts"]:
            values["mmq_id_max_tokens"] = list(PATHS)
    return [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]


def varied_of(text: str) -> tuple[str, list[Value]]:
    """Parse `NAME=V1,V2`, with values as JSON or as words.

    Raises:
        argparse.ArgumentTypeError: `text` has no values.
    """
    name, _, values = text.partition("=")
    if not name or not values:
        raise argparse.ArgumentTypeError(f"{text!r}: write NAME=V1,V2")

    def value(word: str) -> Value:
        try:
            read: Value = json.loads(word)
        except ValueError:
            return word
        return read

    return name, [value(word) for word in values.split(",")]


def in_rounds(every: Sequence[_T], rounds: int, seed: int) -> list[_T]:
    """All of `every` in each round, in a random order."""
    order = random.Random(seed)
    return [one for _ in range(rounds) for one in order.sample(every, len(every))]


def bench(model: Path, path: dict[str, Value], args: argparse.Namespace) -> list[dict[str, Any]]:
    """The results of `dyno bench` for one model on one path, a record for each u-batch.

    Raises:
        subprocess.CalledProcessError: `dyno bench` failed.
    """
    given = [word for name, value in path.items() for word in ("--set", f"{name}={str(value).lower()}")]
    ubatches = ",".join(map(str, args.ubatches))
    command = [sys.executable, "-P", "-m", "dyno", "bench", "-m", str(model)]
    command += ["-p", str(args.prompt), "-n", "0"]
    command += ["-b", str(args.prompt), "-ub", ubatches, "-r", str(args.repetitions), "--no-warmup"]
    given += [word for text in args.set for word in ("--set", text)]
    command += ["--device", args.device, "--no-profile", "-o", "jsonl", *given]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line]


def record_of(
    said: dict[str, Any], model: Path, path: dict[str, Value], order: int, held: list[str]
) -> dict[str, Any]:
    """A line of the file: the request, the measurement and the machine."""
    kept = ("n_batch", "n_ubatch", "n_prompt", "n_gen", "avg_ts", "stddev_ts", "test_time")
    return {
        **{name: said[name] for name in kept},
        **path,
        **dict(text.split("=", 1) for text in held),
        "samples_ts": [round(rate, 2) for rate in said["samples_ts"]],
        "order": order,
        "model": model.stem,
        "gpu_info": said["gpu_info"],
        "backends": said["backends"],
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--ubatches", type=int, nargs="+", default=UBATCHES)
    parser.add_argument("--repetitions", type=int, default=5, help="samples of a process, the cold one too")
    parser.add_argument("--processes", type=int, default=2, help="of every configuration")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="of every process")
    parser.add_argument(
        "--vary", action="append", default=[], type=varied_of, metavar="NAME=V1,V2", help="more paths"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    parser.add_argument("--out", type=Path, required=True, help="JSON Lines, compressed where it ends in .gz")
    parser.add_argument("--until", type=float, default=math.inf, help="seconds; no process begins after them")
    args = parser.parse_args()
    end = time.monotonic() + args.until

    every = [(model, path) for model in args.models for path in paths_of(model, args.device, dict(args.vary))]
    lines: list[str] = []
    for model, path in in_rounds(every, args.processes, args.seed):
        if time.monotonic() >= end:
            print(f"{args.until} s have passed; the rest of {args.processes} processes is left out")
            break
        records = bench(model, path, args)
        lines += [
            json.dumps(record_of(r, model, path, len(lines) + i, args.set)) for i, r in enumerate(records)
        ]
        text = (
            "\n".join(lines) + "\n"
        ).encode()  # after every process, so that an interruption loses at most one
        if args.out.suffix == ".gz":
            text = gzip.compress(text, mtime=0)
        args.out.write_bytes(text)
        print(model.stem, path, [round(r["avg_ts"], 1) for r in records], flush=True)


if __name__ == "__main__":
    main()
