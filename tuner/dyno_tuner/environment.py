"""The state of the machine around a tune, for the journal: what may explain a number later, and decides
nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

_FILES = {
    "transparent_hugepage": "/sys/kernel/mm/transparent_hugepage/enabled",
    "governor": "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor",
    "numa_balancing": "/proc/sys/kernel/numa_balancing",
    "nodes": "/sys/devices/system/node/online",
}


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8").strip()[:200]
    except (OSError, UnicodeDecodeError):
        return None  # not every kernel has every file; what is absent is not recorded


def environment() -> dict[str, Any]:
    """Load, huge pages, NUMA and clock policy, as far as the kernel tells."""
    found: dict[str, Any] = {name: _read(path) for name, path in _FILES.items()}
    if hasattr(os, "getloadavg"):
        found["load"] = [round(x, 2) for x in os.getloadavg()]
    return {name: value for name, value in found.items() if value is not None}


def busy(cores: int) -> str:
    """A warning for people where other processes take the cores; nothing where they don't."""
    if not hasattr(os, "getloadavg"):
        return ""
    load = os.getloadavg()[0]
    if load < 0.5 * cores:
        return ""
    return (
        f"this machine is busy (load {load:.1f} on {cores} cores): only large gains will be told from noise; "
        "better tune when nothing else runs"
    )
