"""What `test_numa` looks at, in a process of its own: `MODEL MODE SYSCALL…` in, JSON out. The system refuses
the calls with these numbers, as a container's filter does."""

from __future__ import annotations

import ctypes
import json
import logging
import struct
import sys

import dyno
import numpy as np

TOKENS = list(range(3, 30))
NO_NEW_PRIVILEGES, SET_FILTER, FILTER = 38, 22, 2  # of prctl
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06  # a word; jump if equal; the verdict
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | 1  # with EPERM


def refuse(numbers: list[int]) -> bool:
    """Whether the system has taken a filter that refuses these calls."""
    code = [(LOAD, 0, 0, 0)]
    code += [(EQUAL, len(numbers) - i, 0, number) for i, number in enumerate(numbers)]
    code += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, REFUSE)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in code))
    header = struct.pack("HxxxxxxQ", len(code), ctypes.addressof(program))
    libc = ctypes.CDLL(None)
    if libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0):
        return False
    return not libc.prctl(SET_FILTER, FILTER, ctypes.c_char_p(header), 0, 0)


def main(model: str, mode: str, numbers: list[int]) -> dict[str, object]:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dyno").addHandler(handler)
    with dyno.Engine(model, device="cpu", profile=None, ctx=96, threads=3) as engine:
        want = engine.logits(TOKENS)
    if not refuse(numbers):
        return {"no filter": True}
    with dyno.Engine(model, device="cpu", profile=None, ctx=96, threads=3, numa=mode) as engine:
        same = bool(np.array_equal(engine.logits(TOKENS), want))
    return {"same": same, "told": [line for line in told if "[numa]" in line]}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], [int(number) for number in sys.argv[3:]])))
