"""The application: routes, keys, limits and errors."""

from __future__ import annotations

import hmac
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from dyno.scheduler import Scheduler
from dyno.server.answers import Chat, Completions
from dyno.server.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from dyno.server.errors import ApiError, api_error, from_validation
from dyno.server.metrics import CONTENT_TYPE_LATEST, Metrics
from dyno.server.running import ClientGoneError, Threads, events, unless_gone

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from starlette.requests import Request
    from starlette.types import Send

    from dyno.chat import ChatTemplate
    from dyno.engine import Engine

__all__ = ["Options", "create_app"]

_log = logging.getLogger("dyno.server")
Body = TypeVar("Body", bound=BaseModel)
_OPEN = ("/health", "/ready")


@dataclass(frozen=True)
class Options:
    """The settings of a server."""

    model: str = "model"
    """The name of the model in responses."""
    api_key: str | None = None
    """Requests have to carry it as a bearer token; None: no key. /health and /ready need none."""
    max_waiting: int = 64
    """Requests that may wait for a sequence."""
    step_tokens: int | None = None
    """As of `Scheduler`."""
    max_body_bytes: int = 8 << 20
    template: ChatTemplate | None = None
    """The chat template; None takes the model's."""


class _Stream(StreamingResponse):
    """A stream whose text ends when the client goes."""

    async def stream_response(self, send: Send) -> None:
        try:
            await super().stream_response(send)
        finally:
            await self.body_iterator.aclose()  # type: ignore[attr-defined]


