"""The HTTP server under load: full queues, deadlines, failed steps, answers made beside the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from chat_model import chat_model
from dyno import GgufError
from dyno._grammar import Grammar
from dyno._sampling import Sampling
from dyno.chat._rendering import Renderer
from dyno.errors import DeviceLostError
from dyno.server import Options, wire
from dyno.server.answers import Completions
from dyno.server.errors import ApiError, from_validation
from dyno.server.fields import IGNORED_FIELDS, Fields
from dyno.server.running import Deadline, Pieces
from dyno.server.wire import OPENAI, written
from served import GREEDY, HELLO, KEY, Served, chat, serving, stream
from waiting import until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterator
    from pathlib import Path

    import httpx
    from pydantic import ValidationError

T = TypeVar("T")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("model") / "m.gguf")


@pytest.fixture(scope="module")
def served(model: Path, device: str) -> Iterator[Served]:
    options = Options(model="tiny", api_key=KEY, max_waiting=2)
    with serving(model, options, device=device) as server:
        yield server


@pytest.fixture
def client(served: Served) -> httpx.Client:
    return served.client


@pytest.fixture(autouse=True)
def fails_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure counts for a hundred times as long as usual, so that it counts on a busy machine, too."""
    monkeypatch.setattr("dyno.scheduler._FAILING_S", 1000.0)
    monkeypatch.setattr("dyno.scheduler._LONGEST_FAILING_S", 30000.0)


