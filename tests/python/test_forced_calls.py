"""Answers that have to call a function: grammar, parser, engine and both APIs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from chat_model import chat_model
from dyno import Engine
from dyno.chat.answer import Part, parser_for
from dyno.chat.forced import ForcedCalls, call_grammar
from dyno.errors import ChatError, PlanError
from dyno.server import Options
from served import HELLO, KEY, Served, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import httpx

pytest.importorskip("llguidance")


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


CITY = {"$ref": "#/$defs/City"}
TOOLS = [
    tool("look", type="object", properties={}, additionalProperties=False),
    tool(
        'w "x"',
        type="object",
        properties={"city": CITY, "days": {"enum": [1, 2]}},
        required=["city", "days"],
        additionalProperties=False,
        **{"$defs": {"City": {"enum": ["Rom", "Oslo"]}}},
    ),
]
NAMES = [each["function"]["name"] for each in TOOLS]
DRAWN: dict[str, Any] = {"temperature": 1.0, "max_tokens": 1200}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("model") / "m.gguf", n_ctx=1500)


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Served]:
    with serving(model, Options(model="tiny", api_key=KEY), ctx=1500) as server:
        yield server


def checked(name: str, arguments: str | dict[str, Any]) -> str:
    """The name, if the arguments fit its schema."""
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    if name == "look":
        assert given == {}
    else:
        assert name == NAMES[1]
        assert set(given) == {"city", "days"}
        assert given["city"] in ("Rom", "Oslo")
        assert given["days"] in (1, 2)
    return name


def parts(parser: ForcedCalls, *pieces: str) -> list[Part]:
    return [part for piece in pieces for part in parser.push(piece)] + [*parser.finish()]


def test_content_becomes_calls() -> None:
    text = '[{"name": "a", "arguments": {"b": [1]}}, {"name": "c", "arguments": {}}]'
    for size in (1, 7, 1000):
        parser = ForcedCalls(parser_for("<think></think>", "", TOOLS))
        whole = "<think>so\n</think>" + text
        found = parts(parser, *(whole[at : at + size] for at in range(0, len(whole), size)))
        assert "".join(part.reasoning for part in found) == "so"
        calls = [part.tool_call for part in found if part.tool_call is not None]
        assert [(call.name, json.loads(call.arguments)) for call in calls] == [("a", {"b": [1]}), ("c", {})]
        assert not any(part.content for part in found)


def test_a_call_that_was_cut_off_is_shown() -> None:
    found = parts(ForcedCalls(parser_for("", "", TOOLS)), '[{"name": "a", "argu')
    assert [part.content for part in found] == ['[{"name": "a", "argu']
    assert not parts(ForcedCalls(parser_for("", "", TOOLS)))


@pytest.mark.parametrize(
    ("end", "rest"),
    [
        ("", ""), (", ", ""), (', {"na', '{"na'), (', {"name": "b", "arguments": {"x": {}}', None), ("]", ""),
    ],
)  # fmt: skip
def test_calls_before_one_that_was_cut_off_are_calls(end: str, rest: str | None) -> None:
    calls = '[{"name": "a", "arguments": {"b": "}, ["}}, {"name": "c", "arguments": {}}'
    found = parts(ForcedCalls(parser_for("", "", TOOLS)), calls + end)
    assert [part.tool_call.name for part in found if part.tool_call is not None] == ["a", "c"]
    assert "".join(part.content for part in found) == (end[2:] if rest is None else rest)


HARMONY = "{# <|channel|>final<|message|> #}{{ messages[-1].content }}<|start|>assistant"


def test_a_model_with_headers_calls_the_function_that_was_asked_for(tmp_path: Path) -> None:
    """Before its content it may call any function, in a form of its own: so its content begins at once."""
    model = chat_model(tmp_path / "m.gguf", HARMONY, n_ctx=1500)
    with Engine(model, device="cpu", profile=None, ctx=1500) as engine:
        for seed in range(2):
            reply = engine.chat(HELLO, tools=TOOLS, call="look", seed=seed, **DRAWN)
            [call] = reply.message()["tool_calls"]
            assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("look", {})
            assert engine.detokenize(reply.tokens).startswith('[{"name": "look"')


def test_rules_for_a_whole_answer_need_all_of_it(served: Served, model: Path) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "{"}]
    schema = {"type": "object"}
    tools = [{"name": "look", "input_schema": {"type": "object"}}]
    for path, fields in (
        ("messages", {"output_config": {"format": {"type": "json_schema", "schema": schema}}}),
        ("messages", {"tools": tools, "tool_choice": {"type": "any"}}),
        ("chat/completions", {"continue_final_message": True, "response_format": {"type": "json_object"}}),
        ("chat/completions", {"continue_final_message": True, "tools": TOOLS, "tool_choice": "required"}),
    ):
        answer = served.client.post(f"/v1/{path}", json={"messages": begun, "max_tokens": 9, **fields})
        assert answer.status_code == 400, answer.text
        assert "the last message begins the answer" in answer.json()["error"]["message"]
    with Engine(model, device="cpu", profile=None, ctx=1500) as engine:
        # Thoughts have ended before the beginning: the rules of the rest hold from its first token.
        rest = engine.chat(
            begun, continues=True, variables={"thinking": True}, regex="[0-9]{3}", max_tokens=9
        )
        message = rest.message()
        assert "reasoning_content" not in message
        assert len(message["content"]) == 3
        assert message["content"].isdigit()
        assert engine.detokenize(rest.prompt, special=True).endswith("<|assistant|><think></think>{")


@pytest.mark.parametrize(
    ("tools", "function", "words"),
    [
        (None, None, "the request has no tools"),
        ([], "look", "the request has no tools"),
        (TOOLS, "walk", "asks for 'walk'; the tools are look, w "),
    ],
)
def test_a_call_of_nothing_is_refused(
    tools: list[dict[str, Any]] | None, function: str | None, words: str
) -> None:
    with pytest.raises(ChatError, match=words):
        call_grammar(tools, function, one=True)


@pytest.mark.parametrize("call", ["", *NAMES])
def test_an_engine_s_answer_is_a_call(model: Path, call: str) -> None:
    with Engine(model, device="cpu", profile=None, ctx=1500) as engine:
        for seed in range(3):
            message = engine.chat(HELLO, tools=TOOLS, call=call, seed=seed, **DRAWN).message()
            names = [checked(**each["function"]) for each in message.get("tool_calls", [])]
            assert names, message
            assert message["content"] == ""
            assert len(names) == 1 or not call
            assert set(names) <= ({call} if call else set(NAMES))
        with pytest.raises(PlanError, match="regex cannot hold"):
            engine.chat(HELLO, tools=TOOLS, call=call, regex="a")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", [None, *NAMES])
def test_chat_completions_call(served: Served, name: str | None, stream: bool) -> None:
    choice = "required" if name is None else {"type": "function", "function": {"name": name}}
    body = {
        **DRAWN,
        **{"messages": HELLO, "tools": TOOLS, "tool_choice": choice, "stream": stream, "seed": 4},
        **{"parallel_tool_calls": False, "response_format": {"type": "json_object"}},
    }
    answer = served.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    if stream:
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        choices = [choice for event in events for choice in event["choices"]]
        calls = [call for each in choices for call in each["delta"].get("tool_calls", [])]
        reason = choices[-1]["finish_reason"]
        assert not any(each["delta"].get("content") for each in choices)
    else:
        [only] = answer.json()["choices"]
        calls, reason = only["message"]["tool_calls"], only["finish_reason"]
        assert only["message"]["content"] is None
    assert [checked(**call["function"]) for call in calls] == [name or calls[0]["function"]["name"]]
    assert reason == "tool_calls"


@pytest.mark.parametrize("name", [None, *NAMES])
def test_messages_call(served: Served, name: str | None) -> None:
    tools = [
        {"name": each["function"]["name"], "input_schema": each["function"]["parameters"]} for each in TOOLS
    ]
    choice = {"type": "any"} if name is None else {"type": "tool", "name": name}
    body = {**DRAWN, "messages": HELLO, "tools": tools, "tool_choice": choice, "seed": 4}
    answer = served.client.post("/v1/messages", json=body).json()
    assert answer["stop_reason"] == "tool_use", answer
    names = [checked(block["name"], block["input"]) for block in answer["content"]]
    assert set(names) <= ({name} if name else set(NAMES))


def test_what_cannot_be_called_is_refused(served: Served) -> None:
    def asked(**fields: Any) -> httpx.Response:
        return served.client.post("/v1/chat/completions", json={**DRAWN, "messages": HELLO, **fields})

    for fields, words in (
        ({"tool_choice": "required"}, "the request has no tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "asks for 'f'"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "grammar": 'root ::= "a"'}, "grammar cannot hold"),
    ):
        answer = asked(**fields)
        assert answer.status_code == 400
        assert words in answer.json()["error"]["message"]
