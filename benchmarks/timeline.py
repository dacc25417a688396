"""The launches of one step of several sequences on a GPU: when each begins and ends, and what it adds.

    python benchmarks/timeline.py llama-8b-q4_k.gguf --sequences 8,32 --json timeline.json

CUPTI records the launches of captured graphs, also those that begin while the one before runs. `adds` is the
time from the latest end before a launch to its own end; the sum over a step is the step. The step is timed
with and without the records, because they cost time themselves: about 6 % of a step of 32 sequences.
Needs a C++ compiler and CUPTI (part of the CUDA toolkit; --cupti names its folder).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
STEPS, WARM_UP = 20, 5
DRAW = (0.8, 40, 0.95, 0.05, 0.5)


@dataclass(frozen=True)
class Launch:
    """A launch of a kernel; times in nanoseconds."""

    start: int
    end: int
    shape: str
    name: str


def step_seconds(path: Path, device: str, counts: list[int], depth: int) -> dict[int, float]:
    """By sequences: the median of steps that append a random token to each and draw the next one."""
    from dyno import Engine

    random = np.random.default_rng(0)
    medians = {}
    with Engine(path, device, ctx=depth + 2 * STEPS) as engine:
        vocabulary = int(engine.model["n_vocab"])
        for count in counts:
            engine.set_context(sequences=count)
            for slot in range(count):
                tokens = random.integers(0, vocabulary, depth, dtype=np.int32)
                engine.logits_batch({slot: tokens}, rows="none")
            took = []
            for _ in range(STEPS):
                rows = random.integers(0, vocabulary, (count, 1), dtype=np.int32)
                begun = time.perf_counter()
                engine._open().decode_and_draw(list(enumerate(rows)), [DRAW] * count)
                took.append(time.perf_counter() - begun)
            medians[count] = statistics.median(took[WARM_UP:])
    return medians


def built(folder: Path, cupti: Path | None) -> Path:
    """Build the library that records launches."""
    site = Path(np.__file__).resolve().parents[1]
    places = [cupti] if cupti else [Path("/usr/local/cuda"), *sorted(site.glob("nvidia/*"))]
    headers = [found for place in places for found in place.resolve().rglob("cupti.h")]
    libraries = [found for place in places for found in place.resolve().rglob("libcupti.so*")]
    if not headers or not libraries:
        raise SystemExit(f"no CUPTI below {', '.join(map(str, places))}; --cupti names its folder")
    library = folder / "launch_trace.so"
    command = [
        "c++", "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{headers[0].parent}", "-I/usr/local/cuda/include",
        str(HERE / "launch_trace.cpp"), "-o", str(library), str(libraries[0]),
        f"-Wl,-rpath,{libraries[0].parent}",
    ]  # fmt: skip
    subprocess.run(command, check=True)
    return library


def short(name: str) -> str:
    """The function's name without its namespaces, with the numbers among its template arguments."""
    found, at = name, 3
    while name.startswith("_ZN") and (digits := re.match(r"\d+", name[at:])):
        begin = at + digits.end()
        at = begin + int(digits.group())
        found = name[begin:at]
    numbers = re.findall(r"Li(\d+)E", name)
    return found + (f"<{','.join(numbers)}>" if numbers else "")


def read(trace: Path) -> list[Launch]:
    """The launches of the file, by their start."""
    launches = []
    for line in trace.read_text().splitlines():
        if line.startswith("K "):
            _, start, end, grid, threads, shared, cluster, registers, name = line.split(" ", 8)
            shape = f"grid {grid} threads {threads} shared {shared} cluster {cluster} registers {registers}"
            launches.append(Launch(int(start), int(end), shape, short(name)))
    return sorted(launches, key=lambda launch: launch.start)


def steps(launches: list[Launch]) -> list[list[Launch]]:
    """Split launches into steps. A step ends with its last sampling launch."""
    found: list[list[Launch]] = [[]]
    for launch in launches:
        if found[-1] and "sample" in found[-1][-1].name and "sample" not in launch.name:
            found.append([])
        found[-1].append(launch)
    return found


def added(step: list[Launch]) -> list[float]:
    """The microseconds that each launch adds to the step."""
    latest, out = step[0].start, []
    for launch in step:
        out.append(max(0, launch.end - latest) / 1e3)
        latest = max(latest, launch.end)
    return out


def report(step: list[Launch]) -> dict[str, Any]:
    """One step: launches in their order, and sums by kernel and shape, the most expensive first."""
    adds = added(step)
    sums: dict[str, list[float]] = {}
    for launch, us in zip(step, adds, strict=True):
        sums.setdefault(f"{launch.name} {launch.shape}", []).append(us)
    ordered = sorted(sums.items(), key=lambda item: -sum(item[1]))
    rows = [[key, len(us), round(sum(us), 1)] for key, us in ordered]
    begun = step[0].start
    order = [
        [
            round((launch.start - begun) / 1e3, 2),
            round((launch.end - begun) / 1e3, 2),
            round(us, 2),
            launch.name,
        ]
        for launch, us in zip(step, adds, strict=True)
    ]
    return {"us": round(sum(adds), 1), "kernels": rows, "launches": order}


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="GGUF file")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--sequences", default="8,16,32,64")
    parser.add_argument("--depth", type=int, default=128, help="tokens of each sequence before")
    parser.add_argument("--cupti", type=Path, help="folder that holds cupti.h and libcupti.so")
    parser.add_argument("--json", type=Path, help="write every launch of a step there")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Runs the steps in processes of their own: without records, then with them."""
    args = parse_args()
    counts = [int(count) for count in args.sequences.split(",")]
    if args.inside:
        json.dump(step_seconds(args.model, args.device, counts, args.depth), sys.stdout)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace"
        records = {
            "CUDA_INJECTION64_PATH": str(built(Path(folder), args.cupti)),
            "LAUNCH_TRACE": str(trace),
        }
        seconds = []
        for extra in ({}, records):
            command = [sys.executable, "-P", *sys.argv, "--inside"]
            done = subprocess.run(command, env={**os.environ, **extra}, stdout=subprocess.PIPE, check=True)
            seconds.append(json.loads(done.stdout))
        found = steps(read(trace))
    result: dict[str, Any] = {"model": args.model.stem, "depth": args.depth, "steps": {}}
    for count in counts:
        # Steps of as many sequences as the draw has rows, of which the last ones are replayed graphs.
        mine = [step for step in found if re.search(rf"grid \d+,{count},", step[-1].shape)]
        if not mine:
            raise SystemExit(f"no step of {count} sequences was recorded; does one launch draw all rows?")
        row = report(mine[-2])
        row["step_us"], row["recorded_step_us"] = (round(1e6 * s[str(count)], 1) for s in seconds)
        result["steps"][str(count)] = row
        print(
            f"{count} sequences: {row['step_us']} us, recorded {row['recorded_step_us']}, device {row['us']}"
        )
        for key, launches, us in row["kernels"]:
            print(f"  {us:8.1f} us, {launches:3d} x {us / launches:7.2f}  {key}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
