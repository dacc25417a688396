"""The monitor of the CPUs during a measurement: load by other programs, steal time, an exhausted quota, and
stopped processes.

The kernel counts the busy time of each CPU (proc(5), `/proc/stat`) and of each process (`/proc/PID/stat`).
The load of other programs is the busy time of the CPUs that this process may use, minus the time of the
process tree of this run. A window does not count if other programs used more than a twentieth of the cores
that a measurement needs.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dyno import _core

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .cpu_distance import Distance

LIMIT = 0.05
"""The share of the needed cores that other programs may use."""
LEAST = 0.05
"""CPU seconds that other programs may use in any window: five ticks of the kernel's clock, which is its
resolution."""
USED_UP = 0.9
"""Share of the quota from which on the run itself exhausts it."""
PERIOD = 0.25  # seconds between two checks of the state of the run's processes
LATE = 0.5  # seconds by which a check may be late before the run counts as stopped

# Fields of a line of /proc/stat after its name.
_USER, _NICE, _SYSTEM, _STEAL = 0, 1, 2, 7
_CPU = 36  # field "processor" of /proc/PID/stat, after the name


@dataclass(frozen=True, slots=True)
class _Process:
    name: str
    parent: int
    state: str
    own: float  # CPU seconds
    children: float  # CPU seconds of ended children
    cpu: str  # the CPU that it ran on last


@dataclass(frozen=True, slots=True)
class _Reading:
    """The counters at one moment, in seconds."""

    at: float
    busy: float
    steal: float
    throttled: float
    run: float  # CPU time of the process tree of this run
    processes: Mapping[int, _Process]
    ours: frozenset[int]


@dataclass
class Load:
    """The use of the CPUs in a window. All figures except `seconds` are numbers of cores.

    The object is complete when the window has ended.
    """

    needed: float  # cores that the measurement needs
    spare: float = 0.0  # further usable cores, which other programs may use
    seconds: float = 0.0
    others: float = 0.0
    steal: float = 0.0  # steal time of the hypervisor
    throttled: float = 0.0  # seconds of throttling per second, if other programs exhausted the quota
    stopped: set[str] = field(default_factory=set)  # processes of this run that were stopped
    busiest: list[str] = field(default_factory=list)
    changed: str = ""  # the change of the quota since the first window
    between: list[Distance] = field(default_factory=list)
    """Distances between the CPUs before and after the window, as far as they were measured."""

    @property
    def share(self) -> float:
        """The share of the needed cores that other programs and the hypervisor used."""
        return max(0.0, self.others + self.steal - self.spare) / self.needed

    @property
    def disturbed(self) -> str:
        """The reason why the window does not count; empty if it does."""
        if self.stopped:
            return f"{', '.join(sorted(self.stopped))} stopped during the measurement"
        if self.changed:
            return self.changed
        if self.throttled > LIMIT:
            return (
                f"other programs in the control group used up the CPU quota for "
                f"{self.throttled:.0%} of the time"
            )
        if self.share <= LIMIT or (self.others + self.steal) * self.seconds <= LEAST:
            return ""
        cores = f"of {self.needed + self.spare:g} cores"
        if self.steal > self.others:
            return f"the hypervisor takes {self.steal:.2g} {cores} (steal time)"
        named = (
            f" ({', '.join(self.busiest)})" if self.busiest else " (their names are not visible from here)"
        )
        return f"other programs use {self.others:.2g} {cores}{named}"

    def to_dict(self) -> dict[str, Any]:
        """The figures for the journal."""
        return {"others": round(self.others, 3), "steal": round(self.steal, 3)}


class CpuWatch:
    """The monitor of the CPUs that this process may use.

    Args:
        needed: Number of cores that a measurement needs; None: all usable ones.
        root: Folder with `proc` and, for the quota, the files that `_core.cpu_limits` reads; "/" except in
            tests.
        period: Seconds between two checks of the state of processes.
    """

    def __init__(self, needed: int | None = None, root: str = "/", period: float = PERIOD) -> None:
        self._root = root
        limits = _core.cpu_limits(root)
        usable = min(float(limits["quota"]) or float("inf"), float(limits["affinity"]))
        self._needed = usable if needed is None else min(float(needed), usable)
        self._quota = float(limits["quota"])
        self._group = Path(limits["quota_from"]).parent if limits["quota_from"] else None
        self._cpus = {f"cpu{n}" for n in os.sched_getaffinity(0)}
        self._proc = Path(root) / "proc"
        self._tick = os.sysconf("SC_CLK_TCK")
        self._period = period

    @contextlib.contextmanager
    def window(self) -> Iterator[Load]:
        """A window from the beginning to the end of the context."""
        load = Load(self._needed, max(0.0, len(self._cpus) - self._needed))
        _take_continued(os.getpid(), self._processes())  # stops before the window do not count
        before = self._read()
        done = threading.Event()

        def look() -> None:
            expected = time.monotonic() + self._period
            while not done.wait(self._period):
                now = time.monotonic()
                if now - expected > LATE:
                    load.stopped.add(f"this program ({os.getpid()})")
                processes = self._processes()
                load.stopped |= {
                    f"{processes[pid].name} ({pid})"
                    for pid in _tree(os.getpid(), processes)
                    if processes[pid].state in "Tt"
                }
                expected = time.monotonic() + self._period

        watcher = threading.Thread(target=look, daemon=True)
        watcher.start()
        try:
            yield load
        finally:
            done.set()
            watcher.join()
            after = self._read()
            load.stopped |= _take_continued(os.getpid(), after.processes)
            self._compare(load, before, after)

    def _compare(self, load: Load, before: _Reading, after: _Reading) -> None:
        quota = float(_core.cpu_limits(self._root)["quota"])
        if quota != self._quota:
            load.changed = f"the CPU quota has changed from {self._quota:g} to {quota:g} CPUs (0: no limit)"
        load.seconds = seconds = max(1e-6, after.at - before.at)
        run = after.run - before.run
        load.others = max(0.0, after.busy - before.busy - run) / seconds
        load.steal = max(0.0, after.steal - before.steal) / seconds
        # If the run itself exhausts the quota, it has too many threads for the quota.
        if self._quota and run / seconds < USED_UP * self._quota:
            load.throttled = max(0.0, after.throttled - before.throttled) / seconds
        used = {
            pid: (p.own - (before.processes[pid].own if pid in before.processes else 0.0)) / seconds
            for pid, p in after.processes.items()
            if pid not in after.ours
        }
        here = [pid for pid in used if used[pid] > LIMIT and after.processes[pid].cpu in self._cpus]
        busiest = sorted(here, key=lambda pid: -used[pid])
        load.busiest = [f"{after.processes[p].name} ({p}): {used[p]:.1f}" for p in busiest[:3]]

    def _read(self) -> _Reading:
        busy = steal = 0.0
        for line in _lines(self._proc / "stat"):
            name, *words = line.split()
            if name in self._cpus and len(words) > _STEAL:
                busy += int(words[_USER]) + int(words[_NICE]) + int(words[_SYSTEM])
                steal += int(words[_STEAL])
        processes = self._processes()
        ours = _tree(os.getpid(), processes)
        run = sum(processes[pid].own + processes[pid].children for pid in ours)
        return _Reading(
            time.monotonic(), busy / self._tick, steal / self._tick, self._throttled(), run, processes, ours
        )

    def _throttled(self) -> float:
        """Total seconds that the control group has waited for its quota."""
        for line in _lines(self._group / "cpu.stat") if self._group is not None else ():
            name, _, value = line.partition(" ")
            if name == "throttled_usec":  # cgroup v2
                return int(value) / 1e6
            if name == "throttled_time":  # cgroup v1
                return int(value) / 1e9
        return 0.0

    def _processes(self) -> dict[int, _Process]:
        found = {}
        for entry in self._proc.glob("[0-9]*"):
            text = "".join(_lines(entry / "stat"))
            head, _, rest = text.rpartition(")")
            words = rest.split()
            if len(words) > _CPU:
                found[int(entry.name)] = _Process(
                    head.partition("(")[2], int(words[1]), words[0],
                    (int(words[11]) + int(words[12])) / self._tick,
                    (int(words[13]) + int(words[14])) / self._tick, f"cpu{words[_CPU]}",
                )  # fmt: skip
        return found


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []  # the process has ended, or the kernel does not have this file


def _tree(root: int, processes: Mapping[int, _Process]) -> frozenset[int]:
    """A process and all its living descendants."""
    children: dict[int, list[int]] = {}
    for pid, process in processes.items():
        children.setdefault(process.parent, []).append(pid)
    found, left = set(), [root] if root in processes else []
    while left:
        pid = left.pop()
        found.add(pid)
        left += children.get(pid, [])
    return frozenset(found)


def _take_continued(parent: int, processes: Mapping[int, _Process]) -> set[str]:
    """Children that were stopped and continued since the last call. The kernel keeps this for the parent
    (waitid(2)), so even a short stop between two checks shows."""
    found = set()
    for pid, process in processes.items():
        if process.parent == parent:
            with contextlib.suppress(ChildProcessError):  # another thread has waited for it
                if os.waitid(os.P_PID, pid, os.WCONTINUED | os.WNOHANG) is not None:
                    found.add(f"{process.name} ({pid})")
    return found
