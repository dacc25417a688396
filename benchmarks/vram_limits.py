"""Speed of a mixture of experts that is larger than the GPU's memory, beside other engines.

    python benchmarks/vram_limits.py model.gguf --threads 16 --vram 8,12,16,24 --json out.json \\
        --peer "llama.cpp=llama.cpp/build/bin/llama-bench -fa 1" \\
        --peer "ik_llama.cpp=ik_llama.cpp/build/bin/llama-bench -fa 1 -fmoe 1"

dyno places the weights by itself (`--vram`). The other engines have no such limit, so the script searches
the smallest N of their `--n-cpu-moe N` that stays within it. The driver's count of the memory in use decides
that: its peak, read every 20 ms, less the count before the start. The peak of dyno is written as well. A
limit of 0 means: all experts in host memory. Each engine is a process of its own.

A short run of each other engine tells its memory, from which its N for each limit follows. A run at that N
measures the cells, and its peak is held against the limit again. The cells are two prompts and 64 generated
tokens. The u-batch of the other engines is the longer prompt; with a shorter one they have room for more
experts, so --ubatches names several, each a row of its own. If an engine fails at the prompt of the short
run, its tokens are measured alone, and the row keeps the error. Every sample is kept, and the median counts.
--dyno adds further rows with options of `dyno bench`. --until ends the script after so many seconds, and rows
that are left say so.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import os
import shlex
import sys
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dyno import _core
from gpu_processes import GIB, add_options, device_name, run

Row = dict[str, Any]

BUFFERS_GIB = 2.0
"""Estimated memory of an engine beside the weights, in GiB, for its first run."""


@dataclass(frozen=True)
class Experts:
    """The experts of a model, which `--n-cpu-moe` moves.

    Attributes:
        layers: smallest N that moves all experts: layers in front of the first experts count too.
        gib: the experts of one layer, the largest.
        others_gib: all other weights.
    """

    layers: int
    gib: float
    others_gib: float


def experts_of(model: str) -> Experts:
    """The experts of a model file; exits if it has none."""
    sizes: dict[int, int] = collections.defaultdict(int)
    others = 0
    for tensor in _core.Gguf(model).tensors():
        if "_exps" in tensor["name"]:
            sizes[int(tensor["name"].split(".")[1])] += tensor["nbytes"]
        else:
            others += tensor["nbytes"]
    if not sizes:
        raise SystemExit(f"error: {model} has no experts; give a mixture of experts")
    return Experts(1 + max(sizes), max(sizes.values()) / GIB, others / GIB)


class OutOfTime(Exception):
    """An error: the time of --until is over."""


def started(args: argparse.Namespace, command: list[str]) -> Row:
    """A process within the time that is left. Raises OutOfTime if no time is left."""
    left = args.ends - time.monotonic()
    if left <= 0:
        raise OutOfTime
    timeout = min(args.timeout, left)
    return run(argparse.Namespace(**{**vars(args), "timeout": timeout}), command)


def dyno_row(args: argparse.Namespace, limit: float, options: str) -> Row:
    """dyno with a limit of `limit` GiB, or with all experts on the CPU if it is 0."""
    command = [sys.executable, "-P", "-m", "dyno", "bench", "--model", args.model]
    command += ["--device", f"cuda:{args.gpu}"]
    command += ["--no-profile", "-o", "json", "-t", str(args.threads), "-r", str(args.repetitions)]
    command += ["-p", args.prompts, "-n", "64", "-b", args.prompts.split(",")[-1]]
    command += [f"--vram={limit:g}GiB"] if limit else ["--cpu-moe"]
    return started(args, command + shlex.split(options))


@dataclass
class Peer:
    """Another engine with one u-batch.

    Attributes:
        words: command of its llama-bench, with flags.
        rows: by N of `--n-cpu-moe N`, those with all cells.
        peaks: GiB by N, of all runs that ended well.
        prompts_error: the error at prompts; empty if they work.
    """

    words: str
    ubatch: str
    rows: dict[int, Row] = field(default_factory=dict)
    peaks: dict[int, float] = field(default_factory=dict)
    prompts_error: str = ""

    def _run(self, args: argparse.Namespace, count: int, *cells: str) -> Row:
        command = [*shlex.split(self.words), "-m", args.model, "-ngl", "99", "-t", str(args.threads)]
        command += ["-o", "json", *cells, "-ub", self.ubatch, "-b", args.prompts.split(",")[-1]]
        row = {**started(args, [*command, "--n-cpu-moe", str(count)]), "n_cpu_moe": count}
        if "error" not in row:
            self.peaks[count] = row["peak_gib"]
        return row

    def probed(self, args: argparse.Namespace, count: int) -> Row:
        """Run the longest prompt once, or one token if that fails, to measure the engine's memory."""
        row = self._run(args, count, "-p", args.prompts.split(",")[-1], "-n", "1", "-r", "1")
        if "error" not in row:
            return row
        alone = self._run(args, count, "-p", "0", "-n", "1", "-r", "1")
        if "error" in alone:
            return row
        self.prompts_error = row["error"]
        return alone

    def measured(self, args: argparse.Namespace, count: int) -> Row:
        """All cells at one N; each N runs once."""
        if count not in self.rows:
            prompts = "0" if self.prompts_error else args.prompts
            row = self._run(args, count, "-p", prompts, "-n", "64", "-r", str(args.repetitions))
            if self.prompts_error:
                row["prompts_error"] = self.prompts_error
            self.rows[count] = row
        return self.rows[count]

    def expected(self, limit: float, experts: Experts) -> int:
        """The smallest N that should fit, by the peak of the N nearest to the limit."""
        near = min(self.peaks, key=lambda count: abs(self.peaks[count] - limit))
        more = math.ceil(round((self.peaks[near] - limit) / experts.gib, 6))
        return max(0, min(experts.layers, near + more))


