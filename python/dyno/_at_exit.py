"""The end of the interpreter: nothing computes any longer when the memory of the process goes."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dyno._open_model import OpenModel

__all__ = ["stop_at_exit"]

_LONGEST_S = 60.0
"""Seconds that one call of a daemon thread is waited for."""
_engines: weakref.WeakSet[OpenModel] = weakref.WeakSet()
_adding = threading.RLock()


def stop_at_exit(engine: OpenModel) -> None:
    """Let no thread compute with an engine after the end of the interpreter has begun.

    A thread that calls this later waits until the process has ended.
    """
    with _adding:
        _engines.add(engine)


@atexit.register
def _stop_all() -> None:
    """Wait until the call of a daemon thread has ended, then keep the lock that the next call needs.

    A daemon thread may belong to the program or to a scheduler. Closing the engine would give it an error,
    which it would print.
    """
    _adding.acquire(timeout=_LONGEST_S)
    for engine in list(_engines):
        # In a forked child, a thread that does not exist here may hold the lock.
        if engine._process == os.getpid():
            engine._own_lock.acquire(timeout=_LONGEST_S)


def _renew_lock() -> None:
    """In a forked child: a thread that held the lock is not here to release it."""
    global _adding
    _adding = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)
