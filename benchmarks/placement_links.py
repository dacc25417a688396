"""Predicted against measured times of placements, on virtual devices behind links of several speeds.

    python benchmarks/placement_links.py model.gguf --json benchmarks/results/placement_links.json

Three parts (`--parts`): predictions of the cost model, thresholds that the tuner solves, and placements that
it chooses; `placement_tuned.py` has the last two. With `--lanes N` so many processes work at once, each on
cores of its own; that is for machines with many cores, which nothing else uses.

The ops of a prompt and of a token are timed once on one device. The cost model adds them up, with the
transfers of each placement over each link. Each placement is then measured, in turns with the one device.

All times are the least of their repeats, because other programs can only lengthen a run. On a busy machine a
prompt has to be shorter than a slice of the scheduler, about 2 ms. The computing part of a prediction is
scaled by the one device's measured time over its predicted one. So work between ops counts, and a drift does
not.

Virtual devices compute as fast as the CPU, so the link alone makes placements differ. The placement that is
predicted to be fastest is compared with the fastest one measured.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import placement_tuned
import svg
from dyno import Engine
from dyno._core import cpu_info

if TYPE_CHECKING:
    from collections.abc import Callable

LINKS = (4, 8, 12, 25, 55)  # GB/s
LATENCY_US = 10
Measured = list[tuple[str, str, int, float]]
PARTS = ("predictions", "thresholds", "tuned")


def placements(engine: Engine) -> dict[str, dict[str, Any]]:
    """Arguments of `Engine` by name: experts, then whole layers, leave for the CPU."""
    layers = int(engine.model["n_layers"])
    found: dict[str, dict[str, Any]] = {}
    if engine.model["moe_layers"]:
        found |= {f"n_cpu_moe={n}": {"n_cpu_moe": n} for n in range(1, layers + 1)}
    return found | {f"n_gpu_layers={n}": {"n_gpu_layers": n} for n in range(layers + 1, -1, -1)}


def works(tokens: int, vocabulary: int) -> dict[str, Callable[[Engine], float]]:
    """Seconds of a prompt with all its logits, and of a token behind it."""
    prompt = np.random.default_rng(0).integers(vocabulary, size=tokens, dtype=np.int32)

    def read(engine: Engine) -> float:
        started = time.perf_counter()
        engine.logits(prompt)
        return time.perf_counter() - started

    def generate(engine: Engine) -> float:
        engine.logits(prompt, rows="none")
        found = []
        for token in prompt[:8]:
            started = time.perf_counter()
            engine.logits([int(token)], reset=False, rows="last")
            found.append(time.perf_counter() - started)
        return min(found)

    return {"prompt": read, "token": generate}


def timed_ops(engine: Engine, tokens: int, depth: int, repeats: int) -> Measured:
    """Seconds of a launch of each op, for every device of a plan."""
    prompt = np.random.default_rng(0).integers(int(engine.model["n_vocab"]), size=tokens, dtype=np.int32)
    rows = {op["key"]: int(op["rows"]) for op in engine.describe_ops(tokens)}
    least: dict[str, float] = {}
    session = engine._open()
    for _ in range(repeats):
        engine.reset()
        if depth:
            session.decode([(0, np.resize(prompt, depth))], rows="none")
        for op in session.time_ops([(0, prompt)], rows="all"):
            each = op["seconds"] / op["count"]
            least[op["key"]] = min(each, least.get(op["key"], each))
    return [(device, key, rows[key], value) for device in ("cpu", "cpu:1") for key, value in least.items()]


def compare(path: str, link: float, tokens: int, repeats: int, threads: int) -> list[dict[str, Any]]:
    """A row for each placement and metric over one link."""
    common: dict[str, Any] = {"profile": None, "ctx": 2 * tokens, "ubatch": tokens, "threads": threads}
    rows = []
    with Engine(path, "cpu", **common) as one:
        todo = works(tokens, int(one.model["n_vocab"]))
        loads = {"prompt": (tokens, 0, tokens), "token": (1, tokens, 1)}
        ops = {m: timed_ops(one, count, depth, 2 * repeats) for m, (count, depth, _) in loads.items()}
        for name, placed in placements(one).items():
            where = {"cpu:1": {"link_gbps": link, "latency_us": LATENCY_US}}
            with Engine(path, "cpu:1", **common, virtual_devices=where, **placed) as engine:
                for metric, work in todo.items():
                    pairs = [(work(one), work(engine)) for _ in range(repeats)]
                    whole, seconds = (min(samples) for samples in zip(*pairs, strict=True))
                    plain, _ = cost(one, *loads[metric], ops[metric])
                    computing, crossing = cost(engine, *loads[metric], ops[metric])
                    rows.append(
                        {
                            "link_gbps": link,
                            "placement": name,
                            "metric": f"{metric}{tokens}",
                            "seconds": seconds,
                            "one_device_seconds": whole,
                            "predicted": computing * whole / plain + crossing,
                        }
                    )
    print(f"{link} GB/s, {tokens} tokens", file=sys.stderr)
    return rows


def cost(engine: Engine, tokens: int, depth: int, logits: int, ops: Measured) -> tuple[float, float]:
    """Expected seconds of the launches, and of the transfers."""
    parts = engine.diagnostics.expected_cost(tokens, depth=depth, logit_rows=logits, measured=ops)
    return sum(float(p["seconds"]) for p in parts), sum(float(p["transfer_seconds"]) for p in parts)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The share of predictions within 15 %, and what the placement that is predicted best loses."""
    found: dict[str, Any] = {}
    for metric in dict.fromkeys(row["metric"] for row in rows):
        own = [row for row in rows if row["metric"] == metric]
        errors = [abs(row["predicted"] / row["seconds"] - 1) for row in own]
        losses = {}
        for link in dict.fromkeys(row["link_gbps"] for row in own):
            of_link = [row for row in own if row["link_gbps"] == link]
            chosen = min(of_link, key=lambda row: float(row["predicted"] / row["one_device_seconds"]))
            ratios = {row["placement"]: row["seconds"] / row["one_device_seconds"] for row in of_link}
            losses[str(link)] = round(ratios[chosen["placement"]] / min(ratios.values()) - 1, 4)
        found[metric] = {
            "placements": len(own),
            "within_15_percent": round(sum(e <= 0.15 for e in errors) / len(errors), 4),
            "median_error": round(statistics.median(errors), 4),
            "chosen_over_best": losses,
        }
    return found


