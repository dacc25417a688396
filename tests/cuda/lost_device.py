"""What `test_lost_device` looks at, in a process of its own; `MODEL FAULT MOMENT` in, JSON out."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dyno
import numpy as np
from break_context import NoCompiler, break_context
from dyno import _core, devices

if TYPE_CHECKING:
    from collections.abc import Callable

TOKENS = [5, 9, 200, 31]
TINY = Path(__file__).resolve().parent.parent / "data" / "tiny"


def error_of(call: Callable[[], Any]) -> list[str]:
    """Class and message of what a call raises; empty where it succeeds."""
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return []


def after_the_loss(
    model: str, engine: dyno.Engine, other: dyno.Engine, drafting: dyno.Engine
) -> dict[str, list[str]]:
    """What every way to use the device raises."""
    family, desc = _core.ops.parse_key("norm n=512", 64)
    calls: dict[str, Callable[[], Any]] = {
        "logits": lambda: engine.logits(TOKENS),
        "logits again": lambda: engine.logits(TOKENS),
        "logits of another engine": lambda: other.logits(TOKENS),
        "generate": lambda: list(engine.generate(TOKENS, max_tokens=4)),
        "greedy_after": lambda: engine.diagnostics.greedy_after(TOKENS),
        "a draft": lambda: drafting.draft(5),
        "logits beside a head": lambda: drafting.logits([5], reset=False),
        "forgetting beside a head": lambda: drafting.rewind(0),
        "another head": drafting.load_draft_head,
        "set": lambda: engine.set(ubatch=64),
        "set_context": lambda: engine.set_context(ctx=64),
        "reset": engine.reset,
        "rewind": lambda: engine.rewind(0),
        "position": engine.position,
        "time_ops": lambda: engine.diagnostics.time_ops(TOKENS),
        "a new engine": lambda: dyno.Engine(model, device="cuda:0", profile=None),
        "a plan": lambda: _core.Session(model, load={"device": "cuda:0"}, plan_only=True),
        "rates": lambda: _core.measure_rates("cuda:0"),
        "a single op": lambda: _core.ops.time(family, desc, None, min_seconds=1e-4, device="cuda:0"),
    }
    return {name: error_of(call) for name, call in calls.items()}


def main(model: str, fault: str, moment: str) -> None:
    found: dict[str, Any] = {}
    with dyno.Engine(model, device="cpu", profile=None, ctx=128) as cpu:
        on_cpu = cpu.logits(TOKENS)
    engine = dyno.Engine(model, device="cuda:0", profile=None, ctx=128)
    # With a handle of cuBLAS, which has to be given back too.
    other = dyno.Engine(model, device="cuda:0", profile=None, ctx=128, mmq_max_tokens=0, matvec_max_tokens=1)
    drafting = dyno.Engine(TINY / "qwen35-tiny.gguf", device="cuda:0", profile=None, ctx=128)
    drafting.load_draft_head()
    drafting.logits(TOKENS)
    kept = engine.logits(TOKENS)
    copy = kept.copy()
    engine.logits(TOKENS)  # not kept: its page-locked memory is there for the next
    other.logits(TOKENS)
    text = engine.generate(TOKENS, max_tokens=64)
    if moment in ("generating", "closing"):
        for _ in range(3):  # two steps are under way then
            next(text)
    found["error"] = break_context(fault)
    if moment == "generating":
        found["first"] = error_of(lambda: list(text))
    elif moment == "decoding":
        found["first"] = error_of(lambda: engine.logits(TOKENS))
    elif moment == "another engine":
        found["first"] = error_of(lambda: other.logits(TOKENS))
    else:
        engine.close()
        found["closed"] = error_of(lambda: engine.logits(TOKENS))
        engine = other
    found["after"] = after_the_loss(model, engine, other, drafting)
    found["problem"] = devices.list_devices()[1].info["problem"]
    found["auto"] = devices.resolve_device("auto").name
    found["kept"] = bool(np.array_equal(kept, copy))
    engine.close()
    other.close()
    drafting.close()
    with dyno.Engine(model, device="cpu", profile=None, ctx=128) as cpu:
        found["cpu"] = bool(np.array_equal(cpu.logits(TOKENS), on_cpu))
    print(json.dumps(found))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except NoCompiler as reason:
        print(json.dumps({"skip": str(reason)}))
