"""The endpoints of a server, which turn requests into responses."""

from __future__ import annotations

import asyncio
import functools
import time
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from pydantic import ValidationError
from starlette.responses import JSONResponse, Response, StreamingResponse

from dyno.errors import ChatError, DeviceLostError
from dyno.scheduler import Scheduler
from dyno.server.answers import Chat, Completions, joined
from dyno.server.bodies import ChatBody, CompletionBody, DetokenizeBody, EmbeddingBody, Known, TokenizeBody
from dyno.server.embeddings import Embeddings
from dyno.server.errors import ApiError, from_validation
from dyno.server.fields import Fields
from dyno.server.messages import Messages, count_tokens
from dyno.server.messages_body import CountBody, MessagesBody
from dyno.server.metrics import CONTENT_TYPE_LATEST, Metrics
from dyno.server.openapi import document_bytes
from dyno.server.running import Bell, Deadline, Pieces, Threads, unless_gone
from dyno.server.wire import MESSAGES, OPENAI, path_of, written

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from dyno.engine import Engine
    from dyno.server.bodies import RequestBody
    from dyno.server.options import Options
    from dyno.server.running import Writing
    from dyno.server.wire import Wire

__all__ = ["Endpoints"]

Body = TypeVar("Body", bound=Known)
_OPENERS = 16
"""Number of threads in which texts begin. More would only need memory."""
_RENDERERS = 4
"""Number of threads in which conversations become prompts. They wait for the one process that renders."""
_COMPILERS = 4
"""Number of threads in which texts with rules begin, because compiling a schema or grammar may take
seconds."""
_LARGE = 1 << 18
"""Bytes of a body from which on it is checked outside of the event loop."""


class _Answer(Protocol):
    """The protocol of an answer: its texts, and their objects in one API."""

    @property
    def texts(self) -> Sequence[Writing[Any]]: ...

    @property
    def scores_prompts(self) -> bool: ...

    def whole(self, pieces: Sequence[Sequence[Any]]) -> dict[str, Any]: ...

    def first(self) -> Iterator[dict[str, Any]]: ...

    def chunk(self, index: int, piece: Any) -> Iterator[dict[str, Any]]: ...

    def last(self) -> Iterator[dict[str, Any]]: ...


