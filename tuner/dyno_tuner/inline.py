"""Carries operations out in this process: for targets that hold no engine (replay, simulated)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import TuneError
from .measure import VisitPolicy, run_visit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .target import Configuration, Description, KernelOp, OpContext, Quality, Target, Visit, Workload


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

    def kernel_ops(self, configuration: Configuration, workload: Workload) -> list[KernelOp]:
        return []

    def time_ops(self, request: Mapping[str, Any], context: OpContext, deadline: float) -> list[list[float]]:
        raise TuneError("this target has no ops to time")

    def close(self) -> None:
        self._target.close()
