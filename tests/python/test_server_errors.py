"""Wrong requests to the HTTP server: which of them are refused, with which status and in which words."""

from __future__ import annotations

import json
import math
import sys
from typing import TYPE_CHECKING, Any

import pytest
from chat_model import chat_model
from dyno import ClosedError, ContextLengthError, PlanError
from dyno._sampling import BOUNDS, Sampling
from dyno.server import Options
from dyno.server.bodies import ChatBody, CompletionBody, DetokenizeBody, EmbeddingBody
from dyno.server.errors import api_error, from_validation
from dyno.server.messages_body import MessagesBody
from dyno.testing.models import byte_vocabulary
from pydantic import ValidationError
from served import HELLO, KEY, serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import httpx
    from pydantic import BaseModel

REQUIRED: dict[type[BaseModel], dict[str, Any]] = {
    ChatBody: {"messages": HELLO},
    CompletionBody: {"prompt": "a"},
    MessagesBody: {"messages": HELLO, "max_tokens": 1},
}


SCHEMA = {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nope"}}}}
NOPE = {"type": "function", "function": {"name": "f", "parameters": {"type": "nope"}}}
TEXT = {"type": "text", "text": ""}
RESULT = {"type": "tool_result", "tool_use_id": "1"}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, device: str) -> Iterator[httpx.Client]:
    model: Path = chat_model(tmp_path_factory.mktemp("model") / "m.gguf")
    with serving(model, Options(model="tiny", api_key=KEY), device=device) as server:
        yield server.client


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        # The engine computes with float32, in which it is 0.
        ("/v1/completions", {"prompt": "a", "repeat_penalty": 1e-300}, "repeat_penalty", "above 0"),
        ("/v1/chat/completions", {"messages": []}, "messages", "messages must have at least 1 item"),
        ("/v1/chat/completions", {"messages": HELLO, "temperature": -1}, "temperature", "at least 0, not -1"),
        ("/v1/chat/completions", {"messages": HELLO, "timeout": 0}, "timeout", "greater than 0, not 0"),
        ("/v1/chat/completions", {"messages": HELLO, "tool_choice": "must"}, "tool_choice", "supported: au"),
        ("/v1/chat/completions", {"messages": HELLO, "tool_choice": "required"}, "tool_choice", "no tools"),
        ("/v1/chat/completions", {"messages": HELLO, **SCHEMA}, "response_format",
         "response_format cannot be used: Invalid type: nope"),
        ("/v1/chat/completions", {"messages": HELLO, "tool_choice": "required", "tools": [NOPE]}, "tools",
         "tools cannot be used: "),
        ("/v1/chat/completions", {"messages": [{"content": "a"}]}, "messages.0.role", "is required"),
        ("/v1/chat/completions", {"messages": [*HELLO, {"role": ""}]}, "messages.1.role", "not ''"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "messages.0.content",
         "messages.0.content is required in a message of the role 'user'"),
        ("/v1/chat/completions", {"messages": [{"role": "tool", "content": None}]}, "messages.0.content",
         "is required"),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 1},
         None, "messages.0.content.0.type: 'image' is not supported; expected text, "),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 1, "tools": [{"type": "web_search", "name": "a"}]},
         None, "tools.0.type must be 'custom', not 'web_search'"),
        ("/v1/embeddings", {"input": []}, "input", "input is empty"),
        ("/v1/embeddings", {"input": [[1], [300]]}, "input.1", "input.1: token 300 is not one of 0 to 287"),
        ("/v1/completions", {}, "prompt", "required"),
        ("/v1/completions", [], None, "the body must be an object"),
        ("/v1/completions", {"prompt": ""}, "prompt", "prompt is empty"),
        ("/v1/completions", {"prompt": 5}, "prompt", "prompt must be a string or a list, not 5"),
        ("/v1/completions", {"prompt": "a", "max_tokens": "abc"}, "max_tokens",
         "max_tokens must be a whole number, not 'abc'"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1.5}, "max_tokens", "a whole number, not 1.5"),
        ("/v1/completions", {"prompt": "a", "top_p": "high"}, "top_p", "top_p must be a number, not 'high'"),
        ("/v1/completions", {"prompt": "a", "stream": "often"}, "stream", "stream must be true or false"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"a": 1}}, "logit_bias",
         "logit_bias: the key 'a' must be a whole number"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"a": "b"}}, "logit_bias",
         "logit_bias: the key 'a' must be a whole number"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"[key]": "b"}}, "logit_bias",
         "logit_bias: the key '[key]' must be a whole number"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"5": "b"}}, "logit_bias.5",
         "logit_bias.5 must be a number, not 'b'"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"-1": 1}}, "logit_bias",
         "logit_bias names token -1; expected a token id, 0 or more"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"288": 1}}, "logit_bias",
         "logit_bias names token 288; the vocabulary has 288"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"5": None}}, "logit_bias.5", "a number, not null"),
        ("/v1/completions", {"prompt": "a", "dry_sequence_breakers": [""]}, "dry_sequence_breakers",
         "dry_sequence_breakers has an empty string; leave it out"),
        ("/v1/completions", {"prompt": "a", "dry_sequence_breakers": ["a"] * 33}, "dry_sequence_breakers",
         "dry_sequence_breakers has 33 strings"),
        ("/v1/completions", {"prompt": []}, "prompt", "prompt is an empty list; expected a text, token ids"),
        ("/v1/completions", {"prompt": [[]]}, "prompt", "expected a text or a list of token ids"),
        ("/v1/completions", {"prompt": ["a", {}]}, "prompt.1", "prompt.1 must be a string, not an object"),
        ("/v1/completions", {"prompt": [99999]}, "prompt", "token 99999 is not one of 0 to 287"),
        ("/v1/completions", {"prompt": [99999], "echo": True}, "prompt", "token 99999 is not one of 0"),
        ("/v1/completions", {"prompt": [5, -5], "echo": True}, "prompt", "token -5 is not one of 0 to 287"),
        ("/v1/completions", {"prompt": "x" * 9000}, "prompt", "ctx is 256"),
        ("/v1/chat/completions", {"messages": [{"role": "a", "content": "x" * 9000}]}, "messages", "ctx is "),
        ("/detokenize", {"tokens": [-1]}, "tokens", "-1 is not one of 0 to"),
        ("/v1/completions", {"prompt": "a", "regex": "("}, "regex", 'invalid regex "(": unclosed group'),
        ("/v1/completions", {"prompt": "a", "grammar": "start: x"}, "grammar",
         'grammar cannot be used: line 1, column 8: unknown name: "x"'),
        ("/v1/completions", {"prompt": "a", "stop": 5}, "stop", "a string or a list of strings, not 5"),
        ("/v1/completions", {"prompt": "a", "stop": True}, "stop", "a list of strings, not true"),
        ("/v1/completions", {"prompt": "a", "stop": ["b"] * 33}, "stop", "33 strings; expected at most 32"),
        ("/v1/completions", {"prompt": "a", "stop": "b" * 257}, "stop", "257 characters; expected at most"),
        ("/v1/completions", {"prompt": "a", "stop": ["b", 1]}, "stop", "must be a string"),
        ("/v1/completions", {"prompt": "a", "stop": ""}, "stop", "must not be empty"),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 1, "stop_sequences": ["b"] * 33}, None, "most 32"),
    ],
)  # fmt: skip
def test_errors_name_the_field(
    client: httpx.Client, device: str, path: str, body: dict[str, Any], param: str | None, words: str
) -> None:
    if {"regex", "grammar", "response_format", "tools"} & {*body} and device != "cpu":
        pytest.importorskip("llguidance")  # which a machine that only lends its GPU need not have
    response = client.post(path, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert words in error["message"]
    assert not error["message"].startswith("["), "the part of dyno that refuses it is of no use to a client"
    if param is not None:
        assert str(error["param"]).startswith(param)


@pytest.mark.parametrize("choice", ["auto", "none", None])
@pytest.mark.parametrize(
    ("tool", "place", "words"),
    [
        ({}, "tools.0.function", "is required: an object with the name of the function"),
        ({"type": "function"}, "tools.0.function", "is required"),
        ({"name": "f", "parameters": {}}, "tools.0.function", "is required"),
        ({"type": "function", "function": [1]}, "tools.0.function", "must be an object, not a list"),
        ({"type": "function", "function": {}}, "tools.0.function.name", "is required"),
        ({"type": "function", "function": {"name": 5}}, "tools.0.function.name", "not 5"),
        ({"type": "function", "function": {"name": ""}}, "tools.0.function.name", "not ''"),
        ({"function": {"name": "f", "parameters": [1]}}, "tools.0.function.parameters", "not a list"),
        ({"type": "web_search"}, "tools.0.type", "'web_search' is not supported; expected function"),
        (5, "tools.0", "must be an object, not 5"),
    ],
)
def test_a_tool_that_is_no_function_is_refused(
    client: httpx.Client, choice: str | None, tool: object, place: str, words: str
) -> None:
    """Otherwise the template shows it to the model as it is, or leaves it out without a word."""
    body = {"messages": HELLO, "max_tokens": 1, "tools": [tool], "tool_choice": choice}
    refused = client.post("/v1/chat/completions", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == place
    assert refused.json()["error"]["message"].startswith(f"{place}{':' if 'type' in place else ''} ")
    assert words in refused.json()["error"]["message"]
    for sound in (
        {"function": {"name": "f"}},
        {"type": "function", "function": {"name": "f", "parameters": None}},
    ):
        assert client.post("/v1/chat/completions", json={**body, "tools": [sound]}).status_code == 200


def test_a_body_that_is_no_json_has_no_field_that_is_wrong(client: httpx.Client) -> None:
    refused = client.post("/v1/completions", content=b'{"prompt": ')
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] is None
    assert "JSON" in refused.json()["error"]["message"]


def test_an_error_names_a_field_that_the_body_has() -> None:
    """Of the types that a value may have, the one that accepts the most of it."""

    def told(*blocks: dict[str, Any]) -> tuple[str | None, str]:
        body = {"messages": [{"role": "user", "content": blocks}], "max_tokens": 1}
        with pytest.raises(ValidationError) as error:
            MessagesBody.model_validate_json(json.dumps(body))
        found = from_validation(error.value).body["error"]
        return found["param"], found["message"]

    result = {"type": "tool_result", "tool_use_id": "1"}
    param, message = told({**result, "content": [{"type": "image", "source": {}}]})
    assert param == "messages.0.content.0.content.0.type"
    assert message == f"{param} must be 'text', not 'image'"
    assert told({"type": "text", "text": "a"}, {"type": "text"})[0] == "messages.0.content.1.text"
    assert told({"type": "image"})[0] == "messages.0.content.0.type"
    assert told({})[1].startswith("messages.0.content.0")
    assert told({**result, "content": 5})[1].endswith("content must be a string or a list, not 5")
    for choice, place in (
        ({"type": "custom"}, "tool_choice.type"),
        ({"type": "function", "function": {"name": ""}}, "tool_choice.function.name"),
        (5, "tool_choice"),
    ):
        with pytest.raises(ValidationError) as wrong:
            ChatBody.model_validate_json(json.dumps({"messages": HELLO, "tool_choice": choice}))
        error = from_validation(wrong.value).body["error"]
        assert error["param"] == place
        assert error["message"].startswith(f"{place} must ")


MANY = 5000


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionBody, {"prompt": [*[0] * MANY, {}]}),
        (CompletionBody, {"prompt": [{}] * MANY}),
        (CompletionBody, {"prompt": [[0]] * MANY + [[{}] * MANY]}),
        (CompletionBody, {"prompt": "a", "stop": [0] * MANY}),
        (CompletionBody, {"prompt": "a", "dry_sequence_breakers": [0] * MANY}),
        (CompletionBody, {"prompt": "a", "logit_bias": {f"a{i}": "x" for i in range(MANY)}}),
        (EmbeddingBody, {"input": [*[0] * MANY, {}]}),
        (ChatBody, {"messages": [0] * MANY}),
        (ChatBody, {"messages": HELLO, "tools": [0] * MANY}),
        (DetokenizeBody, {"tokens": [{}] * MANY}),
        (MessagesBody, {"messages": [0] * MANY, "max_tokens": 1}),
        (MessagesBody, {"messages": [{"role": "user", "content": [0] * MANY}], "max_tokens": 1}),
        (
            MessagesBody,
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "1", "content": [0] * MANY}],
                    }
                ],
                "max_tokens": 1,
            },
        ),
        (MessagesBody, {"messages": HELLO, "max_tokens": 1, "tools": [0] * MANY}),
        (MessagesBody, {"messages": HELLO, "max_tokens": 1, "system": [0] * MANY}),
    ],
)
def test_a_list_with_many_wrong_items_has_few_errors(kind: type[BaseModel], body: dict[str, Any]) -> None:
    """A body is judged on the loop of all answers, and has room for millions of items."""
    with pytest.raises(ValidationError) as error:
        kind.model_validate_json(json.dumps(body))
    assert error.value.error_count() < 20
    assert len(from_validation(error.value).message) < 300


