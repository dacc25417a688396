"""Watches the CPUs during a measurement: load by others, steal time, a used-up quota, stopped processes.

The kernel counts the busy time of every CPU (proc(5), `/proc/stat`) and of every process (`/proc/PID/stat`).
Others have used the difference between the CPUs that this process may use and the process tree of this run. A
window in which others had more than a twentieth of the cores that a measurement needs does not count.
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

LIMIT = 0.05
"""The share of the needed cores that others may use."""
LEAST = 0.05
"""Seconds of CPU that others may use in any window: five ticks of the kernel's clock, which counts no
finer."""
USED_UP = 0.9
"""The share of a quota from which the run itself is the reason that the quota is used up."""
PERIOD = 0.25  # seconds between two looks at the state of the run's processes
LATE = 0.5  # seconds that a look may come late before the run counts as stopped

# Fields of a line of /proc/stat, after its name.
_USER, _NICE, _SYSTEM, _STEAL = 0, 1, 2, 7
_CPU = 36  # field "processor" of /proc/PID/stat, after the name


@dataclass(frozen=True, slots=True)
class _Process:
    name: str
    parent: int
    state: str
    own: float  # seconds of CPU
    children: float  # seconds of the children that have ended
    cpu: str  # that it ran on last


@dataclass(frozen=True, slots=True)
class _Reading:
    """The counters at one moment; seconds."""

    at: float
    busy: float
    steal: float
    throttled: float
    run: float  # CPU time of this run: the process tree
    processes: Mapping[int, _Process]
    ours: frozenset[int]


@dataclass
class Load:
    """The use of the CPUs in one stretch of time. All figures but `seconds` are numbers of cores.

    The object is complete when the window has ended.
    """

    needed: float  # cores that the measurement needs
    spare: float = 0.0  # usable cores beyond these, which others may use
    seconds: float = 0.0
    others: float = 0.0
    steal: float = 0.0  # taken by the hypervisor
    throttled: float = 0.0  # seconds without a quota that others have used up, per second
    stopped: set[str] = field(default_factory=set)  # processes of this run that stood still
    busiest: list[str] = field(default_factory=list)
    changed: str = ""  # how the quota differs from that of the first window

    @property
    def share(self) -> float:
        """The part of the needed cores that others and the hypervisor had."""
        return max(0.0, self.others + self.steal - self.spare) / self.needed

    @property
    def disturbed(self) -> str:
        """The reason that the window does not count; empty if it does."""
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
    """The watch over the CPUs that this process may use.

    Args:
        needed: cores that a measurement needs; None: every usable one.
        root: holds `proc` and, for the quota, what `_core.cpu_limits` reads; "/" but in tests.
        period: seconds between two looks at the state of processes.
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
        """Counts from the beginning to the end of the context."""
        load = Load(self._needed, max(0.0, len(self._cpus) - self._needed))
        _take_continued(os.getpid(), self._processes())  # stops before the window are no matter of it
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
        # A run that has used the quota up itself has more threads than the quota has room for.
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
        """Seconds that the control group has waited for its quota so far."""
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
        return []  # a process that has ended, or a kernel without this file


def _tree(root: int, processes: Mapping[int, _Process]) -> frozenset[int]:
    """A process and all that descend from it, as far as they are alive."""
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
    """Children that were stopped and go on since the last call: the kernel keeps that for the parent
    (waitid(2)), so that even a short stop between two looks shows."""
    found = set()
    for pid, process in processes.items():
        if process.parent == parent:
            with contextlib.suppress(ChildProcessError):  # somebody else has waited for it
                if os.waitid(os.P_PID, pid, os.WCONTINUED | os.WNOHANG) is not None:
                    found.add(f"{process.name} ({pid})")
    return found
