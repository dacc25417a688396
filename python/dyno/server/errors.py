"""Errors in the form of the public API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dyno.errors import (
    ChatError,
    ClosedError,
    ContextLengthError,
    NotInstalledError,
    PlanError,
    QueueFullError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from pydantic import ValidationError

__all__ = ["ApiError", "api_error", "from_validation"]


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.headers, self.message = status, headers or {}, message
        self.body: dict[str, Any] = {
            "error": {"message": message, "type": kind, "param": param, "code": code}
        }


def from_validation(error: ValidationError) -> ApiError:
    """The first field of a body that is wrong."""
    first = error.errors(include_url=False, include_context=False)[0]
    param = ".".join(map(str, first["loc"])) or None
    given = f", not {first['input']!r:.80}" if param and first["type"] != "missing" else ""
    words = str(first["msg"]).removeprefix("Value error, ")  # which pydantic puts before words of our own
    message = f"{param}: {words}{given}" if param else words
    return ApiError(400, message, param=param, code="invalid_value")


def api_error(error: BaseException) -> ApiError:
    """The error that a client gets for an exception."""
    if isinstance(error, ApiError):
        return error
    text = " ".join(str(error).split())
    if isinstance(error, QueueFullError):
        wait = {"Retry-After": str(error.retry_after_s)}
        return ApiError(429, text, kind="rate_limit_error", code="queue_full", headers=wait)
    if isinstance(error, ContextLengthError):
        return ApiError(400, text, code="context_length_exceeded", param="messages")
    if isinstance(error, ClosedError):
        return ApiError(503, "the server shuts down", kind="server_error", code="shutting_down")
    if isinstance(error, NotInstalledError):
        return ApiError(501, text, kind="server_error", code="not_installed")
    if isinstance(error, (PlanError, ChatError, UnsupportedError)):
        return ApiError(400, text, code="invalid_value")
    # Without the error's own text, which may hold a path.
    return ApiError(500, f"{type(error).__name__}; the server's log has more", kind="server_error")
