"""The web application: routes, API keys and errors."""

from __future__ import annotations

import hmac
import logging
import time
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Route

from dyno._shell import escaped
from dyno.errors import ClosedError, NotInstalledError
from dyno.server import page
from dyno.server.endpoints import Endpoints
from dyno.server.errors import ApiError, api_error
from dyno.server.fields import IGNORED_FIELDS
from dyno.server.hosts import HostCheck
from dyno.server.options import Options
from dyno.server.running import ClientGoneError
from dyno.server.wire import path_of, wire_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from starlette.requests import Request

    from dyno.engine import Engine

__all__ = ["Options", "create_app"]

_log = logging.getLogger("dyno.server")
_OPEN = ("/health", "/ready")
_PROMPTS = {"/v1/completions": "prompt", "/v1/embeddings": "input", "/tokenize": "content"}
"""The field that becomes the prompt by path, if its name is not `messages`."""
_CLIENT_GONE = 499
"""Status for a client that has gone. Only logs and metrics show it."""


def create_app(engine: Engine, options: Options | None = None) -> Starlette:
    """Make the application that serves an engine.

    Args:
        engine: Open, with as many `sequences` as texts are to be written at a time. It belongs to the
            application from now on: `app.state.scheduler` draws all its texts, until it is closed.
        options: The other settings of the server.

    Raises:
        ModelError, UnsupportedError: The model has no vocabulary, or an unknown one.
    """
    chosen = options or Options()
    _ = engine.tokenizer  # all requests need it
    server = Endpoints(engine, chosen)

    def endpoint(
        path: str, work: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def answered(request: Request) -> Response:
            begun = time.monotonic()
            response = await attempt(request)
            if ignored := getattr(request.state, "ignored_fields", None):
                response.headers[IGNORED_FIELDS] = ", ".join(ignored)
            seconds = time.monotonic() - begun
            server.metrics.answered(path.replace(":path}", "}"), response.status_code, seconds)
            return response

        async def attempt(request: Request) -> Response:
            try:
                _check_key(request, chosen.api_key)
                _check_origin(request, chosen)
                return await work(request)
            except (ClientGoneError, ClientDisconnect):
                return Response(status_code=_CLIENT_GONE)
            except Exception as error:
                given: frozenset[str] = getattr(request.state, "given_fields", frozenset())
                told = api_error(error, _PROMPTS.get(path_of(request), "messages"), given)
                if told.status >= 500 and not isinstance(error, (ApiError, ClosedError)):
                    # The message about a missing library is sufficient, without a traceback.
                    trace = not isinstance(error, NotInstalledError)
                    _log.error(
                        "%s %s fails: %s", request.method, escaped(path_of(request)), error, exc_info=trace
                    )
                return wire_of(request).response(told)

        return answered

    routes = [
        ("POST", "/v1/chat/completions", server.chat),
        ("POST", "/v1/completions", server.completions),
        ("POST", "/v1/embeddings", server.embeddings),
        ("POST", "/v1/messages", server.messages),
        ("POST", "/v1/messages/count_tokens", server.count_tokens),
        ("GET", "/v1/models", server.models),
        ("GET", "/v1/models/{name:path}", server.model),
        ("POST", "/tokenize", server.tokenize),
        ("POST", "/detokenize", server.detokenize),
        ("GET", "/tokenizer_info", server.tokenizer_info),
        ("GET", "/openapi.json", server.openapi),
        ("GET", "/props", server.props),
        ("GET", "/metrics", server.metric_text),
        ("GET", "/health", server.health),
        ("GET", "/ready", server.ready),
    ]
    app = Starlette(
        routes=[
            *(Route(path, endpoint(path, work), methods=[method]) for method, path, work in routes),
            *page.routes(),
        ],
        exception_handlers={404: _no_route, 405: _no_route},
        middleware=[*_hosts(chosen), *_cors(chosen.cors_origins)],
    )
    app.state.scheduler = server.scheduler
    return app


def _hosts(options: Options) -> list[Middleware]:
    """The check of the name by which a request addresses a server without a key."""
    if options.api_key is not None or options.listens is None:
        return []
    return [Middleware(HostCheck, listens=options.listens, names=options.allowed_hosts)]


def _cors(origins: Sequence[str]) -> list[Middleware]:
    """The headers with which a browser allows requests from pages of other origins."""
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[IGNORED_FIELDS, "Retry-After"],
        )
    ]


def _check_key(request: Request, key: str | None) -> None:
    if key is None or path_of(request) in _OPEN:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        given = request.headers.get("x-api-key", "")
    # Headers are decoded as Latin-1, so the bytes of the key are compared.
    if not hmac.compare_digest(given.strip(" \t").encode("latin-1"), key.encode()):
        raise ApiError(
            401,
            "the API key is missing or wrong; send it in the header Authorization: Bearer KEY",
            kind="authentication_error",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def _check_origin(request: Request, options: Options) -> None:
    """Raises ApiError if a page of another origin asks, and nothing but the browser's question lets it.

    A browser asks before it sends JSON with its content type, or a key. It sends any text without a question,
    so a page could use a server without a key, though not read the answer.
    """
    if options.api_key is not None or request.method != "POST" or "*" in options.cors_origins:
        return
    origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site")
    if origin is None and site is None:
        return  # not a browser
    if site is None and origin is not None:  # an older browser, or an address without TLS
        of_own = origin.partition("://")[2].lower() == request.headers.get("host", "").lower()
    else:
        of_own = site in ("same-origin", "none")
    if not of_own and (origin or "").lower() not in options.cors_origins:
        raise ApiError(
            403,
            f"a web page of {origin or 'another origin'} sent this request; to let it use the server, start "
            "the server with --cors-origin ORIGIN",
            kind="permission_error",
            code="origin_not_allowed",
        )


# By a path of another server, or of an API without its prefix: the equivalent path of this server.
_ELSEWHERE = {
    "/completion": "/v1/completions",
    "/completions": "/v1/completions",
    "/chat/completions": "/v1/chat/completions",
    "/embedding": "/v1/embeddings",
    "/embeddings": "/v1/embeddings",
    "/models": "/v1/models",
    "/messages": "/v1/messages",
    "/v1": "/v1/models",
    "/v1/health": "/health",
    "/slots": "/metrics",
    "/v1/responses": "/v1/chat/completions",
    "/api/chat": "/v1/chat/completions",
    "/api/embed": "/v1/embeddings",
    "/api/embeddings": "/v1/embeddings",
    "/api/generate": "/v1/completions",
    "/api/tags": "/v1/models",
    "/api/version": "/props",
    "/generate": "/v1/completions",
}


async def _no_route(request: Request, error: Any) -> Response:
    headers = dict(error.headers or {})
    if error.status_code == 405:
        allowed = ", ".join(sorted(name.strip() for name in headers["Allow"].split(",")))
        headers["Allow"] = allowed
        message = f"{request.method} is not allowed on {path_of(request)} (allowed: {allowed})"
        told = ApiError(405, message, code="method_not_allowed", headers=headers)
    else:
        path = path_of(request)
        other = _ELSEWHERE.get(path.rstrip("/"))
        hint = "" if other is None else f"; use {other}"
        told = ApiError(404, f"{path} is not a path of this server{hint}", code="not_found")
    return wire_of(request).response(told)