def test_a_text_of_digits_is_no_token() -> None:
    years = {"input": ["2024", "2025"]}
    assert EmbeddingBody.model_validate_json(json.dumps(years)).inputs == ["2024", "2025"]
    for prompt in (["42"], ["42", "7"]):
        assert CompletionBody.model_validate_json(json.dumps({"prompt": prompt})).prompts == prompt
    for prompt, several in (([42, 7], [[42, 7]]), ([[42], [7]], [[42], [7]]), ("42", ["42"])):
        assert CompletionBody.model_validate_json(json.dumps({"prompt": prompt})).prompts == several
    for tokens in (["42"], [True], [1.0]):
        with pytest.raises(ValidationError):
            DetokenizeBody.model_validate_json(json.dumps({"tokens": tokens}))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"tools": []}, "the template's variable tools"),
        ({"messages": []}, "the template's variable messages"),
        ({"documents": 5}, "expected a list of objects"),
        ({"now": "2024-01-01"}, None),
        ({"self": 1}, None),
    ],
)
def test_variables_of_a_template_cause_no_failure(
    client: httpx.Client, path: str, variables: dict[str, Any], words: str | None
) -> None:
    body = {"messages": HELLO, "max_tokens": 1, "chat_template_kwargs": variables}
    response = client.post(path, json=body)
    assert response.status_code == (400 if words else 200), response.text
    assert (words or "") in response.text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"])