def test_a_deadline_ends_a_request(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    client, scheduler = served.client, served.scheduler
    batch = scheduler._batch
    monkeypatch.setattr(scheduler, "_batch", list)  # no step does anything
    for path, body in (("/v1/chat/completions", {"messages": HELLO}), ("/v1/completions", {"prompt": "a"})):
        for wish in ({}, {"stream": True}):
            late = client.post(path, json={**body, **wish, "timeout": 0.05})
            assert late.status_code == 504
            assert late.json()["error"]["code"] == "deadline_exceeded"
            until(lambda: scheduler.load()["running"] == scheduler.load()["waiting"] == 0)

    # A stream that has begun ends with an error event. The time is over when the client has its first event.
    has_begun = threading.Event()

    class Ends(Deadline):
        async def hold(self, work: Awaitable[T]) -> T:
            task = asyncio.ensure_future(work)
            while not (has_begun.is_set() or task.done()):
                await asyncio.wait([task], timeout=0.01)
            return await super().hold(task)

    def stuck() -> list[object]:
        made = batch()
        return (
            [] if any(request.drawn > 12 for request, _ in made) else made
        )  # the first may be half a character

    monkeypatch.setattr(scheduler, "_batch", stuck)
    monkeypatch.setattr("dyno.server.endpoints.Deadline", Ends)
    body = {"prompt": "a", "max_tokens": 200, "timeout": 0.001, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
        assert "error" not in next(lines)
        has_begun.set()
        *_, last = lines
    assert json.loads(last)["error"]["code"] == "deadline_exceeded"
    until(lambda: scheduler.load()["running"] == 0)


def test_rules_that_compile_keep_no_other_text_waiting(
    served: Served, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device != "cpu":
        pytest.importorskip("llguidance")
    client, requests = served.client, 20  # more than there are threads of either kind
    compiling: list[str | None] = []
    begun: list[None] = []
    ready = threading.Event()

    class Slow(Grammar):
        def __init__(self, sampling: Sampling, tokenizer: Any) -> None:
            compiling.append(sampling.regex)
            assert ready.wait(120)
            super().__init__(sampling, tokenizer)

    class Counted(Pieces[Any]):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            begun.append(None)

    monkeypatch.setattr("dyno._grammar.Grammar", Slow)
    monkeypatch.setattr("dyno.server.endpoints.Pieces", Counted)
    body = {"prompt": "a", "regex": "[a-f]*", "max_tokens": 2}
    with ThreadPoolExecutor(requests) as pool:
        try:
            ruled = [pool.submit(client.post, "/v1/completions", json=body) for _ in range(requests)]
            until(lambda: len(begun) == requests and compiling)
            chatted = chat(client, timeout=110)
            assert chatted.status_code == 200, chatted.text
            assert len(compiling) <= 4
            late = client.post("/v1/completions", json={**body, "regex": "late", "timeout": 0.1})
            assert late.status_code == 504
        finally:
            ready.set()
        # The queue of this server is short.
        assert {each.result().status_code for each in ruled} <= {200, 429}
    assert client.post("/v1/completions", json=body).status_code == 200


def test_conversations_that_are_rendered_keep_no_other_text_waiting(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, requests = served.client, 20  # more than there are threads of either kind
    rendering: list[None] = []
    ready = threading.Event()
    render = Renderer.render

    def slow(self: Renderer, *given: Any) -> dict[str, Any]:
        rendering.append(None)
        assert ready.wait(120)
        return render(self, *given)

    monkeypatch.setattr(Renderer, "render", slow)
    with ThreadPoolExecutor(requests) as pool:
        try:
            chats = [pool.submit(chat, client) for _ in range(requests)]
            until(lambda: len(rendering) == 4)
            text = client.post("/v1/completions", json={"prompt": "a", **GREEDY, "timeout": 110})
            assert text.status_code == 200, text.text
            assert client.post("/tokenize", json={"content": "a"}).status_code == 200
            assert len(rendering) == 4
        finally:
            ready.set()
        # The queue of this server is short.
        assert {each.result().status_code for each in chats} <= {200, 429}


def test_a_text_that_was_cancelled_compiles_nothing(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(*_: object) -> None:
        raise AssertionError("rules were compiled")

    monkeypatch.setattr("dyno._grammar.Grammar.__init__", compiled)
    cancelled = threading.Event()
    with pytest.raises(AssertionError, match="were compiled"):
        next(served.scheduler.drawn([5], Sampling(regex="a*"), 4, cancelled))
    cancelled.set()
    assert list(served.scheduler.drawn([5], Sampling(regex="a*"), 4, cancelled)) == []


def test_a_full_queue_a_lost_client_and_a_failure(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    client, scheduler = served.client, served.scheduler
    batch = scheduler._batch
    monkeypatch.setattr(scheduler, "_batch", list)  # requests wait from now on
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(chat, client, timeout=None) for _ in range(4)]
        until(lambda: (scheduler.load()["running"], scheduler.load()["waiting"]) == (2, 2))
        refused = chat(client)
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        monkeypatch.setattr(scheduler, "_batch", batch)
        assert {each.result(120).status_code for each in waiting} == {200}
    monkeypatch.setattr(scheduler, "_batch", list)
    for body in ({}, {"stream": True}):
        gone = HTTPConnection(served.address.removeprefix("http://"))
        with contextlib.closing(gone):
            sent = json.dumps({"messages": HELLO, **body})
            gone.request("POST", "/v1/chat/completions", sent, {"Authorization": f"Bearer {KEY}"})
            until(lambda: scheduler.load()["running"] == 1)
        until(lambda: scheduler.load()["running"] == 0)

    def fail() -> None:
        raise GgufError("the file /secret/m.gguf has changed")

    monkeypatch.setattr(scheduler, "_batch", fail)
    for failed in (chat(client), client.get("/ready")):
        assert failed.status_code in (500, 503)
        assert "GgufError" in failed.text
        assert "secret" not in failed.text
    monkeypatch.setattr(scheduler, "_batch", batch)
    assert chat(client).status_code == 200
    assert client.get("/ready").status_code == 200


def test_a_failure_keeps_an_idle_server_from_work_for_a_while(served: Served) -> None:
    """Without requests there is no step that works: a server that waits for one never gets requests again."""
    client, scheduler = served.client, served.scheduler
    paths = ("/health", "/ready")
    now, scheduler.failing_s = time.monotonic(), 1000.0
    for failure, at, expected in (
        (GgufError("x"), now, (200, 503)),
        (GgufError("x"), now - 3600, (200, 200)),
        (DeviceLostError("x"), now, (503, 503)),
        (DeviceLostError("x"), now - 3600, (503, 503)),
        (None, now, (200, 200)),
    ):
        scheduler.failed_at, scheduler.failure = at, failure
        answers = [client.get(path) for path in paths]
        assert tuple(answer.status_code for answer in answers) == expected, failure
        assert all(("failed" in answer.text) == (answer.status_code == 503) for answer in answers)


def test_a_failed_step_has_a_time(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise GgufError("x")

    before = time.monotonic()
    with monkeypatch.context() as patched:
        patched.setattr(served.scheduler, "_batch", fail)
        assert chat(served.client).status_code == 500
    assert before <= served.scheduler.failed_at <= time.monotonic()
    assert served.client.get("/ready").status_code == 503
    assert chat(served.client).status_code == 200
    assert served.client.get("/ready").status_code == 200


def test_failures_in_a_row_keep_a_server_from_work_for_longer(served: Served) -> None:
    scheduler = served.scheduler
    scheduler.failure = None
    later = [(100000, seconds) for seconds in (8000, 16000, 30000, 30000)]
    for waited, expected in ((0, 1000), (100, 1000), (1100, 2000), (500, 2000), (2100, 4000), *later):
        scheduler.failed_at -= waited
        scheduler._note(GgufError("x"))
        assert scheduler.failing_s == expected
        assert served.client.get("/ready").status_code == 503
        scheduler.failed_at -= expected
        assert served.client.get("/ready").status_code == 200
        scheduler.failed_at += expected
    assert chat(served.client).status_code == 200
    scheduler._note(GgufError("x"))
    assert scheduler.failing_s == 1000
    assert chat(served.client).status_code == 200


@pytest.mark.parametrize("wish", [{}, {"stream": True}])
def test_a_request_of_many_texts_goes_on_while_the_queue_is_full(
    served: Served, monkeypatch: pytest.MonkeyPatch, wish: dict[str, Any]
) -> None:
    client, scheduler = served.client, served.scheduler
    batch = scheduler._batch
    body = {"prompt": ["a", "b", "c", "d", "e"], **GREEDY, "ignore_eos": True}
    alone = [choice["text"] for choice in client.post("/v1/completions", json=body).json()["choices"]]
    with ThreadPoolExecutor(2) as pool, monkeypatch.context() as patched:
        patched.setattr(scheduler, "_batch", list)  # the first two texts stay where they are
        asked = pool.submit(client.post, "/v1/completions", json={**body, **wish})
        until(lambda: scheduler.load()["running"] == 2)
        patched.setattr(scheduler, "_max_waiting", -100)
        assert chat(client).status_code == 429
        patched.setattr(scheduler, "_batch", batch)
        got = asked.result(120)
    assert got.status_code == 200, got.text
    if not wish:
        assert [choice["text"] for choice in got.json()["choices"]] == alone
    else:
        lines = [line.removeprefix("data: ") for line in got.text.splitlines() if line]
        assert lines[-1] == "[DONE]"
        ends = [json.loads(line)["choices"][0]["finish_reason"] for line in lines[:-1]]
        assert sum(end == "length" for end in ends) == len(alone)


def test_many_vectors_go_on_while_the_queue_is_full(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    client, scheduler = served.client, served.scheduler
    batch = scheduler._batch
    body = {"input": ["a", "b", "c", "d", "e"]}
    with ThreadPoolExecutor(2) as pool, monkeypatch.context() as patched:
        patched.setattr(scheduler, "_batch", list)
        asked = pool.submit(client.post, "/v1/embeddings", json=body)
        until(lambda: scheduler.load()["running"] == 2)
        patched.setattr(scheduler, "_max_waiting", -100)
        assert client.post("/v1/embeddings", json=body).status_code == 429
        patched.setattr(scheduler, "_batch", batch)
        got = asked.result(120)
    assert got.status_code == 200, got.text
    assert len(got.json()["data"]) == 5


def test_scored_prompts_are_told_in_threads(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of all the tokens of a prompt take seconds, in which the loop has other clients."""
    names: set[str] = set()
    new = Completions._new_logprobs

    def noted(self: Completions, index: int) -> dict[str, Any] | None:
        names.add(threading.current_thread().name)
        return new(self, index)

    json_of = wire._json

    def noted_json(data: Any) -> bytes:
        if "token_logprobs" in str(data):
            names.add(threading.current_thread().name)
        return json_of(data)

    monkeypatch.setattr(wire, "_json", noted_json)
    monkeypatch.setattr(Completions, "_new_logprobs", noted)
    body = {"prompt": "def main", "echo": True, "logprobs": 1, "max_tokens": 2, "temperature": 0}
    (choice,) = served.client.post("/v1/completions", json=body).json()["choices"]
    *chunks, done = stream(served.client, "/v1/completions", body)
    assert done == "[DONE]"
    told = [token for chunk in chunks for token in chunk["choices"][0]["logprobs"]["tokens"]]
    assert told == choice["logprobs"]["tokens"]
    assert names
    assert all(name.startswith("dyno-request") for name in names)


def test_long_answers_are_written_in_pieces_beside_the_loop(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All other threads wait while JSON is written: here for the entry of one token, or 256 numbers."""
    noticed: list[tuple[str, Any]] = []
    dumps = json.dumps

    def noted(data: Any, **options: Any) -> str:
        noticed.append((threading.current_thread().name, data))
        return dumps(data, **options)

    texts = {"prompt": ["a", "b", "c"], "echo": True, "logprobs": 1, "max_tokens": 1}
    for path, body, name in (
        ("/v1/completions", texts, "choices"),
        ("/v1/embeddings", {"input": ["a", "b", "c"]}, "data"),
        ("/v1/chat/completions", {"messages": HELLO, "n": 3, **GREEDY}, "choices"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr("dyno.server.wire.json.dumps", noted)
            answer = served.client.post(path, content=dumps(body))
        assert answer.headers["content-type"] == "application/json"
        assert [entry["index"] for entry in answer.json()[name]] == [0, 1, 2]
        assert noticed
        assert all(thread.startswith("dyno-request") for thread, _ in noticed)
        assert not any(isinstance(data, dict) and {name, "index"} & {*data} for _, data in noticed)
        noticed.clear()


@pytest.mark.parametrize("kind", ["whole", "stream"])
@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        {"a": {}, "b": []},
        {"a": [None, {"b": 1}, [], [[]]], "c": "ü\u2028"},
        {
            "choices": [
                {"logprobs": {"tokens": ["a"] * 3000, "top_logprobs": [None] + [{"b": -0.5, "c": -1}] * 3000}}
            ]
        },
        {
            "choices": [
                {"logprobs": {"content": [{"token": "a", "top_logprobs": [{"token": "b"}] * 20}] * 3000}}
            ]
        },
        {"data": [{"embedding": [0.25] * 5000}] * 3},
    ],
)
def test_pieces_are_the_json_of_the_whole(
    kind: str, value: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    dumps, sizes = json.dumps, [0]

    def noted(data: Any, **options: Any) -> str:
        text = dumps(data, **options)
        sizes.append(len(text))
        return text

    with monkeypatch.context() as patched:
        patched.setattr("dyno.server.wire.json.dumps", noted)
        found = bytes(written(value).body) if kind == "whole" else OPENAI.event(value, large=True)
    expected = dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    assert found == (expected if kind == "whole" else b"data: " + expected + b"\n\n")
    assert max(sizes) < 8000


def test_a_conversation_is_rendered_once_for_all_answers(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process renders for all clients."""
    rendered: list[None] = []
    render = Renderer.render

    def counted(self: Renderer, *given: Any) -> dict[str, Any]:
        rendered.append(None)
        return render(self, *given)

    drawn = {"temperature": 1.5, "top_k": 0, "top_p": 1, "min_p": 0}
    alone = [chat(served.client, **drawn, seed=seed).json()["choices"][0] for seed in (7, 8)]
    monkeypatch.setattr(Renderer, "render", counted)
    both = chat(served.client, **drawn, seed=7, n=2).json()["choices"]
    assert [choice["message"] for choice in both] == [choice["message"] for choice in alone]
    assert len(rendered) == 1


@pytest.mark.parametrize("large", [False, True])
def test_fields_of_a_large_body_are_judged_beside_the_loop(
    served: Served, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    threads: list[str] = []
    ignored = Fields.ignored

    def noted(self: Fields, path: str, body: Any) -> list[str]:
        threads.append(threading.current_thread().name)
        return ignored(self, path, body)

    monkeypatch.setattr(Fields, "ignored", noted)
    body = {"content": "a" * (300_000 if large else 3), "unknown": 1}
    answer = served.client.post("/tokenize", json=body)
    assert answer.status_code == 200
    assert answer.headers[IGNORED_FIELDS] == "unknown"
    assert [name.startswith("dyno-request") for name in threads] == [large]


@pytest.mark.parametrize("large", [False, True])
def test_a_large_body_is_read_beside_the_loop(
    served: Served, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    threads: list[str] = []

    def noted(error: ValidationError) -> ApiError:
        threads.append(threading.current_thread().name)
        return from_validation(error)

    monkeypatch.setattr("dyno.server.endpoints.from_validation", noted)
    answer = served.client.post("/tokenize", json={"content": [0] * (200_000 if large else 3)})
    assert answer.status_code == 400
    assert [name.startswith("dyno-request") for name in threads] == [large]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
def test_a_body_that_comes_too_slowly_is_refused(model: Path, path: str) -> None:
    """Each byte is soon followed by the next one, and the last one never comes."""
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\n".encode()
    with serving(model, Options(body_timeout_s=0.3)) as server:
        host, port = server.address.removeprefix("http://").split(":")
        answer, end = b"", time.monotonic() + 120
        with socket.create_connection((host, int(port))) as slow:
            slow.sendall(head + b"{")
            slow.settimeout(0.02)
            with contextlib.suppress(ConnectionError):  # bytes that nobody has read make the end a reset
                while time.monotonic() < end:
                    try:
                        some = slow.recv(1 << 16)
                        answer += some
                        if not some:
                            break
                    except TimeoutError:
                        if not answer:
                            slow.sendall(b" ")
        assert time.monotonic() < end, "the server waits for the rest"
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"connection: close" in answer.lower()
        error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        assert error["type"] == "timeout_error"
        assert error.get("code") == (None if path == "/v1/messages" else "body_timeout")
        assert "arrived within 0.3 s, but not its end; send it faster" in error["message"]
        assert server.client.get("/health").status_code == 200
