"""Carries operations out in this process: for targets that hold no engine (replay, simulated)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..core.errors import TuneError
from ..measure.measurement import run_visit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..core.options import VisitPolicy
    from ..core.protocol import (
        Configuration,
        Description,
        KernelOp,
        OpContext,
        Quality,
        Target,
        Value,
        Visit,
        Workload,
    )


class InlineExecutor:
    def __init__(self, target: Target) -> None:
        self._target = target

    def describe(self) -> Description:
        return self._target.describe()

    def visit(
        self,
        configuration: Configuration,
        workload: Workload,
        metrics: Sequence[str],
        policy: VisitPolicy,
        context: OpContext,
        deadline: float,
    ) -> Visit:
        return run_visit(self._target, configuration, workload, metrics, policy, context)

    def quality(self, configuration: Configuration, context: OpContext, deadline: float) -> Quality:
        return self._target.quality(configuration, context)

    def routing(self, configuration: Configuration, workload: Workload, context: OpContext) -> dict[str, Any]:
        counted = getattr(self._target, "routing", None)
        return dict(counted(configuration, workload)) if counted is not None else {}

    def memory(self, settings: Mapping[str, Value]) -> int | None:
        planned = getattr(self._target, "memory", None)
        if planned is None:
            raise TuneError("this target has no memory plan, so a limit cannot be kept")
        return None if (size := planned(settings)) is None else int(size)

    def kernel_ops(self, configuration: Configuration, workload: Workload) -> list[KernelOp]:
        listed = getattr(self._target, "kernel_ops", None)
        return list(listed(configuration, workload)) if listed is not None else []

    def time_ops(self, request: Mapping[str, Any], context: OpContext, deadline: float) -> list[list[float]]:
        timed = getattr(self._target, "time_ops", None)
        if timed is None:
            raise TuneError("this target has no ops to time")
        times: list[list[float]] = timed(
            request["key"], request["m"], request["configs"], threads=request["threads"],
            seconds=request["seconds"],
        )  # fmt: skip
        return times

    def abort(self) -> None:
        """Nothing here takes long, or could be ended from outside."""

    def close(self) -> None:
        self._target.close()