def test_more_messages_than_tokens_are_not_rendered(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """One process renders for all clients, and a body has room for 250,000 empty messages."""

    def rendered(*_: object) -> None:
        raise AssertionError("it was rendered")

    monkeypatch.setattr("dyno.chat._rendering.Renderer.render", rendered)
    body = {"messages": [{"role": "user", "content": ""}] * 257, "max_tokens": 1}
    response = client.post(path, json=body)
    assert response.status_code == 400
    assert "at least 257 tokens, ctx is 256" in response.json()["error"]["message"]
    assert client.post(path, json={**body, "messages": body["messages"][:1]}).status_code == 500


@pytest.mark.parametrize(
    ("kind", "field", "entries"),
    [
        (ChatBody, "messages", [*HELLO, *[{}] * 16384, 5]),
        (ChatBody, "messages", [*HELLO, {"content": [""] * 9000}, {"content": [""] * 9000}, 5]),
        (ChatBody, "tools", [*[{}] * 16384, 5]),
        (MessagesBody, "messages", [*HELLO * 16384, 5]),
        (MessagesBody, "messages", [{"role": "user", "content": [TEXT] * 9000}, {"content": [TEXT] * 9000}]),
        (MessagesBody, "messages", [{"role": "user", "content": [{**RESULT, "content": [TEXT] * 16384}]}]),
        (MessagesBody, "system", [*[TEXT] * 16384, 5]),
        (MessagesBody, "tools", [*[{"name": "f", "input_schema": {}}] * 16384, 5]),
    ],
)
def test_a_conversation_has_few_enough_entries(kind: type[BaseModel], field: str, entries: list[Any]) -> None:
    """They are counted before any is judged: nothing else runs while pydantic makes 230,000 objects."""
    body = {"messages": HELLO, "max_tokens": 1, field: entries}
    with pytest.raises(ValidationError) as wrong:
        kind.model_validate_json(json.dumps(body))
    told = from_validation(wrong.value)
    assert (told.status, told.body["error"]["param"]) == (400, field)
    assert told.message == (
        f"{field}: more than 16384 entries, counted with their parts; join some of them, or leave some out"
    )
    kind.model_validate_json(json.dumps({"messages": [*HELLO] * 16384, "max_tokens": 1}))


def test_a_text_that_the_vocabulary_cannot_spell_is_the_clients_fault(tmp_path: Path) -> None:
    model = chat_model(
        tmp_path / "m.gguf", vocabulary={byte_vocabulary(288)["tokenizer.ggml.tokens"].index("z"): "[unused]"}
    )
    with serving(model, Options(model="tiny", api_key=KEY)) as server:
        for path, body in (
            ("/v1/completions", {"prompt": "fizz"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "fizz"}]}),
            ("/v1/embeddings", {"input": "fizz"}),
            ("/tokenize", {"content": "fizz"}),
        ):
            refused = server.client.post(path, json=body)
            assert refused.status_code == 400, path
            assert "no token for byte 0x7A" in refused.json()["error"]["message"]


