"""The effect of each session setting on a device: its other values against its default, in turn.

    python benchmarks/bench_settings.py model.gguf --json out.json

Rounds alternate between the default and a value (default, value, value, default), so that a drift affects
both.
Prompt: 4096 tokens, at the default u-batch and at one of 4096; generation: 64 tokens at depth 0 and 4096. A
ratio is the median with the value over the median with the default. Values that the engine refuses are listed
with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dyno import Engine, bench
from dyno.errors import DynoError
from dyno.settings import SETTINGS, settings_for

if TYPE_CHECKING:
    from collections.abc import Mapping

SKIPPED = frozenset({"threads", "threads_batch", "ubatch"})
THRESHOLDS = (0, 512, 4096)
# Some settings have no effect unless others change, so both sides get these values.
HELD = {"compute_type": {"mmq_max_tokens": 0, "mmq_id_max_tokens": 0}}


def alternatives(name: str, default: Any) -> list[Any]:
    """The values of a setting to compare with its default."""
    setting = SETTINGS[name]
    if setting.type == "bool":
        return [not default]
    if setting.type == "choice":
        return [choice for choice in setting.choices if choice != default]
    return [value for value in THRESHOLDS if value != default and setting.minimum <= value <= setting.maximum]


def cases() -> dict[str, tuple[dict[str, Any], bench.BenchCase]]:
    """Cells by name, with their fixed settings."""
    return {
        "pp4096": ({}, bench.BenchCase(4096, 0, 0, 4096)),
        "pp4096 ub4096": ({"ubatch": 4096}, bench.BenchCase(4096, 0, 0, 4096)),
        "tg64": ({}, bench.BenchCase(0, 64, 0, 4096)),
        "tg64 d4096": ({}, bench.BenchCase(0, 64, 4096, 4096)),
    }


def rates(engine: Engine, case: bench.BenchCase, count: int) -> list[float]:
    """Tokens a second of `count` runs after one untimed one."""
    return bench._measure(engine, case, count, 0, True, lambda note: None).samples_ts


def change(engine: Engine, values: Mapping[str, Any]) -> None:
    """Change session and context settings."""
    for kind, call in (("context", engine.set_context), ("session", engine.set)):
        chosen = {name: value for name, value in values.items() if SETTINGS[name].kind == kind}
        if chosen:
            call(**chosen)


def compare(engine: Engine, value: dict[str, Any], samples: int) -> dict[str, Any]:
    """All cells of one change, in the order default, value, value, default."""
    default = {name: engine.settings[name] for name in value}
    beside = {name: kept for key in value for name, kept in HELD.get(key, {}).items()}
    row: dict[str, Any] = {"value": value, "default": default, "held": beside, "cells": {}}
    for cell, (of_cell, case) in cases().items():
        held = {**of_cell, **beside}
        found: dict[str, list[float]] = {"default": [], "value": []}
        kept = {name: engine.settings[name] for name in held}
        try:
            for which in ("default", "value", "value", "default"):
                change(engine, {**(value if which == "value" else default), **held})
                found[which] += rates(engine, case, samples)
        finally:
            change(engine, {**default, **kept})
        medians = {which: statistics.median(values) for which, values in found.items()}
        row["cells"][cell] = {
            "default": round(medians["default"], 1),
            "value": round(medians["value"], 1),
            "ratio": round(medians["value"] / medians["default"], 4),
            "samples": {which: [round(x, 1) for x in values] for which, values in found.items()},
        }
    return row


def changes(engine: Engine) -> list[dict[str, Any]]:
    """One session setting at a time, and the cache in q8_0."""
    found: list[dict[str, Any]] = []
    for setting in settings_for(engine.device.partition(":")[0]):
        if setting.kind == "session" and setting.name not in SKIPPED:
            default = engine.settings[setting.name]
            found += [{setting.name: value} for value in alternatives(setting.name, default)]
    return [*found, {"kv_type_k": "q8_0", "kv_type_v": "q8_0"}]


def main() -> int:
    """Exit code 1 where nothing could be measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--samples", type=int, default=3, help="of each of the four turns")
    parser.add_argument("--only", help="names, separated by commas")
    parser.add_argument("--commit", default="")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    report: dict[str, Any] = {
        "command": "python benchmarks/bench_settings.py " + " ".join(map(os.path.basename, sys.argv[1:])),
        "commit": args.commit,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": bench.machine_facts(args.device),
        "models": {},
    }
    for path in args.models:
        rows: list[dict[str, Any]] = []
        report["models"][path.stem] = rows
        ctx = max(case.positions for _, case in cases().values())
        with Engine(path, args.device, profile=None, ctx=ctx) as engine:
            for value in changes(engine):
                if args.only and not set(value) & set(args.only.split(",")):
                    continue
                text = " ".join(f"{name}={v}" for name, v in value.items())
                try:
                    row = compare(engine, value, args.samples)
                except DynoError as error:
                    rows.append({"value": value, "refused": str(error)})
                    print(f"{path.stem:26} {text:34} refused: {error}", flush=True)
                    continue
                rows.append(row)
                cells = "  ".join(f"{cell} {c['ratio']:.3f}" for cell, c in row["cells"].items())
                print(f"{path.stem:26} {text:34} {cells}", flush=True)
                if args.json:  # after every row, so that an interruption loses at most one
                    args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if any(report["models"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