def plot(rows: list[dict[str, Any]]) -> str:
    """Predicted over measured, a point for each placement, by link."""
    width, height, left, bottom = 560, 320, 50, 270
    parts = [svg.text(left, 24, "Predicted over measured time of placements", kind="t")]
    for ratio in (0.7, 0.85, 1.0, 1.15, 1.3):
        y = bottom - (ratio - 0.6) / 0.8 * 220
        parts += [svg.line(left, y, width - 20, y, "g"), svg.text(left - 6, y + 4, f"{ratio:g}", "end")]
    for i, link in enumerate(LINKS):
        x = left + 50 + i * 95
        parts.append(svg.text(x, bottom + 24, f"{link} GB/s", "middle"))
        for row in rows:
            if row["link_gbps"] != link:
                continue
            ratio = min(max(row["predicted"] / row["seconds"], 0.6), 1.4)
            shift, colour = (-14, "#3b7dd8") if row["metric"].startswith("prompt") else (6, "#d8703b")
            parts.append(svg.bar(x + shift, bottom - (ratio - 0.6) / 0.8 * 220 - 2, 10, 4, colour))
    parts.append(svg.text(left, bottom + 44, "blue: a prompt; orange: a token"))
    return svg.svg(width, height, parts)


def pin(numbers: Any, cores: int) -> None:
    """Gives this process `cores` cores that no other lane has."""
    lane = numbers.get()
    allowed = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, allowed[lane * cores : (lane + 1) * cores])


def judged(result: dict[str, Any]) -> dict[str, bool]:
    """The three claims, as far as their parts have run."""
    found = {}
    if "summary" in result:
        found["predicted_within_15_percent_of_9_in_10"] = all(
            part["within_15_percent"] >= 0.9 for part in result["summary"].values()
        )
    if "thresholds" in result:
        found["thresholds_within_one_step"] = all(row["steps_off"] <= 1 for row in result["thresholds"])
    if "tuned" in result:
        found["tuned_within_3_percent_of_the_best"] = all(row["loss"] <= 0.03 for row in result["tuned"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--tokens", default="64,512", help="Of the prompts.")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="Of each lane.")
    parser.add_argument("--lanes", type=int, default=1)
    parser.add_argument("--links", default=",".join(map(str, LINKS)), help="GB/s.")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--budget", type=float, default=90, help="Seconds of each tune.")
    parser.add_argument("--json", type=Path, required=True, help="File to write; the plot lies beside it.")
    given = parser.parse_args()
    links = [float(link) if "." in link else int(link) for link in given.links.split(",")]
    lengths = [int(tokens) for tokens in given.tokens.split(",")]
    parts = given.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts: no part {sorted(unknown)[0]!r}; there are {', '.join(PARTS)}")
    load = os.getloadavg()[0]
    started = time.monotonic()
    context = multiprocessing.get_context("spawn")
    numbers = context.Queue()
    for lane in range(given.lanes):
        numbers.put(lane)
    pinned = (numbers, given.threads) if given.lanes > 1 else None
    with ProcessPoolExecutor(
        given.lanes, context, initializer=pin if pinned else None, initargs=pinned or ()
    ) as lanes:
        # The longest first, so that no lane waits for one that began last.
        tuned = (
            [
                lanes.submit(placement_tuned.tuned, given.model, link, given.budget, given.threads)
                for link in links
            ]
            if "tuned" in parts
            else []
        )
        compared = (
            [
                lanes.submit(compare, given.model, link, tokens, given.repeats, given.threads)
                for tokens in sorted(lengths, reverse=True)
                for link in links
            ]
            if "predictions" in parts
            else []
        )
        thresholds = (
            [
                lanes.submit(placement_tuned.threshold, given.model, link, given.repeats, given.threads)
                for link in links
            ]
            if "thresholds" in parts
            else []
        )
        result: dict[str, Any] = {
            "date": datetime.date.today().isoformat(),
            "device": str(cpu_info()["name"]),
            "command": "placement_links.py "
            f"{Path(given.model).name} --tokens {given.tokens} --repeats {given.repeats} "
            f"--threads {given.threads} --lanes {given.lanes} --links {given.links} --parts {given.parts} "
            f"--budget {given.budget:g}",
            "cores": os.cpu_count(),
            "load_average": [load],
            "latency_us": LATENCY_US,
        }
        rows = [row for future in compared for row in future.result()]
        if rows:
            result["summary"] = summary(rows)
        if thresholds:
            result["thresholds"] = [future.result() for future in thresholds]
        if tuned:
            result["tuned"] = [future.result() for future in tuned]
    result["load_average"].append(os.getloadavg()[0])
    result["seconds"] = round(time.monotonic() - started, 1)
    result["claims"] = judged(result)
    if rows:
        result["rows"] = rows
        given.json.with_suffix(".svg").write_text(plot(rows), encoding="utf-8")
    given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({k: v for k, v in result.items() if k != "rows"}, indent=1))


if __name__ == "__main__":
    main()
