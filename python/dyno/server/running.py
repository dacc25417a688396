"""Texts of the engine, which are written in threads, for requests, which are not."""

from __future__ import annotations

import asyncio
import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import anyio

from dyno.server.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence

    from starlette.requests import Request

__all__ = ["ClientGoneError", "Deadline", "Pieces", "Threads", "Writing", "unless_gone"]

T = TypeVar("T")
Piece_co = TypeVar("Piece_co", covariant=True)


class Writing(Protocol[Piece_co]):
    """A text that is being written: `chat.Reply` or `TextRun`."""

    def __iter__(self) -> Iterator[Piece_co]:
        """The pieces, as they come."""
        ...

    def cancel(self) -> None:
        """End the text, from any thread."""
        ...


class Threads:
    """A pool of as many threads as requests may be in work, so that no request waits for another's."""

    def __init__(self, count: int) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="dyno-request")

    async def run(self, work: Callable[..., T], *args: Any, **options: Any) -> T:
        """The result of `work`, which runs in a thread. If the caller is cancelled, the thread goes on."""
        call = functools.partial(work, *args, **options)
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)

    def start(self, work: Callable[..., None], *args: Any) -> None:
        """Run `work` in a thread; it raises nothing."""
        self._pool.submit(work, *args)


class Deadline:
    """The time at which a request ends, whatever it is doing.

    Args:
        seconds: From now on; None: there is no such time.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._at = None if seconds is None else asyncio.get_running_loop().time() + seconds

    async def hold(self, work: Awaitable[T]) -> T:
        """The result of `work`, which is cancelled at the deadline.

        Raises:
            ApiError: The time is over.
        """
        try:
            async with asyncio.timeout_at(self._at):
                return await work
        except TimeoutError as error:
            raise ApiError(
                504,
                f"the request is not done after its limit of {self._seconds:g} seconds (timeout)",
                kind="timeout_error",
                code="deadline_exceeded",
            ) from error


class Pieces(Generic[T]):
    """The pieces of a request's texts: threads read the texts, the event loop takes what has come.

    A loop that is busy finds several pieces at a time, so that load makes larger pieces, not a longer queue.

    Args:
        threads: Read the texts.
        texts: Written together, `at_once` at a time.
        at_once: The next text begins when one of so many has ended.
        deadline: Of the request.
    """

    def __init__(
        self, threads: Threads, texts: Sequence[Writing[T]], at_once: int, deadline: Deadline
    ) -> None:
        self._threads, self._texts, self._deadline = threads, texts, deadline
        self._loop = asyncio.get_running_loop()
        self._come = asyncio.Event()
        self._lock = threading.Lock()
        self._found: list[tuple[int, T | None]] = []
        self._failure: Exception | None = None
        self._left = len(texts)
        self._next = 0
        for _ in range(max(at_once, 1)):
            self._begin()

    def cancel(self) -> None:
        """End all texts."""
        with self._lock:
            self._next = len(self._texts)
        for text in self._texts:
            text.cancel()

    async def come(self) -> list[tuple[int, T | None]]:
        """The pieces that have come since the last call, with the number of their text; waits for one.

        The piece of a text that has ended is None. Without pieces, all texts have ended.

        Raises:
            Exception: From a text. The other texts are ended too, here and for any other error.
        """
        try:
            while True:
                with self._lock:
                    found, self._found = self._found, []
                    failure = self._failure
                    self._come.clear()
                if failure is not None:
                    raise failure
                self._left -= sum(piece is None for _, piece in found)
                if found or not self._left:
                    return found
                await self._deadline.hold(self._come.wait())
        except BaseException:
            self.cancel()
            raise

    async def whole(self) -> list[list[T]]:
        """All pieces of each text."""
        found: list[list[T]] = [[] for _ in self._texts]
        while some := await self.come():
            for index, piece in some:
                if piece is not None:
                    found[index].append(piece)
        return found

    async def groups(self) -> AsyncIterator[list[tuple[int, T | None]]]:
        """What `come` gives, until all texts have ended. If the caller is cancelled, the texts end."""
        try:
            while some := await self.come():
                yield some
        finally:
            self.cancel()

    def _begin(self) -> None:
        with self._lock:
            index, self._next = self._next, self._next + 1
        if index < len(self._texts):
            self._threads.start(self._read, index)

    def _read(self, index: int) -> None:
        """Read a text to its end; in a thread."""
        try:
            for piece in self._texts[index]:
                self._put(index, piece)
        except Exception as error:
            with self._lock:
                self._failure = self._failure or error
        self._put(index, None)
        self._begin()

    def _put(self, index: int, piece: T | None) -> None:
        with self._lock:
            wake = not self._found
            self._found.append((index, piece))
        if wake and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._come.set)


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
