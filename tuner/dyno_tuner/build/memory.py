"""The memory that builds may take: how much is free, how many compilers fit, and which link does not."""

from __future__ import annotations

import os
import re
from pathlib import Path

from dyno import _core

COMPILER_MIB = 1536
"""Of one compiler, as long as no build has told a better number."""
ROOM = 1.15
"""A link is predicted with this room above the last one."""


def available_mib() -> int:
    """Memory in MiB that new processes could take without swapping, within the limit of the container."""
    meminfo = Path("/proc/meminfo").read_text(encoding="ascii")
    found = re.search(r"^MemAvailable:\s*([0-9]+) kB", meminfo, re.MULTILINE)
    free = int(found[1]) // 1024 if found else 0
    limits = _core.cpu_limits()
    limit = int(limits["memory_bytes"]) >> 20
    return min(free, limit) if limit else free


def jobs(free_mib: int, compiler_mib: int = COMPILER_MIB, cores: int | None = None) -> int:
    """Compilers that may run beside each other: one for each core, as far as memory allows."""
    most = cores if cores is not None else len(os.sched_getaffinity(0))
    return max(1, min(most, free_mib // max(1, compiler_mib)))


def too_large(predicted_mib: int, free_mib: int) -> str:
    """Why a link would not fit, with both numbers; "" if it fits or nothing is known about it."""
    needed = round(predicted_mib * ROOM)
    if predicted_mib <= 0 or needed <= free_mib:
        return ""
    return (
        f"linking would take about {needed:,} MiB (the last one took {predicted_mib:,}), "
        f"and {free_mib:,} MiB are free"
    )