def peer_row(args: argparse.Namespace, limit: float, peer: Peer, experts: Experts) -> Row:
    """Another engine with the smallest N of `--n-cpu-moe N` that stays within `limit` GiB.

    Args:
        limit: 0 means all experts on the CPU.
    """
    if not peer.peaks:
        room = int((limit - experts.others_gib - BUFFERS_GIB) / experts.gib) if limit else 0
        row = peer.probed(args, max(0, min(experts.layers, experts.layers - room)))
        if "error" in row:
            return row
    if not limit:
        return peer.measured(args, experts.layers)
    count = peer.expected(limit, experts)
    tried: set[int] = set()
    fitting: Row | None = None
    row = {}
    while count not in tried:
        tried.add(count)
        row = peer.measured(args, count)
        if "error" not in row and row["peak_gib"] <= limit:
            fitting = row
            count = min(count, peer.expected(limit, experts))
        else:  # an N between this one and the fit that is known may fit as well
            expected = peer.expected(limit, experts) if fitting is None else 0
            count = min(experts.layers, max(count + 1, expected))
    if fitting is not None:
        return fitting
    return row if "error" in row else {**row, "error": f"does not fit into {limit:g} GiB"}


def rows_of(args: argparse.Namespace) -> dict[str, tuple[str, str]]:
    """By name: the words of a peer and its u-batch, or the options of a row of dyno and nothing."""
    ours = [] if args.peers_alone else ["dyno="]
    found = {name: (words, "") for name, words in (row.split("=", 1) for row in [*ours, *args.dyno])}
    ubatches = (args.ubatches or args.prompts.split(",")[-1]).split(",")
    for row in args.peer:
        name, words = row.split("=", 1)
        for ubatch in ubatches:
            found[f"{name} -ub {ubatch}" if len(ubatches) > 1 else name] = (words, ubatch)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    add_options(parser)
    parser.add_argument("--vram", default="0,8,12,16,24", help="GiB (default %(default)s)")
    parser.add_argument("--ubatches", help="of the other engines, a list (default: the longest prompt)")
    parser.add_argument("--dyno", action="append", default=[], metavar="NAME=OPTIONS", help="a further row")
    parser.add_argument("--peers-alone", action="store_true", help="leave the first row of dyno out")
    parser.add_argument("--until", type=float, default=math.inf, help="seconds for all rows together")
    args = parser.parse_args()
    args.ends = time.monotonic() + args.until
    experts = experts_of(args.model)
    result: Row = {
        "command": shlex.join(["python", "benchmarks/vram_limits.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "device": device_name(args.gpu),
        "cores": len(os.sched_getaffinity(0)),
        "model": Path(args.model).stem,
        "threads": args.threads,
        "limits": {},
    }
    named = rows_of(args)
    peers = {name: Peer(words, ubatch) for name, (words, ubatch) in named.items() if ubatch}
    for limit in map(float, args.vram.split(",")):
        rows = result["limits"][f"{limit:g}"] = {}
        for engine, (words, _) in named.items():
            try:
                if engine in peers:
                    row = peer_row(args, limit, peers[engine], experts)
                else:
                    row = dyno_row(args, limit, words)
            except OutOfTime:
                row = {"error": f"no time left within --until {args.until:g}"}
            rows[engine] = row
            cells = " ".join(
                f"{cell} {values['median']:,.0f}" for cell, values in row.get("cells", {}).items()
            )
            where = f" n_cpu_moe {row['n_cpu_moe']}" if "n_cpu_moe" in row else ""
            print(
                f"{limit:g} GiB {engine}:{where} {cells} peak {row.get('peak_gib')} GiB,"
                f" {row.get('seconds')} s {row.get('error', row.get('prompts_error', ''))}",
                flush=True,
            )
            if args.json:
                args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
