"""Watches the machine during a measurement: a GPU's clocks, temperature and power, why it is slowed down and
who else computes on it; the load of the CPUs by others.

A reading before and one after a measurement show an idle GPU, so readings go on while the measurement runs.
The readings decide nothing about a configuration; they say whether a window counts.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from dyno import _nvml

from ..core.errors import DisturbedError
from .cpu_monitor import CpuWatch, Load
from .environment import company, is_ours

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import TracebackType

# Of NVML's clocks event reasons those that are faults of the moment.
_REASONS = {
    0x8: "hardware slowdown",
    0x20: "thermal limit",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
# A power limit that is reached is how a GPU runs under full load, at its default and at every candidate:
# nothing is dropped. But how much it slows a run down depends on what ran right before, so short prompts are
# read after a rest from then on.
_POWER_LIMIT = 0x4
# Of the enforced limit. The reason alone is not enough: it is also given for moments that the second or so
# over which power is averaged does not show, and which slow nothing down by what could be measured. On an
# H200 measurements that got to 680 of 700 W were slower than all that did not, and a mixture of experts that
# stayed below had the reason all the same.
NEAR_LIMIT = 0.97
T = TypeVar("T")

_RANGES = ("temperature_c", "sm_mhz", "power_w")
PERIOD = 0.25  # seconds between two readings
SPILL_MB_S = 500.0
"""Traffic of the link of a GPU with full memory, from which on weights or cache lie in host memory. A model
that lies on the GPU moves a few MB/s."""
SPILL_READINGS = 4
"""Readings in a row, about a second, that all show such traffic. The last weights of a model that just fits
are loaded while the memory is full already, which one or two readings can see."""


def why_throttled(reasons: int) -> str:
    """Those of NVML's reasons for which a window does not count, in words; empty where there are none."""
    return ", ".join(name for bit, name in _REASONS.items() if reasons & bit)


def at_power_limit(seen: Mapping[str, Any]) -> bool:
    """Whether the GPU was slowed down by its power limit in a window (`Window.to_dict()`), and drew what it
    may."""
    limit, power = seen["power_limit_w"], seen.get("power_w")
    if not (seen["throttle_reasons"] & _POWER_LIMIT and limit and power):
        return False
    return bool(power[1] >= NEAR_LIMIT * limit)


COOLING = (2.0, 5.0)  # seconds to wait after a window in which the GPU was throttled
REST = 0.5  # seconds without others' load after which a disturbed measurement is made again
PATIENCE = 30.0  # seconds that one measurement waits for the machine to come to rest
WINDOWS = 3.0  # or so many times as long as the measurement takes
GPU_CORES = 2  # that a run on a GPU needs: one thread launches, the other one reads


def patience_of(budget: float | None) -> float:
    """Seconds that one measurement of a run waits for the machine to come to rest: a quarter of a short
    budget."""
    return PATIENCE if budget is None else min(PATIENCE, max(5.0, budget / 4))


@dataclass
class Window:
    """The state of the machine in one stretch of time."""

    reasons: int = 0  # all of NVML's reasons, ORed
    others: set[int] = field(default_factory=set)  # ids of processes that are not ours
    ranges: dict[str, list[float]] = field(default_factory=dict)  # lowest and highest
    power_limit_w: float | None = None
    readings: int = 0
    load: Load | None = None  # of the CPUs
    link_mb_s: float = 0.0
    """Over PCIe while the GPU's memory was full: the most that SPILL_READINGS in a row have reached."""
    _row: list[float] = field(default_factory=list)  # of the last readings with a full memory

    def add(self, state: Mapping[str, Any]) -> None:
        """One reading of `dyno._nvml.state`; what it does not tell is left out."""
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
        """Why the window does not count; empty if it does."""
        return why_throttled(self.reasons)

    @property
    def spilled(self) -> bool:
        """Whether the GPU's memory was full and much crossed its link."""
        return self.link_mb_s >= SPILL_MB_S

    @property
    def disturbed(self) -> str:
        """Who disturbs on the CPUs, so that the window does not count; empty if it does."""
        return self.load.disturbed if self.load is not None else ""

    def to_dict(self) -> dict[str, Any]:
        """For the journal; `at_power_limit` reads it."""
        return {
            "throttle_reasons": self.reasons,
            "others": sorted(self.others),
            "power_limit_w": self.power_limit_w,
            **({"spilled": True} if self.spilled else {}),
            **self.ranges,
        }


