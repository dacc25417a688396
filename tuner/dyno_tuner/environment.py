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


def gpu_state(pci_bus_id: str | None) -> dict[str, Any]:
    """Temperature, clocks, power and throttle reasons of a GPU, as far as the driver tells them."""
    if pci_bus_id is None:
        return {}
    from dyno import _nvml

    return {f"gpu_{name}": value for name, value in _nvml.state(pci_bus_id).items() if value is not None}


def gpu_busy(pci_bus_id: str | None) -> str:
    """A warning for people where other processes compute on the GPU; nothing where none does or none can be
    seen.

    Args:
        pci_bus_id: of the GPU; None for no GPU.
    """
    if pci_bus_id is None:
        return ""
    from dyno import _nvml

    state = _nvml.state(pci_bus_id)
    # Our own worker is one of them.
    others = [pid for pid in state.get("processes") or [] if not _is_child(pid)]
    if not others:
        return ""
    return (
        f"the GPU is also used by {len(others)} other process{'es' if len(others) > 1 else ''} "
        f"({', '.join(map(str, others[:5]))}): better tune when nothing else runs on it"
    )


def _is_child(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except (OSError, UnicodeDecodeError):
        return True  # of another container, or gone: nothing can be said of it
    return pid == os.getpid() or int(words[1]) == os.getpid()


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
