"""The exceptions of dyno. The compiled engine raises the same classes. Messages contain the wrong values."""

from __future__ import annotations

__all__ = [
    "ChatError",
    "ClosedError",
    "ContextLengthError",
    "DeviceError",
    "DeviceLostError",
    "DynoError",
    "GgufError",
    "ModelError",
    "NotInstalledError",
    "OutOfMemoryError",
    "PlanError",
    "ProfileError",
    "QueueFullError",
    "StepError",
    "UnsupportedError",
]


class DynoError(Exception):
    """Base class of all errors that dyno raises deliberately."""


class GgufError(DynoError):
    """A GGUF file is not valid. The message names the field, its value and the byte offset."""


class ModelError(DynoError):
    """A valid file does not describe a model that the engine can build."""


class ProfileError(DynoError):
    """A profile cannot be read, or names settings that do not exist."""


class PlanError(DynoError):
    """A request or setting is not possible: memory budget, context length, batch, or a wrong value."""


class ContextLengthError(PlanError):
    """A prompt is longer than the context."""


class ClosedError(PlanError):
    """An engine or a scheduler is closed and cannot be used any more."""


class QueueFullError(DynoError):
    """The queue of waiting generations is full. The same request may succeed later.

    Args:
        message: The message, with the numbers.
        retry_after_s: Seconds after which a place in the queue is probably free.
    """

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message, retry_after_s)
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return str(self.args[0])


class StepError(DynoError):
    """A step of a scheduler failed, and with it all running and waiting requests. No request caused the
    error."""


class UnsupportedError(DynoError):
    """A valid request that no kernel or device here supports."""


class NotInstalledError(DynoError, ImportError):
    """An optional library is not installed. The message says how to install it."""


class ChatError(DynoError):
    """A conversation cannot become a prompt: its template is missing, wrong, refuses the messages or exceeds
    a limit."""


class DeviceError(DynoError):
    """A device failed or does not answer."""


class DeviceLostError(DeviceError):
    """This process has lost a GPU by an earlier error, such as an illegal address, a failed launch or an
    uncorrectable memory error. CUDA then refuses all calls until the process ends.

    From then on, all calls on that GPU raise this error with the first error in the message. Engines can
    still be closed, and the CPU still works.
    """


class OutOfMemoryError(DynoError):
    """Memory on the host or a device is exhausted."""
