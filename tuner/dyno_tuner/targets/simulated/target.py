"""A simulated engine: a response surface with the noise of real measurements.

The state is the configuration and a clock. Noise is drawn from (seed, operation, sample), and the part of a
process from (seed, process number). So an operation gives the same samples, whether or not earlier operations
were carried out. A resumed run can thus be compared with an uninterrupted one. Two parts depend on earlier
work: `heat`, which a measurement leaves to the next one of its process, and `power`, an average over all work
of the device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...core.errors import TargetFailure, TuneError
from ...core.intervals import keyed_rng
from ...core.protocol import (
    Capabilities,
    Configuration,
    Description,
    KernelOp,
    OpContext,
    Quality,
    Sample,
    Target,
    TrialStatus,
    Value,
    Workload,
    kind_of,
)
from ...measure.machine_monitor import Window
from .power import GENERATION_DRAW, SimulatedPower
from .surfaces import SURFACES, Surface

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ...space.knobs import Knob


@dataclass(frozen=True, slots=True)
class SimulationNoise:
    """The noise of a simulation: standard deviations in log units unless stated otherwise."""

    within: float = 0.005  # of a sample
    process: float = 0.01  # common to all samples of one process
    layout: float = 0.004  # of one configuration in one process
    drift: float = 0.0  # slowdown that grows over `drift_seconds`, as a fraction
    drift_seconds: float = 600.0
    throttle: float = 0.0  # slowdown during an episode, as a fraction
    throttle_period: float = 90.0  # seconds from one episode to the next
    throttle_seconds: float = 8.0
    outliers: float = 0.01  # probability of a sample that is 10 to 30 % too slow
    cold: float = 0.06  # slowdown of the first sample after apply(), as a fraction
    impossible: float = 0.0  # probability of a sample whose first clock stood still
    # Slowdown of generation right after prompts of the default, as a fraction; larger after faster prompts.
    heat: float = 0.0
    heat_seconds: float = 0.25  # time in which the slowdown falls to a third
    # Power while the device processes prompts with the default, as a share of the limit. Faster
    # configurations draw more. 0: no limit. See `power`.
    power: float = 0.0


@functools.lru_cache(maxsize=65536)
def _normal(*key: object) -> float:
    """Standard normal noise; cached, because many samples share it."""
    return float(keyed_rng(*key).standard_normal())


class SimulatedTarget(Target):
    """A simulated engine with known true rates and chosen noise, in virtual time.

    Args:
    surface: a name in `surfaces.SURFACES`.
    seed: seed of the noise.
    real_faults: really crash, hang and exhaust memory (only in a worker); else faults are statuses.
    pace: seconds of sleep per simulated second, so that a test can kill a run in the middle.
    device: properties of the device that differ from the usual ones.
    """

    def __init__(
        self,
        surface: str | Surface = "saturating",
        seed: int = 0,
        noise: SimulationNoise | Mapping[str, float] | None = None,
        *,
        real_faults: bool = False,
        pace: float = 0.0,
        device: Mapping[str, Any] | None = None,
    ) -> None:
        if isinstance(surface, str):
            if surface not in SURFACES:
                raise TuneError(
                    f"simulated target: no surface {surface!r}; there are {', '.join(sorted(SURFACES))}"
                )
            surface = SURFACES[surface]()
        self.surface = surface
        self.seed = seed
        if noise is None or isinstance(noise, SimulationNoise):
            self.noise = noise or SimulationNoise()
        else:
            self.noise = SimulationNoise(**noise)
        self._real_faults = real_faults
        self._pace = pace
        self._device = dict(device or {})
        self._now = 0.0  # time of the run, for drift and episodes
        self._spent = 0.0  # time spent by this target; only grows
        self._configuration: Configuration | None = None
        self._context = OpContext("", 0, 0.0)
        self._sample = 0
        self._counts = False
        self._true: dict[str, float] = {}
        self._power = SimulatedPower()
        self._hot = (0.0, 0.0, -1)  # slowdown after the last prompt, its time, its process

    def knobs(self) -> tuple[Knob, ...]:
        return self.surface.knobs

    def describe(self) -> Description:
        return Description(
            target="simulated",
            label=f"simulated {self.surface.name}",
            device={"kind": "cpu", "isa": "portable", "cores": 8, "memory_mib": 1024, **self._device},
            model={
                "architecture": f"simulated-{self.surface.name}",
                "layers": 1,
                "embedding": 1,
                "types": {"F32": 1.0},
                "weights": "synthetic",
            },
            engine={
                "version": "simulated",
                "ops_revision": 0,
                "ctx": 4096,
                "defaults": {k.name: k.default for k in self.surface.knobs},
                "noise": {**dataclasses.asdict(self.noise), "seed": self.seed},
            },
            bounds={"pp": 1e6, "tg": 1e5},
            virtual_time=True,
            capabilities=self.capabilities(),
        )

    def capabilities(self) -> Capabilities:
        return Capabilities(kernels=bool(self.surface.ops))

    def apply(self, configuration: Configuration, context: OpContext) -> None:
        self._configuration = configuration = self._complete(configuration)
        if context.process != self._context.process:  # a new process has been loading for seconds
            self._power = SimulatedPower()
        self._context = context
        self._sample = 0
        self._true = self.surface.with_kernels(configuration)
        # Each operation has its own time, so that it does not depend on whether earlier operations ran.
        self._now = context.now
        self._advance(0.05)
        fault = self.surface.fault_of(configuration)
        if fault is not None:
            self._fail(fault)

    def _complete(self, configuration: Configuration) -> Configuration:
        """The configuration with defaults for missing settings."""
        defaults = {k.name: k.default for k in self.surface.knobs}
        return Configuration({**defaults, **configuration.settings}, configuration.kernels)

    def _advance(self, seconds: float) -> None:
        """Let time pass in which the device does not compute."""
        if self.noise.power:
            self._power.idle(seconds)
        self._pass(seconds)

    def _pass(self, seconds: float) -> None:
        self._now += seconds
        self._spent += seconds
        if self._pace:
            time.sleep(seconds * self._pace)

    def _fail(self, fault: TrialStatus) -> None:
        if self._real_faults:
            if fault is TrialStatus.CRASH:
                os.kill(os.getpid(), signal.SIGSEGV)
            if fault is TrialStatus.OOM:
                os.kill(os.getpid(), signal.SIGKILL)  # as the kernel's OOM killer does
            while fault is TrialStatus.TIMEOUT:
                time.sleep(60)
        self._advance(5.0)
        raise TargetFailure(fault, f"simulated {fault}")

    def measure(self, workload: Workload, metric: str, prompt: int) -> Sample:
        if self._configuration is None:
            raise TuneError("simulated target: measure() before apply()")
        n, process = self.noise, self._context.process
        settings = self._configuration.settings
        rng = keyed_rng("sample", self.seed, self._context.key, process, metric, self._sample)
        level = math.log(self._true[kind_of(metric)])
        level += 0.01 * _normal("prompt", metric, prompt)
        level += n.process * _normal("process", self.seed, process)
        kernels = self._configuration.kernels_key()
        layout = json.dumps(dict(settings), sort_keys=True) + (str(kernels) if kernels else "")
        level += n.layout * _normal("layout", self.seed, process, layout)
        level += math.log1p(-n.drift * min(1.0, self._now / n.drift_seconds))
        if n.throttle and (self._now + n.throttle_period / 3) % n.throttle_period < n.throttle_seconds:
            level += math.log1p(-n.throttle)
        level += n.within * float(rng.standard_normal())
        if rng.random() < n.outliers:
            level += math.log1p(-float(rng.uniform(0.1, 0.3)))
        if self._sample == 0:
            level += math.log1p(-n.cold)
        if n.heat and kind_of(metric) == "tg":
            level += math.log1p(-self._heat())
        self._sample += 1
        seconds = workload.tokens(metric) / math.exp(level)
        if n.power:
            seconds = self._power.work(seconds, self._draw(metric))
        self._pass(seconds)
        if n.heat and kind_of(metric) == "pp":
            usual = self.surface.with_kernels(self._complete(Configuration({})))["pp"]
            self._hot = (min(0.5, n.heat * self._true["pp"] / usual), self._now, process)
        shown = seconds * 1e-4 if rng.random() < n.impossible else seconds
        joules = None
        if self._counts and self.surface.watts is not None:
            joules = (
                seconds * self.surface.watts(settings) * math.exp(n.within * float(rng.standard_normal()))
            )
        return Sample(metric, prompt, workload.tokens(metric), shown, seconds, joules)

    def count_energy(self, wanted: str | None) -> str:
        self._counts = wanted is not None
        return "the simulated surface has no watts" if wanted and self.surface.watts is None else ""

    def rest(self, seconds: float) -> None:
        self._advance(seconds)

    def _draw(self, metric: str) -> float:
        """The power of the device without its limit, as a share of the limit."""
        if kind_of(metric) == "tg":
            return GENERATION_DRAW
        usual = self.surface.with_kernels(self._complete(Configuration({})))["pp"]
        return self.noise.power * self._true["pp"] / usual

    @contextlib.contextmanager
    def window(self) -> Iterator[Window]:
        """Simulated readings of a driver for a `Recorder`, as from a `GpuWatch`."""
        self._power.look()
        seen = Window()
        yield seen
        seen.add(self._power.state())

    def _heat(self) -> float:
        """The remaining slowdown from the last prompt of this process."""
        slowdown, since, process = self._hot
        if process != self._context.process:
            return 0.0
        return slowdown * math.exp(-max(0.0, self._now - since) / self.noise.heat_seconds)

    def quality(self, configuration: Configuration, context: OpContext) -> Quality:
        configuration = self._complete(configuration)
        self._now = context.now
        fault = self.surface.fault_of(configuration)
        if fault is not None:
            try:
                self._fail(fault)
            except TargetFailure as failure:
                return Quality(TrialStatus(failure.status), message=failure.message, seconds=5.0)
        self._advance(0.2)
        kld = self.surface.kld(configuration.settings)
        rounding = {
            k.name: configuration.settings[k.name] for k in self.surface.knobs if str(k.fidelity) != "exact"
        }
        digest = json.dumps(rounding, sort_keys=True)
        return Quality(TrialStatus.OK, kld, 20 * kld, 1.0 - min(1.0, kld), 512, digest, seconds=0.2)

    def kernel_ops(self, configuration: Configuration, workload: Workload) -> list[KernelOp]:
        default: dict[str, Value] = {"variant": "plain"}
        found: dict[str, KernelOp] = {}
        for op in self.surface.ops:
            if workload.tokens(op.metric):
                before = found[op.key].candidates if op.key in found else (default,)
                candidates = (*before, {"variant": op.variant})
                found[op.key] = KernelOp(op.key, "m1", 1, 1, default, candidates, op.metric)
        return list(found.values())

    def time_ops(
        self, key: str, m: int, configs: Sequence[Mapping[str, Value]], *, threads: int, seconds: float,
        depth: int = 0,
    ) -> list[list[float]]:  # fmt: skip
        gains = {o.variant: o.alone for o in self.surface.ops if o.key == key}
        op = next(o for o in self.surface.ops if o.key == key)
        launch = op.share * m / self.surface.rates(self._complete(Configuration({})).settings)[op.metric]
        found = []
        for number, config in enumerate(configs):
            rng = keyed_rng("op", self.seed, key, config["variant"], number)
            gain = gains.get(str(config["variant"]), 1.0)
            noise = rng.standard_normal(5)
            found.append([launch / gain * math.exp(self.noise.within * float(z)) for z in noise])
        return found

    def clock(self) -> float:
        return self._spent

    def close(self) -> None:
        self._configuration = None


def from_options(options: Mapping[str, Any]) -> SimulatedTarget:
    """Build a target from plain values, in a worker process."""
    return SimulatedTarget(**options)
