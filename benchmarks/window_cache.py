"""Layers with a sliding window: speed and memory if their cache keeps all rows, or only the window.

    python benchmarks/window_cache.py gpt-oss-20b-MXFP4.gguf --device cuda:0 --ctx 32768 --json out.json

One engine for each value of `window_cache`, measured in turn, round by round: a prompt that fills --ctx up to
--tg tokens, then --tg single tokens behind it. Then --sequences texts of --depth tokens each, and --tg steps
that draw a token for all of them. Memory is that of the cache behind each load, and the
checksum is of the tokens drawn. A ratio is `window` over
`full` in the same round; the report gives medians.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from dyno import Engine
from result_file import write_result

MODES = ("full", "window")
DRAW = (0.8, 40, 0.95, 0.05, 0.5)


def long_text(engine: Engine, tokens: np.ndarray, tg: int) -> dict[str, float]:
    """Tokens per second of a prompt, and of single tokens behind it; bytes of the cache afterwards."""
    session = engine._open()
    session.reset(0)
    prompt, rest = np.split(tokens, [len(tokens) - tg])
    begun = time.perf_counter()
    drawn = [session.decode_and_draw([(0, prompt)], [DRAW])[0]]
    read = time.perf_counter()
    for token in rest:
        drawn.append(session.decode_and_draw([(0, token.reshape(1))], [DRAW])[0])
    ended = time.perf_counter()
    return {
        "checksum": zlib.crc32(np.concatenate(drawn).tobytes()),
        "prompt_rate": len(prompt) / (read - begun),
        "token_rate": tg / (ended - read),
        "cache_bytes": int(session.cache_memory),
    }


def many_texts(engine: Engine, tokens: np.ndarray, count: int, depth: int, tg: int) -> dict[str, float]:
    """Tokens per second of `count` prompts, and of steps behind them; bytes of the cache afterwards."""
    session = engine._open()
    for slot in range(count):
        session.reset(slot)
    begun = time.perf_counter()
    drawn = [session.decode_and_draw([(s, tokens[s : s + depth])], [DRAW])[0] for s in range(count)]
    read = time.perf_counter()
    for at in range(tg):
        step = [(slot, tokens[slot + at : slot + at + 1]) for slot in range(count)]
        drawn.append(session.decode_and_draw(step, [DRAW] * count)[0])
    ended = time.perf_counter()
    return {
        "checksum": zlib.crc32(np.concatenate(drawn).tobytes()),
        "prompt_rate": count * depth / (read - begun),
        "token_rate": count * tg / (ended - read),
        "cache_bytes": int(session.cache_memory),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--ctx", type=int, default=32768)
    parser.add_argument(
        "--sequences", type=int, default=16, help="texts of the second load (default %(default)s)"
    )
    parser.add_argument(
        "--depth", type=int, default=1900, help="tokens of each of them (default %(default)s)"
    )
    parser.add_argument("--tg", type=int, default=300, help="tokens drawn (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    if max(given.depth, given.tg) + given.tg + given.sequences > given.ctx:
        parser.error(f"--ctx is {given.ctx}; expected room for --depth, --tg and --sequences tokens")
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    facts: dict[str, Any] = {}
    for name, count in (("long", 1), (f"{given.sequences} texts", given.sequences)):
        engines = {
            mode: Engine(
                given.model, device=given.device, profile=None,
                ctx=given.ctx, sequences=count, window_cache=mode,
            )
            for mode in MODES
        }  # fmt: skip
        runs: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
        for number in range(given.rounds + 1):
            random = np.random.default_rng(number)
            n_vocab = int(engines["full"].model["n_vocab"])
            tokens = random.integers(0, n_vocab, given.ctx, dtype=np.int32)
            for mode in MODES if number % 2 else reversed(MODES):
                if count == 1:
                    run = long_text(engines[mode], tokens, given.tg)
                else:
                    run = many_texts(engines[mode], tokens, count, given.depth, given.tg)
                if number:  # the first round warms up
                    runs[mode].append(run)
        for mode, engine in engines.items():
            plan = engine._open().plan
            facts = {"device": engine.device, "hardware": engine.device_headline}
            planned = {"planned_bytes": int(plan["kv_bytes"]), "ubatch": int(engine.settings["ubatch"])}
            facts.setdefault("window", int(engines["window"]._open().plan["cache_window"]))
            found.setdefault(name, {})[mode] = [{**run, **planned} for run in runs[mode]]
            engine.close()
    report: dict[str, Any] = {}
    for name, by_mode in found.items():
        report[name] = {}
        for figure in ("prompt_rate", "token_rate", "cache_bytes", "planned_bytes"):
            pairs = [(a[figure], b[figure]) for a, b in zip(by_mode["full"], by_mode["window"], strict=True)]
            full, window = (statistics.median(each) for each in zip(*pairs, strict=True))
            ratio = statistics.median(b / a for a, b in pairs)
            report[name][figure] = {
                "full": round(full, 1),
                "window": round(window, 1),
                "ratio": round(ratio, 4),
            }
            print(f"{name:<10} {figure:<14} full {full:>14,.1f}  window {window:>14,.1f}  {ratio:.3f}")
        same = [
            a["checksum"] == b["checksum"] for a, b in zip(by_mode["full"], by_mode["window"], strict=True)
        ]
        report[name]["rounds_with_the_same_tokens"] = f"{sum(same)} of {len(same)}"
        print(f"{name:<10} the same tokens were drawn in {sum(same)} of {len(same)} rounds")
    if given.json:
        write_result(given.json, given.model, {**facts, "medians": report, "runs": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
