"""A measuring process with this or another build of dyno: `python child.py JSON`, with PYTHONPATH set to the
build.

It uses only the public `dyno.Engine`, so that older and newer builds can run it, and imports nothing of this
package. It prints one line of JSON.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from importlib.machinery import PathFinder
from typing import Any

import numpy as np

SAMPLE_SECONDS = 0.1  # least work in a sample; shorter runs are repeated within it
SAMPLE_RUNS = 64


def tokens(count: int, vocab: int, *key: int) -> Any:
    return np.random.default_rng((20261120, *key)).integers(vocab, size=count, dtype=np.int32)


def hooks(engine: Any) -> Any:
    """The hooks of the engine for measurements. In older builds, they are methods of the engine itself."""
    return getattr(engine, "diagnostics", engine)


def one(engine: Any, ask: dict[str, Any], part: dict[str, Any], prompt: int) -> float:
    """Seconds of one run: pp processes a prompt, tg feeds random tokens one by one. If the build draws tokens
    on its device, tg includes that draw, like generation. Otherwise no token is drawn."""
    count, depth = part["tokens"], part["depth"]
    piece = tokens(count, ask["vocab"], prompt, int(part["kind"] == "tg"))
    engine.reset()
    if depth:
        engine.logits(tokens(depth, ask["vocab"], prompt, 2), reset=False, rows="last")
    begun = time.perf_counter()
    if part["kind"] == "pp":
        engine.logits(piece, reset=False, rows="last")
    elif getattr(hooks(engine), "draws_on_device", False):
        hooks(engine).greedy_after(piece)
    else:
        for i in range(count):
            engine.logits(piece[i : i + 1], reset=False, rows="last")
    return time.perf_counter() - begun


def counters(ask: dict[str, Any]) -> Any:
    """The energy counters, from a file of the comparing build; None if the file was not named."""
    place = ask.get("energy")
    if not place:
        return None
    spec = importlib.util.spec_from_file_location("dyno_energy", place)
    if spec is None or spec.loader is None:
        raise ImportError(place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Counters(ask["bus"], ask["powercap"])


def speed(engine: Any, ask: dict[str, Any]) -> dict[str, Any]:
    """Measure generation first, because a GPU that has just processed prompts generates more slowly."""
    rates: dict[str, list[float]] = {}
    energy: dict[str, dict[str, list[float]]] = {}
    meter = counters(ask)
    for part in sorted(ask["parts"], key=lambda p: str(p["kind"]) != "tg"):
        for prompt in range(-1, ask["prompts"]):
            runs: list[float] = []
            before, since = joules_now(meter), time.perf_counter()
            while len(runs) < SAMPLE_RUNS and sum(runs) < SAMPLE_SECONDS:
                runs.append(one(engine, ask, part, max(0, prompt)))
            if prompt >= 0:  # the first run was cold
                middle = sorted(runs)[(len(runs) - 1) // 2]
                rates.setdefault(part["metric"], []).append(part["tokens"] / middle)
                # With a depth, the tokens of the context would count, too.
                if before and not part["depth"] and (after := joules_now(meter)):
                    elapsed = time.perf_counter() - since
                    add_energy(energy, part, runs, elapsed, meter.spent(before, after))
    return {"rates": rates, "energy": energy}


def joules_now(meter: Any) -> dict[str, float]:
    """Joules by counter; empty without a counter, or if one fails. The comparison continues without them."""
    try:
        return dict(meter.read()) if meter is not None else {}
    except (OSError, ValueError):
        return {}


def add_energy(
    energy: dict[str, dict[str, list[float]]],
    part: dict[str, Any],
    runs: list[float],
    elapsed: float,
    joules: dict[str, float],
) -> None:
    """Add tokens, seconds and joules of one sample to the totals of its metric, by source.

    Args:
        elapsed: Seconds in which the joules were spent. That is longer than the runs, because the engine is
            reset between them. The runs get their share of the joules.
    """
    for source, spent in joules.items():
        total = energy.setdefault(part["metric"], {}).setdefault(source, [0.0, 0.0, 0.0])
        timed = sum(runs)
        for n, value in enumerate((part["tokens"] * len(runs), timed, spent * timed / elapsed)):
            total[n] += value


def answers(engine: Any, ask: dict[str, Any]) -> dict[str, Any]:
    """Write the logits of all sequences. With `routing`, the routing of the most exact path is written or
    used."""
    kept: dict[str, Any] = {}
    pins = np.load(ask["pins"], allow_pickle=False) if ask["pins"] else {}
    for n, sequence in enumerate(ask["sequences"]):
        piece = np.asarray(sequence, dtype=np.int32)
        if ask["capture"] and hasattr(hooks(engine), "logits_with_routing"):
            logits, chosen = hooks(engine).logits_with_routing(piece)
            if chosen is not None:
                kept[f"routing{n}"] = chosen
        elif f"routing{n}" in pins:
            logits = hooks(engine).logits(piece, rows="all", pinned_routing=pins[f"routing{n}"])
        else:
            logits = engine.logits(piece, rows="all")
        kept[f"logits{n}"] = np.asarray(logits, dtype=np.float32)
    try:
        np.savez(ask["out"], **kept)
    except OSError as error:
        error.filename = error.filename or ask["out"]  # an error of a write lacks the file name
        raise
    return {}


def resident_mib() -> float:
    """Current resident memory of this process in MiB."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def take_the_path_first() -> None:
    """Move the path before the finder of an editable install, so that the build on the path is imported."""
    for finder in list(sys.meta_path):
        find = getattr(finder, "find_spec", None)
        if finder is not PathFinder and find is not None and find("dyno", None) is not None:
            sys.meta_path.remove(finder)


def main() -> None:
    ask = json.loads(sys.argv[1])
    if ask.get("build"):
        take_the_path_first()
    begun = time.perf_counter()
    import dyno

    build: dict[str, Any] = {}
    try:
        from dyno import _core

        build = dict(_core.build_info())
    except (ImportError, AttributeError):
        pass  # a build without these facts is named by its version only
    # Older builds do not have it.
    force: dict[str, Any] = {"force_profile": True} if ask["force"] else {}
    with dyno.Engine(
        ask["model"], device=ask["device"], profile=ask["profile"], **force, **ask["settings"]
    ) as engine:
        opened = {"load_seconds": time.perf_counter() - begun, "resident_mib": resident_mib()}
        doing = {"speed": speed, "answers": answers, "load": lambda *_: opened}
        done = doing[ask["do"]](engine, ask)
        fallbacks = getattr(engine, "fallbacks", [])
        # A build that does not report it was given the profile, so it counts as used.
        told = ask["profile"] is not None and hasattr(engine, "profile")
        ignored = told and engine.profile is None
        reasons = getattr(getattr(engine, "match", None), "reasons", []) if ignored else []
    known = {k: str(build[k]) for k in ("version", "commit", "ops_revision") if k in build}
    print(json.dumps({**done, "version": getattr(dyno, "__version__", "unknown"), "build": known,
                      "from": str(dyno.__file__), "fallbacks": list(map(str, fallbacks)),
                      "ignored": ignored, "reasons": list(map(str, reasons))}))  # fmt: skip


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        sys.exit(1)
