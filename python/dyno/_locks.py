"""Locks that refuse a second call in the same thread instead of a deadlock.

A signal handler interrupts a call of its own thread. If that call holds a lock and the handler waits for the
lock, it waits for ever. So no thread waits for a lock that it holds itself. A thread that holds the lock of
an engine waits for no other lock except the locks of log handlers, so `Engine.close` waits only for
computations and their warnings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dyno.errors import PlanError

if TYPE_CHECKING:
    import threading

__all__ = ["for_one_call", "is_mine"]


def is_mine(lock: threading.RLock) -> bool:
    """Whether this thread holds the lock, so that the caller is a signal handler that interrupted a call."""
    return bool(lock._is_owned())  # type: ignore[attr-defined]  # as threading.Condition asks


def for_one_call(lock: threading.RLock, part: str, but: str = "") -> threading.RLock:
    """The lock, to be held with `with` during one call.

    Args:
        lock: The lock that serialises the calls of `part`.
        part: Name of the object, for the message.
        but: The use that is allowed during another call, such as "close() it".

    Raises:
        PlanError: This thread holds the lock already.
    """
    if is_mine(lock):
        allowed = f", and can only {but}" if but else ""
        raise PlanError(
            f"[{part}] the handler of a signal runs in the middle of a call of this {part}{allowed}; use the "
            f"{part} when that call has returned"
        )
    return lock
