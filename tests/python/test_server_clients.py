"""The public clients, `openai` and `anthropic`, against the server.

Tests import them: every worker collects this file, and both take two CPU seconds.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from chat_model import chat_model
from dyno.chat import Part, Reply, ToolCall
from dyno.server import Options
from served import GREEDY, HELLO, KEY, Served, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import httpx

COLD = {"extra_body": {"temperature": 0}}  # the client has no argument for it any more
TOOL = {
    "name": "weather",
    "description": "The weather of a place.",
    "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}},
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = chat_model(tmp_path_factory.mktemp("model") / "m.gguf")
    with serving(model, Options(model="tiny", api_key=KEY, max_body_bytes=8000)) as server:
        yield server


@pytest.fixture
def chatgpt(served: Served) -> Iterator[Any]:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{served.address}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture
def claude(served: Served) -> Iterator[Any]:
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=served.address, api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[Part]:
    """Parts of answers in place of those that the tiny model of random weights would give."""
    parts: list[Part] = []

    def written(self: Reply) -> Iterator[Part]:
        self.tokens += [1] * len(parts)
        for part in parts:
            self.answer.add(part)
            yield part
        self.finish_reason = "tool_calls" if self.answer.tool_calls else "stop"

    monkeypatch.setattr(Reply, "_written", written)
    return parts


# ---- openai ----


def test_chat_completions(served: Served, chatgpt: Any) -> None:
    expected = served.engine.chat(HELLO, max_tokens=12).message()["content"]
    asked = {"model": "any", "messages": HELLO, **GREEDY}
    assert chatgpt.chat.completions.create(**asked).choices[0].message.content == expected
    stream = chatgpt.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected
    assert chunks[-1].usage.completion_tokens > 3
    scored = chatgpt.chat.completions.create(**asked, logprobs=True, top_logprobs=3, n=2)
    assert [len(c.logprobs.content[0].top_logprobs) for c in scored.choices] == [3, 3]
    assert chatgpt.models.list().data[0].id == "tiny"


def test_tools_of_a_chat(chatgpt: Any, answers: list[Part]) -> None:
    answers += [
        Part(reasoning="hm"),
        Part(content="So:"),
        Part(tool_call=ToolCall("weather", '{"place": "x"}')),
    ]
    tool = {"type": "function", "function": {"name": "weather", "parameters": TOOL["input_schema"]}}
    asked = {"model": "any", "messages": HELLO, "tools": [tool]}
    (choice,) = chatgpt.chat.completions.create(**asked).choices
    assert choice.finish_reason == "tool_calls"
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"place": "x"}
    with chatgpt.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.message.content == "So:"
    assert final.message.tool_calls[0].function.name == "weather"


def test_one_call_of_several(chatgpt: Any, claude: Any, answers: list[Part]) -> None:
    answers += [Part(tool_call=ToolCall("weather", f'{{"place": "{place}"}}')) for place in "xyz"]
    tool = {"type": "function", "function": {"name": "weather", "parameters": TOOL["input_schema"]}}
    asked = {"model": "any", "messages": HELLO, "tools": [tool]}
    for several in (True, False):
        (choice,) = chatgpt.chat.completions.create(**asked, parallel_tool_calls=several).choices
        with chatgpt.chat.completions.stream(**asked, parallel_tool_calls=several) as stream:
            streamed = stream.get_final_completion().choices[0]
        for each in (choice, streamed):
            assert each.finish_reason == "tool_calls"
            assert len(each.message.tool_calls) == (3 if several else 1)
    asked = {"model": "any", "messages": HELLO, "tools": [TOOL], "max_tokens": 9}
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    message = claude.messages.create(**asked, tool_choice=choice)
    with claude.messages.stream(**asked, tool_choice=choice) as stream:
        streamed = stream.get_final_message()
    for each in (message, streamed):
        assert [block.input for block in each.content] == [{"place": "x"}]
        assert each.stop_reason == "tool_use"


def test_completions_and_errors(served: Served, chatgpt: Any) -> None:
    openai = pytest.importorskip("openai")
    expected = ["".join(served.engine.generate(p, 12)) for p in ("a", "def main")]
    got = chatgpt.completions.create(model="any", prompt=["a", "def main"], n=1, echo=True, **GREEDY)
    assert [c.text for c in got.choices] == ["a" + expected[0], "def main" + expected[1]]
    with pytest.raises(openai.BadRequestError, match="600 tokens, ctx is 256") as told:
        chatgpt.completions.create(model="any", prompt="x" * 600)
    assert told.value.code == "context_length_exceeded"
    with pytest.raises(openai.AuthenticationError):
        chatgpt.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.NotFoundError):
        chatgpt.images.generate(prompt="a cat")


def test_content_may_come_in_parts(chatgpt: Any) -> None:
    openai = pytest.importorskip("openai")
    asked = {"model": "any", **GREEDY}
    expected = chatgpt.chat.completions.create(messages=HELLO, **asked)
    for part in ({"type": "text", "text": "Hello"}, {"type": "input_text", "text": "Hello"}):
        got = chatgpt.chat.completions.create(messages=[{"role": "user", "content": [part]}], **asked)
        assert got.choices[0].message == expected.choices[0].message
        assert got.usage.prompt_tokens == expected.usage.prompt_tokens
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    for parts, param, words in (
        (
            [{"type": "text", "text": "Hello"}, image],
            "messages.1.content.1.type",
            "'image_url' is not supported",
        ),
        ([5], "messages.1.content.0", "expected an object"),
        ([{"type": "text", "text": 5}], "messages.1.content.0.text", "expected a text"),
        ({"text": "Hello"}, "messages.1.content", "expected a text or a list of parts"),
    ):
        messages = [*HELLO, {"role": "user", "content": parts}]
        with pytest.raises(openai.BadRequestError, match=words) as told:
            chatgpt.chat.completions.create(messages=messages, **asked)
        assert told.value.param == param


def test_a_result_may_be_absent_or_an_error(served: Served, claude: Any) -> None:
    def count(**fields: Any) -> int:
        result = {"type": "tool_result", "tool_use_id": "1", **fields}
        history = [
            *HELLO,
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": None}]},
            {"role": "user", "content": [result]},
        ]
        return int(claude.messages.count_tokens(model="any", messages=history).input_tokens)

    empty, plain = count(), count(content="no file")
    assert count(content=None, is_error=None) == empty == plain - len("no file")
    assert count(content="no file", is_error=False) == plain
    assert count(content="no file", is_error=True) == plain + len("Error: ")


ITEMS = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{% for name, value in c.function.arguments | items %}<{{ name }}={{ value }}>{% endfor %}{% endfor %}"
    "{% endfor %}"
)


def test_both_clients_give_the_results_of_tools_to_a_template_of_objects(
    tmp_path: Path, answers: list[Part]
) -> None:
    """The API has arguments as JSON text, and the template runs over the items of an object."""
    anthropic = pytest.importorskip("anthropic")
    openai = pytest.importorskip("openai")
    model = chat_model(tmp_path / "m.gguf", ITEMS)
    answers += [Part(tool_call=ToolCall("weather", '{"place": "x"}'))]
    function = {"type": "function", "function": {"name": "weather", "parameters": TOOL["input_schema"]}}
    asked = {"model": "any", "messages": HELLO}
    with serving(model, Options(model="tiny", api_key=KEY)) as server:
        expected = len(server.engine.tokenize("Hello<place=x>rain"))
        with openai.OpenAI(base_url=f"{server.address}/v1", api_key=KEY, max_retries=0) as client:
            answer = client.chat.completions.create(**asked, tools=[function]).choices[0].message
            result = {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": "rain"}
            asked["messages"] = [*HELLO, answer, result]
            assert client.chat.completions.create(**asked).usage.prompt_tokens == expected
        asked = {"model": "any", "messages": HELLO, "max_tokens": 9}
        with anthropic.Anthropic(base_url=server.address, api_key=KEY, max_retries=0) as client:
            content = client.messages.create(**asked, tools=[TOOL]).content
            result = {"type": "tool_result", "tool_use_id": content[0].id, "content": "rain"}
            asked["messages"] = [
                *HELLO,
                {"role": "assistant", "content": content},
                {"role": "user", "content": [result]},
            ]
            assert client.messages.create(**asked).usage.input_tokens == expected


# ---- anthropic ----


def test_messages(served: Served, claude: Any) -> None:
    reply = served.engine.chat([{"role": "system", "content": "Be brief."}, *HELLO], max_tokens=12)
    expected = reply.message()["content"]
    asked = {"model": "any", "system": "Be brief.", "messages": HELLO, "max_tokens": 12, **COLD}
    got = claude.messages.create(**asked)
    assert [(block.type, block.text) for block in got.content] == [("text", expected)]
    assert got.stop_reason == {"stop": "end_turn", "length": "max_tokens"}[reply.finish_reason or ""]
    usage = got.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == len(reply.prompt)
    assert usage.output_tokens == len(reply.tokens)
    blocks = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    assert claude.messages.create(**{**asked, "messages": blocks}).content[0].text == expected
    with claude.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == expected
        final = stream.get_final_message()
    assert final.stop_reason == got.stop_reason
    assert final.usage.output_tokens == usage.output_tokens
    count = claude.messages.count_tokens(model="any", system="Be brief.", messages=HELLO)
    assert count.input_tokens == len(reply.prompt)


def test_a_stop_sequence_is_named(claude: Any) -> None:
    asked = {"model": "any", "messages": HELLO, "max_tokens": 12, **COLD}
    text = claude.messages.create(**asked).content[0].text
    stop = text[2:4]
    got = claude.messages.create(**asked, stop_sequences=["never", stop])
    assert (got.stop_reason, got.stop_sequence) == ("stop_sequence", stop)
    assert "".join(block.text for block in got.content) == text[: text.index(stop)]


def test_a_schema_holds(claude: Any) -> None:
    pytest.importorskip("llguidance")
    wanted = {"format": {"type": "json_schema", "schema": {"enum": ["first", "second"]}}}
    got = claude.messages.create(model="any", messages=HELLO, max_tokens=60, output_config=wanted, **COLD)
    assert json.loads(got.content[0].text) in ("first", "second")


def test_tools_of_a_message(claude: Any, answers: list[Part]) -> None:
    calls = [ToolCall("weather", '{"place": "x"}'), ToolCall("weather", "{}")]
    answers += [Part(reasoning="h"), Part(reasoning="m"), Part(content="So:")]
    answers += [Part(tool_call=call) for call in calls]
    asked = {"model": "any", "messages": HELLO, "tools": [TOOL], "max_tokens": 9}
    whole = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream:
        events = [event.type for event in stream]
        streamed = stream.get_final_message()
    for got in (whole, streamed):
        assert got.stop_reason == "tool_use"
        thought, text, *uses = got.content
        assert (thought.type, thought.thinking) == ("thinking", "hm")
        assert (text.type, text.text) == ("text", "So:")
        assert [(use.type, use.id, use.input) for use in uses] == [
            ("tool_use", calls[0].id, {"place": "x"}),
            ("tool_use", calls[1].id, {}),
        ]
    assert events[0] == "message_start"
    assert events[-1] == "message_stop"
    assert events.count("content_block_start") == events.count("content_block_stop") == 4


def test_a_conversation_with_tools_reaches_the_template(served: Served, claude: Any) -> None:
    history = [
        *HELLO,
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "So:"},
                {"type": "tool_use", "id": "1", "name": "weather", "input": {"place": "x"}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "rain"}]},
    ]
    called = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "x"}'}}
    same = [
        *HELLO,
        {"role": "assistant", "content": "So:", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    count = claude.messages.count_tokens(model="any", messages=history)
    assert count.input_tokens == len(served.engine.chat(same).prompt)


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"max_tokens": 0}, "invalid_request_error", "max_tokens"),
        ({"messages": []}, "invalid_request_error", "messages"),
        ({"tool_choice": {"type": "some"}}, "invalid_request_error", "tool_choice"),
        ({"tool_choice": {"type": "any", "name": "f"}}, "invalid_request_error", "a name belongs to"),
        ({"tool_choice": {"type": "any"}}, "invalid_request_error", "the request has no tools"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "invalid_request_error", "ctx is 256"),
        ({"messages": [{"role": "user", "content": "x" * 9000}]}, "request_too_large", "more than 8000"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url"}}]}]},
            "invalid_request_error",
            "image",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "a"}]}]},
            "invalid_request_error",
            "does not fit the role user",
        ),
    ],
)  # fmt: skip
def test_errors_of_messages(served: Served, change: dict[str, Any], kind: str, words: str) -> None:
    body = {"model": "any", "messages": HELLO, "max_tokens": 5, **change}
    response: httpx.Response = served.client.post("/v1/messages", json=body)
    error = response.json()
    assert error["type"] == "error"
    assert error["error"]["type"] == kind
    assert words in error["error"]["message"]


def test_keys_of_both_clients(claude: Any, chatgpt: Any) -> None:
    anthropic = pytest.importorskip("anthropic")
    openai = pytest.importorskip("openai")
    with pytest.raises(anthropic.AuthenticationError):
        claude.with_options(api_key="wrong").messages.create(model="any", messages=HELLO, max_tokens=1)
    with pytest.raises(openai.AuthenticationError):
        chatgpt.with_options(api_key="wrong").models.list()
