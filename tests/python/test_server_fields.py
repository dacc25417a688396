"""Fields of requests that no body has: harmless, refused, unknown."""

from __future__ import annotations

import difflib
import logging
from typing import TYPE_CHECKING, Any

import pytest
from chat_model import chat_model
from dyno.server import Options
from dyno.server.bodies import ChatBody
from dyno.server.errors import ApiError
from dyno.server.fields import IGNORED_FIELDS, Fields
from dyno.server.messages_body import MessagesBody
from served import GREEDY, HELLO, KEY, Served, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CHAT: dict[str, Any] = {"messages": HELLO, **GREEDY}
TEXT: dict[str, Any] = {"prompt": "Hello", **GREEDY}
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": TEXT,
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/v1/embeddings": {"input": "Hello"},
    "/tokenize": {"content": "Hello"},
    "/detokenize": {"tokens": [5]},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("model") / "m.gguf")


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Served]:
    with serving(model, Options(model="tiny", api_key=KEY)) as server:
        yield server


@pytest.mark.parametrize("path", PATHS)
def test_an_unknown_field_is_ignored_and_told(
    served: Served, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    with caplog.at_level(logging.WARNING, "dyno.server"):
        plain = served.client.post(path, json=PATHS[path])
        given = [served.client.post(path, json={**PATHS[path], "max_tokns": 3, "none": None}) for _ in (1, 2)]
    assert plain.status_code == 200
    assert IGNORED_FIELDS not in plain.headers
    for each in given:
        assert each.status_code == 200
        assert each.headers[IGNORED_FIELDS] == "max_tokns"
    told = [record.getMessage() for record in caplog.records if "max_tokns" in record.getMessage()]
    assert len(told) == 1  # once, not for each request
    assert f"max_tokns is not a field of {path}" in told[0]
    if "max_tokens" in PATHS[path]:
        assert "did you mean max_tokens?" in told[0]


def test_streams_tell_it_too(served: Served) -> None:
    with served.client.stream(
        "POST", "/v1/chat/completions", json={**CHAT, "stream": True, "temprature": 0}
    ) as answer:
        assert answer.headers[IGNORED_FIELDS] == "temprature"
        assert "[DONE]" in answer.read().decode()


@pytest.mark.parametrize(
    ("path", "fields", "name", "advice"),
    [
        (
            "/v1/chat/completions",
            {"stream_options": {"include_usge": True}},
            "stream_options.include_usge",
            "did you mean stream_options.include_usage?",
        ),
        (
            "/v1/chat/completions",
            {"response_format": {"type": "json_object", "shema": {}}},
            "response_format.shema",
            "did you mean response_format.schema?",
        ),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "txt": ""}] * 2}] * 2},
            "messages.content.txt",
            "did you mean messages.content.text?",
        ),
        ("/v1/messages", {"output_config": {"efort": "low"}}, "output_config.efort", "output_config.effort?"),
        (
            "/v1/messages/count_tokens",
            {"tools": [{"name": "f", "input_schema": {}, "descripton": ""}]},
            "tools.descripton",
            "tools.description?",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and value[0] == "/" else "",
)
def test_a_field_inside_of_another_is_told_with_its_place(
    served: Served,
    caplog: pytest.LogCaptureFixture,
    path: str,
    fields: dict[str, Any],
    name: str,
    advice: str,
) -> None:
    with caplog.at_level(logging.WARNING, "dyno.server"):
        given = [served.client.post(path, json={**PATHS[path], **fields}) for _ in (1, 2)]
    for each in given:
        assert each.status_code == 200, each.text
        assert each.headers[IGNORED_FIELDS] == name
    told = [record.getMessage() for record in caplog.records if name in record.getMessage()]
    assert len(told) == 1
    assert f"{name} is not a field of {path}" in told[0]
    assert advice in told[0]


