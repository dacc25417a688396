"""The two wire formats of objects and errors."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse, Response

from dyno.errors import ClosedError
from dyno.server.errors import api_error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator

    from starlette.requests import Request

    from dyno.server.errors import ApiError

__all__ = ["MESSAGES", "OPENAI", "MessagesWire", "Wire", "path_of", "wire_of", "written"]

_log = logging.getLogger("dyno.server")
_DEPTH = 5
"""Depth at which log-probabilities of single tokens are: below the answer, its choices, one choice and a list
of tokens."""
_SLICE = 256


class Wire:
    """The wire format of the public chat API: events without names, and `[DONE]` at the end of a stream."""

    done = b"data: [DONE]\n\n"

    def event(self, data: dict[str, Any], *, large: bool = False) -> bytes:
        """One server-sent event.

        Args:
            data: Object of the event.
            large: Whether to write it in pieces, as in `written`.
        """
        return b"data: " + (b"".join(_pieces(data)) if large else _json(data)) + b"\n\n"

    def error(self, error: ApiError) -> dict[str, Any]:
        """The object for an error."""
        return error.body

    def response(self, error: ApiError) -> JSONResponse:
        """The response for an error."""
        return JSONResponse(self.error(error), status_code=error.status, headers=error.headers)

    async def events(
        self, begin: Iterable[dict[str, Any]], rest: AsyncIterator[bytes]
    ) -> AsyncIterator[bytes]:
        """The bytes of a stream. An error within it becomes the last event.

        Args:
            begin: Objects to send at once.
            rest: The following events.
        """
        try:
            for each in begin:
                yield self.event(each)
            async for event in rest:
                yield event
        except Exception as error:
            told = api_error(error)
            if told.status >= 500 and not isinstance(error, ClosedError):
                _log.error("a stream ends with an error: %s", error, exc_info=told.status != 501)
            yield self.event(self.error(told))
            return
        if self.done:
            yield self.done


class MessagesWire(Wire):
    """The wire format of the public messages API: the name of an event is the type of its object."""

    done = b""

    def event(self, data: dict[str, Any], *, large: bool = False) -> bytes:
        return b"event: " + str(data["type"]).encode() + b"\n" + super().event(data, large=large)

    def error(self, error: ApiError) -> dict[str, Any]:
        kind = _KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": error.message}}


_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
OPENAI, MESSAGES = Wire(), MessagesWire()


def path_of(request: Request) -> str:
    """The path by which a request is routed.

    `request.url` is made from the header Host too, and older releases of Starlette read a path there.
    """
    return str(request.scope["path"])


def wire_of(request: Request) -> Wire:
    """The form of the answers to a request."""
    return MESSAGES if path_of(request).startswith("/v1/messages") else OPENAI


def written(data: dict[str, Any]) -> Response:
    """A response with a whole answer.

    The JSON is written in pieces, because all other threads wait meanwhile, and an answer may have thousands
    of vectors or millions of log-probabilities.
    """
    return Response(b"".join(_pieces(data)), media_type="application/json")


def _pieces(value: Any, depth: int = _DEPTH) -> Iterator[bytes]:
    """JSON in pieces: objects and lists of objects by entry down to a depth, other long lists in slices."""
    if depth and isinstance(value, dict):
        for index, (name, each) in enumerate(value.items()):
            yield (b"," if index else b"{") + _json(name) + b":"
            yield from _pieces(each, depth - 1)
        yield b"}" if value else b"{}"
    elif depth and isinstance(value, list) and any(isinstance(each, (dict, list)) for each in value[:2]):
        for index, each in enumerate(value):
            yield b"," if index else b"["
            yield from _pieces(each, depth - 1)
        yield b"]"
    elif isinstance(value, list) and len(value) > _SLICE:
        for at in range(0, len(value), _SLICE):
            yield (b"," if at else b"[") + _json(value[at : at + _SLICE])[1:-1]
        yield b"]"
    else:
        yield _json(value)


def _json(data: Any) -> bytes:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()
