"""Clients that hold a connection, or send heads without an end, against the connections of a server."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest
import uvicorn
from dyno.server import connections
from dyno.server.connections import Connection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_MANY = b"x" * (16 << 20)
"""More than the buffers of a connection between two processes hold."""


class _Watched(Connection):
    """A connection whose end is known."""

    patience_s = 0.1
    ended: threading.Event

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.ended.set()


async def _application(scope: dict[str, Any], receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
    """Answers before it has read a body, as a server does that refuses a key; `/many` with many bytes."""
    answer = _MANY if scope["path"] == "/many" else b"hello"
    length = (b"content-length", str(len(answer)).encode())
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    await send({"type": "http.response.body", "body": answer, "more_body": False})


@contextlib.contextmanager
def _connected(protocol: type[Connection]) -> Iterator[socket.socket]:
    config = uvicorn.Config(
        _application,
        host="127.0.0.1",
        port=0,
        http=protocol,
        log_level="error",
        lifespan="off",
        timeout_graceful_shutdown=1,
    )
    with config.bind_socket() as listening:
        listening.listen()
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            with socket.create_connection(listening.getsockname(), timeout=120) as client:
                yield client
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture
def watched() -> type[_Watched]:
    return type("Fresh", (_Watched,), {"ended": threading.Event()})


def _read(client: socket.socket) -> bytes:
    """The bytes until the server closes the connection."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while some := client.recv(1 << 16):
            found += some
    return found


def _answer(client: socket.socket) -> bytes:
    """The next answer, whose head and body may come one after the other."""
    found = b""
    while not found.endswith(b"hello"):
        some = client.recv(1 << 16)
        assert some, found
        found += some
    return found


@pytest.mark.parametrize("sent", [b"", b"GET /hea", b"GET / HTTP/1.1\r\nHost: a\r\nX-A: b"])
def test_a_head_that_never_ends_does_not_hold_a_connection(watched: type[_Watched], sent: bytes) -> None:
    with _connected(watched) as client:
        client.sendall(sent)
        assert watched.ended.wait(120)
        assert _read(client) == b""


def test_a_head_behind_an_answer_does_not_hold_a_connection(watched: type[_Watched]) -> None:
    patience, watched.patience_s = watched.patience_s, 1000.0  # a busy machine may send the request late
    with _connected(watched) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert _answer(client).startswith(b"HTTP/1.1 200")
        watched.patience_s = patience
        client.sendall(b"GET / HT")  # ends the timer that uvicorn has for idle connections
        assert watched.ended.wait(120)


def test_a_client_that_reads_nothing_does_not_hold_a_connection(watched: type[_Watched]) -> None:
    with _connected(watched) as client:
        client.sendall(b"GET /many HTTP/1.1\r\nHost: a\r\n\r\n")
        assert watched.ended.wait(120)
        assert len(_read(client)) < len(_MANY)


def test_a_client_that_reads_all_gets_all() -> None:
    with _connected(Connection) as client:
        client.sendall(b"GET /many HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        assert _read(client).endswith(_MANY)


_POST = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}"
_ENDLESS = b"GET / HTTP/1.1\r\nHost: a\r\nX-A: " + b"a" * (connections._MOST_HEAD + 1)


@pytest.mark.skipif(connections._HAS_BOUND, reason="h11 refuses such heads by itself")
@pytest.mark.parametrize(
    "sent",
    [
        _ENDLESS,
        b"GET /" + b"a" * (connections._MOST_HEAD + 1),
        b"GET / HTTP/1.1\r\n" + b"X-A: b\r\n" * (connections._MOST_HEAD // 8 + 1),
    ],
)
@pytest.mark.parametrize("earlier", [0, 1])
def test_a_head_that_is_too_large_is_refused(sent: bytes, earlier: int) -> None:
    with _connected(Connection) as client:
        for _ in range(earlier):
            client.sendall(_POST)
            assert _answer(client).startswith(b"HTTP/1.1 200")
        client.sendall(sent)
        head, _, body = _read(client).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 431 ")
        assert json.loads(body)["error"]["code"] == "headers_too_large"


def test_bodies_may_be_larger_than_heads() -> None:
    """Of a request whose answer came before its body, too."""
    body = b"a" * (4 * connections._MOST_HEAD)
    with _connected(Connection) as client:
        for _ in range(3):
            client.sendall(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            assert _answer(client).startswith(b"HTTP/1.1 200")
