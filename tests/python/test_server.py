"""The HTTP server over a tiny chat model: whole answers, streams, errors and the command."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest
from chat_model import chat_model
from dyno import Engine, GgufError, ModelError, PlanError
from dyno._grammar import Grammar
from dyno._sampling import Sampling
from dyno.chat._rendering import Renderer
from dyno.errors import DeviceLostError
from dyno.server import Options, create_app, wire
from dyno.server.answers import Completions
from dyno.server.fields import IGNORED_FIELDS
from dyno.server.opening import Recipe, opened
from dyno.server.running import Pieces
from dyno.server.wire import OPENAI, written
from dyno.testing import Array, tiny_model
from served import GREEDY, HELLO, KEY, Served, serving, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("model") / "m.gguf")


@pytest.fixture(scope="module")
def served(model: Path, device: str) -> Iterator[Served]:
    options = Options(model="tiny", api_key=KEY, max_waiting=2, max_body_bytes=4000)
    with serving(model, options, device=device) as server:
        yield server


@pytest.fixture
def client(served: Served) -> httpx.Client:
    return served.client


def chat(client: httpx.Client, **fields: Any) -> httpx.Response:
    return client.post("/v1/chat/completions", json={"messages": HELLO, **GREEDY, **fields})


def stream(client: httpx.Client, path: str, body: dict[str, Any]) -> list[Any]:
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def test_an_answer_is_that_of_the_engine(served: Served) -> None:
    client, engine = served.client, served.engine
    reply = engine.chat(HELLO, max_tokens=12)
    message = reply.message()
    got = chat(client, model="any name", cache_prompt=False).json()
    assert got["object"] == "chat.completion"
    assert got["model"] == "tiny"
    (choice,) = got["choices"]
    assert choice == {"index": 0, "message": message, "finish_reason": reply.finish_reason}
    drawn = len(reply.tokens)
    assert drawn > 3
    assert got["usage"] == {
        "prompt_tokens": len(reply.prompt),
        "completion_tokens": drawn,
        "total_tokens": len(reply.prompt) + drawn,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    again = chat(client).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert again == len(reply.prompt) - 1
    assert chat(client, cache_prompt=False).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_stream_holds_the_same_answer(client: httpx.Client) -> None:
    whole = chat(client).json()
    body = {"messages": HELLO, **GREEDY, "stream_options": {"include_usage": True}}
    *chunks, usage, done = stream(client, "/v1/chat/completions", body)
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == whole["choices"][0]["message"]["content"] != ""
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + [whole["choices"][0]["finish_reason"]]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_many_clients_at_a_time_get_what_each_gets_alone(client: httpx.Client) -> None:
    bodies = [{"messages": [{"role": "user", "content": word}]} for word in ("a", "bb" * 20, "c d", "e")]
    alone = [chat(client, **body).json()["choices"] for body in bodies]
    with ThreadPoolExecutor(4) as pool:
        assert [r.json()["choices"] for r in pool.map(lambda b: chat(client, **b), bodies)] == alone
    assert len({json.dumps(choices) for choices in alone}) > 1


def test_choices_seeds_and_log_probabilities(client: httpx.Client) -> None:
    drawn = {"temperature": 1.5, "top_k": 0, "top_p": 1, "min_p": 0, "seed": 7, "n": 3}
    first, again = (chat(client, **drawn).json()["choices"] for _ in range(2))
    assert first == again
    assert len({choice["message"]["content"] for choice in first}) == 3
    probable = chat(client, logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    assert len(probable) > 3
    assert all(each["logprob"] == each["top_logprobs"][0]["logprob"] <= 0 for each in probable)
    assert all(bytes(each["bytes"]).decode(errors="replace") == each["token"] for each in probable)


def test_a_stream_of_choices_with_log_probabilities(client: httpx.Client) -> None:
    drawn = {"temperature": 1.5, "top_k": 0, "top_p": 1, "min_p": 0, "seed": 7, "n": 3, "max_tokens": 12}
    asked = {"messages": HELLO, "logprobs": True, "top_logprobs": 2, **drawn}
    whole = chat(client, **asked).json()["choices"]
    *chunks, done = stream(client, "/v1/chat/completions", asked)
    assert done == "[DONE]"
    for wanted in whole:
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == wanted["index"]]
        text = "".join(each["delta"].get("content", "") for each in mine)
        assert text == wanted["message"]["content"]
        scored = [one for each in mine for one in each.get("logprobs", {}).get("content", [])]
        assert [one["token"] for one in scored] == [one["token"] for one in wanted["logprobs"]["content"]]
        assert len(scored) > 3
        assert [each["finish_reason"] for each in mine if each["finish_reason"]] == [wanted["finish_reason"]]


def test_texts(served: Served) -> None:
    client, engine = served.client, served.engine
    body = {"prompt": "def main", **GREEDY}
    expected = "".join(engine.generate("def main", 12))
    got = client.post("/v1/completions", json=body).json()
    assert got["object"] == "text_completion"
    assert got["choices"][0]["text"] == expected
    assert got["usage"]["completion_tokens"] <= 12
    *chunks, done = stream(client, "/v1/completions", body)
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected
    stop = expected[3:5]
    cut = client.post("/v1/completions", json={**body, "stop": stop, "logprobs": 1}).json()["choices"][0]
    assert cut["text"] == expected[: expected.index(stop)]
    assert cut["finish_reason"] == "stop"
    assert len(cut["logprobs"]["tokens"]) == len(cut["logprobs"]["token_logprobs"]) > 0
    tokens = engine.tokenize("def main")
    assert (
        client.post("/v1/completions", json={**body, "prompt": tokens}).json()["choices"][0]["text"]
        == expected
    )


def test_echo_scores_the_prompt(served: Served) -> None:
    client, engine = served.client, served.engine
    prompts = ["def main", "x" * 90]  # the second one takes more than one step
    body = {"prompt": prompts, "echo": True, "logprobs": 1, "temperature": 0}
    for count in (0, 3):
        choices = client.post("/v1/completions", json={**body, "max_tokens": count}).json()["choices"]
        for prompt, choice in zip(prompts, choices, strict=True):
            tokens = engine.tokenize(prompt)
            logits = reference(engine, tokens)
            wanted = [
                row[token] - np.logaddexp.reduce(row) for row, token in zip(logits, tokens[1:], strict=False)
            ]
            scored = choice["logprobs"]
            assert choice["text"].startswith(prompt)
            assert (choice["text"] == prompt) == (count == 0)
            assert len(scored["tokens"]) == len(scored["text_offset"]) == len(tokens) + count
            assert scored["token_logprobs"][0] is None
            assert scored["top_logprobs"][0] is None
            np.testing.assert_allclose(scored["token_logprobs"][1 : len(tokens)], wanted, atol=0.02)
            for row, top in zip(logits, scored["top_logprobs"][1 : len(tokens)], strict=False):
                best = max(top, key=top.get)
                piece = engine.tokenizer.piece(int(row.argmax()), special=True)
                assert best in (piece.decode(errors="replace"), f"bytes:\\x{piece.hex()}")
    *chunks, done = stream(client, "/v1/completions", {**body, "max_tokens": 3})
    assert done == "[DONE]"
    for index, choice in enumerate(choices):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(each["text"] for each in mine) == choice["text"]
        told = [token for each in mine for token in each["logprobs"]["tokens"]]
        assert told == choice["logprobs"]["tokens"]


def reference(engine: Engine, tokens: list[int]) -> np.ndarray:
    return engine.logits(tokens, slot=0).astype(np.float64)


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

    # A stream that has begun ends with an error event.
    def stuck() -> list[object]:
        made = batch()
        return (
            [] if any(request.drawn > 12 for request, _ in made) else made
        )  # the first may be half a character

    monkeypatch.setattr(scheduler, "_batch", stuck)
    *begun, last = stream(
        client, "/v1/completions", {"prompt": "a", "max_tokens": 200, "timeout": 3, "ignore_eos": True}
    )
    assert begun
    assert last["error"]["code"] == "deadline_exceeded"
    until(lambda: scheduler.load()["running"] == 0)


def test_schemas_hold(client: httpx.Client) -> None:
    pytest.importorskip("llguidance")
    schema = {"enum": ["first", "second"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    got = chat(client, response_format=wanted, max_tokens=60).json()["choices"][0]
    assert json.loads(got["message"]["content"]) in ("first", "second")
    more = {"type": "json_object", "schema": schema}  # of llama-server
    got = chat(client, response_format=more, max_tokens=60).json()["choices"][0]
    assert json.loads(got["message"]["content"]) in ("first", "second")
    got = chat(client, response_format={"type": "json_object"}, max_tokens=8).json()["choices"][0]
    assert got["message"]["content"].lstrip().startswith("{")  # an object, not any JSON


def test_a_stream_tells_of_a_first_token_without_text(tmp_path: Path, device: str) -> None:
    kinds = {"tokenizer.ggml.token_type": Array("int32", [3] * 288)}  # control tokens, which are no text
    model = tiny_model(tmp_path / "m.gguf", metadata=kinds)
    with serving(model, Options(model="tiny", api_key=KEY), device=device, numerics="exact") as server:
        body = {"prompt": [5], **GREEDY, "ignore_eos": True, "stream_options": {"include_usage": True}}
        first, end, usage, done = stream(server.client, "/v1/completions", body)
        whole = server.client.post("/v1/completions", json={**body, "stream_options": None}).json()
    assert [(e["choices"][0]["text"], e["choices"][0]["finish_reason"]) for e in (first, end)] == [
        ("", None),
        ("", "length"),
    ]
    assert usage["usage"]["completion_tokens"] == GREEDY["max_tokens"]
    assert done == "[DONE]"
    assert whole["choices"][0]["text"] == ""


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
            chatted = chat(client, timeout=60)
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
            text = client.post("/v1/completions", json={"prompt": "a", **GREEDY, "timeout": 60})
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


def test_limits_keys_and_paths(client: httpx.Client) -> None:
    long = chat(client, messages=[{"role": "user", "content": "x" * 600}])
    assert long.status_code == 400
    assert long.json()["error"]["code"] == "context_length_exceeded"
    assert chat(client, messages=[{"role": "user", "content": "x" * 5000}]).status_code == 413
    assert client.post("/v1/completions", content=b"{").status_code == 400
    for headers in ({"Authorization": "Bearer wrong"}, {"Authorization": KEY}):
        refused = client.get("/v1/models", headers=headers)
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"
        assert client.get("/health", headers=headers).status_code == 200
    missing = client.get("/nothing")
    assert missing.status_code == 404
    assert missing.json()["error"]["message"] == "/nothing is not a path of this server"


def test_a_method_that_a_path_lacks_gets_those_that_it_has(client: httpx.Client) -> None:
    for method, path, allowed in (("GET", "/v1/completions", "POST"), ("POST", "/health", "GET, HEAD")):
        refused = client.request(method, path)
        assert refused.status_code == 405
        assert refused.headers["allow"] == allowed
        error = refused.json()["error"]
        assert error["message"] == f"{method} is not allowed on {path} (allowed: {allowed})"
        assert error["code"] == "method_not_allowed"


@pytest.mark.parametrize("key", ["", " ", "\t\n"])
def test_an_empty_key_is_refused(key: str) -> None:
    with pytest.raises(PlanError, match=r"\[server\] api_key is '.*'; give a key"):
        Options(api_key=key)
    command = [sys.executable, "-m", "dyno", "serve", "none.gguf", "--api-key", key]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2
    assert "--api-key is empty" in " ".join(done.stderr.split())


@pytest.mark.parametrize("key", [" blanks around \n", "schlüssel à"])
def test_keys_of_any_letters(model: Path, key: str) -> None:
    with serving(model, Options(api_key=key)) as server:
        bare = key.strip().encode()
        for headers in ({"Authorization": b"Bearer " + bare}, {"x-api-key": bare, "Authorization": b""}):
            assert server.client.get("/v1/models", headers=headers).status_code == 200
        for wrong in (b"x", bare + b"x", bare[:-1]):
            headers = {"Authorization": b"Bearer " + wrong}
            assert server.client.get("/v1/models", headers=headers).status_code == 401


def test_the_page(client: httpx.Client) -> None:
    page = httpx.get(f"{client.base_url}/")  # without a key
    assert page.status_code == 200
    assert "default-src 'self'" in page.headers["content-security-policy"]
    files = re.findall(r'(?:href|src)="([^"]+\.\w+)"', page.text)
    assert sorted(files) == ["page.css", "page.js"]
    for name in files:
        assert httpx.get(f"{client.base_url}/{name}").status_code == 200
    script = httpx.get(f"{client.base_url}/page.js").text
    named = set(re.findall(r'at\("(\w+)"\)', script))
    assert named <= set(re.findall(r'id="(\w+)"', page.text))
    for path in re.findall(r'fetch\("([^"]+)"', script):
        assert client.get(f"/{path}").status_code in (200, 405)
    assert "innerHTML" not in script


def test_an_end_can_be_ignored(served: Served) -> None:
    client, engine = served.client, served.engine
    end = next(iter(engine.tokenizer.end_of_generation))
    wish = {"prompt": "a", "max_tokens": 6, "logit_bias": {str(end): 1e6}, "temperature": 0}
    (choice,) = client.post("/v1/completions", json=wish).json()["choices"]
    assert choice["finish_reason"] == "stop"
    got = client.post("/v1/completions", json={**wish, "ignore_eos": True}).json()
    assert got["choices"][0]["finish_reason"] == "length"
    assert got["usage"]["completion_tokens"] == 6


def test_pages_of_other_origins(model: Path) -> None:
    asked = {
        **{"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"},
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    path, body = "/v1/completions", {"prompt": "a", "max_tokens": 1, "max_tokns": 1}
    with serving(model, Options(api_key=KEY, cors_origins=("https://chat.example",))) as server:
        # A browser asks first, without the key.
        before = httpx.options(server.address + path, headers=asked)
        assert before.status_code == 200
        assert before.headers["access-control-allow-origin"] == "https://chat.example"
        assert "authorization" in before.headers["access-control-allow-headers"].lower()
        answer = server.client.post(path, json=body, headers={"Origin": "https://chat.example"})
        assert answer.headers["access-control-allow-origin"] == "https://chat.example"
        assert answer.headers["access-control-expose-headers"] == f"{IGNORED_FIELDS}, Retry-After"
        with server.client.stream("POST", path, json={**body, "stream": True}, headers=asked) as stream:
            assert stream.headers["access-control-allow-origin"] == "https://chat.example"
            assert "[DONE]" in stream.read().decode()
        foreign = {**asked, "Origin": "https://other.example"}
        assert httpx.options(server.address + path, headers=foreign).status_code == 400
        answer = server.client.post(path, json=body, headers={"Origin": "https://other.example"})
        assert "access-control-allow-origin" not in answer.headers
    with serving(model, Options(api_key=KEY)) as server:
        assert httpx.options(server.address + path, headers=asked).status_code == 405


def test_origins_are_the_ones_that_browsers_send() -> None:
    given = ("https://Chat.example/", "http://localhost:3000", "chrome-extension://abc", "*", "null")
    sent = ("https://chat.example", "http://localhost:3000", "chrome-extension://abc", "*", "null")
    assert Options(cors_origins=given).cors_origins == sent
    for wrong in ("chat.example", "https://chat.example/page", "https://", "https://a b", ""):
        with pytest.raises(PlanError, match="is no origin; give SCHEME://HOST"):
            Options(cors_origins=("*", wrong))


def test_an_answer_goes_on_from_the_last_message(served: Served) -> None:
    client, engine = served.client, served.engine
    begun = [*HELLO, {"role": "assistant", "content": "abc"}]
    prompt = engine.chat_template().prompt(HELLO).text + "abc"
    tokens = engine.tokenize(prompt, parse_special=True)
    rest = engine.complete([*tokens], 12, temperature=0)[0].text
    body = {"messages": begun, **GREEDY}

    def content(path: str, **fields: Any) -> str:
        answer = client.post(path, json={**body, **fields})
        assert answer.status_code == 200, answer.text
        given = answer.json()
        assert given["usage"].get("prompt_tokens", len(tokens)) == len(tokens)
        return str(given["choices"][0]["message"]["content"])

    path = "/v1/chat/completions"
    assert content(path, continue_final_message=True) == rest
    assert content(path, continue_final_message=True, add_generation_prompt=False) == rest
    parts = [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "abc"}]}]
    assert content(path, continue_final_message=True, messages=parts) == rest
    assert engine.chat(begun, continues=True, max_tokens=12).message()["content"] == rest
    for where, messages in (
        (path, begun),
        ("/v1/messages", begun),
        ("/v1/messages", [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "abc"}]}]),
    ):
        given = client.post(where, json={**body, "messages": messages}).json()
        if where == "/v1/messages":
            assert given["content"][0]["text"] == rest
            assert given["usage"]["input_tokens"] + given["usage"]["cache_read_input_tokens"] == len(tokens)
            counted = client.post(f"{where}/count_tokens", json={"messages": messages}).json()
            assert counted["input_tokens"] == len(tokens)
        else:  # an answer of its own
            assert given["usage"]["prompt_tokens"] > len(tokens)
    called = {"role": "assistant", "content": "", "tool_calls": []}
    for last in ({"role": "user", "content": "a"}, {"role": "assistant", "content": None}, called):
        answer = client.post(
            "/v1/chat/completions", json={**body, "messages": [last], "continue_final_message": True}
        )
        expected = 200 if last is called else 400
        assert answer.status_code == expected, answer.text


def test_facts(client: httpx.Client) -> None:
    [listed] = client.get("/v1/models").json()["data"]
    assert (listed["id"], listed["max_model_len"]) == ("tiny", 256)
    assert listed == client.get("/v1/models/tiny").json()
    assert abs(listed["created"] - time.time()) < 3600
    unknown = client.get("/v1/models/no/such")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    told = [line for line in client.get("/metrics").text.splitlines() if "/v1/models/" in line]
    assert told
    assert all('path="/v1/models/{name}"' in line for line in told)
    tokens = client.post("/tokenize", json={"content": "a b"}).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": tokens}).json() == {"content": "a b"}
    props = client.get("/props").json()
    assert props["settings"]["ctx"] == 256
    assert props["sequences"] == 2
    assert client.get("/ready").json()["status"] == "ready"


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
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/chat/completions", json={"messages": HELLO, **body}, timeout=0.2)
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
    now = time.monotonic()
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
    later = [(1000, seconds) for seconds in (80, 160, 300, 300)]
    for waited, expected in ((0, 10), (1, 10), (11, 20), (5, 20), (21, 40), *later):
        scheduler.failed_at -= waited
        scheduler._note(GgufError("x"))
        assert scheduler.failing_s == expected
        assert served.client.get("/ready").status_code == 503
        scheduler.failed_at -= expected
        assert served.client.get("/ready").status_code == 200
        scheduler.failed_at += expected
    assert chat(served.client).status_code == 200
    scheduler._note(GgufError("x"))
    assert scheduler.failing_s == 10
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


def test_scored_prompts_have_a_bound(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dyno.server.answers._MOST_SCORED", 12)
    body = {"prompt": ["ab", "cd"], "echo": True, "max_tokens": 1}
    for logprobs, more, status in ((2, {}, 200), (3, {}, 400), (2, {"n": 2}, 400), (3, {"echo": False}, 200)):
        asked = {**body, "logprobs": logprobs, **more}
        response = served.client.post("/v1/completions", json=asked)
        assert response.status_code == status, response.text
        if status == 400:
            error = response.json()["error"]
            assert error["param"] == "logprobs"
            assert "more than 12 log-probabilities of prompts" in error["message"]


def test_the_command(model: Path, device: str, tmp_path: Path) -> None:
    port_file = tmp_path / "port"
    command = [
        sys.executable,
        "-m",
        "dyno",
        "serve",
        str(model),
        "--port",
        "0",
        "--port-file",
        str(port_file),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    more = ["--device", device, "--ctx", "128", "--sequences", "2", "--no-profile"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, *more], env=environment, **streams) as server:  # type: ignore[call-overload]
        try:
            until(lambda: port_file.exists() or server.poll() is not None)
            address = f"http://127.0.0.1:{port_file.read_text().strip()}"
            got = httpx.post(f"{address}/v1/completions", json={"prompt": "a", **GREEDY}, timeout=120)
            assert got.json()["model"] == "m"
            server.send_signal(signal.SIGTERM)
            told, said = server.communicate(timeout=120)
        finally:
            server.kill()
    assert server.returncode in (0, -signal.SIGTERM)
    assert told.splitlines()[0] == f"listening on {address}"
    assert "Traceback" not in said
    assert "no key is set" not in said
    assert "profile: " in said
    assert "serving m: 2 texts at a time, 128 tokens each" in said


def test_a_file_without_a_vocabulary_is_refused_at_the_start(tmp_path: Path) -> None:
    bare = tiny_model(tmp_path / "bare.gguf", vocabulary=False)
    with (
        pytest.raises(ModelError, match=r"\[server\] bare.gguf has no vocabulary"),
        opened(Recipe(str(bare), Options(), "cpu", {"profile": None})),
    ):
        pass
    with (
        Engine(bare, device="cpu", profile=None, ctx=64) as engine,
        pytest.raises(ModelError, match="no vocabulary"),
    ):
        create_app(engine, Options())
    command = [sys.executable, "-m", "dyno", "serve", str(bare), "--port", "0", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    assert "bare.gguf has no vocabulary" in " ".join(done.stderr.split())
    assert "listening" not in done.stdout


def test_a_port_in_use_is_named_before_the_model_is_read(tmp_path: Path) -> None:
    broken = tmp_path / "m.gguf"
    broken.write_bytes(b"no model")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        command = [sys.executable, "-m", "dyno", "serve", str(broken), "--port", port, "--device", "cpu"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    assert f"--port {port}: another program listens there" in done.stderr
    assert "Errno" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("host", "alone"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("a.b", False),
    ],
)
def test_loopback_addresses(host: str, alone: bool) -> None:
    from dyno._cli.serve import _is_loopback

    assert _is_loopback(host) == alone


def test_sequences_of_a_server(model: Path) -> None:
    from dyno.server.opening import give_default_sequences

    for given, expected in (({}, 4), ({"sequences": 3}, 3), ({"sequences": 1}, 1)):
        with Engine(model, device="cpu", profile=None, ctx=64, **given) as engine:
            give_default_sequences(engine)
            assert engine.settings["sequences"] == expected
    with Engine(model, device="cpu", profile=None, ctx=64) as engine:
        engine.settings.origins["sequences"] = "profile.yaml:12"  # as a profile that says 1
        give_default_sequences(engine)
        assert engine.settings["sequences"] == 1