class _Server:
    """The endpoints over one engine."""

    def __init__(self, engine: Engine, options: Options) -> None:
        self._engine, self._options = engine, options
        sequences = int(engine.settings["sequences"])
        self.scheduler = Scheduler(engine, max_waiting=options.max_waiting, step_tokens=options.step_tokens)
        self.metrics = Metrics(self.scheduler)
        self._threads = Threads(2 * (sequences + options.max_waiting) + 8)

    # ---- texts ----

    async def chat(self, request: Request) -> Response:
        body = await self._body(request, ChatBody)
        chat = await self._threads.run(Chat, self._engine, body, self._options.template, self._options.model)
        if not body.stream:
            await unless_gone(request, self._threads.whole(list(chat.texts)))
            return JSONResponse(chat.whole())
        return await self._stream(request, chat.texts[0], chat.chunk, chat.last, chat.first())

    async def completions(self, request: Request) -> Response:
        body = await self._body(request, CompletionBody)
        run = await self._threads.run(Completions, self._engine, body, self._options.model)
        if not body.stream:
            found = await unless_gone(request, self._threads.whole(list(run.texts)))
            return JSONResponse(run.whole(found))
        return await self._stream(request, run.texts[0], run.chunk, run.last, None)

    async def _stream(
        self,
        request: Request,
        text: Any,
        chunk: Callable[[Any], dict[str, Any]],
        last: Callable[[], Iterator[dict[str, Any]]],
        first: dict[str, Any] | None,
    ) -> Response:
        pieces = self._threads.pieces(text)
        # The first piece is waited for: an error before it is a status, not an event.
        try:
            opening = await unless_gone(request, anext(pieces, None))
        except BaseException:
            text.cancel()
            raise

        async def rest() -> Any:
            if opening is not None and first is not None:
                yield chunk(opening)
            async for piece in pieces:
                yield chunk(piece)

        begin = first if first is not None else chunk("" if opening is None else opening)
        return _Stream(
            events(begin, rest(), last),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )

    # ---- the rest ----

    async def models(self, request: Request) -> Response:
        entry = {"id": self._options.model, "object": "model", "created": 0, "owned_by": "dyno"}
        return JSONResponse({"object": "list", "data": [entry]})

    async def tokenize(self, request: Request) -> Response:
        body = await self._body(request, TokenizeBody)
        tokens = await self._threads.run(
            self._engine.tokenize,
            body.content,
            add_special=body.add_special,
            parse_special=body.parse_special,
        )
        return JSONResponse({"tokens": tokens})

    async def detokenize(self, request: Request) -> Response:
        body = await self._body(request, DetokenizeBody)
        n_vocab = len(self._engine.tokenizer)
        wrong = next((token for token in body.tokens if not 0 <= token < n_vocab), None)
        if wrong is not None:
            raise ApiError(400, f"tokens: {wrong} is not one of 0 to {n_vocab - 1}", param="tokens")
        text = await self._threads.run(self._engine.detokenize, body.tokens, special=body.special)
        return JSONResponse({"content": text})

    async def props(self, request: Request) -> Response:
        from dyno import __version__

        engine = self._engine
        profile = engine.match.profile
        return JSONResponse(
            {
                "version": __version__,
                "model": self._options.model,
                "architecture": engine.model["architecture"],
                "device": engine.device,
                "profile": None if profile is None else profile.label,
                "settings": dict(engine.settings),
                "n_ctx_train": engine.model["n_ctx_train"],
                "n_vocab": engine.model["n_vocab"],
                **self.scheduler.load(),
            }
        )

    async def metric_text(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        failure = self.scheduler.failure
        if failure is not None:
            return JSONResponse(
                {"status": "failed", "reason": " ".join(str(failure).split())}, status_code=503
            )
        return JSONResponse({"status": "ready", **self.scheduler.load()})

    async def _body(self, request: Request, kind: type[Body]) -> Body:
        most = self._options.max_body_bytes
        data = bytearray()
        async for chunk in request.stream():
            data += chunk
            if len(data) > most:
                raise ApiError(413, f"the body has more than {most} bytes", code="body_too_large")
        try:
            return kind.model_validate_json(bytes(data))
        except ValidationError as error:
            raise from_validation(error) from error


def create_app(engine: Engine, options: Options | None = None) -> Starlette:
    """The application that serves an engine.

    Args:
        engine: Open, with as many `sequences` as texts are to be written at a time. It belongs to the
            application from now on: `app.state.scheduler` draws all its texts, until it is closed.
        options: The rest.
    """
    chosen = options or Options()
    server = _Server(engine, chosen)

    def endpoint(work: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def answered(request: Request) -> Response:
            begun = time.monotonic()
            response = await attempt(request)
            seconds = time.monotonic() - begun
            server.metrics.answered(request.url.path, response.status_code, seconds)
            return response

        async def attempt(request: Request) -> Response:
            try:
                _check_key(request, chosen.api_key)
                return await work(request)
            except ClientGoneError:
                return Response(status_code=499)  # nobody reads it; logs show it
            except Exception as error:
                told = api_error(error)
                if told.status >= 500:
                    _log.exception("%s %s fails", request.method, request.url.path)
                return told.response()

        return answered

    routes = [
        ("POST", "/v1/chat/completions", server.chat),
        ("POST", "/v1/completions", server.completions),
        ("GET", "/v1/models", server.models),
        ("POST", "/tokenize", server.tokenize),
        ("POST", "/detokenize", server.detokenize),
        ("GET", "/props", server.props),
        ("GET", "/metrics", server.metric_text),
        ("GET", "/health", server.health),
        ("GET", "/ready", server.ready),
    ]
    app = Starlette(
        routes=[Route(path, endpoint(work), methods=[method]) for method, path, work in routes],
        exception_handlers={404: _no_route, 405: _no_route},
    )
    app.state.scheduler = server.scheduler
    return app


def _check_key(request: Request, key: str | None) -> None:
    if key is None or request.url.path in _OPEN:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), key.encode()):
        raise ApiError(
            401,
            "give the server's key in the header: Authorization: Bearer KEY",
            kind="authentication_error",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


async def _no_route(request: Request, error: Any) -> Response:
    status = int(error.status_code)
    what = "has another method" if status == 405 else "is no path of this server"
    return ApiError(status, f"{request.method} {request.url.path} {what}", code="not_found").response()
