"""The connections of a server, with limits that uvicorn leaves to a proxy in front of it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from dyno.server.errors import ApiError
from dyno.server.options import KEEP_ALIVE_S

if TYPE_CHECKING:
    import asyncio

__all__ = ["Connection"]

_MOST_HEAD = 1 << 16
"""Most bytes of the request line and the headers, as in h11. httptools itself keeps any number in memory."""
_HAS_BOUND = not hasattr(AutoHTTPProtocol, "on_headers_complete")
"""Whether the protocol of uvicorn has such a limit itself, like the one based on h11."""

_Protocol: Any = AutoHTTPProtocol


class Connection(_Protocol):  # type: ignore[misc]
    """A connection of uvicorn that a client can neither hold for ever nor fill with headers.

    It closes if a client sends no whole head of a request for `patience_s`, or does not make room in a full
    buffer of answers for as long. uvicorn's keep-alive closes it between requests.
    """

    patience_s: float = KEEP_ALIVE_S

    _unknown = 0
    """Bytes since the last event of the parser, which may all be one header."""
    _waiting: asyncio.TimerHandle | None = None
    """Runs from the connection's beginning, or the first byte behind a request, to the next whole head."""
    _stalled: asyncio.TimerHandle | None = None
    """Runs from a full buffer of answers until the client has read most of it (the transport's low mark)."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._waiting = self.loop.call_later(self.patience_s, transport.close)

    def data_received(self, data: bytes) -> None:
        if self._waiting is None and self._is_idle:
            self._waiting = self.loop.call_later(self.patience_s, self.transport.close)
        self._unknown += len(data)
        super().data_received(data)
        if not self._is_idle:
            self._waiting = _stop(self._waiting)
        if self._unknown > _MOST_HEAD and not _HAS_BOUND and not self.transport.is_closing():
            self._refuse()

    def connection_lost(self, exc: Exception | None) -> None:
        self._waiting, self._stalled = _stop(self._waiting), _stop(self._stalled)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        # Closing it would wait until the client has read the rest.
        self._stalled = self.loop.call_later(self.patience_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._stalled = _stop(self._stalled)
        super().resume_writing()

    @property
    def _is_idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def is_busy(self) -> bool:
        """Whether an answer is not complete, or its client has not read it."""
        return not self._is_idle or self.transport.get_write_buffer_size() > 0

    def _refuse(self) -> None:
        """End a connection with too large a head. The answer to an earlier request is cut off."""
        if self._is_idle:
            error = ApiError(
                431,
                f"the request line and the headers have more than {_MOST_HEAD} bytes",
                code="headers_too_large",
            )
            body = json.dumps(error.body).encode()
            self.transport.write(
                b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
                b"connection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
            )
        self.transport.close()

    # ---- callbacks of the parser httptools ----

    def on_headers_complete(self) -> None:
        self._unknown = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unknown = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unknown = 0
        super().on_message_complete()


def _stop(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """Cancel a timer, if there is one. Returns None, for the attribute of the timer."""
    if timer is not None:
        timer.cancel()
    return None
