"""The two forms that objects and errors have on the way to a client."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse, Response

from dyno.server.errors import api_error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from dyno.server.errors import ApiError

__all__ = ["MESSAGES", "OPENAI", "MessagesWire", "Wire", "written"]

_log = logging.getLogger("dyno.server")


class Wire:
    """The public chat API: events without names, `[DONE]` at the end of a stream."""

    done = b"data: [DONE]\n\n"

    def event(self, data: dict[str, Any]) -> bytes:
        """One server-sent event."""
        return b"data: " + _json(data) + b"\n\n"

    def error(self, error: ApiError) -> dict[str, Any]:
        """The object that tells an error."""
        return error.body

    def response(self, error: ApiError) -> JSONResponse:
        """An error as the response of a request."""
        return JSONResponse(self.error(error), status_code=error.status, headers=error.headers)

    async def events(
        self, begin: Iterable[dict[str, Any]], rest: AsyncIterator[dict[str, Any]]
    ) -> AsyncIterator[bytes]:
        """The bytes of a stream; an error within it becomes its last event.

        Args:
            begin: Objects that are sent at once.
            rest: The following ones.
        """
        try:
            for each in begin:
                yield self.event(each)
            async for each in rest:
                yield self.event(each)
        except Exception as error:
            told = api_error(error)
            if told.status >= 500:
                _log.error("a stream ends with an error: %s", error, exc_info=told.status != 501)
            yield self.event(self.error(told))
            return
        if self.done:
            yield self.done


class MessagesWire(Wire):
    """The public messages API: each event has the name of its object's type."""

    done = b""

    def event(self, data: dict[str, Any]) -> bytes:
        return b"event: " + str(data["type"]).encode() + b"\ndata: " + _json(data) + b"\n\n"

    def error(self, error: ApiError) -> dict[str, Any]:
        kind = _KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": error.message}}


_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
OPENAI, MESSAGES = Wire(), MessagesWire()


def written(data: dict[str, Any]) -> Response:
    """A whole answer as a response.

    The entries of its lists are written one by one. All other threads wait while JSON is written, and an
    answer may have thousands of vectors or millions of log-probabilities.
    """
    fields = [_json(name) + b":" + _field(value) for name, value in data.items()]
    return Response(b"{" + b",".join(fields) + b"}", media_type="application/json")


def _field(value: Any) -> bytes:
    return b"[" + b",".join(map(_json, value)) + b"]" if isinstance(value, list) else _json(value)


def _json(data: Any) -> bytes:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()
