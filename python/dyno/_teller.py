"""A thread that makes the callbacks of a scheduler while the engine computes."""

from __future__ import annotations

import logging
import queue
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Teller"]

_log = logging.getLogger("dyno.scheduler")


class Teller:
    """A thread that makes calls in the order in which they were given.

    A scheduler gives the tokens of a step to their readers, and numbers to counters. If it did so between two
    steps, the device would be idle meanwhile. So it collects these calls, and hands them over at the start of
    the next step. The thread makes them while the engine computes without the GIL.
    """

    def __init__(self) -> None:
        self._collected: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._handed: queue.SimpleQueue[list[tuple[Callable[..., None], tuple[Any, ...]]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name="dyno-teller", daemon=True)
        self._thread.start()

    def later(self, call: Callable[..., None], *arguments: Any) -> None:
        """Collect a call. Only one thread may collect."""
        self._collected.append((call, arguments))

    def tell_all(self) -> None:
        """Hand over the collected calls; returns at once."""
        if self._collected:
            self._handed.put(self._collected)
            self._collected = []

    def is_here(self) -> bool:
        """Whether this is the thread that makes the calls."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Make all calls, and end the thread."""
        self.tell_all()
        self._handed.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (calls := self._handed.get()) is not None:
            for call, arguments in calls:
                try:
                    call(*arguments)
                except Exception:
                    # An exception of one reader must not keep tokens from the others.
                    _log.exception("a call to a reader of the scheduler failed")
