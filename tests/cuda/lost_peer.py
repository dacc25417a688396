"""What `test_two_gpus` looks at, in a process of its own; `MODEL NUMBER` of the GPU to lose in, JSON out."""

from __future__ import annotations

import json
import sys

import dyno
import numpy as np
from break_context import NoCompiler, break_context
from lost_device import TOKENS, error_of


def main(model: str, lost: int) -> None:
    found: dict[str, object] = {}
    kept = f"cuda:{1 - lost}"
    with dyno.Engine(model, device="cpu", profile=None, ctx=128) as engine:
        on_cpu = engine.logits(TOKENS)
    with dyno.Engine(model, device=kept, profile=None, ctx=128) as engine:
        on_kept = engine.logits(TOKENS)
    split = dyno.Engine(model, device="cuda:0", split="layer", profile=None, ctx=128)
    split.logits(TOKENS)
    found["error"] = break_context("trap", lost)
    found["first"] = error_of(lambda: split.logits(TOKENS))
    found["again"] = error_of(lambda: split.logits(TOKENS))
    found["another engine"] = error_of(lambda: dyno.Engine(model, device=f"cuda:{lost}", profile=None))
    split.close()
    with dyno.Engine(model, device="cpu", profile=None, ctx=128) as engine:
        found["cpu"] = bool(np.array_equal(engine.logits(TOKENS), on_cpu))
    with dyno.Engine(model, device=kept, profile=None, ctx=128) as engine:
        found["other gpu"] = bool(np.array_equal(engine.logits(TOKENS), on_kept))
    print(json.dumps(found))


if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]))
    except NoCompiler as reason:
        print(json.dumps({"skip": str(reason)}))
