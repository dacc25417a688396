"""The cost of a CUDA build for each architecture: core-seconds, seconds and sizes.

    python benchmarks/cuda_build.py --arch 75 --arch 80 --arch 90a --out benchmarks/results/cuda_build.json

Each build starts in an empty folder, without a compiler cache. Core-seconds are what all processes of the
step used. The targets: at most 1,700 core-seconds and 40 MB of device code for one architecture. Runs are
added to those in the file. A run replaces an older one of the same architecture and switches.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def step(command: list[str]) -> dict[str, float]:
    """Runs a command; its seconds and the core-seconds of all its processes. Output is shown on failure."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    environment = {**os.environ, "CCACHE_DISABLE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": round(time.monotonic() - started, 1), "core_seconds": round(used, 1)}


def build(arch: str, switches: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="dyno-cuda-build-") as folder:
        given = ["-DGGML_CUDA=ON", f"-DCMAKE_CUDA_ARCHITECTURES={arch}", "-DDYNO_WERROR=ON"]
        given += [f"-D{switch}" for switch in switches]
        step(
            [
                "cmake",
                "-S",
                str(ROOT),
                "-B",
                folder,
                "-GNinja",
                f"-DPython_EXECUTABLE={sys.executable}",
                *given,
            ]
        )
        libraries = ["dyno_cuda", *(["dyno_cuda_lto"] if "GGML_CUDA_LTO=ON" in switches else [])]
        device = step(["cmake", "--build", folder, "--target", *libraries])
        everything = step(["cmake", "--build", folder])
        links = json.loads(
            (Path(folder) / "csrc" / "bindings" / "link_report.json").read_text(encoding="utf-8")
        )
    return {
        "architectures": arch,
        "switches": given,
        "device_units": device,
        "rest_of_the_build": everything,
        "links": links,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--arch", action="append", required=True, help="as CMAKE_CUDA_ARCHITECTURES; repeatable"
    )
    parser.add_argument("--switch", action="append", default=[], metavar="NAME=VALUE", help="repeatable")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    machine = {"machine": platform.processor() or platform.machine(), "cores": len(os.sched_getaffinity(0))}
    found = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {"runs": []}
    for arch in args.arch:
        run = {**machine, "commit": commit, **build(arch, args.switch)}
        key = (run["architectures"], run["switches"])
        found["runs"] = [r for r in found["runs"] if (r["architectures"], r["switches"]) != key] + [run]
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        device = run["device_units"]
        size = run["links"]["device_code_bytes"] / 1e6
        cost = f"{device['core_seconds']} core-seconds, {device['seconds']} s"
        print(f"{arch}: device units {cost}; {size:.1f} MB of code")
    return 0


if __name__ == "__main__":
    sys.exit(main())
