"""Tunes placements on virtual devices and measures all of them for the truth; placement_links.py runs it.

A threshold: prompts are read with all experts on the CPU, multiplied there and over copies, at each u-batch.
The first u-batch at which copies are faster is the truth. The tuner's solver measures anew, and its error is
counted in steps of the grid.

A placement: the device and the CPU have room for a part of the model each. A tune chooses counts of layers,
u-batch and the threshold of offload. Then every configuration of its space is measured, and the best of them
and the tune's choice once more in turns, because the best of many short measurements is also the luckiest.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from dyno import Engine
from dyno_tuner.core.protocol import Configuration, OpContext, Workload
from dyno_tuner.execution.inline_executor import InlineExecutor
from dyno_tuner.run.session import Request, limit_memory, run, space_for
from dyno_tuner.run.tune import Options
from dyno_tuner.search.crossover import solve_by_curves
from dyno_tuner.space.knobs import NEVER_OFFLOAD
from dyno_tuner.targets.dyno.target import DynoTarget

LATENCY_US = 10
SHARE = 0.8  # share of the model that fits the device
HOST_SHARE = (
    0.6  # likewise the CPU, which would be the fastest place for all: it computes as fast, without a link
)
WORKLOAD = Workload(pp=512, tg=32)
HELD = ("cpu_repack", *(f"op_offload.{op}" for op in ("matmul", "matmul_id", "up_gate", "moe_up_gate")))
"""Switches that stay on, so that everything can be measured in minutes."""
AGAIN = 6  # number of the best configurations to measure once more


def device(link: float) -> dict[str, dict[str, float]]:
    return {"cpu:1": {"link_gbps": link, "latency_us": LATENCY_US, "streams": 1}}


def threshold(path: str, link: float, repeats: int, threads: int) -> dict[str, Any]:
    """The first u-batch at which copies are faster: by `repeats` of each, and by the tuner's solver."""
    with Engine(
        path,
        "cpu:1",
        None,
        cpu_moe=True,
        virtual_devices=device(link),
        threads=threads,
        ctx=1024,
        ubatch=1024,
    ) as engine:
        longest = min(1024, int(engine.settings["ctx"]))
        grid = [1 << p for p in range(4, 11) if 1 << p <= longest]
        prompt = np.random.default_rng(0).integers(int(engine.model["n_vocab"]), size=longest, dtype=np.int32)

        def read(index: int, offload: int) -> float:
            engine.set(ubatch=grid[index], offload_min_tokens=offload)
            started = time.perf_counter()
            engine.logits(prompt, rows="last")
            return time.perf_counter() - started

        def pairs(index: int, count: int) -> list[tuple[float, float]]:
            read(index, NEVER_OFFLOAD), read(index, 0)  # warm
            return [(read(index, NEVER_OFFLOAD), read(index, 0)) for _ in range(count)]

        times: dict[int, tuple[float, float]] = {}

        def measure(index: int, repeat: int) -> tuple[float, float]:
            found = pairs(index, max(3, repeats // 4))
            times[index] = (min(a for a, _ in found) / longest, min(b for _, b in found) / longest)
            return math.log(times[index][1] / times[index][0]), 0.01

        truth = [
            (min(a for a, _ in p), min(b for _, b in p))
            for p in (pairs(i, repeats) for i in range(len(grid)))
        ]
        found = solve_by_curves(grid, measure, times.get)
    first = next((i for i, (cpu, copies) in enumerate(truth) if copies < cpu), len(grid))
    # If both times agree within 1 %, either verdict is right.
    ties = [i for i, (cpu, copies) in enumerate(truth) if abs(math.log(copies / cpu)) < 0.01]
    low, high = min([first, *ties]), max([first, *(i + 1 for i in ties)])
    return {
        "link_gbps": link, "grid": grid, "cpu_over_copies": [round(a / b, 4) for a, b in truth],
        "true_first": grid[first] if first < len(grid) else None,
        "solved_first": grid[found.below] if found.below < len(grid) else None,
        "computed_at": None if found.at is None else round(found.at, 1), "measurements": found.measurements,
        "steps_off": max(low - found.below, found.below - high, 0),
    }  # fmt: skip


def tuned(path: str, link: float, budget: float, threads: int) -> dict[str, Any]:
    """The loss of a tune of `budget` seconds against the best point of its whole space."""

    def target(**more: Any) -> DynoTarget:
        settings = {"threads": threads, "threads_batch": threads}
        return DynoTarget(path, settings, 1024, device="cpu:1", virtual_devices=device(link), **more)

    whole = target()
    needed = whole.memory({}) or 0
    limits = {"vram": int(SHARE * needed), "ram": int(HOST_SHARE * needed)}
    whole.close()
    held = {"threads": threads, "threads_batch": threads, **dict.fromkeys(HELD, True)}
    engine = InlineExecutor(target(**limits))
    with tempfile.TemporaryDirectory() as folder:
        options = Options(WORKLOAD, budget=budget, kernels=False)
        request = Request(
            path, options, "cpu:1", ctx=1024, out=Path(folder) / "p.yaml", quiet=True, force=True, held=held
        )
        description = engine.describe()
        space, _ = limit_memory(description, request, engine, space_for(description, request))
        result = run(request, engine, space)
    one = target(**limits)
    rates: dict[tuple[int, ...], list[float]] = {}

    def score(point: tuple[int, ...]) -> float:
        one.apply(Configuration(space.settings(point)), OpContext(str(point)))
        logs = []
        for metric in WORKLOAD.metrics:
            one.measure(WORKLOAD, metric, 0)  # warm
            samples = [one.measure(WORKLOAD, metric, n).rate for n in range(2)]
            logs.append(math.log(max(samples)))
        rates.setdefault(point, []).append(sum(logs) / len(logs))
        return rates[point][-1]

    points = list(space.classes().values())
    chosen = space.point(result.outcome.settings)
    ranked = sorted(points, key=score, reverse=True)[:AGAIN]
    finals: dict[tuple[int, ...], list[float]] = {
        p: [] for p in dict.fromkeys([chosen, space.default, *ranked])
    }
    for _ in range(5):
        for point, found in finals.items():
            found.append(score(point))
    one.close()
    levels = {point: statistics.median(found) for point, found in finals.items()}
    best = max(levels, key=lambda point: levels[point])
    return {
        "link_gbps": link, "configurations": len(points),
        "memory_mib": {name: size >> 20 for name, size in limits.items()},
        "chosen": space.settings(chosen), "best": space.settings(best),
        "chosen_over_default": round(math.exp(levels[chosen] - levels[space.default]), 4),
        "loss": round(1 - math.exp(levels[chosen] - levels[best]), 4), "status": result.outcome.status,
        "seconds": round(result.outcome.seconds, 1),
    }  # fmt: skip
