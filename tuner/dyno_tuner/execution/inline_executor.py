"""An executor in this process, for targets without an engine (replay, simulated)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..measure.measurement import run_measurement

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..core.options import MeasurementPolicy
    from ..core.protocol import (
        Configuration,
        Description,
        KernelOp,
        Measurement,
        OpContext,
        Quality,
        Target,
        Value,
        Workload,
    )


class InlineExecutor:
    def __init__(self, target: Target) -> None:
        self._target = target

    def describe(self) -> Description:
        return self._target.describe()

    def measurement(
        self,
        configuration: Configuration,
        workload: Workload,
        metrics: Sequence[str],
        policy: MeasurementPolicy,
        context: OpContext,
        deadline: float,
    ) -> Measurement:
        return run_measurement(self._target, configuration, workload, metrics, policy, context)

    def quality(self, configuration: Configuration, context: OpContext, deadline: float) -> Quality:
        return self._target.quality(configuration, context)

    def routing(self, configuration: Configuration, workload: Workload, context: OpContext) -> dict[str, Any]:
        return dict(self._target.routing(configuration, workload))

    def memory(self, settings: Mapping[str, Value], where: str = "device") -> int | None:
        # Most targets have only one memory.
        asked = (settings,) if where == "device" else (settings, where)
        return None if (size := self._target.memory(*asked)) is None else int(size)

    def expected(self, settings: Mapping[str, Value], workload: Workload) -> dict[str, float] | None:
        return self._target.expected(settings, workload)

    def kernel_ops(self, configuration: Configuration, workload: Workload) -> list[KernelOp]:
        return list(self._target.kernel_ops(configuration, workload))

    def time_ops(self, request: Mapping[str, Any], context: OpContext, deadline: float) -> list[list[float]]:
        return self._target.time_ops(
            request["key"], request["m"], request["configs"], threads=request["threads"],
            seconds=request["seconds"], depth=request.get("depth", 0),
        )  # fmt: skip

    def watch(self, pci_bus_id: str | None) -> None:
        """The target runs on this machine."""

    def look_around(self, model: str, description: Description) -> None:
        """The target runs on this machine."""

    def abort(self) -> None:
        """Operations here are short, and cannot be ended from outside."""

    def close(self) -> None:
        self._target.close()
