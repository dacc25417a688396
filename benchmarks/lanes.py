"""Lanes: sets of CPUs on which measurements run side by side without disturbing each other.

Two CPUs of one core share its arithmetic units, so a lane never shares a core with another lane. If the
machine does not report which CPUs share a core, as many virtual machines do not, it is measured.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from dyno._effective import usable_cores

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

BURN = "while True: pass"
_COUNT = """
import os, time
os.sched_setaffinity(0, [{cpu}])
best = 0
for _ in range(3):
    n, end = 0, time.perf_counter() + 0.05
    while time.perf_counter() < end:
        n += 1
    best = max(best, n)
print(best)
"""
SLOWED = 0.85  # share of its rate alone; a slower CPU shares a core with the busy one
START_SECONDS = 0.1  # time until a Python program runs


@contextlib.contextmanager
def busy(program: str, cpus: Sequence[int]) -> Iterator[None]:
    """A Python program on these CPUs, ended with the context."""
    words = [sys.executable, "-P", "-c", f"import os\nos.sched_setaffinity(0, {list(cpus)})\n{program}"]
    with subprocess.Popen(words) as child:
        try:
            yield
        finally:
            child.kill()


def told_siblings(cpu: int) -> list[int]:
    """The CPUs that share a core with `cpu`, from the kernel; only `cpu` if the kernel does not report
    them."""
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        return parse_list(path.read_text())
    except (OSError, ValueError):
        return [cpu]


def parse_list(text: str) -> list[int]:
    """Parse a list such as `0-2,8`."""
    found: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def _rate(cpu: int) -> int:
    words = [sys.executable, "-P", "-c", _COUNT.format(cpu=cpu)]
    return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


def measured_stride(cpus: Sequence[int]) -> int | None:
    """The distance of two CPUs that share a core, or None. CPUs share a core if one slows the other down,
    twice in a row."""
    first = cpus[0]
    alone = max(_rate(first) for _ in range(3))

    def slowed(other: int) -> bool:
        with busy(BURN, [other]):
            time.sleep(START_SECONDS)
            return _rate(first) < SLOWED * alone

    # Kernels number the CPUs of a core side by side, or all first ones before all second ones.
    strides = dict.fromkeys((1, len(cpus) // 2))
    return next((n for n in strides if first + n in cpus and slowed(first + n) and slowed(first + n)), None)


def cores(cpus: Sequence[int]) -> list[list[int]]:
    """`cpus` grouped by core."""
    told = [tuple(c for c in told_siblings(cpu) if c in cpus) or (cpu,) for cpu in cpus]
    if any(len(group) > 1 for group in told) or len(cpus) < 4:
        return [list(group) for group in dict.fromkeys(told)]
    stride = measured_stride(cpus)
    if stride is None:
        return [[cpu] for cpu in cpus]
    return [[cpu, cpu + stride] for cpu in cpus if (cpu - cpus[0]) // stride % 2 == 0]


def of_two(groups: Sequence[Sequence[int]], limit: int) -> list[list[int]]:
    """Lanes of the first CPUs of two cores each, for `limit` busy CPUs at most."""
    firsts = [group[0] for group in groups]
    return [firsts[i : i + 2] for i in range(0, min(len(firsts), limit) - 1, 2)]


def automatic() -> list[list[int]]:
    """All lanes of two cores that this process may use."""
    return of_two(cores(sorted(os.sched_getaffinity(0))), usable_cores())
