"""The memory for builds: free memory, the number of parallel compilers, and links that do not fit."""

from __future__ import annotations

import os
import re
from pathlib import Path

from dyno import _core

COMPILER_MIB = 1536
"""Memory of one compiler in MiB, until a build gives a better number."""
ROOM = 1.15
"""Factor between the memory of the last link and the prediction for the next one."""


def available_mib() -> int:
    """Memory in MiB that new processes could take without swapping, within the limit of the container."""
    meminfo = Path("/proc/meminfo").read_text(encoding="ascii")
    found = re.search(r"^MemAvailable:\s*([0-9]+) kB", meminfo, re.MULTILINE)
    free = int(found[1]) // 1024 if found else 0
    limits = _core.cpu_limits()
    limit = int(limits["memory_bytes"]) >> 20
    return min(free, limit) if limit else free


def jobs(free_mib: int, compiler_mib: int = COMPILER_MIB, cores: int | None = None) -> int:
    """Number of compilers that run in parallel: one for each core, as far as memory allows."""
    most = cores if cores is not None else len(os.sched_getaffinity(0))
    return max(1, min(most, free_mib // max(1, compiler_mib)))


def too_large(predicted_mib: int, free_mib: int) -> str:
    """The reason why a link would not fit, with both numbers; "" if it fits or its size is unknown."""
    needed = round(predicted_mib * ROOM)
    if predicted_mib <= 0 or needed <= free_mib:
        return ""
    return (
        f"linking would take about {needed:,} MiB (the last one took {predicted_mib:,}), "
        f"and {free_mib:,} MiB are free"
    )
