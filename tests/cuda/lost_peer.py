"""What `test_two_gpus` looks at, in a process of its own; `MODEL NUMBER` of the GPU to lose in, JSON out."""

from __future__ import annotations

import ctypes
import json
import sys
from typing import TYPE_CHECKING

import dyno
import numpy as np
from break_context import NoCompiler, break_context
from lost_device import TOKENS, error_of

if TYPE_CHECKING:
    from numpy.typing import NDArray


def logits_of(model: str, device: str) -> NDArray[np.float32]:
    with dyno.Engine(model, device=device, profile=None, ctx=128) as engine:
        return engine.logits(TOKENS)


def answers(ordinal: int) -> bool:
    """Whether the primary context of a GPU still does what it is asked, by the driver's own word."""
    driver = ctypes.CDLL("libcuda.so.1")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    driver.cuDeviceGet(ctypes.byref(device), ordinal)
    if driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
        return False
    driver.cuCtxPushCurrent_v2(context)
    code = driver.cuCtxSynchronize()
    driver.cuCtxPopCurrent_v2(ctypes.byref(context))
    return not code


def main(model: str, lost: int) -> None:
    found: dict[str, object] = {}
    kept = f"cuda:{1 - lost}"
    with dyno.Engine(model, device="cpu", profile=None, ctx=128) as engine:
        on_cpu = engine.logits(TOKENS)
    on_kept = logits_of(model, kept)
    split = dyno.Engine(model, device="cuda:0", split="layer", profile=None, ctx=128)
    split.logits(TOKENS)
    found["error"] = break_context("trap", lost)
    found["first"] = error_of(lambda: split.logits(TOKENS))
    found["again"] = error_of(lambda: split.logits(TOKENS))
    found["another engine"] = error_of(lambda: dyno.Engine(model, device=f"cuda:{lost}", profile=None))
    split.close()
    with dyno.Engine(model, device="cpu", profile=None, ctx=128) as engine:
        found["cpu"] = bool(np.array_equal(engine.logits(TOKENS), on_cpu))
    # The driver decides whether a context outlives the fault of another one.
    found["kept answers"] = answers(1 - lost)
    found["other gpu"] = error_of(lambda: logits_of(model, kept))
    if found["kept answers"]:
        found["same"] = bool(np.array_equal(logits_of(model, kept), on_kept))
    print(json.dumps(found))


if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]))
    except NoCompiler as reason:
        print(json.dumps({"skip": str(reason)}))
