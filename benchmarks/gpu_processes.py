"""Tools to run engines as separate processes on one GPU: options of the scripts, peak memory, and cells."""

from __future__ import annotations

import json
import shlex
import statistics
import subprocess
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pynvml

if TYPE_CHECKING:
    import argparse

GIB = float(1 << 30)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the common options of scripts that compare engines on one GPU."""
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--prompts", default="512,4096", help="tokens, the longest last")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds of one process")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND", help="its program")
    parser.add_argument("--json", type=Path, metavar="FILE")


def device_name(gpu: int) -> str:
    """The name of a GPU. After this call its memory can be read.

    Args:
        gpu: number of the GPU, as NVML counts it.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise SystemExit(f"error: the memory of a GPU cannot be read: NVML: {error}") from error
    return str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(gpu)))


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