@pytest.mark.parametrize("kind", [CompletionBody, MessagesBody])
def test_a_request_may_have_the_settings_that_python_may(kind: type[BaseModel]) -> None:
    names = [name for name in BOUNDS if name in kind.model_fields and name not in ("seed", "logprobs")]
    assert {"temperature", "top_k", "top_p", "min_p"} <= set(names)

    def takes(make: Callable[..., object], *given: object, **named: Any) -> bool:
        try:
            make(*given, **named)
        except (ValidationError, PlanError):
            return False
        return True

    for name in names:
        bound, number = BOUNDS[name], type(getattr(Sampling, name))
        most = 10**30 if math.isinf(bound.most) else bound.most
        below = min(bound.least * 2, bound.least - 1)
        values = [number(value) for value in (below, bound.least, 1, most, most * 2)]
        ours = [takes(Sampling, **{name: value}) for value in values]
        bodies = [json.dumps({**REQUIRED[kind], name: value}) for value in values]
        theirs = [takes(kind.model_validate_json, body) for body in bodies]
        assert ours == theirs, (name, values)
        assert not ours[0]
        assert ours[2]


@pytest.mark.parametrize("kind", REQUIRED)
def test_null_is_a_field_that_is_not_given(kind: type[BaseModel]) -> None:
    required = REQUIRED[kind]
    plain = kind.model_validate(required)
    for name in kind.model_fields.keys() - required.keys():
        assert kind.model_validate({**required, name: None}) == plain, name
    with pytest.raises(ValidationError, match="Field required"):
        kind.model_validate({name: None for name in required})


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_clients_may_send_null(client: httpx.Client, path: str) -> None:
    nulls = dict.fromkeys(("temperature", "top_p", "n", "stream", "logit_bias", "presence_penalty", "stop"))
    kind = CompletionBody if path == "/v1/completions" else ChatBody
    assert client.post(path, json={**REQUIRED[kind], "max_tokens": 1, **nulls}).status_code == 200