class Conditions:
    """The sum of all windows of a run."""

    def __init__(self) -> None:
        self.windows = 0
        self.repeated = 0  # measurements that were dropped because others disturbed them
        self.disturbed = 0  # measurements that count although others disturbed them
        self.throttled = 0
        self.power_limited = 0  # windows at the power limit
        self.spilled = 0  # windows in which data lay in host memory for want of room
        self.others: set[int] = set()
        self.ranges: dict[str, list[float]] = {}
        self.power_limit_w: float | None = None

    @classmethod
    def of(cls, parts: Sequence[Conditions]) -> Conditions:
        """Those of several GPUs as one."""
        whole = cls()
        for part in parts:
            whole.windows += part.windows
            whole.repeated += part.repeated
            whole.disturbed += part.disturbed
            whole.throttled += part.throttled
            whole.power_limited += part.power_limited
            whole.spilled += part.spilled
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
        """`seen` is `Window.to_dict()` with `dropped`, the number of windows before it that did not count."""
        self.windows += 1
        self.throttled += int(seen["dropped"])
        self.power_limited += at_power_limit(seen)
        self.spilled += bool(seen.get("spilled"))
        self.others |= set(seen["others"])
        self.power_limit_w = seen["power_limit_w"] or self.power_limit_w
        self._widen(seen)

    def add_load(self, seen: Mapping[str, Any]) -> None:
        """`seen` is `Load.to_dict()` with `dropped` and, if others disturbed it, `disturbed`."""
        self.repeated += int(seen.get("dropped") or 0)
        self.disturbed += bool(seen.get("disturbed"))

    def to_dict(self) -> dict[str, Any]:
        """For the profile's evidence; empty where nothing was watched."""
        found: dict[str, Any] = {}
        if self.repeated:
            found["repeated"] = self.repeated
        if self.disturbed:
            found["disturbed"] = True
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
    """A source of readings of a GPU."""

    def window(self) -> contextlib.AbstractContextManager[Window]: ...


class GpuWatch:
    """The state of a GPU around measurements, by NVML.

    Args:
    pci_bus_id: of the GPU.
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
        """Readings before, all through and after what runs inside; complete when the context has ended."""
        seen = Window()
        seen.add(_nvml.state(self._bus))
        done = threading.Event()

        def go_on() -> None:
            while not done.wait(self._period):
                seen.add(_nvml.state(self._bus))

        # Without NVML nothing is ever told, so nothing has to be asked.
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
    """The watch over the CPUs and, if there is one, the GPU of a run.

    Args:
        pci_bus_id: of the GPU; None for none.
        host_weights: weights lie in host memory by a plan, or may for all that is known, so that what crosses
            the link tells nothing.
    """

    def __init__(self, pci_bus_id: str | None, *, host_weights: bool) -> None:
        self._host_weights = host_weights
        self._gpu = GpuWatch(pci_bus_id) if pci_bus_id else None
        self._cpu = CpuWatch(GPU_CORES if pci_bus_id else None)

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
        """One window over both; complete when the context has ended."""
        with contextlib.ExitStack() as stack:
            window = stack.enter_context(self._gpu.window()) if self._gpu is not None else Window()
            window.load = stack.enter_context(self._cpu.window())
            yield window
        if self._host_weights:
            window.link_mb_s = 0.0


class Careful:
    """A careful measurer: it measures while the machine is watched, and repeats what does not count.

    A window in which the GPU was throttled is dropped and measured again, as long as there is hope: a GPU
    that stays throttled is measured as it is, and said to be, and until it has recovered no time is spent on
    waiting for it again. A window in which others used the CPUs is dropped and measured again when the
    machine has come to rest.

    Args:
        note: takes what is to be said: a kind, and a `message` among its data.
        seen: takes every window as it ends.
        sleep: waits for a GPU to cool down.
        patience: seconds that one measurement waits for the CPUs to come to rest; None: it does not wait, and
            a disturbed window counts and is marked.
        left: seconds of the run's budget that were left when the measurement began; it waits no longer.
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
        self._strangers: set[int] = set()  # processes on the GPU that were said
        self._spilled = False  # a spill was said
        self._hot = False  # the last window was measured on a GPU that stayed throttled
        self._restless = False  # the message about others' load was given, and no window was at rest since
        self.conditions = Conditions()

    def measure(self, key: str, work: Callable[[], T], good: Callable[[T], bool]) -> tuple[T, dict[str, Any]]:
        """The result of `work`, and what was seen meanwhile: `gpu` and `cpu`, each if it can be watched.

        Args:
            good: whether the result can be spoilt by a slow machine at all; a failure is not repeated.

        Raises:
            DisturbedError: the machine did not come to rest.
        """
        throttled = disturbed = 0
        why = ""  # the machine was not quiet
        lost = 0.0  # seconds
        left = self._left()
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
            seen["cpu"] = self._of_load(window, good(found), disturbed, lost)
            if disturbed and not window.disturbed:
                counted = f"{disturbed} measurement{'s' if disturbed > 1 else ''}"
                self._note("disturbed", message=f"{counted} were discarded: {why}. The machine is quiet now.")
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
        if dropped:
            seen |= {"dropped": dropped, "lost": round(lost, 3)}
        if not window.disturbed:
            self._restless = False
        elif counts:
            seen["disturbed"] = window.disturbed
            self._say_restless(f"{window.disturbed}: measuring anyway")
        return seen

    def _say_restless(self, message: str) -> None:
        """Once, until a measurement was free of others' load."""
        if not self._restless:
            self._restless = True
            self._note("disturbed", message=message)

    def _come_to_rest(self, why: str, patience: float, waited: float, first: bool) -> None:
        """Waits until nobody disturbs. Raises DisturbedError if that takes too long.

        The line about the wait does not name who disturbs, because a line follows that does: the error, or
        that the machine is quiet.

        Args:
            patience: seconds from which on it is too long.
            waited: seconds that have gone by before.
            first: whether the measurement waits for the first time, which a line tells.
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

    def learn(self, seen: Mapping[str, Any]) -> None:
        """Counts a window, of now or of a journal."""
        self.conditions.add(seen)
        self._hot = bool(why_throttled(int(seen["throttle_reasons"])))
