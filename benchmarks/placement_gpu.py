"""Expected against measured times of placements of a mixture of experts on a GPU beside the CPU.

    python benchmarks/placement_gpu.py model.gguf --threads 16 --json out.json

Rates are measured first with --threads threads; --kept takes those that `tune probe` has stored instead. Each
placement is opened once, decodes a prompt of 512 tokens and generates 128. Both times are compared with the
expected ones, as is their sum, by which `auto` chooses. The median of all samples is reported.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dyno import _core, _rates
from dyno.bench import cases, run
from dyno.devices import resolve_device

if TYPE_CHECKING:
    from dyno import Engine

PROMPT, ANSWER = 512, 128


def placements(layers: int, sizes: list[int], limits: list[int]) -> list[dict[str, Any]]:
    """Experts of all, two thirds, two fifths and a seventh of the layers on the CPU, and caches beside; then
    what `auto` chooses within some GiB."""
    counts = [layers, round(layers * 2 / 3), round(layers * 2 / 5), round(layers / 7)]
    found: list[dict[str, Any]] = [{"n_cpu_moe": count} for count in counts]
    found += [{"n_cpu_moe": layers, "expert_cache_mib": size} for size in sizes]
    found += [{"n_cpu_moe": counts[1], "expert_cache_mib": size} for size in sizes[:1]]
    return found + [{"vram": f"{limit}GiB"} for limit in limits]


def expectations(engine: Engine) -> dict[str, Any]:
    """Expected milliseconds, and their parts, of the prompt and of a token in the middle of the answer."""
    instruments = engine.diagnostics
    found: dict[str, Any] = {"expected": {}, "parts": {}}
    for name, (tokens, depth) in {"prompt": (PROMPT, 0), "token": (1, PROMPT + ANSWER // 2)}.items():
        found["expected"][name] = 1e3 * instruments.expected_seconds(tokens, depth=depth)
        parts = instruments.expected_cost(tokens, depth=depth)
        own = {device: 0.0 for device in ("cpu", engine.device, "transfers")}
        for part in parts:
            own[part["device"]] += 1e3 * part["seconds"]
            own["transfers"] += 1e3 * part["transfer_seconds"]
        found["parts"][name] = own
    return found


def measure(args: argparse.Namespace, placement: dict[str, Any]) -> dict[str, Any]:
    """Expected and measured milliseconds of one placement."""
    row: dict[str, Any] = {"placement": placement, "measured": {}, "samples": {}}
    grid = cases([PROMPT], [], [], [0], [4096], {}) + cases([], [ANSWER], [], [PROMPT], [4096], {})
    results = run(
        args.model, grid, repetitions=args.repetitions,
        on_open=lambda engine: row.update(expectations(engine)),
        device=f"cuda:{args.gpu}", profile=None, ctx=PROMPT + ANSWER, ubatch=args.ubatch,
        threads=args.threads, threads_batch=args.threads, **placement,
    )  # fmt: skip
    for result in results:
        name = "token" if result.case.n_gen else "prompt"
        samples = [ns / 1e6 / max(1, result.case.n_gen) for ns in result.samples_ns]
        row["measured"][name] = statistics.median(samples)
        row["samples"][name] = [round(ms, 3) for ms in samples]
    for times in (row["expected"], row["measured"]):
        times["both"] = times["prompt"] + ANSWER * times["token"]
    row["ratio"] = {name: row["expected"][name] / row["measured"][name] for name in row["measured"]}
    return row


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--ubatch", type=int, default=4096)
    parser.add_argument("--caches", default="4096,8192,12288", help="MiB (default %(default)s)")
    parser.add_argument("--vram", default="8,12,16", help="GiB for auto (default %(default)s)")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--kept", action="store_true", help="use kept rates")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    device = f"cuda:{args.gpu}"
    infos = {"cpu": dict(_core.cpu_info()), device: resolve_device(device).info}
    rates = {} if args.kept else {name: _rates.measure(name, args.threads) for name in infos}
    for name, own in rates.items():
        _rates.remember(infos[name], own, threads=args.threads)
    layers = int(_core.describe_model(_core.Gguf(args.model))["n_layers"])
    sizes = [int(size) for size in args.caches.split(",") if size]
    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "device": str(infos[device]["name"]),
        "model": Path(args.model).stem,
        "threads": args.threads,
        "ubatch": args.ubatch,
        "rates": rates,
        "rows": [],
    }
    limits = [int(limit) for limit in args.vram.split(",") if limit]
    for placement in placements(layers, sizes, limits):
        row = measure(args, placement)
        result["rows"].append(row)
        print(placement)
        for name, ratio in row["ratio"].items():
            expected, measured = row["expected"][name], row["measured"][name]
            print(f"  {name}: expected {expected:.2f}, measured {measured:.2f} ms ({ratio - 1:+.1%})")
        sys.stdout.flush()
        near = sum(abs(r["ratio"]["both"] - 1) <= 0.15 for r in result["rows"])
        result["within_15_percent"] = near / len(result["rows"])
        if args.json:
            args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
