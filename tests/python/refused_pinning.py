"""What `test_cpu_distances` looks at, in a process of its own: the system refuses to bind a thread."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import struct

NO_NEW_PRIVILEGES, SET_FILTER, FILTER = 38, 22, 2  # of prctl
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06  # a word; a jump; the verdict
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
NUMBERS = {"x86_64": 203, "aarch64": 122}
"""Of the call sched_setaffinity."""


def refuse_to_bind() -> bool:
    """Whether the system has taken the filter."""
    number = NUMBERS.get(platform.machine())
    if number is None:
        return False
    code = [(LOAD, 0, 0, 0), (EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in code))
    header = struct.pack("HxxxxxxQ", len(code), ctypes.addressof(program))
    libc = ctypes.CDLL(None)
    if libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0):
        return False
    return not libc.prctl(SET_FILTER, FILTER, ctypes.c_char_p(header), 0, 0)


def main() -> dict[str, object]:
    from dyno import _core

    cpus = len(os.sched_getaffinity(0))
    if not refuse_to_bind():
        return {"filtered": False}
    return {"filtered": True, "cpus": cpus, "distances": _core.cpu_distances()}


if __name__ == "__main__":
    print(json.dumps(main()))