class _Stream(StreamingResponse):
    """A streaming response whose texts end when the client goes."""

    def __init__(self, events: AsyncIterator[bytes], pieces: Pieces[Any]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._pieces.cancel()


class Endpoints:
    """The endpoints of one engine.

    Args:
        engine: Open; see `create_app`.
        options: Settings of the server.
    """

    def __init__(self, engine: Engine, options: Options) -> None:
        self._engine, self._options = engine, options
        self._sequences = int(engine.settings["sequences"])
        self._begun = int(time.time())
        self.metrics = Metrics(engine, options.model)
        self.scheduler = Scheduler(
            engine,
            max_waiting=options.max_waiting,
            step_tokens=options.step_tokens,
            speculation=options.speculation,
            events=self.metrics,
        )
        self.metrics.watch(self.scheduler)
        # Texts, and answers to short requests, begin in these threads, which are free again after that.
        self._threads = Threads(_OPENERS)
        # Separate threads, so that texts without a template do not wait for long conversations.
        self._renderers = Threads(_RENDERERS)
        # Separate threads, so that texts without rules do not wait for compilations.
        self._compilers = Threads(_COMPILERS)
        # A request for vectors uses its thread until the end.
        self._embedders = Threads(self._sequences + options.max_waiting + 8)
        self._bell = Bell()
        self._fields = Fields(strict=options.strict_fields)

    # ---- texts ----

    async def chat(self, request: Request) -> Response:
        body = await self._body(request, ChatBody)
        make = (Chat, self._engine, body, self._options.template, self._options.model)
        return await self._answer(request, body, body.stream, make, OPENAI, self._renderers)

    async def completions(self, request: Request) -> Response:
        body = await self._body(request, CompletionBody)
        make = (Completions, self._engine, body, self._options.model)
        return await self._answer(request, body, body.stream, make, OPENAI, self._threads)

    async def messages(self, request: Request) -> Response:
        body = await self._body(request, MessagesBody)
        make = (Messages, self._engine, body, self._options.template, self._options.model)
        return await self._answer(request, body, body.stream, make, MESSAGES, self._renderers)

    async def embeddings(self, request: Request) -> Response:
        body = await self._body(request, EmbeddingBody)
        work = Embeddings(self._engine, body, self._options.model)
        try:
            computed = self._deadline(body).hold(self._embedders.run(lambda: written(work.whole())))
            return await unless_gone(request, computed)
        finally:
            work.cancel()

    async def count_tokens(self, request: Request) -> Response:
        body = await self._body(request, CountBody)
        counted = self._renderers.run(count_tokens, self._engine, body, self._options.template)
        return JSONResponse(await self._deadline(body).hold(counted))

    async def _answer(
        self,
        request: Request,
        body: RequestBody,
        stream: bool,
        make: tuple[Any, ...],
        wire: Wire,
        makers: Threads,
    ) -> Response:
        deadline = self._deadline(body)
        answer: _Answer = await deadline.hold(makers.run(*make))
        # One request must not fill the queue, so its texts share as many places as there are sequences.
        ruled = any(text.has_rules for text in answer.texts)
        threads = self._compilers if ruled else self._threads
        pieces = Pieces(threads, self._bell, answer.texts, self._sequences, deadline)
        if not stream:
            found = await unless_gone(request, pieces.whole())
            return await self._threads.run(lambda: written(answer.whole(found)))
        # Wait for the first piece, so that an error before it gives a status instead of an event.
        opening = await unless_gone(request, pieces.come())

        async def rest() -> AsyncIterator[bytes]:
            for one in await self._events(answer, opening, wire):
                yield one
            async for group in pieces.groups():
                for one in await self._events(answer, group, wire):
                    yield one
            for last in answer.last():
                yield wire.event(last)

        return _Stream(wire.events(answer.first(), rest()), pieces)

    async def _events(self, answer: _Answer, pieces: Sequence[tuple[int, Any]], wire: Wire) -> list[bytes]:
        """The events for pieces that came together."""
        large = answer.scores_prompts

        def made() -> list[bytes]:
            objects = (one for each in joined(pieces) for one in answer.chunk(*each))
            return [wire.event(one, large=large) for one in objects]

        # The tokens of a whole prompt may take seconds, so they need a thread. For a single token, a thread
        # would take longer.
        return await self._threads.run(made) if large else made()

    def _deadline(self, body: RequestBody) -> Deadline:
        given = [each for each in (self._options.timeout_s, body.timeout) if each is not None]
        return Deadline(min(given, default=None))

    # ---- the rest ----

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._entry()]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._options.model:
            raise ApiError(
                404,
                f"the server has no model {name!r:.80}; it serves {self._options.model!r}",
                param="model",
                code="model_not_found",
            )
        return JSONResponse(self._entry())

    def _entry(self) -> dict[str, Any]:
        """The model as an entry of the public API, with the context length as in vLLM."""
        entry = {"id": self._options.model, "object": "model", "created": self._begun, "owned_by": "dyno"}
        return {**entry, "max_model_len": int(self._engine.settings["ctx"])}

    async def tokenize(self, request: Request) -> Response:
        body = await self._body(request, TokenizeBody)
        tokens = await self._threads.run(
            self._engine.tokenize,
            body.content,
            add_special=body.add_special,
            parse_special=body.parse_special,
        )
        if body.with_pieces:
            named = ({"id": token, "piece": self._piece(token)} for token in tokens)
            return await self._threads.run(lambda: written({"tokens": list(named)}))
        return JSONResponse({"tokens": tokens})

    def _piece(self, token: int) -> str | list[int]:
        piece = self._engine.tokenizer.piece(token, special=True)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return list(piece)

    async def detokenize(self, request: Request) -> Response:
        body = await self._body(request, DetokenizeBody)
        n_vocab = len(self._engine.tokenizer)
        wrong = next((token for token in body.tokens if not 0 <= token < n_vocab), None)
        if wrong is not None:
            raise ApiError(
                400,
                f"tokens: {wrong} is not one of 0 to {n_vocab - 1}",
                param="tokens",
                code="invalid_value",
            )
        text = await self._threads.run(self._engine.detokenize, body.tokens, special=body.special)
        return JSONResponse({"content": text, "prompt": text})

    async def tokenizer_info(self, request: Request) -> Response:
        vocabulary = self._engine.tokenizer.vocabulary
        ids = {"bos_token": vocabulary.bos, "eos_token": vocabulary.eos, "unk_token": vocabulary.unknown}
        try:
            template = (self._options.template or self._engine.chat_template()).text
        except ChatError:
            template = None
        return JSONResponse(
            {
                **{name: None if id is None else vocabulary.tokens[id] for name, id in ids.items()},
                "add_bos_token": vocabulary.add_bos,
                "add_eos_token": vocabulary.add_eos,
                "chat_template": template,
                "model_max_length": int(self._engine.settings["ctx"]),
            }
        )

    async def openapi(self, request: Request) -> Response:
        written_once = document_bytes(needs_key=self._options.api_key is not None)
        return Response(written_once, media_type="application/json")

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
        if isinstance(self.scheduler.failure, DeviceLostError):
            reason = "the engine has lost its GPU; restart the server"
            return JSONResponse({"status": "failed", "reason": reason}, status_code=503)
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        failure = self.scheduler.failure
        # Without requests, no step would succeed, so a failure only counts for a while.
        young = time.monotonic() - self.scheduler.failed_at < self.scheduler.failing_s
        if failure is not None and (young or isinstance(failure, DeviceLostError)):
            # Without the text of the failure, because this path needs no key, and the text may contain a file
            # path.
            reason = f"the last step of the engine failed: {type(failure).__name__}"
            return JSONResponse({"status": "failed", "reason": reason}, status_code=503)
        return JSONResponse({"status": "ready", **self.scheduler.load()})

    async def _body(self, request: Request, kind: type[Body]) -> Body:
        data = await self._data(request)
        judge = functools.partial(self._judged, path_of(request), kind, data)
        # For a long list of objects, this takes a second.
        judged = await self._threads.run(judge) if len(data) > _LARGE else judge()
        body, request.state.ignored_fields = judged
        request.state.given_fields = frozenset(body.model_fields_set)  # for errors
        return body

    def _judged(self, path: str, kind: type[Body], data: bytes) -> tuple[Body, list[str]]:
        """A checked body, and the names of its unknown fields."""
        try:
            body = kind.model_validate_json(data)
        except ValidationError as error:
            raise from_validation(error) from error
        return body, self._fields.ignored(path, body)

    async def _data(self, request: Request) -> bytes:
        """Read the bytes of a body.

        Raises:
            ApiError: There are too many, or they arrive too slowly.
        """
        most, seconds = self._options.max_body_bytes, self._options.body_timeout_s
        if int(request.headers.get("content-length", "0")) > most:  # before the client sends all of it
            raise _too_large(most)
        data = bytearray()
        try:
            async with asyncio.timeout(seconds):
                async for chunk in request.stream():
                    data += chunk
                    if len(data) > most:
                        raise _too_large(most)
        except TimeoutError as error:
            raise ApiError(
                408,
                f"{len(data)} bytes of the body arrived within {seconds:g} s, but not its end; send it "
                "faster, or start the server with a longer --body-timeout",
                kind="timeout_error",
                code="body_timeout",
                headers={"Connection": "close"},
            ) from error
        return bytes(data)


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body has more than {most} bytes", code="body_too_large")
