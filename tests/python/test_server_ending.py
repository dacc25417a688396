"""The end of a server: requests that run, clients that read nothing, and a second Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import uvicorn
from chat_model import chat_model
from dyno import Engine
from dyno._steps import computed
from dyno.server import Options, create_app, ending
from dyno.server.connections import Connection
from dyno.server.ending import EndingServer
from waiting import LONG, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_MANY = b"x" * (16 << 20)
"""More than the buffers of a connection between two processes hold."""


class _Patient(Connection):
    """A connection with a longer patience than any test."""

    patience_s = 1e6


class _Scheduler:
    """Counts how often it was closed."""

    closed = 0

    def close(self) -> None:
        self.closed += 1


async def _application(scope: dict[str, Any], receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
    """`/many` answers with many bytes, `/never` does not answer, whether its client is there or not."""
    if scope["path"] == "/never":
        await asyncio.Event().wait()
    length = (b"content-length", str(len(_MANY)).encode())
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    await send({"type": "http.response.body", "body": _MANY, "more_body": False})


@contextlib.contextmanager
def _started(application: Any, scheduler: Any, drain_s: float) -> Iterator[tuple[Any, threading.Thread, str]]:
    """A server, its thread, which has ended behind the context, and its address."""
    config = uvicorn.Config(application, port=0, http=_Patient, log_level="error", lifespan="off")
    with config.bind_socket() as listening:
        listening.listen()
        server = EndingServer(config, scheduler, drain_s)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        host, port = listening.getsockname()
        yield server, thread, f"{host}:{port}"
        server.should_exit = True
        thread.join(LONG)
        assert not thread.is_alive()


@pytest.mark.parametrize("path", ["/many", "/never"])
def test_no_client_holds_a_server_that_ends(
    path: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = _Scheduler()
    with _started(_application, scheduler, 0.1) as (server, _, address):
        host, port = address.split(":")
        with socket.create_connection((host, int(port)), timeout=LONG) as client:
            client.sendall(f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
            until(lambda: server._busy == 1)
            server.should_exit = True
            until(lambda: server.force_exit or not server.server_state.connections)
    until(lambda: scheduler.closed)
    told = capsys.readouterr().err.splitlines()
    assert told == [
        "the server ends; 1 request may take 0.1 s more (--drain-timeout). Ctrl-C ends it at once",
        "1 request did not end within 0.1 s (--drain-timeout); the server ends without them",
    ]
    assert scheduler.closed == 1
    assert not caplog.records


def test_a_client_that_reads_has_the_time_that_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    with _started(_application, _Scheduler(), LONG) as (server, _, address):
        host, port = address.split(":")
        with socket.create_connection((host, int(port)), timeout=LONG) as client:
            client.sendall(b"GET /many HTTP/1.1\r\nHost: a\r\n\r\n")
            until(lambda: server._busy == 1)
            server.should_exit = True
            until(lambda: "the server ends" in capsys.readouterr().err)
            found = b""
            while some := client.recv(1 << 16):
                found += some
    assert found.endswith(_MANY)


def test_an_idle_server_ends_without_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    with _started(_application, _Scheduler(), LONG):
        pass
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_that_takes_too_long_ends_with_an_error(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    stream: bool,
) -> None:
    monkeypatch.setattr(ending, "_LAST_WORDS_S", LONG)  # the client may read late
    steps, goes_on, begun = itertools.count(), threading.Event(), threading.Event()
    found: list[tuple[int, str]] = []

    def slow(*given: Any) -> Any:
        """A step of the engine, the third of which takes as long as the test wants."""
        if next(steps) == 2:
            assert goes_on.wait(LONG)
        return computed(*given)

    monkeypatch.setattr("dyno.scheduler.computed", slow)
    model = chat_model(tmp_path / "m.gguf")
    with Engine(model, device="cpu", profile=None, threads=1, ctx=64) as engine:
        app = create_app(engine, Options())
        with app.state.scheduler as scheduler, _started(app, scheduler, 0.1) as (server, _, address):

            def ask() -> None:
                body = {"prompt": "a", "max_tokens": 60, "ignore_eos": True, "stream": stream}
                url = f"http://{address}/v1/completions"
                with httpx.stream("POST", url, json=body, timeout=LONG) as answer:
                    begun.set()
                    found.append((answer.status_code, answer.read().decode()))

            asking = threading.Thread(target=ask)
            asking.start()
            until(lambda: scheduler.totals()["generated_tokens"] == 2)
            assert not stream or begun.wait(LONG)
            server.should_exit = True
            until(lambda: scheduler._closing)
            goes_on.set()
            asking.join()
    ((status, text),) = found
    assert status == (200 if stream else 503)
    assert json.loads(text.split("data: ")[-1])["error"]["code"] == "shutting_down"
    assert "1 request did not end within 0.1 s" in capsys.readouterr().err
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


@pytest.fixture
def command(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], socket.socket]]:
    """`dyno serve`, and a client whose request has begun and does not go on."""
    model, port = chat_model(tmp_path / "m.gguf"), tmp_path / "port"
    words = ["--port", "0", "--port-file", str(port), "--device", "cpu", "--ctx", "64", "--no-profile"]
    bounds = ["--body-timeout", "100000", "--drain-timeout", os.environ.get("DRAIN", "100000")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with subprocess.Popen(
        [sys.executable, "-m", "dyno", "serve", str(model), *words, *bounds],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as server:  # fmt: skip
        try:
            until(lambda: port.is_file() or server.poll() is not None)
            with socket.create_connection(("127.0.0.1", int(port.read_text())), timeout=LONG) as client:
                client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")
                client.sendall(b"Content-Length: 9\r\nExpect: 100-continue\r\n\r\n")
                assert client.recv(1 << 16).startswith(b"HTTP/1.1 100 ")
                yield server, client
        finally:
            server.kill()


def test_running_requests_end_if_nobody_reads_the_output(
    command: tuple[subprocess.Popen[str], socket.socket],
) -> None:
    """In `dyno serve … 2>&1 | tee log`, Ctrl-C ends `tee`, too."""
    server, client = command
    assert server.stderr is not None
    server.stderr.close()
    address = client.getpeername()
    server.send_signal(signal.SIGINT)
    until(lambda: not _accepts(address))  # the end has begun
    client.sendall(b'{"a": 12}')
    assert client.recv(1 << 16).startswith(b"HTTP/1.1 400 ")
    server.wait(LONG)


def _accepts(address: tuple[str, int]) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(address, timeout=LONG):
        return True
    return False


def test_the_first_process_of_a_container_ends_at_once_as_well() -> None:
    """The kernel spares it from signals that it does not handle."""
    code = (
        "import signal; from dyno.server.ending import end_at_once; "
        "signal.raise_signal = lambda _: None; end_at_once(signal.SIGINT)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert (done.returncode, done.stderr) == (130, "ended at once; running requests were cut off\n")


def _line(server: subprocess.Popen[str], begin: str) -> str:
    assert server.stderr is not None
    return next((line for line in server.stderr if line.startswith(begin)), "")


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_interrupt_ends_a_server_at_once(
    command: tuple[subprocess.Popen[str], socket.socket], first: signal.Signals
) -> None:
    server, _ = command
    server.send_signal(first)
    assert "1 request may take 100000 s more" in _line(server, "the server ends; ")
    server.send_signal(signal.SIGINT)
    _, rest = server.communicate(timeout=LONG)
    assert rest == "ended at once; running requests were cut off\n"
    assert server.returncode == -signal.SIGINT


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_request_that_does_not_go_on_ends_with_the_time_to_drain(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, first: signal.Signals
) -> None:
    monkeypatch.setenv("DRAIN", "0.1")
    server, client = request.getfixturevalue("command")
    server.send_signal(first)
    _, told = server.communicate(timeout=LONG)
    with contextlib.suppress(ConnectionError):
        assert client.recv(1 << 16) == b""
    assert "1 request did not end within 0.1 s (--drain-timeout)" in told
    assert "Traceback" not in told
    assert server.returncode == (130 if first == signal.SIGINT else -signal.SIGTERM)
