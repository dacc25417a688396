"""The protocol of an executor, through which the recorder and the session use workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    from .options import MeasurementPolicy
    from .protocol import (
        Configuration,
        Description,
        KernelOp,
        Measurement,
        OpContext,
        Quality,
        Value,
        Workload,
    )


class Executor(Protocol):
    """An executor of operations, in a worker process, or in this process for targets without state."""

    def describe(self) -> Description: ...

    def measurement(
        self,
        configuration: Configuration,
        workload: Workload,
        metrics: Sequence[str],
        policy: MeasurementPolicy,
        context: OpContext,
        deadline: float,
    ) -> Measurement:
        """Measure a configuration. It never raises for errors that settings can cause: a dead or hung worker
        is a status."""
        ...

    def quality(self, configuration: Configuration, context: OpContext, deadline: float) -> Quality: ...

    def kernel_ops(self, configuration: Configuration, workload: Workload) -> list[KernelOp]: ...

    def routing(self, configuration: Configuration, workload: Workload, context: OpContext) -> dict[str, Any]:
        """The distribution of the workload's tokens over experts; empty if there are no experts."""
        ...

    def memory(self, settings: Mapping[str, Value], where: str = "device") -> int | None:
        """Bytes that the plan needs on the device, or with `host` on the CPU; None if the engine refuses the
        settings."""
        ...

    def expected(self, settings: Mapping[str, Value], workload: Workload) -> dict[str, float] | None:
        """Seconds by metric that the engine's cost model expects; None if it has none."""
        ...

    def time_ops(self, request: Mapping[str, Any], context: OpContext, deadline: float) -> list[list[float]]:
        """Seconds per launch of each of `request["configs"]`, in turn."""
        ...

    def watch(self, pci_bus_id: str | None) -> AbstractContextManager[Any] | None:
        """A monitor of the measuring machine; None: it is this machine."""
        ...

    def look_around(self, model: str, description: Description) -> Any | None:
        """The environment of a tune on the measuring machine; None: it is this machine."""
        ...

    def abort(self) -> None:
        """End the running operation as fast as possible, from another thread."""
        ...

    def close(self) -> None: ...
