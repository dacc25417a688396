"""What `test_cpu_limits` looks at, in a process of its own: the system refuses a set of CPUs with room for
fewer than 2048, as a kernel does that knows as many."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import struct

NO_NEW_PRIVILEGES, SET_FILTER, FILTER = 38, 22, 2  # of prctl
LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06  # a word; jumps; the verdict
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.EINVAL
NUMBERS = {"x86_64": 204, "aarch64": 123}
"""Of the call sched_getaffinity."""
SECOND_ARGUMENT = 24
"""Where its low word stands."""


def refuse_small_sets() -> bool:
    """Whether the system has taken the filter."""
    number = NUMBERS.get(platform.machine())
    if number is None:
        return False
    code = [
        (LOAD, 0, 0, 0),
        (EQUAL, 0, 2, number),
        (LOAD, 0, 0, SECOND_ARGUMENT),
        (AT_LEAST, 0, 1, 2048 // 8),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, REFUSE),
    ]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in code))
    header = struct.pack("HxxxxxxQ", len(code), ctypes.addressof(program))
    libc = ctypes.CDLL(None)
    if libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0):
        return False
    return not libc.prctl(SET_FILTER, FILTER, ctypes.c_char_p(header), 0, 0)


def main() -> dict[str, object]:
    from dyno import _core

    cpus = sorted(os.sched_getaffinity(0))
    if not refuse_small_sets():
        return {"filtered": False}
    return {"filtered": True, "cpus": cpus, "limits": _core.cpu_limits(), "nodes": _core.numa_nodes()}


if __name__ == "__main__":
    print(json.dumps(main()))
