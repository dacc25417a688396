"""Answers of the HTTP server over a tiny chat model: whole ones, streams, scores of prompts, and facts."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from chat_model import chat_model
from dyno import _core
from dyno.server import Options
from dyno.testing import Array, tiny_model
from served import GREEDY, HELLO, KEY, Served, chat, serving, stream
from vocabularies import byte_level, sentencepiece

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import httpx
    from dyno import Engine


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


def test_tokens_that_the_model_excludes_have_a_log_probability(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JSON has no infinite numbers."""
    monkeypatch.setattr(
        _core,
        "logprobs",
        lambda _, token, top=0: [(token, -np.inf), *((i, -np.inf) for i in range(5, 5 + top))],
    )
    asked = {"messages": HELLO, "logprobs": True, "top_logprobs": 2, **GREEDY}
    texts = {"prompt": "ab", "logprobs": 2, "echo": True, **GREEDY}
    for path, body in (("/v1/chat/completions", asked), ("/v1/completions", texts)):
        for wish in ({}, {"stream": True}):
            answer = client.post(path, json={**body, **wish})
            assert answer.status_code == 200
            assert "-9999.0" in answer.text
            assert "Infinity" not in answer.text


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
            own = zip(scored["tokens"], scored["token_logprobs"], scored["top_logprobs"], strict=True)
            for name, logprob, top in list(own)[1:]:
                assert top[name] == logprob  # of the text, even if it is not the most probable one
                assert len(top) <= 2
    *chunks, done = stream(client, "/v1/completions", {**body, "max_tokens": 3})
    assert done == "[DONE]"
    for index, choice in enumerate(choices):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(each["text"] for each in mine) == choice["text"]
        told = [token for each in mine for token in each["logprobs"]["tokens"]]
        assert told == choice["logprobs"]["tokens"]


@pytest.mark.parametrize("blank", [False, True], ids=["bytes", "blank in front"])
def test_places_of_tokens_are_those_in_the_text(tmp_path: Path, device: str, blank: bool) -> None:
    prompt = "the é中 x"
    tokenizer = sentencepiece() if blank else byte_level()
    count = max(len(tokenizer["tokenizer.ggml.tokens"]), 288)
    model = tiny_model(tmp_path / "m.gguf", n_vocab=count, vocabulary=False, metadata=as_metadata(tokenizer))
    with serving(model, Options(model="tiny", api_key=KEY), device=device) as server:
        engine, client = server.engine, server.client
        tokens = engine.tokenize(prompt)
        (x,) = engine.tokenize("x")[-1:]
        body = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 3, "temperature": 0}
        body |= {"logit_bias": {str(x): 1e6}}
        whole = client.post("/v1/completions", json=body).json()["choices"][0]
        *chunks, _ = stream(client, "/v1/completions", body)
        pieces = [engine.tokenizer.piece(token) for token in tokens]
    assert whole["text"] == prompt + "xxx"
    assert len(tokens) > len(prompt) - 3, "the bytes of some characters are tokens"
    ends = [len(b"".join(pieces[:i]).decode(errors="ignore")) for i in range(len(pieces))]
    wanted = [max(end - blank, 0) for end in ends] + [len(prompt) + i for i in range(3)]
    assert whole["logprobs"]["text_offset"] == wanted
    assert [at for each in chunks for at in each["choices"][0]["logprobs"]["text_offset"]] == wanted


def as_metadata(tokenizer: dict[str, Any]) -> dict[str, object]:
    """Metadata as a file holds it."""
    kinds = {np.dtype(np.int32): "int32", np.dtype(np.float32): "float32"}
    return {
        key: Array(kinds[value.dtype], value.tolist())
        if isinstance(value, np.ndarray)
        else Array("string", value)
        if isinstance(value, list)
        else value
        for key, value in tokenizer.items()
    }


def reference(engine: Engine, tokens: list[int]) -> np.ndarray:
    return engine.logits(tokens, slot=0).astype(np.float64)


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


def test_an_end_can_be_ignored(served: Served) -> None:
    client, engine = served.client, served.engine
    end = next(iter(engine.tokenizer.end_of_generation))
    wish = {"prompt": "a", "max_tokens": 6, "logit_bias": {str(end): 1e6}, "temperature": 0}
    (choice,) = client.post("/v1/completions", json=wish).json()["choices"]
    assert choice["finish_reason"] == "stop"
    got = client.post("/v1/completions", json={**wish, "ignore_eos": True}).json()
    assert got["choices"][0]["finish_reason"] == "length"
    assert got["usage"]["completion_tokens"] == 6


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


def test_a_path_of_another_server_names_the_one_that_answers(client: httpx.Client) -> None:
    for path, other in (
        ("/completion", "/v1/completions"),
        ("/embedding", "/v1/embeddings"),
        ("/api/chat", "/v1/chat/completions"),
        ("/v1/responses", "/v1/chat/completions"),
    ):
        answer = client.post(path, json={"prompt": "x"})
        assert answer.status_code == 404
        assert answer.json()["error"]["message"].endswith(f"; use {other}")
        assert client.post(other, json={}).status_code == 400, "the other path is there"
    assert client.get("/v1/nothing").json()["error"]["message"] == "/v1/nothing is not a path of this server"


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
    body = {"content": "a é<|end|>", "with_pieces": True}
    pieces = client.post("/tokenize", json=body).json()["tokens"]
    bare = client.post("/tokenize", json={**body, "with_pieces": False}).json()["tokens"]
    assert [each["id"] for each in pieces] == bare
    text = b"".join(p.encode() if isinstance(p := each["piece"], str) else bytes(p) for each in pieces)
    assert text.decode() == "a é<|end|>"
    assert any(isinstance(each["piece"], list) for each in pieces), "a byte of é alone is no text"
    assert client.post("/detokenize", json={"tokens": tokens}).json() == {"content": "a b", "prompt": "a b"}
    props = client.get("/props").json()
    assert props["settings"]["ctx"] == 256
    assert props["sequences"] == 2
    assert client.get("/ready").json()["status"] == "ready"


def test_tokens_by_the_names_of_vllm(served: Served) -> None:
    client, vocabulary = served.client, served.engine.tokenizer.vocabulary
    body = {"prompt": "a b<|end|>", "add_special_tokens": True}
    tokens = client.post("/tokenize", json=body).json()["tokens"]
    own = {"content": body["prompt"], "add_special": True}
    assert tokens == client.post("/tokenize", json=own).json()["tokens"]
    assert tokens == served.engine.tokenize("a b<|end|>", add_special=True, parse_special=True)
    wrong = client.post("/tokenize", json={"prompt": 5})
    assert wrong.status_code == 400
    assert "prompt must be a string" in wrong.json()["error"]["message"]
    told = client.get("/tokenizer_info").json()
    assert told["eos_token"] == vocabulary.tokens[vocabulary.eos]
    assert told["add_bos_token"] == vocabulary.add_bos
    assert told["model_max_length"] == served.engine.settings["ctx"]
    assert told["chat_template"] == served.engine.chat_template().text


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
