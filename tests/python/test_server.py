"""The HTTP server over a tiny chat model: whole answers, streams, errors and the command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import uvicorn
from chat_model import chat_model
from dyno import Engine
from dyno.server import Options, create_app

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dyno import Scheduler

HELLO = [{"role": "user", "content": "Hello"}]
GREEDY = {"temperature": 0, "max_tokens": 12}
KEY = "a-key"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("model") / "m.gguf")


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[tuple[httpx.Client, Engine, Scheduler]]:
    with Engine(model, device="cpu", profile=None, sequences=2, ctx=256, threads=2) as engine:
        app = create_app(engine, Options(model="tiny", api_key=KEY, max_waiting=2, max_body_bytes=4000))
        config = uvicorn.Config(app, port=0, log_level="warning", lifespan="off")
        with app.state.scheduler, config.bind_socket() as socket:
            server = uvicorn.Server(config)
            thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]})
            thread.start()
            address = f"http://127.0.0.1:{socket.getsockname()[1]}"
            with httpx.Client(base_url=address, headers={"Authorization": f"Bearer {KEY}"}) as client:
                yield client, engine, app.state.scheduler
            server.should_exit = True
            thread.join()


@pytest.fixture
def client(served: tuple[httpx.Client, Engine, Scheduler]) -> httpx.Client:
    return served[0]


def chat(client: httpx.Client, **fields: Any) -> httpx.Response:
    return client.post("/v1/chat/completions", json={"messages": HELLO, **GREEDY, **fields})


def stream(client: httpx.Client, path: str, body: dict[str, Any]) -> list[Any]:
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def test_an_answer_is_that_of_the_engine(served: tuple[httpx.Client, Engine, Scheduler]) -> None:
    client, engine, _ = served
    reply = engine.chat(HELLO, max_tokens=12)
    message = reply.message()
    got = chat(client, model="any name").json()
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
    }


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
    assert usage["usage"] == whole["usage"]


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


def test_texts(served: tuple[httpx.Client, Engine, Scheduler]) -> None:
    client, engine, _ = served
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


def test_schemas_hold(client: httpx.Client) -> None:
    pytest.importorskip("llguidance")
    schema = {"enum": ["first", "second"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    got = chat(client, response_format=wanted, max_tokens=60).json()["choices"][0]
    assert json.loads(got["message"]["content"]) in ("first", "second")


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/v1/chat/completions", {"messages": []}, "messages", "at least 1 item"),
        ("/v1/chat/completions", {"messages": HELLO, "temperature": -1}, "temperature", "not -1"),
        ("/v1/chat/completions", {"messages": HELLO, "stream": True, "n": 2}, None, "a stream holds one"),
        ("/v1/chat/completions", {"messages": HELLO, "tool_choice": "required"}, None, "supported: auto"),
        ("/v1/completions", {}, "prompt", "required"),
        ("/v1/completions", {"prompt": ""}, None, "prompt is empty"),
        ("/v1/completions", {"prompt": [99999]}, None, "99999"),
        ("/detokenize", {"tokens": [-1]}, "tokens", "-1 is not one of 0 to"),
        ("/v1/completions", {"prompt": "a", "regex": "("}, None, "regex"),
    ],
)  # fmt: skip
def test_errors_name_the_field(
    client: httpx.Client, path: str, body: dict[str, Any], param: str | None, words: str
) -> None:
    response = client.post(path, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert words in error["message"]
    if param is not None:
        assert str(error["param"]).startswith(param)


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
    assert client.get("/nothing").status_code == 404
    assert client.get("/v1/completions").status_code == 405


def test_facts(client: httpx.Client) -> None:
    assert [m["id"] for m in client.get("/v1/models").json()["data"]] == ["tiny"]
    tokens = client.post("/tokenize", json={"content": "a b"}).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": tokens}).json() == {"content": "a b"}
    props = client.get("/props").json()
    assert props["settings"]["ctx"] == 256
    assert props["sequences"] == 2
    assert client.get("/ready").json()["status"] == "ready"


def test_metrics_count(served: tuple[httpx.Client, Engine, Scheduler]) -> None:
    client, _, scheduler = served

    def values() -> dict[str, float]:
        lines = client.get("/metrics").text.splitlines()
        return {name: float(value) for name, value in (x.rsplit(" ", 1) for x in lines if x[0] != "#")}

    before, load = values(), scheduler.load()
    content = "a text that no other test has sent"
    used = chat(client, messages=[{"role": "user", "content": content}]).json()["usage"]
    chat(client, temperature=-1)
    after = values()

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert grown("dyno_generated_tokens_total") == used["completion_tokens"]
    assert grown("dyno_prompt_tokens_total") + grown("dyno_reused_tokens_total") == used["prompt_tokens"]
    for status in (200, 400):
        assert grown(f'dyno_requests_total{{path="/v1/chat/completions",status="{status}"}}') == 1
    assert after["dyno_sequences"] == load["sequences"] == 2
    assert after["dyno_running"] == 0


def test_a_full_queue_a_lost_client_and_a_failure(
    served: tuple[httpx.Client, Engine, Scheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, _, scheduler = served
    batch = scheduler._batch
    monkeypatch.setattr(scheduler, "_batch", list)  # requests wait from now on
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(chat, client, timeout=None) for _ in range(4)]
        _until(lambda: scheduler.load()["waiting"] == 2)
        refused = chat(client)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        monkeypatch.setattr(scheduler, "_batch", batch)
        assert {each.result(20).status_code for each in waiting} == {200}
    monkeypatch.setattr(scheduler, "_batch", list)
    for body in ({}, {"stream": True}):
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/chat/completions", json={"messages": HELLO, **body}, timeout=0.2)
        _until(lambda: scheduler.load()["running"] == 0)

    def fail() -> None:
        raise RuntimeError("made to fail")

    monkeypatch.setattr(scheduler, "_batch", fail)
    assert chat(client).status_code == 500
    assert client.get("/ready").status_code == 503
    monkeypatch.setattr(scheduler, "_batch", batch)
    assert chat(client).status_code == 200
    assert client.get("/ready").status_code == 200


def _until(condition: Any) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_the_command(model: Path, tmp_path: Path) -> None:
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
    more = ["--device", "cpu", "--ctx", "128", "--sequences", "2", "--no-profile"]
    with subprocess.Popen([*command, *more], stderr=subprocess.PIPE, text=True, env=environment) as server:
        _until(lambda: port_file.exists() or server.poll() is not None)
        address = f"http://127.0.0.1:{port_file.read_text().strip()}"
        got = httpx.post(f"{address}/v1/completions", json={"prompt": "a", **GREEDY}, timeout=20)
        assert got.json()["model"] == "m"
        server.send_signal(signal.SIGTERM)
        _, said = server.communicate(timeout=20)
    assert server.returncode in (0, -signal.SIGTERM)
    assert f"serving m.gguf on {address}" in said
    assert "Traceback" not in said
