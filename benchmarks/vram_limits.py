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
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pynvml
from dyno import _core

GIB = float(1 << 30)


class PeakMemory:
    """Highest count of bytes in use on one GPU within a `with` block, less the count at its start.

    Args:
        gpu: number of the GPU, as NVML counts it.
    """

    def __init__(self, gpu: int) -> None:
        self._handle = pynvml.nvmlDeviceGetHandleByIndex(gpu)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.peak = 0

    def _used(self) -> int:
        return int(pynvml.nvmlDeviceGetMemoryInfo(self._handle).used)

    def _watch(self) -> None:
        while not self._ended.wait(0.02):
            self.peak = max(self.peak, self._used())

    def __enter__(self) -> PeakMemory:
        self._before = self._used()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def gib(self) -> float:
        """The peak in GiB."""
        return max(0, self.peak - self._before) / GIB


def expert_layers(model: str) -> tuple[int, float]:
    """Number of layers with experts, and GiB of the experts of one of them."""
    sizes: dict[str, int] = collections.defaultdict(int)
    for tensor in _core.Gguf(model).tensors():
        if "_exps" in tensor["name"]:
            sizes[tensor["name"].split(".")[1]] += tensor["nbytes"]
    if not sizes:
        raise SystemExit(f"error: {model} has no experts; give a mixture of experts")
    return len(sizes), max(sizes.values()) / GIB


def run(args: argparse.Namespace, command: list[str]) -> dict[str, Any]:
    """Cells and peak memory of one process that prints the JSON of llama-bench."""
    begun = time.perf_counter()
    with PeakMemory(args.gpu) as memory:
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=args.timeout)
        except subprocess.TimeoutExpired:
            return {"error": f"longer than {args.timeout} s", "command": shlex.join(command)}
    row: dict[str, Any] = {"command": shlex.join(command), "peak_gib": round(memory.gib, 2)}
    row["seconds"] = round(time.perf_counter() - begun, 1)
    begin = done.stdout.find("[\n")
    if done.returncode != 0 or begin < 0:
        return {**row, "error": f"exit status {done.returncode}: {done.stderr[-600:]}"}
    row["notes"] = [line for line in done.stderr.splitlines() if line.startswith("placement")]
    for cell in json.loads(done.stdout[begin : done.stdout.rindex("]") + 1]):
        row["version"] = cell.get("build_commit") or cell.get("build_version")
        samples = [round(rate, 1) for rate in cell["samples_ts"]]
        name = f"tg{cell['n_gen']}" if cell["n_gen"] else f"pp{cell['n_prompt']}"
        row.setdefault("cells", {})[name] = {"samples": samples, "median": statistics.median(samples)}
        row["ubatch"] = cell["n_ubatch"]
    return row


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
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--vram", default="0,8,12,16,24", help="GiB (default %(default)s)")
    parser.add_argument("--prompts", default="512,4096", help="tokens, the longest last")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds of one process")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND", help="its llama-bench")
    parser.add_argument("--dyno", action="append", default=[], metavar="NAME=OPTIONS", help="a further row")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise SystemExit(f"error: the memory of a GPU cannot be read: NVML: {error}") from error
    name = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(args.gpu))
    result: dict[str, Any] = {
        "device": name,
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