def test_names_are_no_way_into_headers_and_logs(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    names = ["a\r\nset-cookie: x", "ü,b", "c" * 500, *(f"field_{i}" for i in range(97))]
    with caplog.at_level(logging.WARNING, "dyno.server"):
        answer = served.client.post("/tokenize", json={"content": "Hello", **dict.fromkeys(names, 1)})
        names = [f"other_{i}" for i in range(100)]
        served.client.post("/tokenize", json={"content": "Hello", **dict.fromkeys(names, 1)})
    assert answer.status_code == 200
    assert "set-cookie" not in answer.headers
    shown = answer.headers[IGNORED_FIELDS].split(", ")
    assert shown[:3] == [r"a\r\nset-cookie: x", r"\xfc\x2cb", "c" * 64]
    assert len(shown) == 9
    assert shown[-1] == "..."
    assert len(caplog.records) <= 100
    assert all("\n" not in record.getMessage() for record in caplog.records)


def test_many_unknown_fields_cost_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body has room for a million names, and they are judged on the loop of all answers."""
    searches, search = 0, difflib.get_close_matches

    def counted(*args: Any) -> list[str]:
        nonlocal searches
        searches += 1
        return search(*args)

    monkeypatch.setattr(difflib, "get_close_matches", counted)
    fields = Fields(strict=False)
    many = ChatBody.model_validate({**CHAT, **{f"max_tokenq{i}": 0 for i in range(100_000)}})
    with pytest.raises(ApiError, match="100000 fields"):
        fields.ignored("/v1/chat/completions", many)
    assert searches == 0
    for first in (0, 0, 90, 180):
        some = {f"max_tokenq{i}": 0 for i in range(first, first + 90)}
        assert len(fields.ignored("/v1/chat/completions", ChatBody.model_validate({**CHAT, **some}))) == 9
    assert searches == 100


def test_many_unknown_fields_inside_of_others_are_refused() -> None:
    fields = Fields(strict=False)
    text = {"type": "text", "text": "a"}
    parts = [{**text, f"part{i}": 1} for i in range(10_000)]

    def body(*content: object) -> MessagesBody:
        messages = [{"role": "user", "content": list(content)}]
        return MessagesBody.model_validate({"messages": messages, "max_tokens": 3})

    with pytest.raises(ApiError, match="101 fields"):
        fields.ignored("/v1/messages", body(*parts))
    assert len(fields.ignored("/v1/messages", body(*parts[:100]))) == 9
    assert fields.ignored("/v1/messages", body(*[{**text, "own": 1}] * 1000)) == ["messages.content.own"]


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_a_second_name_of_a_limit_does_not_count_beside_it(limit: str) -> None:
    body = ChatBody.model_validate({"messages": HELLO, limit: 3, "n_predict": 5})
    assert Fields(strict=True).ignored("/v1/chat/completions", body) == []
    asked = MessagesBody.model_validate({"messages": HELLO, "max_tokens": 3, "n": 5, "best_of": 5})
    with pytest.raises(ApiError, match="best_of"):
        Fields(strict=False).ignored("/v1/messages", asked)


@pytest.mark.parametrize(
    ("path", "field", "value", "words"),
    [
        ("/v1/completions", "suffix", "end", "suffix is not supported"),
        ("/v1/completions", "best_of", 3, "best_of"),
        ("/v1/chat/completions", "n_predict", 5, "use max_tokens"),
        ("/v1/completions", "n_predict", 5, "use max_tokens"),
        ("/v1/chat/completions", "functions", [{"name": "f"}], "use tools"),
        ("/v1/chat/completions", "modalities", ["text", "audio"], "modalities"),
        ("/v1/chat/completions", "verbosity", "low", "verbosity"),
        ("/v1/chat/completions", "guided_json", {}, "use response_format"),
        ("/v1/chat/completions", "repetition_penalty", 1.1, "use repeat_penalty"),
        ("/v1/chat/completions", "add_generation_prompt", False, "use continue_final_message"),
        ("/v1/messages", "container", "c", "container"),
        ("/v1/chat/completions", "documents", [{"text": "x"}], "use chat_template_kwargs.documents"),
        ("/v1/chat/completions", "skip_special_tokens", False, "skip_special_tokens"),
        ("/v1/chat/completions", "add_special_tokens", True, "add_special_tokens"),
        ("/v1/completions", "add_special_tokens", False, "add_special_tokens"),
        ("/v1/embeddings", "add_special_tokens", False, "add_special_tokens"),
        ("/v1/completions", "prompt_logprobs", 1, "prompt_logprobs"),
        ("/v1/completions", "length_penalty", 0.5, "length_penalty"),
        ("/v1/completions", "logits_processors", ["a"], "logits_processors"),
        ("/v1/completions", "lora", [{"id": 0, "scale": 0.5}], "lora"),
        ("/v1/completions", "samplers", ["top_k"], "samplers"),
        ("/v1/completions", "n_probs", 3, "use logprobs"),
        ("/v1/completions", "t_max_predict_ms", 10, "use timeout"),
        ("/v1/chat/completions", "reasoning_budget", 0, "reasoning_budget"),
        ("/v1/chat/completions", "thinking_budget_tokens", 5, "thinking_budget_tokens"),
        ("/v1/messages", "response_format", {"type": "json_object"}, "use output_config.format"),
        ("/v1/messages", "stop", ["a"], "use stop_sequences"),
        ("/v1/messages", "n", 2, "n is not supported"),
        ("/v1/messages", "logit_bias", {"5": 1}, "logit_bias"),
        ("/v1/messages", "regex", "a*", "regex"),
        ("/v1/messages", "presence_penalty", 0.5, "presence_penalty"),
        ("/v1/chat/completions", "stop_sequences", ["a"], "use stop"),
        ("/v1/chat/completions", "system", "Be brief.", "use messages"),
        ("/v1/chat/completions", "thinking", {"type": "disabled"}, "use chat_template_kwargs"),
        ("/v1/completions", "tools", [{"type": "function"}], "tools"),
        ("/v1/completions", "max_completion_tokens", 5, "use max_tokens"),
    ],
)
def test_a_field_that_would_change_the_answer_is_refused(
    served: Served, path: str, field: str, value: object, words: str
) -> None:
    body = {name: each for name, each in PATHS[path].items() if field != "n_predict" or name != "max_tokens"}
    answer = served.client.post(path, json={**body, field: value})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert words in error["message"]
    if path != "/v1/messages":
        assert (error["param"], error["code"]) == (field, "unsupported_parameter")
    else:
        assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (
            "/v1/chat/completions",
            {
                **{"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
                **{"parallel_tool_calls": True, "safety_identifier": "x", "prompt_cache_key": "k"},
                **{"modalities": ["text"], "verbosity": "medium", "n_predict": 7, "function_call": "none"},
                **{"min_tokens": 0, "mirostat": 0, "top_n_sigma": -1.0, "suffix": None},
                **{"stream_options": {"include_usage": None, "include_obfuscation": False, "later": None}},
                **{"response_format": {"type": "text", "schema": None}},
                **{"documents": [], "skip_special_tokens": True, "add_special_tokens": False},
                **{"mirostat_tau": 5.0, "dynatemp_exponent": 1.0, "n_probs": 0, "t_max_predict_ms": 0},
                **{"samplers": [], "lora": [], "reasoning_budget": -1, "reasoning_format": "auto"},
            },
        ),
        ("/v1/completions", {"user": "me", "best_of": 1, "suffix": "", "use_beam_search": False}),
        (
            "/v1/messages",
            {
                **{"metadata": {"user_id": "me"}, "service_tier": "auto", "mcp_servers": []},
                **{
                    "thinking": {"type": "enabled", "budget_tokens": 1024},
                    "output_config": {"effort": "low"},
                },
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {
                                **{"type": "text", "text": "Hello", "citations": None},
                                "cache_control": {"type": "ephemeral"},
                            }
                        ],
                    }
                ],
            },
        ),
        ("/v1/embeddings", {"user": "me", "add_special_tokens": True}),
    ],
)
def test_harmless_fields_change_nothing(served: Served, path: str, fields: dict[str, Any]) -> None:
    plain, given = (served.client.post(path, json={**PATHS[path], **more}) for more in ({}, fields))
    assert given.status_code == 200, given.text
    assert IGNORED_FIELDS not in given.headers
    made = [
        answer.json().get("choices", answer.json().get("content", answer.json().get("data")))
        for answer in (plain, given)
    ]
    assert made[0] == made[1]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages"])
def test_fields_of_another_kind_of_text_may_ask_for_nothing(served: Served, path: str) -> None:
    neutral: dict[str, Any] = {
        **{"n": 1, "logit_bias": {}, "presence_penalty": 0, "stop": [], "tools": [], "tool_choice": "auto"},
        **{"response_format": {"type": "text"}, "logprobs": False, "top_logprobs": 0, "grammar": ""},
        **{"parallel_tool_calls": True, "thinking": {"type": "enabled", "budget_tokens": 1024}},
        **{"stop_sequences": [], "output_config": None, "stream_options": {"include_usage": True}},
    }
    for name, value in neutral.items():
        if (name, path) in (("tool_choice", "/v1/messages"), ("logprobs", "/v1/completions")):
            continue  # fields of these requests, of another type
        if name == "grammar" and path != "/v1/messages":
            continue
        body = {**PATHS[path], "stream": name == "stream_options", name: value}
        assert served.client.post(path, json=body).status_code == 200, name


def test_a_count_may_have_the_fields_of_an_answer(served: Served) -> None:
    body = {"messages": HELLO, "max_tokens": 5, "temperature": 0.5, "n": 2, "stop_sequences": ["a"]}
    assert served.client.post("/v1/messages/count_tokens", json=body).status_code == 200


def test_a_strict_server_refuses_unknown_fields(model: Path) -> None:
    with serving(model, Options(model="tiny", api_key=KEY, strict_fields=True)) as server:
        answer = server.client.post("/v1/chat/completions", json={**CHAT, "max_tokns": 3})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == ("max_tokns", "unknown_parameter")
        assert "did you mean max_tokens?" in error["message"]
        answer = server.client.post("/v1/chat/completions", json={**CHAT, "stream_options": {"usage": True}})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream_options.usage")
        assert server.client.post("/v1/chat/completions", json={**CHAT, "user": "me"}).status_code == 200


def test_settings_of_draws_reach_the_engine(served: Served) -> None:
    """The words of llama-server for XTC, DRY and the reach of penalties."""
    body = {**TEXT, "prompt": "abcabcabcabc", "max_tokens": 24}
    texts = {
        name: served.client.post("/v1/completions", json={**body, **more}).json()["choices"][0]["text"]
        for name, more in (
            ("plain", {}),
            ("dry", {"dry_multiplier": 50, "dry_allowed_length": 1, "dry_sequence_breakers": ["\n"]}),
            ("far", {"repeat_penalty": 50, "repeat_last_n": -1}),
            ("not at all", {"repeat_penalty": 50, "repeat_last_n": 0}),
            ("xtc", {"xtc_probability": 1, "xtc_threshold": 0, "temperature": 1, "top_k": 2, "seed": 1}),
            ("no xtc", {"temperature": 1, "top_k": 2, "seed": 1}),
        )
    }
    assert texts["dry"] != texts["plain"]
    assert texts["far"] != texts["plain"]
    assert texts["not at all"] == texts["plain"]
    assert texts["xtc"] != texts["no xtc"]
    wrong = served.client.post("/v1/completions", json={**body, "dry_base": 0})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "dry_base")


def test_other_servers_words_for_all_and_none(served: Served) -> None:
    """Clients of llama-server and vLLM send -1 where others leave a field out."""
    drawn = {**TEXT, "temperature": 5, "top_p": 1, "min_p": 0, "n": 4, "ignore_eos": True}

    def texts(path: str, **fields: Any) -> list[str]:
        given = {name: value for name, value in fields.items() if value is not None}
        answer = served.client.post(path, json={**drawn, "messages": HELLO, **given})
        assert answer.status_code == 200, answer.text
        return [c["text"] if "text" in c else c["message"]["content"] for c in answer.json()["choices"]]

    for path in ("/v1/completions", "/v1/chat/completions"):
        whole, all_of_them = (texts(path, top_k=k, seed=3) for k in (0, -1))
        assert whole == all_of_them
        assert texts(path, top_k=1, seed=3) != whole
        assert texts(path, top_k=0, seed=-1) != texts(path, top_k=0, seed=-1)
        unbounded = {**TEXT, "messages": HELLO, "max_tokens": -1, "ignore_eos": True}
        long = served.client.post(path, json=unbounded)
        usage, choice = long.json()["usage"], long.json()["choices"][0]
        # The last token needs no place in the context.
        assert (usage["total_tokens"], choice["finish_reason"]) == (257, "length")
        host = {"seed": 3, "presence_penalty": 0.5}
        assert texts(path, top_k=0, **host) == texts(path, top_k=-1, **host)
        for field in ("top_k", "max_tokens"):
            wrong = served.client.post(path, json={**TEXT, "messages": HELLO, field: -2})
            assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, field)
    body = {**CHAT, "temperature": 5, "top_p": 1, "min_p": 0, "top_k": -1, "ignore_eos": True}
    drawn_messages = [
        served.client.post("/v1/messages", json={**body, "seed": seed}).json()["content"]
        for seed in (3, 3, -1, -1)
    ]
    assert drawn_messages[0] == drawn_messages[1]
    assert drawn_messages[2] != drawn_messages[3]


def test_the_most_probable_token_alone_by_a_top_p_of_0(served: Served) -> None:
    drawn = {**TEXT, "temperature": 5, "min_p": 0, "seed": 1, "ignore_eos": True}
    greedy, alone, all_tokens = (
        served.client.post("/v1/completions", json={**drawn, **more}).json()["choices"][0]["text"]
        for more in ({"temperature": 0}, {"top_p": 0}, {"top_p": 1})
    )
    host = {**drawn, "presence_penalty": 0.5, "top_k": -1}
    texts = [
        served.client.post("/v1/completions", json={**host, **more}).json()["choices"][0]["text"]
        for more in ({"temperature": 0}, {"top_p": 0})
    ]
    assert texts[0] == texts[1]
    assert greedy == alone != all_tokens
    wrong = served.client.post("/v1/completions", json={**drawn, "top_p": -0.1})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "top_p")


def test_an_effort_is_a_variable_of_the_template() -> None:
    def variables(**fields: Any) -> dict[str, Any]:
        return ChatBody.model_validate({"messages": HELLO, **fields}).variables()

    assert variables() == {}
    assert variables(reasoning_effort="low") == {"reasoning_effort": "low"}
    assert variables(reasoning_effort="none") == {"reasoning_effort": "none", "enable_thinking": False}
    own = {"reasoning_effort": "high"}
    assert variables(reasoning_effort="low", chat_template_kwargs=own) == own
    asked = {"messages": HELLO, "max_tokens": 3, "output_config": {"effort": "low"}}
    assert MessagesBody.model_validate(asked).variables() == {"reasoning_effort": "low"}
    assert MessagesBody.model_validate({**asked, "chat_template_kwargs": own}).variables() == own
