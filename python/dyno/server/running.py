"""Texts of the engine, which are written in threads, for requests, which are not."""

from __future__ import annotations

import functools
import json
import logging
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import anyio
import anyio.to_thread

from dyno.server.errors import api_error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from starlette.requests import Request

__all__ = ["ClientGoneError", "Threads", "Writing", "events", "unless_gone"]

_log = logging.getLogger("dyno.server")
T = TypeVar("T")
Piece_co = TypeVar("Piece_co", covariant=True)


class Writing(Protocol[Piece_co]):
    """A text that is being written: `chat.Reply` or `TextRun`."""

    def __next__(self) -> Piece_co:
        """The next piece; waits for it."""
        ...

    def cancel(self) -> None:
        """End the text, from any thread."""
        ...


class Threads:
    """As many threads as requests may be in work, so that none waits for another's."""

    def __init__(self, count: int) -> None:
        self._limiter = anyio.CapacityLimiter(count)

    async def run(self, work: Callable[..., T], *args: Any, **options: Any) -> T:
        """The result of `work`, which runs in a thread. If the caller is cancelled, the thread goes on."""
        call = functools.partial(work, *args, **options)
        return await anyio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=self._limiter)

    async def pieces(self, text: Writing[T]) -> AsyncIterator[T]:
        """The pieces of a text. If the caller is cancelled, the text ends."""
        missing = object()
        try:
            while (piece := await self.run(_next, text, missing)) is not missing:
                yield piece
        finally:
            text.cancel()

    async def whole(self, texts: list[Writing[T]]) -> list[list[T]]:
        """All pieces of each text; the texts are written together."""
        found: list[list[T]] = [[] for _ in texts]
        failed: list[Exception] = []

        async def read(number: int) -> None:
            try:
                found[number] = [piece async for piece in self.pieces(texts[number])]
            except Exception as error:  # raised below: a task group would wrap it
                failed.append(error)
                readers.cancel_scope.cancel()

        async with anyio.create_task_group() as readers:
            for number in range(len(texts)):
                readers.start_soon(read, number)
        if failed:
            raise failed[0]
        return found


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled if the client goes; the body of the request has been read.

    Raises:
        ClientGoneError: The client has gone.
    """
    result: list[T] = []
    failed: list[Exception] = []

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        try:
            result.append(await work)
        except Exception as error:  # raised below: a task group would wrap it
            failed.append(error)
        tasks.cancel_scope.cancel()
    if failed:
        raise failed[0]
    if not result:
        raise ClientGoneError
    return result[0]


def _next(text: Any, missing: Any) -> Any:
    # StopIteration cannot leave a thread.
    return next(text, missing)


async def events(
    first: dict[str, Any], rest: AsyncIterator[dict[str, Any]], last: Callable[[], Iterator[dict[str, Any]]]
) -> AsyncIterator[bytes]:
    """Server-sent events of a stream; an error within it becomes its last event.

    Args:
        first: Sent at once.
        rest: The following ones.
        last: Makes those after them, when the text has ended.
    """
    yield event(first)
    try:
        async for each in rest:
            yield event(each)
        for each in last():
            yield event(each)
    except Exception as error:
        told = api_error(error)
        if told.status >= 500:
            _log.exception("a stream ends with an error")
        yield event(told.body)
        return
    yield b"data: [DONE]\n\n"


def event(data: dict[str, Any]) -> bytes:
    """One event."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
