"""The monitor of the machine during a measurement: clocks, temperature and power of a GPU, throttle reasons,
other processes on it, the load of the CPUs by other programs, and the distance between the CPUs.

Readings before and after a measurement would show an idle GPU, so readings are also made while it runs. They
decide nothing about a configuration, only whether a window counts.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from dyno import _core, _nvml

from ..core.errors import DisturbedError
from .cpu_distance import FAR_SHARE, Approach, CpuDistances, Distance, least, probe
from .cpu_monitor import CpuWatch, Load
from .environment import company, is_ours

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import TracebackType

# The clocks event reasons of NVML that are temporary faults.
_REASONS = {
    0x8: "hardware slowdown",
    0x20: "thermal limit",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
# A GPU under full load runs at its power limit, for the default and for all candidates, so nothing is
# dropped. But the slowdown of a run depends on the work right before it. So from then on, short prompts are
# processed after a rest.
_POWER_LIMIT = 0x4
# Share of the enforced limit. The reason alone is not enough, because it is also given for short moments that
# the averaged power does not show and that slow nothing down measurably. On an H200, measurements that
# reached 680 of 700 W were slower than all others, and a mixture of experts below that also had the reason.
NEAR_LIMIT = 0.97
T = TypeVar("T")

_RANGES = ("temperature_c", "sm_mhz", "power_w")
PERIOD = 0.25  # seconds between two readings
SPILL_MB_S = 500.0
"""Link traffic of a GPU with full memory above which weights or cache are in host memory. A model that fits
on the GPU causes a few MB/s."""
SPILL_READINGS = 4
"""Number of consecutive readings (about a second) that must all show such traffic. The last weights of a
model that just fits are loaded while the memory is already full, which one or two readings can show."""


def why_throttled(reasons: int) -> str:
    """The NVML reasons for which a window does not count, in words; empty if there are none."""
    return ", ".join(name for bit, name in _REASONS.items() if reasons & bit)


def at_power_limit(seen: Mapping[str, Any]) -> bool:
    """Whether the power limit slowed the GPU down in a window (`Window.to_dict()`), at full power."""
    limit, power = seen["power_limit_w"], seen.get("power_w")
    if not (seen["throttle_reasons"] & _POWER_LIMIT and limit and power):
        return False
    return bool(power[1] >= NEAR_LIMIT * limit)


COOLING = (2.0, 5.0)  # seconds to wait after a window in which the GPU was throttled
REST = 0.5  # seconds without other load before a disturbed measurement is repeated
PATIENCE = 30.0  # seconds that one measurement waits for the machine to become quiet
WINDOWS = 3.0  # or this multiple of the duration of the measurement
GPU_CORES = 2  # cores that a run on a GPU needs: one thread launches, and the other one reads


def patience_of(budget: float | None) -> float:
    """Seconds that one measurement of a run waits for the machine to become quiet: a quarter of a short
    budget."""
    return PATIENCE if budget is None else min(PATIENCE, max(5.0, budget / 4))


@dataclass
class Window:
    """The state of the machine in a window of time."""

    reasons: int = 0  # all NVML reasons, combined with OR
    others: set[int] = field(default_factory=set)  # ids of processes outside of this run
    ranges: dict[str, list[float]] = field(default_factory=dict)  # lowest and highest values
    power_limit_w: float | None = None
    readings: int = 0
    load: Load | None = None  # of the CPUs
    link_mb_s: float = 0.0
    """MB/s over PCIe while the GPU memory was full: the largest value that SPILL_READINGS consecutive
    readings reached."""
    _row: list[float] = field(default_factory=list)  # the last readings with full memory

    def add(self, state: Mapping[str, Any]) -> None:
        """Add a reading of `dyno._nvml.state`. Missing values are left out."""
        self.readings += bool(state)
        self.reasons |= int(state.get("throttle_reasons") or 0)
        self.others |= {pid for pid in state.get("processes") or () if not is_ours(pid)}
        self.power_limit_w = state.get("power_limit_w") or self.power_limit_w
        link = state.get("link_mb_s")
        self._row = [] if link is None else [*self._row, float(link)][-SPILL_READINGS:]
        if len(self._row) == SPILL_READINGS:
            self.link_mb_s = max(self.link_mb_s, min(self._row))
        for name in _RANGES:
            value = state.get(name)
            if value is not None:
                low, high = self.ranges.get(name, [value, value])
                self.ranges[name] = [min(low, value), max(high, value)]

    @property
    def throttled(self) -> str:
        """The reason why the window does not count; empty if it does."""
        return why_throttled(self.reasons)

    @property
    def spilled(self) -> bool:
        """Whether the GPU memory was full and much data crossed its link."""
        return self.link_mb_s >= SPILL_MB_S

    @property
    def disturbed(self) -> str:
        """The disturbance of the CPUs by which the window does not count; empty if it counts."""
        return self.load.disturbed if self.load is not None else ""

    @property
    def between(self) -> list[Distance]:
        """Distances between the CPUs before and after the window, as far as they were measured."""
        return self.load.between if self.load is not None else []

    def to_dict(self) -> dict[str, Any]:
        """The window for the journal; `at_power_limit` reads it."""
        return {
            "throttle_reasons": self.reasons,
            "others": sorted(self.others),
            "power_limit_w": self.power_limit_w,
            **({"spilled": True} if self.spilled else {}),
            **self.ranges,
        }


class Conditions:
    """The summary of all windows of a run."""

    def __init__(self) -> None:
        self.windows = 0
        self.repeated = 0  # measurements that were dropped because of disturbances
        self.disturbed = 0  # measurements that count despite disturbances
        self.throttled = 0
        self.power_limited = 0  # number of windows at the power limit
        self.spilled = 0  # number of windows in which GPU data was in host memory
        self.cpus = CpuDistances()
        self._far_elsewhere = 0  # windows of other devices with CPUs far apart
        self.others: set[int] = set()
        self.ranges: dict[str, list[float]] = {}
        self.power_limit_w: float | None = None

    @classmethod
    def of(cls, parts: Sequence[Conditions]) -> Conditions:
        """The conditions of several GPUs as one."""
        whole = cls()
        for part in parts:
            whole.windows += part.windows
            whole.repeated += part.repeated
            whole.disturbed += part.disturbed
            whole.throttled += part.throttled
            whole.power_limited += part.power_limited
            whole.spilled += part.spilled
            whole._far_elsewhere += part.moved_cpus
            whole.others |= part.others
            whole.power_limit_w = part.power_limit_w or whole.power_limit_w
            whole._widen(part.ranges)
        return whole

    def _widen(self, ranges: Mapping[str, Any]) -> None:
        for name in _RANGES:
            if name in ranges:
                low, high = self.ranges.get(name, ranges[name])
                self.ranges[name] = [min(low, ranges[name][0]), max(high, ranges[name][1])]

    def add(self, seen: Mapping[str, Any]) -> None:
        """Add a window. `seen` is `Window.to_dict()` with `dropped`, the number of earlier windows that did
        not count."""
        self.windows += 1
        self.throttled += int(seen["dropped"])
        self.power_limited += at_power_limit(seen)
        self.spilled += bool(seen.get("spilled"))
        self.others |= set(seen["others"])
        self.power_limit_w = seen["power_limit_w"] or self.power_limit_w
        self._widen(seen)

    def add_load(self, seen: Mapping[str, Any]) -> None:
        """Add a load. `seen` is `Load.to_dict()` with `dropped` and, after a disturbance, `disturbed`. If it
        was measured, the distance between the CPUs is in `between_ns` and `nearest_ns`."""
        self.repeated += int(seen.get("dropped") or 0)
        self.disturbed += bool(seen.get("disturbed"))
        self.cpus.add(seen)

    @property
    def moved_cpus(self) -> int:
        """Number of windows that count although the CPUs were far apart."""
        return self._far_elsewhere + self.cpus.far

    def to_dict(self) -> dict[str, Any]:
        """The conditions for the evidence of a profile; empty if nothing was monitored."""
        found: dict[str, Any] = {}
        if self.repeated:
            found["repeated"] = self.repeated
        if self.disturbed:
            found["disturbed"] = True
        if self.moved_cpus:
            found["moved_cpus"] = self.moved_cpus
        if not self.windows:
            return found
        found |= {"throttled": self.throttled, "other_processes": len(self.others)}
        if self.power_limited:
            found["power_limited"] = self.power_limited
        if self.spilled:
            found["spilled"] = self.spilled
        found |= {n: r for n, r in self.ranges.items() if n != "power_w"}
        return found if self.power_limit_w is None else {**found, "power_limit_w": self.power_limit_w}


class Watch(Protocol):
    """The protocol of a source of GPU readings."""

    def window(self) -> contextlib.AbstractContextManager[Window]: ...


class GpuWatch:
    """The monitor of a GPU around measurements, through NVML.

    Args:
    pci_bus_id: PCI bus id of the GPU.
    period: seconds between readings.
    """

    def __init__(self, pci_bus_id: str, period: float = PERIOD) -> None:
        self._bus = pci_bus_id
        self._period = period
        self._held = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._held.enter_context(_nvml.hold())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.close()

    @contextlib.contextmanager
    def window(self) -> Iterator[Window]:
        """A window with readings before, during and after the work in the context. It is complete when the
        context has ended."""
        seen = Window()
        seen.add(_nvml.state(self._bus))
        done = threading.Event()

        def go_on() -> None:
            while not done.wait(self._period):
                seen.add(_nvml.state(self._bus))

        # Without NVML there are no readings.
        reader = threading.Thread(target=go_on, daemon=True) if seen.readings else None
        if reader is not None:
            reader.start()
        try:
            yield seen
        finally:
            done.set()
            if reader is not None:
                reader.join()
                seen.add(_nvml.state(self._bus))


class Machine:
    """The monitor of the CPUs and, if there is one, the GPU of a run.

    Args:
        pci_bus_id: PCI bus id of the GPU; None: no GPU.
        host_weights: Whether weights are, or may be, in host memory on purpose, so that link traffic means
            nothing.
    """

    def __init__(self, pci_bus_id: str | None, *, host_weights: bool) -> None:
        self._host_weights = host_weights
        self._gpu = GpuWatch(pci_bus_id) if pci_bus_id else None
        self._cpu = CpuWatch(GPU_CORES if pci_bus_id else None)
        # On a GPU the threads of the CPU hardly wait for each other, and a single thread never does.
        self._probes = pci_bus_id is None and _core.cpu_limits()["cores"] > 1

    def __enter__(self) -> Self:
        if self._gpu is not None:
            self._gpu.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._gpu is not None:
            self._gpu.__exit__(kind, error, trace)

    @contextlib.contextmanager
    def window(self) -> Iterator[Window]:
        """A window of both monitors. It is complete when the context has ended."""
        with contextlib.ExitStack() as stack:
            window = stack.enter_context(self._gpu.window()) if self._gpu is not None else Window()
            before = self._distance()
            window.load = stack.enter_context(self._cpu.window())
            yield window
        window.load.between = [d for d in (before, self._distance()) if d is not None]
        if self._host_weights:
            window.link_mb_s = 0.0

    def _distance(self) -> Distance | None:
        return probe() if self._probes else None


class Careful:
    """A careful measurer, which monitors the machine during each measurement and repeats measurements that do
    not count.

    A window in which the GPU was throttled is dropped and measured again, a few times. If the GPU stays
    throttled, it is measured as it is, with a message. Until it has recovered, the run does not wait for it
    again. A window in which other programs used the CPUs is dropped, and measured again when the machine is
    quiet. A window with CPUs far apart is dropped, and measured again when they are nearer. If they stay far
    apart, it is measured as it is, with a message.

    Args:
        note: Receives notes: a kind, and data with a `message`.
        seen: Receives each window when it ends.
        sleep: Waits for a GPU to cool down.
        patience: Seconds that one measurement waits for quiet CPUs; None: it does not wait, and a disturbed
            window counts but is marked.
        left: Seconds left of the budget when the measurement began, which limit the wait.
    """

    def __init__(
        self, watch: Watch, note: Callable[..., None], seen: Callable[[Mapping[str, Any]], None],
        sleep: Callable[[float], None], patience: float | None = PATIENCE,
        left: Callable[[], float] = lambda: math.inf,
    ) -> None:  # fmt: skip
        self._watch = watch
        self._note = note
        self._seen = seen
        self._sleep = sleep
        self._patience = patience
        self._left = left
        self._strangers: set[int] = set()  # other processes on the GPU that were reported
        self._spilled = False  # whether a spill was reported
        self._hot = False  # whether the GPU stayed throttled in the last window
        self._restless = False  # whether load was reported, and no window was quiet since
        self.conditions = Conditions()
        self._approach = Approach(self.conditions.cpus, self._rest, note)

    def measure(self, key: str, work: Callable[[], T], good: Callable[[T], bool]) -> tuple[T, dict[str, Any]]:
        """The result of `work`, and the monitored windows `gpu` and `cpu`, each if it can be monitored.

        Args:
            good: Whether a slow machine can spoil the result at all. Failures are not repeated.

        Raises:
            DisturbedError: The machine did not become quiet.
        """
        throttled = disturbed = far = 0
        near: Distance | None = None  # the least distance in windows that do not count
        gave_up = False  # whether the CPUs stayed far apart
        why = ""  # the reason why the machine was not quiet
        lost = 0.0  # seconds
        left = self._left()
        cpus = self.conditions.cpus
        pauses = iter(() if self._hot else COOLING)
        while True:
            begun = time.monotonic()
            with self._watch.window() as window:
                found = work()
            self._look_at_company(window)
            self._look_at_spill(window)
            if window.readings:
                self._seen({**window.to_dict(), "dropped": self.conditions.throttled + throttled})
            if not good(found):
                break
            if window.disturbed and self._patience is not None:
                disturbed += 1
                took = time.monotonic() - begun
                patience = min(max(self._patience, WINDOWS * took), left)
                why = window.disturbed
                self._come_to_rest(why, patience, lost + took, first=disturbed == 1)
                lost += time.monotonic() - begun
                continue
            if self._patience is not None and not gave_up and (reason := cpus.too_far(window.between, near)):
                took = time.monotonic() - begun
                near = least([near, *window.between])
                # CPUs that stay far apart do not end the run, so the wait leaves it most of its time.
                patience = min(max(self._patience, WINDOWS * took), FAR_SHARE * left)
                came, waited = self._approach.wait(reason, near, patience)
                again = came or not cpus.throughout(window.between, near)
                self._approach.lost += waited + (took if again else 0.0)
                lost += waited + (took if again else 0.0)
                if again:
                    far += 1
                    gave_up = not came
                    continue
            if not window.throttled:
                break
            pause = next(pauses, None)
            what = (
                f"the measurement will be repeated in {pause:.0f} s"
                if pause is not None
                else "it stays throttled, and the tune measures it as it is"
            )
            message = f"the GPU is throttled ({window.throttled}): {what}"
            self._note("throttled", key=key, attempt=throttled, message=message)
            if pause is None:
                break
            throttled += 1
            self._sleep(pause)
        seen: dict[str, Any] = {}
        if window.readings:
            seen["gpu"] = {**window.to_dict(), "dropped": throttled}
        if window.load is not None:
            seen["cpu"] = self._of_load(window, good(found), disturbed + far, lost)
            if good(found) and window.between:
                seen["cpu"]["between_ns"] = [d.to_list() for d in window.between]
            if near is not None:
                seen["cpu"]["nearest_ns"] = near.to_list()
            if disturbed and not window.disturbed:
                counted = f"{disturbed} measurements were" if disturbed > 1 else "1 measurement was"
                self._note("disturbed", message=f"{counted} discarded: {why}. The machine is quiet now.")
        return found, seen

    def _look_at_company(self, window: Window) -> None:
        strangers = window.others - self._strangers
        if strangers:
            self._strangers |= strangers
            self._note("company", processes=sorted(strangers), message=company(strangers))

    def _look_at_spill(self, window: Window) -> None:
        if window.spilled and not self._spilled:
            self._spilled = True
            self._note(
                "spill", link_mb_s=round(window.link_mb_s),
                message=f"the GPU's memory is full and {window.link_mb_s / 1000:.1f} GB/s cross its link: "
                "part of the model or its cache is in host memory; a smaller context, u-batch or cache "
                "type makes room, and so do experts on the CPU",
            )  # fmt: skip

    def _of_load(self, window: Window, counts: bool, dropped: int, lost: float) -> dict[str, Any]:
        seen = window.load.to_dict() if window.load is not None else {}
        if dropped or lost:
            seen |= {"dropped": dropped, "lost": round(lost, 3)}
        if not window.disturbed:
            self._restless = False
        elif counts:
            seen["disturbed"] = window.disturbed
            self._say_restless(f"{window.disturbed}: measuring anyway")
        return seen

    def _say_restless(self, message: str) -> None:
        """Give the message once, until a measurement was free of other load."""
        if not self._restless:
            self._restless = True
            self._note("disturbed", message=message)

    def _come_to_rest(self, why: str, patience: float, waited: float, first: bool) -> None:
        """Wait until the machine is quiet. Raises DisturbedError if that takes too long.

        The line about the wait does not name the cause, because a later line does: the error, or the message
        that the machine is quiet.

        Args:
            patience: Seconds after which it takes too long.
            waited: Seconds that have already passed.
            first: Whether this is the first wait of the measurement, which prints a line.
        """
        if first and patience - waited >= REST:
            self._note(
                "waiting",
                message=f"waiting for the machine to become quiet, at most {math.ceil(patience - waited)} s",
                why=why,
            )
        while True:
            if waited >= patience:
                raise DisturbedError(f"the machine did not become quiet in {waited:.0f} s: {why}")
            begun = time.monotonic()
            with self._watch.window() as window:
                self._sleep(REST)
            if not window.disturbed:
                return
            why = window.disturbed
            waited += max(REST, time.monotonic() - begun)

    def _rest(self) -> tuple[list[Distance], float]:
        """Rest for a moment. Returns the distances between the CPUs around it, and its seconds."""
        begun = time.monotonic()
        with self._watch.window() as window:
            self._sleep(REST)
        return window.between, max(REST, time.monotonic() - begun)

    def learn(self, seen: Mapping[str, Any]) -> None:
        """Count a window, from now or from a journal."""
        self.conditions.add(seen)
        self._hot = bool(why_throttled(int(seen["throttle_reasons"])))
