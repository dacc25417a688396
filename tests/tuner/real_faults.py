"""Workers that really crash, hang and run out of memory, on a machine that may be busy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from dyno_tuner.core.protocol import Configuration, Measurement, Quality

Executor = TypeVar("Executor", bound=Any)

SOON, NEVER = 0.7, 600.0
"""Seconds until a worker is killed that hangs, and any other."""


def patient(executor: Executor) -> Executor:
    """`executor` of a surface like `faulty`: only a configuration that hangs there meets its deadline."""
    measurement, quality = executor.measurement, executor.quality

    def deadline(configuration: Configuration) -> float:
        return SOON if configuration.settings.get("cpu_isa") == "portable" else NEVER

    def measured(configuration: Configuration, *rest: Any) -> Measurement:
        found: Measurement = measurement(configuration, *rest[:-1], deadline(configuration))
        return found

    def checked(configuration: Configuration, *rest: Any) -> Quality:
        found: Quality = quality(configuration, *rest[:-1], deadline(configuration))
        return found

    executor.measurement, executor.quality = measured, checked
    return executor
