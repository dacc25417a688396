"""An engine whose defaults are slow on purpose, so that a tune has gains to find."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from dyno_tuner.core.protocol import Configuration, KernelChoice, OpContext
from dyno_tuner.execution.worker import WorkerExecutor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dyno_tuner.core.options import MeasurementPolicy
    from dyno_tuner.core.protocol import Description, KernelOp, Measurement, Quality, Workload

SLOW = {"ubatch": 32, "threads": 1, "threads_batch": 1}
AS_SLOW = 2.0  # wanted time of a slow kernel, as a multiple of the default's time
LEAST, MOST = 1.5, 4.0  # bounds of a slow kernel's time, as multiples of the default's time
SLOW_OPS = 2  # number of the heaviest ops of a token that get a slow kernel
TIMINGS = 3  # timings of each kernel; the fastest counts


class SlowEngine(WorkerExecutor):
    """An engine with slow defaults. Settings and kernels that a configuration does not name come from
    `start`.

    Args:
        target, options: as a worker takes them.
        start: the settings and kernels that are the defaults instead of the engine's own ones.
    """

    def __init__(self, target: str, options: Mapping[str, Any], start: Configuration) -> None:
        super().__init__(target, options)
        self._start_from = start

    def _begun(self, configuration: Configuration) -> Configuration:
        named = {(k.key, k.tokens) for k in configuration.kernels}
        slow = tuple(k for k in self._start_from.kernels if (k.key, k.tokens) not in named)
        return Configuration(
            {**self._start_from.settings, **configuration.settings}, (*configuration.kernels, *slow)
        )

    def describe(self) -> Description:
        found = super().describe()
        defaults = {**found.engine["defaults"], **self._start_from.settings}
        return dataclasses.replace(found, engine={**found.engine, "defaults": defaults})

    def measurement(
        self,
        configuration: Configuration,
        workload: Workload,
        metrics: Sequence[str],
        policy: MeasurementPolicy,
        context: OpContext,
        deadline: float,
    ) -> Measurement:
        return super().measurement(self._begun(configuration), workload, metrics, policy, context, deadline)

    def quality(self, configuration: Configuration, context: OpContext, deadline: float) -> Quality:
        return super().quality(self._begun(configuration), context, deadline)

    def routing(self, configuration: Configuration, workload: Workload, context: OpContext) -> dict[str, Any]:
        return super().routing(self._begun(configuration), workload, context)

    def kernel_ops(self, configuration: Configuration, workload: Workload) -> list[KernelOp]:
        return super().kernel_ops(self._begun(configuration), workload)


def slow_kernels(
    engine: WorkerExecutor, configuration: Configuration, workload: Workload
) -> list[KernelChoice]:
    """A kernel that takes about AS_SLOW times as long as the default, for the heaviest ops of generation. The
    kernels of prompts differ by less.

    Raises:
        SystemExit: no op has such a kernel.
    """
    found: list[KernelChoice] = []
    for op in engine.kernel_ops(configuration, workload):
        if op.metric == "tg" and len(found) < SLOW_OPS:
            found += _slow_kernel(engine, op, int(configuration.settings["threads"]))
    if not found:
        raise SystemExit(f"no kernel of generation is {LEAST} to {MOST} times as slow as the default")
    return found


def _slow_kernel(engine: WorkerExecutor, op: KernelOp, threads: int) -> list[KernelChoice]:
    others = [dict(c) for c in op.candidates if dict(c) != dict(op.default)]
    asked = {
        "key": op.key, "m": op.m, "configs": [dict(op.default), *others], "threads": threads, "seconds": 0.01,
    }  # fmt: skip
    looks = [engine.time_ops(asked, OpContext(f"slow/{n}"), 60.0) for n in range(TIMINGS)]
    times = [[s for look in looks for s in look[i]] for i in range(1 + len(others))]
    chosen = as_slow(times, AS_SLOW)
    return [] if chosen is None else [KernelChoice(op.key, op.tokens, others[chosen - 1])]


def as_slow(times: Sequence[Sequence[float]], wanted: float) -> int | None:
    """The number of the kernel that comes nearest to `wanted` times the time of the first one; None if none
    is between LEAST and MOST times as slow."""
    if not times[0]:
        return None
    ratios = {n: min(t) / min(times[0]) for n, t in enumerate(times) if n and t}
    slower = {n: abs(r - wanted) for n, r in ratios.items() if LEAST <= r <= MOST}
    return min(slower, key=lambda n: slower[n]) if slower else None
