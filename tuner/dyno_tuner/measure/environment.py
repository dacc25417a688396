"""The state of the machine around a tune, for the journal. It may explain a number later, and decides
nothing."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from dyno import _rates

from dyno_tuner.measure.cpu_monitor import CpuWatch

if TYPE_CHECKING:
    from collections.abc import Collection

    from ..core.protocol import Description

_FILES = {
    "transparent_hugepage": "/sys/kernel/mm/transparent_hugepage/enabled",
    "transparent_hugepage_defrag": "/sys/kernel/mm/transparent_hugepage/defrag",
    "huge_pages": "/proc/sys/vm/nr_hugepages",
    "governor": "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor",
    "numa_balancing": "/proc/sys/kernel/numa_balancing",
    "nodes": "/sys/devices/system/node/online",
}


def _read(path: str, limit: int = 200) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()[:limit]
    except (OSError, UnicodeDecodeError):
        return None  # some kernels lack some files; missing facts are not recorded


def environment(model: str | None = None) -> dict[str, Any]:
    """Load, other busy processes, huge pages, NUMA, clock policy, and the share of the model file in the page
    cache, as far as the kernel reports them."""
    found: dict[str, Any] = {name: _read(path) for name, path in _FILES.items()}
    status = _read("/proc/self/status", 1 << 16) or ""
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    found["cpus_allowed"] = fields.get("Cpus_allowed_list")
    found["memory_nodes_allowed"] = fields.get("Mems_allowed_list")
    found["page_cache"] = page_cache(model) if model is not None else None
    others = busy_processes()
    found["busy"] = [f"{b.name} ({b.pid}): {b.cores:.1f} cores" for b in others[:5]] or None
    if hasattr(os, "getloadavg"):
        found["load"] = [round(x, 2) for x in os.getloadavg()]
    return {name: value for name, value in found.items() if value is not None}


def gpu_state(pci_bus_id: str | None) -> dict[str, Any]:
    """Temperature, clocks, power and throttle reasons of a GPU, as far as the driver reports them."""
    if pci_bus_id is None:
        return {}
    from dyno import _nvml

    return {f"gpu_{name}": value for name, value in _nvml.state(pci_bus_id).items() if value is not None}


def gpu_busy(pci_bus_id: str | None) -> str:
    """A warning if other processes compute on the GPU; empty if there are none, or if it is unknown.

    Args:
        pci_bus_id: PCI bus id of the GPU; None: no GPU.
    """
    if pci_bus_id is None:
        return ""
    from dyno import _nvml

    state = _nvml.state(pci_bus_id)
    return company([pid for pid in state.get("processes") or [] if not is_ours(pid)])


def company(others: Collection[int]) -> str:
    """The warning about processes on the GPU; empty if there are none."""
    if not others:
        return ""
    named = ", ".join(f"{pid} {_read(f'/proc/{pid}/comm') or ''}".strip() for pid in sorted(others)[:5])
    return (
        f"the GPU is also used by {len(others)} other process{'es' if len(others) > 1 else ''} "
        f"({named}); tune when nothing else runs on it"
    )


def is_ours(pid: int) -> bool:
    """Whether a process is this one or a descendant of it: a worker, or an engine that a worker has
    started."""
    seen: set[int] = set()
    while pid > 1 and pid not in seen:
        if pid == os.getpid():
            return True
        seen.add(pid)
        stat = _read(f"/proc/{pid}/stat")
        if stat is None:
            # It is in another container, or has ended, so nothing is known about it.
            return True
        pid = int(stat.rpartition(")")[2].split()[1])
    return False


class Surroundings(NamedTuple):
    """The state of a machine around a tune."""

    warnings: list[str]  # warnings about disturbances, for people
    state: dict[str, Any]
    rates: dict[str, float]  # measured rates in GB/s
    gpu: dict[str, Any]
    busy: str = ""  # a warning about load by other programs, whose end a tune without --force waits for


def look_around(model: str, description: Description) -> Surroundings:
    """The state of this machine, on which `description` was made."""
    bus = (description.engine.get("gpu") or {}).get("pci_bus_id")
    warnings, loaded = [gpu_busy(bus)], busy()
    gpu = description.device.get("kind") == "cuda"
    measured = {"host_memory_gbps" if gpu else "memory_gbps": round(_rates.cpu_memory(), 1)}
    state = environment(model)
    if state.get("busy") and not loaded:
        warnings.append(f"other processes compute: {', '.join(state['busy'])}")
    return Surroundings([w for w in warnings if w], state, measured, gpu_state(bus), loaded)


BUSY = 0.2  # share of a core; a process that uses less does not disturb


class Busy(NamedTuple):
    """A busy process that does not belong to this run."""

    pid: int
    name: str
    cores: float  # number of cores that it keeps busy


def busy_processes(seconds: float = 0.3) -> list[Busy]:
    """Processes outside of this run that use more than BUSY of a core over `seconds`, the busiest first.
    Empty if the kernel has no /proc."""
    before, begun = _cpu_times(), time.monotonic()
    if not before:
        return []
    time.sleep(seconds)
    passed = (time.monotonic() - begun) * os.sysconf("SC_CLK_TCK")
    found = [
        Busy(pid, name, round((ticks - before[pid, name]) / passed, 2))
        for (pid, name), ticks in _cpu_times().items()
        if (pid, name) in before and ticks - before[pid, name] > BUSY * passed
    ]
    return sorted((b for b in found if not is_ours(b.pid)), key=lambda b: -b.cores)


def _cpu_times() -> dict[tuple[int, str], int]:
    """Clock ticks in user and kernel mode, by process."""
    times = {}
    for entry in Path("/proc").glob("[0-9]*"):
        stat = _read(f"{entry}/stat", 4096)
        if stat is not None:
            head, _, rest = stat.rpartition(")")
            words = rest.split()
            times[int(entry.name), head.partition("(")[2]] = int(words[11]) + int(words[12])
    return times


def page_cache(path: str) -> float | None:
    """Share of the pages of a file that are in memory, determined without reading any; None if unknown."""
    # Linux reports all pages as present to a process that may not write to the file.
    if sys.platform != "linux" or not os.access(path, os.W_OK):
        return None
    # Nothing is written to the mapping, so it needs no reserved memory.
    flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000)
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, flags=flags) as view:
            pages = -(-len(view) // mmap.PAGESIZE)
            present = np.zeros(pages, np.uint8)
            where = ctypes.c_char.from_buffer(view)
            libc = ctypes.CDLL(None, use_errno=True)
            refused = libc.mincore(
                ctypes.c_void_p(ctypes.addressof(where)), ctypes.c_size_t(len(view)),
                ctypes.c_void_p(present.ctypes.data),
            )  # fmt: skip
            del where  # a mapping with an exported view cannot be closed
            return None if refused else round(float(np.mean(present & 1)), 3)
    except (OSError, ValueError):
        return None  # not a regular file, or an empty one


def busy(seconds: float = 0.4) -> str:
    """A warning if other programs or the hypervisor currently use the cores.

    The load average does not show this, because it still includes a run that ended a minute ago.
    """
    with CpuWatch().window() as load:
        time.sleep(seconds)
    if not (reason := load.disturbed):
        return ""
    return f"this machine is busy ({reason}): only large gains can be proven; tune when no other program runs"
