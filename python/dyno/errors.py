"""The exceptions of dyno. The compiled engine raises the same classes; messages carry the values at fault."""

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
    """Base of every error that dyno raises on purpose."""


class GgufError(DynoError):
    """A GGUF file is not what it claims to be; the message names the field, its value and the byte offset."""


class ModelError(DynoError):
    """A well-formed file that describes no model the engine can build."""


class ProfileError(DynoError):
    """A profile cannot be read, or names settings that do not exist."""


class PlanError(DynoError):
    """The request does not fit: memory budget, context length, batch."""


class ContextLengthError(PlanError):
    """A prompt is longer than the context."""


class ClosedError(PlanError):
    """An engine or a scheduler was closed, and can do no more."""


class QueueFullError(DynoError):
    """The queue is full: as many generations wait as may. The same request may succeed later.

    Args:
        message: With the numbers.
        retry_after_s: Seconds after which a place is likely to be free.
    """

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message, retry_after_s)
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return str(self.args[0])


class StepError(DynoError):
    """A step of a scheduler failed, and with it all requests that ran or waited. None of them is at fault."""


class UnsupportedError(DynoError):
    """Legal, but no kernel or device here can do it."""


class NotInstalledError(DynoError, ImportError):
    """A library that only some requests need is not installed; the message says how to install it."""


class ChatError(DynoError):
    """A conversation becomes no prompt: its template is missing or wrong, refuses it or exceeds a limit."""


class DeviceError(DynoError):
    """A device failed or does not answer."""


class DeviceLostError(DeviceError):
    """An earlier error has cost this process a GPU: an illegal address, a failed launch, an uncorrectable
    memory error and the like, after which CUDA refuses every call until the process ends.

    Every call on that GPU raises it from then on, with the first error in its message; engines can still be
    closed, and the CPU works on.
    """


class OutOfMemoryError(DynoError):
    """Memory on the host or a device is exhausted."""
