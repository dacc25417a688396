"""The end of a server: running requests get time to end, and no client can hold the process for longer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

import uvicorn

from dyno.errors import DynoError

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator
    from types import FrameType

    from dyno.scheduler import Scheduler

__all__ = ["EndingServer", "end_at_once"]

_LAST_WORDS_S = 2.0
"""Seconds in which clients can read that their request was ended."""
_LAST_TASKS_S = 1.0
"""Seconds in which the requests of aborted connections end."""

_log = logging.getLogger("dyno.server")


class EndingServer(uvicorn.Server):
    """A server that ends within a bound after SIGTERM or Ctrl-C, and at once after a further Ctrl-C.

    Args:
        config: Of uvicorn; its protocol is `Connection`.
        scheduler: Writes the texts; the server closes it if they take too long.
        drain_s: Seconds that running requests get.
    """

    def __init__(self, config: uvicorn.Config, scheduler: Scheduler, drain_s: float) -> None:
        super().__init__(config)
        self._scheduler, self._drain_s = scheduler, drain_s
        self._ended_by: int | None = None
        """The first signal that asked for the end."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if busy := self._busy:
            _tell(
                f"the server ends; {_requests(busy)} may take {self._drain_s:g} s more (--drain-timeout). "
                "Ctrl-C ends it at once"
            )
        rest = asyncio.create_task(self._end_the_rest())
        await super().shutdown(sockets)
        rest.cancel()
        if self.server_state.tasks:
            # The loop cancels them now, and uvicorn would log each as a failure.
            logging.getLogger("uvicorn.error").disabled = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and sig == signal.SIGINT:
            end_at_once(sig)
        self._ended_by = self._ended_by or sig
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {sig: signal.signal(sig, self.handle_exit) for sig in (signal.SIGTERM, signal.SIGINT)}
        yield
        signal.signal(signal.SIGTERM, before[signal.SIGTERM])
        if self._ended_by == signal.SIGINT:
            # The handler stays: Ctrl-C ends the process also while the engine closes.
            raise KeyboardInterrupt
        signal.signal(signal.SIGINT, before[signal.SIGINT])
        if self._ended_by is not None:
            signal.raise_signal(self._ended_by)

    @property
    def _busy(self) -> int:
        """The connections on which an answer is not complete or not sent."""
        connections: Any = self.server_state.connections
        return sum(connection.is_busy for connection in connections)

    async def _end_the_rest(self) -> None:
        """End requests that take too long: with an error at first, then with their connection."""
        await asyncio.sleep(self._drain_s)
        _tell(
            f"{_requests(self._busy)} did not end within {self._drain_s:g} s (--drain-timeout); the server "
            "ends without them"
        )
        # A step of the engine may take long, and the event loop sends the last words meanwhile.
        threading.Thread(target=self._close_scheduler, name="dyno-ending", daemon=True).start()
        await asyncio.sleep(_LAST_WORDS_S)
        connections: Any = list(self.server_state.connections)
        for connection in connections:
            connection.transport.abort()
        await asyncio.sleep(_LAST_TASKS_S)
        self.force_exit = True

    def _close_scheduler(self) -> None:
        try:
            self._scheduler.close()
        except DynoError as error:
            _log.error("the scheduler does not close: %s", error)


def end_at_once(sig: int) -> None:
    """End the process as a signal does that nobody handles."""
    with contextlib.suppress(OSError):  # nobody reads it
        os.write(sys.stderr.fileno(), b"ended at once; running requests were cut off\n")
    signal.signal(sig, signal.SIG_DFL)
    signal.raise_signal(sig)
    os._exit(128 + sig)  # the kernel spares the first process of a container


def _tell(line: str) -> None:
    """Print a line on stderr. Ctrl-C may have ended the program that reads it, as in `2>&1 | tee log`."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"
