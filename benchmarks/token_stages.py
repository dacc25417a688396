"""Whether one kernel could do a whole token: the time of a stage between barriers, beside a launch for each.

    python benchmarks/token_stages.py --json benchmarks/results/h200_token_stages.json

`token_stages.cu` runs programs of stages. In each stage all blocks read a vector, multiply it by their share
of the weights, and write the next vector. A persistent kernel learns in one of four ways that the vector is
there, and its copy engine fetches weights of later stages meanwhile. `launches` is the control: a captured
graph with a launch for each stage that may start early, as dyno's tokens run today. Every way gives the bits
of the host.

The report gives microseconds a stage, and the part of it above the time of the bytes. That time comes from
the same kernel with all bytes in one stage. Programs with a model's name have the stages and bytes of its
token (without the arithmetic of attention and without the head), each layer alike.

The time of a stage leaves out the cost of a real product: the conversion of its vector, the unpacking of its
codes and its epilogue. If even so a stage costs over 2 µs, one kernel for a token is no gain: on an H200 it
does (`results/h200_token_stages.json`, docs/explain/kernels.md). Needs a GPU of sm_90 and nvcc.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MB = 1_000_000
UNIFORM = (0, 1, 4, 8, 16, 32)  # MB a stage
STAGES = 240
STREAM_MB = 1600
# Megabytes of each stage of a layer, True where the layer's router chooses the weights in the stage before.
LAYERS: dict[str, tuple[int, list[tuple[float, bool]]]] = {
    "qwen3moe": (48, [(5.9, False), (0, False), (4.7, False), (1.1, False), (14.2, True), (7.1, False)]),
    "deepseek2-lite": (
        27,
        [(4.2, False), (0, False), (0.6, False), (2.4, False), (0.6, False), (26.1, True), (13.1, False)],
    ),
    "gpt-oss": (24, [(15.7, False), (0, False), (12.6, False), (0.4, False), (35.3, True), (17.7, False)]),
    "llama-8b": (32, [(15.1, False), (0, False), (9.7, False), (68, False), (41, False)]),
    "qwen3-8b": (36, [(26.8, False), (0, False), (17.9, False), (107, False), (53.5, False)]),
}

Program = list[tuple[float, bool]]


def programs() -> dict[str, Program]:
    """By name: megabytes of each stage, and whether its weights are chosen by the vector."""
    found: dict[str, Program] = {f"{size} MB": [(size, False)] * STAGES for size in UNIFORM}
    found |= {f"{size} MB routed": [(size, True)] * STAGES for size in UNIFORM[1:3]}
    found |= {name: layer * count for name, (count, layer) in LAYERS.items()}
    return found


def built(folder: Path, architecture: str) -> Path:
    """Compile the program for an architecture."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    compiler = shutil.which("nvcc") or str(Path(home) / "bin" / "nvcc")
    binary = folder / "token_stages"
    number = architecture.removeprefix("sm_")
    command = [
        compiler, "-std=c++20", "-O3", "-gencode", f"arch=compute_{number},code=sm_{number}",
        f"-I{HERE.parent / 'csrc'}", str(HERE / "token_stages.cu"), "-o", str(binary),
    ]  # fmt: skip
    subprocess.run(command, check=True)
    return binary


def run(binary: Path, program: Program, repeats: int, folder: Path) -> list[dict[str, Any]]:
    """The lines that it prints: the program's size, then one for each way."""
    path = folder / "program"
    path.write_text("".join(f"{size * MB:.0f} {int(routed)}\n" for size, routed in program))
    done = subprocess.run([binary, path, str(repeats)], check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode:  # the program has printed the reason
        raise SystemExit(f"error: {binary.name} ended with {done.returncode}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def rates(lines: list[dict[str, Any]]) -> dict[tuple[str, bool], float]:
    """Bytes a microsecond by way and `ahead`, of a program of one stage."""
    return {(line["way"], line["ahead"]): lines[0]["bytes"] / line["us"] for line in lines[1:]}


def figures(lines: list[dict[str, Any]], rate: float) -> list[dict[str, Any]]:
    """Of each way the time of a stage, and its part above that of its bytes at `rate` bytes a microsecond."""
    head, *ways = lines
    bytes_us = head["bytes"] / rate
    return [
        {
            **way,
            "stage_us": round(way["us"] / head["stages"], 3),
            "above_bytes_us": round((way["us"] - bytes_us) / head["stages"], 3),
            "of_roofline": round(bytes_us / way["us"], 3),
        }
        for way in ways
    ]


def device_names() -> str:
    """The names of the machine's GPUs, each once."""
    asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    told = subprocess.run(asked, check=True, capture_output=True, text=True).stdout
    return ", ".join(sorted(set(told.strip().splitlines())))


def table(name: str, stages: int, found: list[dict[str, Any]]) -> str:
    """Rows of one program."""
    rows = [f"{name}: {stages} stages"]
    for way in found:
        fetched = "fetched ahead" if way["ahead"] else "fetched in its stage"
        rows.append(
            f"  {way['way']:<9} {fetched:<21} {way['us']:>9.1f} us {way['stage_us']:>8.2f} a stage"
            f" {way['above_bytes_us']:>8.2f} above its bytes {way['of_roofline']:>7.1%} of the copy's rate"
        )
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--binary", type=Path, help="token_stages, if it is compiled already")
    parser.add_argument("--architecture", default="sm_90a", help="for nvcc (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--only", help="programs, a list of names")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    chosen = programs()
    if given.only:
        names = given.only.split(",")
        if unknown := [name for name in names if name not in chosen]:
            parser.error(f"--only: no program {unknown[0]!r}; there are: {', '.join(chosen)}")
        chosen = {name: chosen[name] for name in names}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        binary = given.binary or built(folder, given.architecture)
        stream = run(binary, [(STREAM_MB, False)], given.repeats, folder)
        rate = max(rates(stream).values())
        print(f"one stage of {STREAM_MB} MB: {rate / 1e6:.2f} TB/s")
        for name, program in chosen.items():
            lines = run(binary, program, given.repeats, folder)
            rows.append({"program": name, **lines[0], "ways": figures(lines, rate)})
            print(table(name, lines[0]["stages"], rows[-1]["ways"]))
    if given.json:
        whole = {
            "command": ["python", "benchmarks/token_stages.py", *sys.argv[1:]],
            "date": time.strftime("%Y-%m-%d"),
            "device": device_names(),
            "stream_bytes_per_second": round(rate * 1e6),
            "programs": rows,
        }
        given.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