@pytest.mark.parametrize("words", ["the bracket is closed", "5 tokens, ctx is 3"])
def test_words_of_a_client_do_not_change_the_status(client: httpx.Client, device: str, words: str) -> None:
    if device != "cpu":
        pytest.importorskip("llguidance")
    refused = client.post("/v1/completions", json={"prompt": "a", "regex": f"({words}"})
    error = refused.json()["error"]
    assert words in error["message"]
    assert (refused.status_code, error["code"]) == (400, "invalid_value")


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ClosedError("x"), 503, "shutting_down"),
        (ContextLengthError("x"), 400, "context_length_exceeded"),
        (PlanError("is closed"), 400, "invalid_value"),
        (RuntimeError("is closed"), 500, None),
    ],
    ids=repr,
)
def test_the_status_follows_from_the_kind_of_an_error(
    error: Exception, status: int, code: str | None
) -> None:
    told = api_error(error)
    assert (told.status, told.body["error"]["code"]) == (status, code)


def test_a_library_that_is_not_installed_is_named(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    for stream in (False, True):
        body = {"prompt": "a", "regex": "[a-f]*", "stream": stream}
        response = client.post("/v1/completions", json=body)
        assert response.status_code == 501
        assert "gguf-dyno[grammar]" in response.json()["error"]["message"]
    told = [record for record in caplog.records if record.name == "dyno.server"]
    assert len(told) == 2
    assert all("gguf-dyno[grammar]" in record.message and not record.exc_info for record in told)


def test_another_failed_import_keeps_its_text_to_itself(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ImportError("/home/somebody/lib.so: cannot be opened")

    monkeypatch.setattr("dyno._grammar.Grammar.__init__", broken)
    response = client.post("/v1/completions", json={"prompt": "a", "regex": "[a-f]*"})
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "ImportError; the server's log has more"
    (told,) = (record for record in caplog.records if record.name == "dyno.server")
    assert told.exc_info
    assert "somebody" in told.message
