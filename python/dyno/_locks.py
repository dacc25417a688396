"""Locks that know their thread.

The handler of a signal runs in the middle of a call of its own thread. If that call holds a lock, a handler
that waits for the lock waits for ever. So nothing waits for a lock of its own thread. While a thread holds
the lock of an engine, it waits for no other lock but the locks of log handlers: `Engine.close` waits for
computations and their warnings alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dyno.errors import PlanError

if TYPE_CHECKING:
    import threading

__all__ = ["for_one_call", "is_mine"]


def is_mine(lock: threading.RLock) -> bool:
    """Whether this thread holds a lock, so that it is a handler of a signal in the middle of a call."""
    return bool(lock._is_owned())  # type: ignore[attr-defined]  # as threading.Condition asks


def for_one_call(lock: threading.RLock, part: str, but: str = "") -> threading.RLock:
    """The lock itself, to be held with `with` during one call.

    Args:
        lock: The calls of `part` hold it one after the other.
        part: Begins the message.
        but: The use of it in the middle of a call that is allowed, as in "close() it".

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
