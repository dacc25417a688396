"""The protocol of an executor: the recorder and the session see only this of workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .options import VisitPolicy
    from .protocol import Configuration, Description, KernelOp, OpContext, Quality, Value, Visit, Workload


class Executor(Protocol):
    """Carries operations out: in a worker process, or in this one for targets without state."""

    def describe(self) -> Description: ...

    def visit(
        self,
        configuration: Configuration,
        workload: Workload,
        metrics: Sequence[str],
        policy: VisitPolicy,
        context: OpContext,
        deadline: float,
    ) -> Visit:
        """Never raises for what settings can cause: a dead or hung worker is a status."""
        ...

    def quality(self, configuration: Configuration, context: OpContext, deadline: float) -> Quality: ...

    def kernel_ops(self, configuration: Configuration, workload: Workload) -> list[KernelOp]: ...

    def routing(self, configuration: Configuration, workload: Workload, context: OpContext) -> dict[str, Any]:
        """How the router spreads the workload's tokens over its experts; empty where there are none."""
        ...

    def memory(self, settings: Mapping[str, Value]) -> int | None:
        """Bytes that the engine's plan adds up to; None where it refuses the settings."""
        ...

    def time_ops(self, request: Mapping[str, Any], context: OpContext, deadline: float) -> list[list[float]]:
        """Seconds per launch of each of `request["configs"]`, in turn."""
        ...

    def abort(self) -> None:
        """From another thread: ends the operation that runs, as fast as that can be done."""
        ...

    def close(self) -> None: ...
