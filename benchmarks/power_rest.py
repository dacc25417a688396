"""The rest that a GPU at its power limit needs before it processes prompts at full speed again.

    python benchmarks/power_rest.py model.gguf --device cuda:0 --ubatch 512,2048 --json rest.json

For every u-batch, in one process: runs of the prompt without a pause (`--busy` seconds), then, for every
rest, a bit more than a second of runs, the time without work, and ten runs more. The process has been loading
before the first ones, as that of `dyno bench`. The JSON has tokens/s of each run and when it began, and the
power that NVML told at the end of each rest. Printed are the ratios to the first u-batch, over the runs that
`dyno bench` takes (the third to the seventh): the shortest rest with that of a fresh process is long enough.
The last one, over the last second of the busy runs, is what a server sees that never pauses.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from dyno import Engine, _nvml
from dyno.bench import machine_facts

RUNS = 10  # after a rest
HEAT_SECONDS = 1.2  # of runs before a rest; longer than the averaging time of the power limit, one second
BENCH = slice(2, 7)  # the runs after a load or rest that `dyno bench` times


class Reader:
    """A reader that processes one prompt repeatedly."""

    def __init__(self, engine: Engine, tokens: int) -> None:
        self._engine = engine
        self._prompt = np.random.default_rng(0).integers(0, int(engine.model["n_vocab"]), tokens)
        self._begun = time.perf_counter()

    def run(self) -> tuple[float, float]:
        """Run once. Returns seconds since the model was opened, and tokens/s."""
        start = time.perf_counter()
        self._engine.logits(self._prompt, rows="last")
        return start - self._begun, len(self._prompt) / (time.perf_counter() - start)

    def busy(self, seconds: float) -> list[tuple[float, float]]:
        """Runs without a pause, at least `RUNS`."""
        runs = [self.run()]
        while len(runs) < RUNS or runs[-1][0] - runs[0][0] < seconds:
            runs.append(self.run())
        return runs


def measure(ubatch: int, args: argparse.Namespace) -> dict[str, Any]:
    """Runs of one u-batch: fresh and busy, then after each rest with busy ones between."""
    with (
        _nvml.hold(),
        Engine(args.model, args.device, None, ctx=args.tokens, ubatch=ubatch) as engine,
    ):
        bus = str(engine.device_info.get("pci_bus_id", ""))
        reader = Reader(engine, args.tokens)
        found: dict[str, Any] = {"busy": rounded(reader.busy(args.busy)), "rests": {}}
        for rest in args.rests:
            reader.busy(min(args.busy, HEAT_SECONDS))
            time.sleep(rest)
            power = _nvml.state(bus).get("power_w") if rest else None  # a call of a few milliseconds
            runs = rounded([reader.run() for _ in range(RUNS)])
            found["rests"][f"{rest:g}"] = {"power_w": power, "runs": runs}
    return found


def rounded(runs: list[tuple[float, float]]) -> list[list[float]]:
    return [[round(at, 4), round(rate, 1)] for at, rate in runs]


def level(runs: list[list[float]]) -> float:
    """Median tokens/s of the runs that `dyno bench` times."""
    return statistics.median(rate for _, rate in runs[BENCH])


def sustained(runs: list[list[float]]) -> float:
    """Median tokens/s of the last second."""
    return statistics.median(rate for at, rate in runs if at >= runs[-1][0] - 1.0)


def line(found: dict[str, Any], base: dict[str, Any]) -> str:
    """Ratios of one u-batch to the first."""
    words = [f"fresh {level(found['busy']) / level(base['busy']):.3f}"]
    for rest, after in found["rests"].items():
        words.append(f"rest {rest}: {level(after['runs']) / level(base['rests'][rest]['runs']):.3f}")
    return "  ".join([*words, f"without a pause {sustained(found['busy']) / sustained(base['busy']):.3f}"])


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda:N")
    parser.add_argument("--ubatch", type=numbers(int), default=[512, 2048], help="the first is the base")
    parser.add_argument("--rests", type=numbers(float), default=[0.0, 0.1, 0.25, 0.5, 1.0], help="seconds")
    parser.add_argument("--busy", type=float, default=4.0, help="seconds of runs without a pause")
    parser.add_argument("--tokens", type=int, default=4096, help="of the prompt")
    parser.add_argument("--json", type=Path, required=True)
    return parser.parse_args()


def numbers(kind: type) -> Any:
    """A parser for a list with commas."""
    return lambda text: [kind(word) for word in text.split(",")]


def main() -> None:
    args = parse_args()
    report: dict[str, Any] = {
        "command": "python benchmarks/power_rest.py " + " ".join(os.path.basename(a) for a in sys.argv[1:]),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine_facts(args.device),
        "ubatch": {str(ubatch): measure(ubatch, args) for ubatch in args.ubatch},
    }
    base = report["ubatch"][str(args.ubatch[0])]
    for ubatch, found in report["ubatch"].items():
        print(f"u-batch {ubatch}: {level(found['busy']):,.0f} tokens/s fresh, ratios {line(found, base)}")
    args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
