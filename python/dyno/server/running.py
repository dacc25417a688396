"""The connection between texts, which are generated in threads, and requests, which run in the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import queue
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar

import anyio

from dyno.server.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence

    from starlette.requests import Request

__all__ = ["Bell", "ClientGoneError", "Deadline", "Pieces", "Threads", "Writing", "unless_gone"]

T = TypeVar("T")
Piece_co = TypeVar("Piece_co", covariant=True)


class Writing(Protocol[Piece_co]):
    """The protocol of a generation in progress: `chat.Reply` or `TextRun`."""

    @property
    def has_rules(self) -> bool:
        """Whether rules must be compiled before its first token."""
        ...

    def listen(self, wake: Callable[[], None], follows: bool = False) -> Iterator[Piece_co | None]:
        """The pieces, or None if no piece has arrived yet. `wake` is called when there is more.

        If the text `follows` an ended text of the same request, a full queue does not refuse it.
        """
        ...

    def cancel(self) -> None:
        """End the text, from any thread."""
        ...


class Threads:
    """A pool of threads."""

    def __init__(self, count: int) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="dyno-request")

    async def run(self, work: Callable[..., T], *args: Any, **options: Any) -> T:
        """Run `work` in a thread, and return its result. If the caller is cancelled, the thread continues."""
        call = functools.partial(work, *args, **options)
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)

    def start(self, work: Callable[..., None], *args: Any) -> None:
        """Run `work`, which must not raise, in a thread."""
        self._pool.submit(work, *args)


class Bell:
    """A thread that makes calls in event loops for the scheduler, so that the scheduler does not wait.

    A call into a loop lets the thread of the loop run at once, before the scheduler has started its next
    step. So a thread in between makes the calls. It runs while the scheduler waits for the engine, and then
    makes one call for all texts of a step.
    """

    def __init__(self) -> None:
        rung: queue.SimpleQueue[_Ring | None] = queue.SimpleQueue()
        self._rung = rung
        threading.Thread(target=_answer, args=(rung,), name="dyno-bell", daemon=True).start()
        weakref.finalize(self, rung.put, None)

    def ring(self, loop: asyncio.AbstractEventLoop, work: Callable[[], None]) -> None:
        """Call `work` in a loop soon, from any thread."""
        self._rung.put((loop, work))


_Ring: TypeAlias = "tuple[asyncio.AbstractEventLoop, Callable[[], None]]"


def _answer(rung: queue.SimpleQueue[_Ring | None]) -> None:
    """The thread of a bell, until it gets None. Between two calls, it keeps no references."""
    while _answer_once(rung):
        pass


def _answer_once(rung: queue.SimpleQueue[_Ring | None]) -> bool:
    works: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}
    each = rung.get()
    while each is not None:
        works.setdefault(each[0], []).append(each[1])
        try:
            each = rung.get(block=False)
        except queue.Empty:
            break
    for loop, found in works.items():
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits there
            loop.call_soon_threadsafe(_call_all, found)
    return each is not None


def _call_all(works: Sequence[Callable[[], None]]) -> None:
    for work in works:
        work()


class Deadline:
    """The deadline of a request.

    Args:
        seconds: Seconds from now; None: no deadline.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._at = None if seconds is None else asyncio.get_running_loop().time() + seconds

    async def hold(self, work: Awaitable[T]) -> T:
        """Run `work`, which is cancelled at the deadline.

        Raises:
            ApiError: The deadline has passed.
        """
        try:
            async with asyncio.timeout_at(self._at):
                return await work
        except TimeoutError as error:
            raise ApiError(
                504,
                f"the request exceeded its time limit of {self._seconds:g} s",
                kind="timeout_error",
                code="deadline_exceeded",
            ) from error


class Pieces(Generic[T]):
    """The pieces of the texts of a request. A thread begins each text, and the event loop takes the pieces
    that have arrived.

    A busy loop finds several pieces at a time, so that load gives larger pieces instead of a longer queue.

    Args:
        threads: Threads that begin the texts.
        bell: Notifies the loop of new pieces.
        texts: The texts, of which `at_once` run at the same time.
        at_once: Number of texts at the same time. The next one begins when one of them has ended.
        deadline: Deadline of the request.
    """

    def __init__(
        self, threads: Threads, bell: Bell, texts: Sequence[Writing[T]], at_once: int, deadline: Deadline
    ) -> None:
        self._threads, self._bell, self._texts, self._deadline = threads, bell, texts, deadline
        self._loop = asyncio.get_running_loop()
        self._come = asyncio.Event()
        self._streams: dict[int, Iterator[T | None]] = {}
        """Streams of the running texts."""
        self._found: list[tuple[int, T | None]] = []
        self._failure: Exception | None = None
        self._left = len(texts)
        self._next = 0
        self._at_once = max(at_once, 1)
        for _ in range(self._at_once):
            self._begin()

    def cancel(self) -> None:
        """End all texts. Called in the thread of the loop."""
        self._next = len(self._texts)
        for text in self._texts:
            text.cancel()

    async def come(self) -> list[tuple[int, T | None]]:
        """The pieces that have arrived since the last call, with the numbers of their texts. Waits for at
        least one.

        The piece of an ended text is None. If the result is empty, all texts have ended.

        Raises:
            Exception: The error of a text. After any error, the other texts are ended, too.
        """
        try:
            while True:
                found, self._found = self._found, []
                self._come.clear()
                if self._failure is not None:
                    raise self._failure
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
        """The results of `come`, until all texts have ended. If the caller is cancelled, the texts end."""
        try:
            while some := await self.come():
                yield some
        finally:
            self.cancel()

    def _begin(self) -> None:
        index, self._next = self._next, self._next + 1
        if index < len(self._texts):
            self._threads.start(self._open, index)

    def _open(self, index: int) -> None:
        """Begin a text in a thread, because compiling rules may take long."""
        wake = functools.partial(self._bell.ring, self._loop, functools.partial(self._take, index))
        stream = self._texts[index].listen(wake, follows=index >= self._at_once)
        first: list[T] = []
        failure: Exception | None = None
        try:
            if (piece := next(stream)) is not None:
                first.append(piece)
        except StopIteration:
            pass  # the next call raises it again
        except Exception as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits there
            self._loop.call_soon_threadsafe(self._begun, index, stream, first, failure)

    def _begun(
        self, index: int, stream: Iterator[T | None], first: Sequence[T], failure: Exception | None
    ) -> None:
        """Record in the loop that a text has begun. None of its pieces was taken so far."""
        self._streams[index] = stream
        self._found += [(index, piece) for piece in first]
        self._failure = self._failure or failure
        self._take(index)

    def _take(self, index: int) -> None:
        """Take the new pieces of a text. Called in the loop."""
        stream = self._streams.get(index)
        if stream is None:
            return  # it has not begun yet, or has ended
        try:
            while (piece := next(stream)) is not None:
                self._found.append((index, piece))
        except Exception as error:
            if not isinstance(error, StopIteration):
                self._failure = self._failure or error
            del self._streams[index]
            self._found.append((index, None))
            self._begin()
        if self._found or self._failure is not None:
            self._come.set()


class ClientGoneError(Exception):
    """The error that the client has gone."""


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Run `work`, which is cancelled if the client goes. The body of the request was already read.

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
        except Exception as error:  # raised below, because a task group would wrap it
            failed.append(error)
        tasks.cancel_scope.cancel()
    if failed:
        raise failed[0]
    if not result:
        raise ClientGoneError
    return result[0]
