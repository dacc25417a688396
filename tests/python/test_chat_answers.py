"""Answers taken apart: reasoning, content and tool calls, whole and character by character."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import time
from typing import Any

import pytest
from dyno.chat import ChatTemplate
from dyno.chat.answer import Answer, AnswerParser, _TagParser, content_opening, parser_for
from dyno.chat.calls import Schemas, ToolCall, marks_of
from dyno.errors import ChatError
from test_chat_templates import public_templates

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "parameters": {
                "type": "object",
                "properties": {"where": {"type": "string"}, "most": {"type": "integer"}},
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


def parsed(parser: AnswerParser, text: str, step: int) -> Answer:
    answer = Answer()
    for begin in range(0, len(text), step):
        for part in parser.push(text[begin : begin + step]):
            assert sum(map(bool, (part.content, part.reasoning, part.tool_call))) == 1
            answer.add(part)
    for part in parser.finish():
        answer.add(part)
    return answer


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


ZURICH = call("find", where="Zürich", most=3)
THINK = "x <think> </think>"
HARMONY = "<|start|>assistant<|channel|>final<|message|>"

EXAMPLES = [
    # template, prompt, answer, content, reasoning, calls
    ("", "", "Hello\n\nyou ", "Hello\n\nyou ", "", []),
    ("", "", "\n\nHello", "Hello", "", []),
    (THINK, "", "<think>\nwhy\n\nnot\n</think>\n\nBecause.\n", "Because.\n", "why\n\nnot", []),
    (THINK, "", "<think></think>ok", "ok", "", []),
    (THINK, "...<think>\n", "why</think>ok", "ok", "why", []),
    (THINK, "<think>\n\n</think>\n\n", "ok", "ok", "", []),
    (THINK, "", "<think>cut off", "", "cut off", []),
    (THINK, "", "The tag <think> opens.", "The tag <think> opens.", "", []),
    (THINK, "", "a < b <thin", "a < b <thin", "", []),
    (THINK, "What is <think>?", "A tag.", "A tag.", "", []),
    ("[THINK][/THINK]", "", "[THINK]why[/THINK]ok", "ok", "why", []),
    (
        "<tool_call>" + THINK,
        "",
        "<think>why</think>\n\nLooking.\n<tool_call>\n"
        '{"name": "find", "arguments": {"where": "Zürich", "most": 3}}'
        "\n</tool_call>\n<tool_call>\n"
        '{"name": "now", "arguments": {}}\n</tool_call>\n',
        "Looking.",
        "why",
        [ZURICH, call("now")],
    ),
    (
        "<tool_call>",
        "",
        '<tool_call>{"name": "find", "arguments": {"where": "</tool_call>"}}</tool_call>done',
        "done",
        "",
        [call("find", where="</tool_call>")],
    ),
    ("<tool_call>", "", "<tool_call>{nonsense}</tool_call>x", "<tool_call>{nonsense}</tool_call>x", "", []),
    ("<tool_call>", "", "<tool_call>\nnow\n</tool_call>", "", "", [call("now")]),
    (
        "<tool_call>",
        "",
        "<tool_call>\n<function=find>\n<parameter=where>\n12\n</parameter>\n<parameter=most>\n12\n</parameter>\n"
        "</function>\n</tool_call>",
        "",
        "",
        [call("find", where="12", most=12)],
    ),
    (
        "<tool_call>",
        "",
        "<tool_call>find\n<arg_key>where</arg_key>\n<arg_value>a\nb</arg_value>\n<arg_key>most</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>",
        "",
        "",
        [call("find", where="a\nb", most=3)],
    ),
    (
        '<|python_tag|> "parameters": ',
        "",
        '{"name": "find", "parameters": {"where": "Zürich", "most": 3}}',
        "",
        "",
        [ZURICH],
    ),
    (
        '<|python_tag|> "parameters": ',
        "",
        '<|python_tag|>{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}',
        "",
        "",
        [call("now"), call("now")],
    ),
    ('<|python_tag|> "parameters": ', "", '{"a": 1}', '{"a": 1}', "", []),
    (
        "[TOOL_CALLS]",
        "",
        'Wait.[TOOL_CALLS][{"name": "find", "arguments": {"where": "Zürich", "most": 3}, "id": "abc"}]',
        "Wait.",
        "",
        [ZURICH],
    ),
    (
        "[TOOL_CALLS]",
        "",
        '[TOOL_CALLS]find[CALL_ID]abc123def[ARGS]{"where": "Zürich", "most": 3}[TOOL_CALLS]now[ARGS]{}',
        "",
        "",
        [ZURICH, call("now")],
    ),
    (
        HARMONY,
        "",
        "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>final<|message|>Because.",
        "Because.",
        "why",
        [],
    ),
    (
        HARMONY,
        "",
        "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>commentary to=functions.find "
        '<|constrain|>json<|message|>{"where": "Zürich", "most": 3}',
        "",
        "why",
        [ZURICH],
    ),
    (HARMONY, "", " to=functions.now<|channel|>commentary json<|message|>{}<|call|>", "", "", [call("now")]),
    (HARMONY, "", "<|channel|>commentary<|message|>First I look.", "First I look.", "", []),
    (HARMONY, "", "no header", "no header", "", []),
    (HARMONY, "", "<|channel|>analy", "", "", []),
    (
        "<|tool_call>call:",
        "",
        '<|tool_call>call:find{where:<|"|>a, b: {c}<|"|>,most:3}<tool_call|>'
        "<|tool_call>call:now{}<tool_call|>",
        "",
        "",
        [call("find", where="a, b: {c}", most=3), call("now")],
    ),
    (
        "<|tool_list_start|>",
        "",
        '<|tool_call_start|>[find(where="Zürich", most=3), now()]<|tool_call_end|>I look.',
        "I look.",
        "",
        [ZURICH, call("now")],
    ),
    (
        "<|tool_list_start|>",
        "",
        "<|tool_call_start|>[find(open('x'))]<|tool_call_end|>",
        "<|tool_call_start|>[find(open('x'))]<|tool_call_end|>",
        "",
        [],
    ),
    (
        "<|tool_calls_section_begin|>",
        "",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>"
        '{"where": "Zürich", "most": 3}<|tool_call_end|><|tool_calls_section_end|>',
        "",
        "",
        [ZURICH],
    ),
    (
        "<｜tool▁calls▁begin｜>",
        "",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n```json\n"
        '{"where": "Zürich", "most": 3}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "",
        "",
        [ZURICH],
    ),
]


@pytest.mark.parametrize("step", [1, 3, 10**6])
@pytest.mark.parametrize("example", EXAMPLES, ids=[f"{i}" for i in range(len(EXAMPLES))])
def test_examples(example: tuple[str, str, str, str, str, list[ToolCall]], step: int) -> None:
    template, prompt, text, content, reasoning, calls = example
    found = parsed(parser_for(template, prompt, TOOLS), text, step)
    assert found == Answer(content, reasoning, calls)


def test_without_tools_no_text_is_a_call() -> None:
    text = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    assert parsed(parser_for("<tool_call>", "", None), text, 5) == Answer(text)


def test_each_closing_mark_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that cannot be read so far costs one reading for each mark, however it comes in."""
    read: list[str] = []

    def reads(body: str, schemas: object) -> list[ToolCall]:
        read.append(body)
        if body.count("</tool_call>") < 300:
            raise ValueError("not yet")
        return [call("now")]

    for step in (1, 5, 12, 100, 10**6):
        read.clear()
        parser = parser_for("<tool_call>", "", TOOLS)
        monkeypatch.setattr(parser, "_calls", dataclasses.replace(marks_of("<tool_call>"), read=reads))  # type: ignore[type-var]
        text = "<tool_call>!" + "</tool_call>" * 301 + "done<tool_call>!" + "</tool_call>" * 3
        found = parsed(parser, text, step)
        assert found.tool_calls == [call("now")]
        assert found.content == "done<tool_call>!" + "</tool_call>" * 3
        # One reading for each mark of the first call and of the second one, and one at the end of the text.
        assert len(read) == 301 + 3 + 1
        assert read[:301] == ["!" + "</tool_call>" * marks for marks in range(301)]


def test_a_long_text_is_no_call_after_many_closing_marks() -> None:
    """A reading takes time in proportion to the text before the mark, on the loop of all answers."""
    read: list[str] = []

    def reads(body: str, schemas: Schemas) -> list[ToolCall]:
        read.append(body)
        raise ValueError("never")

    parser = parser_for("<tool_call>", "", TOOLS)
    assert isinstance(parser, _TagParser)
    parser._calls = dataclasses.replace(marks_of("<tool_call>"), read=reads)  # type: ignore[type-var]
    text = "<tool_call>" + "!" * 40_000 + "</tool_call>" * 10_000
    assert parsed(parser, text, 1000) == Answer(text)
    assert sum(map(len, read)) < 2.5e6


@pytest.mark.parametrize(
    "arguments",
    [
        '{"t": "\\ud83d"}',
        '{"\\ud83d": 1}',
        '"{\\"t\\": \\"\\\\ud83d\\"}"',
        '{"t": NaN}',
        '{"t": [-Infinity]}',
        '{"t": 1e999}',
        '{"t": ' + "[" * 100_000 + "]" * 100_000 + "}",
        "[" * 100_000,
    ],
    ids=["surrogate", "key", "in a string", "nan", "infinity", "huge", "nested", "open"],
)
@pytest.mark.parametrize("step", [1000, 10**6])
def test_arguments_that_no_client_can_read_are_text(arguments: str, step: int) -> None:
    """A whole answer does not become an error after all its tokens."""
    calls = {
        "<tool_call>": f'<tool_call>{{"name": "find", "arguments": {arguments}}}</tool_call>',
        '<|python_tag|> "parameters": ': f'{{"name": "find", "parameters": {arguments}}}',
        "[TOOL_CALLS]": f"[TOOL_CALLS]find[ARGS]{arguments}",
        HARMONY: f" to=functions.find<|channel|>commentary json<|message|>{arguments}<|call|>",
        "<｜tool▁calls▁begin｜>": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n"
        f"```json\n{arguments}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    }
    for template, text in calls.items():
        found = parsed(parser_for(template, "", TOOLS), text, step)
        assert found == Answer(arguments if template is HARMONY else text), template
        found.content.encode()


@pytest.mark.parametrize("name", ['"\\ud83d"', '"find", "id": "\\ud83d"'])
def test_names_that_no_client_can_read_are_text(name: str) -> None:
    text = f'<tool_call>{{"name": {name}, "arguments": {{}}}}</tool_call>'
    assert parsed(parser_for("<tool_call>", "", TOOLS), text, 10**6) == Answer(text)


@pytest.mark.parametrize(
    ("template", "begin", "repeated", "end"),
    [
        ("<tool_call>", "<function=find>", "<parameter=where>", ""),
        ("<tool_call>", "", "<function=", ""),
        ("<tool_call>", "<function=find>", "<parameter=", ""),
        ("<tool_call>", "find", "<arg_key>a</arg_key>", ""),
        ("<tool_call>", "find", "<arg_key>", ""),
        ("<tool_call>", "", '{"name": "now", "arguments": {}}\n', "!"),
        ("<minimax:tool_call>", "", '<invoke name="find">', ""),
        ("<minimax:tool_call>", '<invoke name="find">', '<parameter name="where">', ""),
        ("<｜tool▁calls▁begin｜>", "", "<｜tool▁call▁begin｜>", ""),
        ("<｜tool▁calls▁begin｜>", "", "<｜tool▁call▁begin｜>x<｜tool▁sep｜>{}", ""),
        ("<|tool_calls_section_begin|>", "", "<|tool_call_begin|>", ""),
        ("<|tool_calls_section_begin|>", "", "<|tool_call_begin|>x<|tool_call_argument_begin|>", ""),
    ],
)
def test_readers_take_time_in_proportion_to_their_text(
    template: str, begin: str, repeated: str, end: str
) -> None:
    """Steps inside of expressions cannot be counted. A megabyte takes a fraction of a second, and minutes if
    each part looks for its end in all others.
    """
    marks = marks_of(template)
    assert marks is not None
    body = begin + repeated * (1_000_000 // len(repeated)) + end
    begun = time.process_time()
    with contextlib.suppress(ValueError):
        marks.read(body, {})
    assert time.process_time() - begun < 20


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("<tool_call>", "<tool_call><function=></tool_call>"),
        ("<tool_call>", "<tool_call>find<arg_key>a</arg_key>b<arg_value>c</arg_value></tool_call>"),
        ("<minimax:tool_call>", "<minimax:tool_call>now</minimax:tool_call>"),
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁begin｜>now<｜tool▁calls▁end｜>"),
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_begin|>now<|tool_calls_section_end|>"),
    ],
)
def test_marks_without_a_call_lose_no_text(template: str, text: str) -> None:
    assert parsed(parser_for(template, "", TOOLS), f"So: {text} Done.", 5) == Answer(f"So: {text} Done.")


def test_content_is_shown_as_soon_as_it_is_certain() -> None:
    parser = parser_for("<tool_call>" + THINK, "", TOOLS)
    assert [[p.content for p in parser.push(t)] for t in ("Hel", "lo <", "b", "\n\n", "x")] == [
        ["Hel"],
        ["lo"],
        [" <b"],
        [],
        ["\n\nx"],
    ]


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize("template", [THINK, HARMONY, "", "[THINK][/THINK]", "<tool_call>", '"parameters": '])
def test_the_rest_of_an_answer_keeps_all_of_its_text(template: str, step: int) -> None:
    parser = parser_for(template, "<think>\n</think>The answer", TOOLS, begun=True)
    assert parser.content_after == ""
    assert parsed(parser, "\n\nis 42.\n", step) == Answer("\n\nis 42.\n")


def test_content_is_opened_as_templates_open_it() -> None:
    for prompt, opening in (
        ("a<think>\n", "\n</think>\n\n"),
        ("a<think>", "</think>"),
        ("a", ""),
        ("a<think>\n\n</think>\n\n", ""),
    ):
        assert content_opening(THINK, prompt, "The answer") == opening
        assert content_opening(THINK, prompt, None) == ""  # a call may come after thoughts
        assert content_opening(THINK, prompt, "thoughts</think>The answer") == ""
    for content in ("The answer", None):
        assert content_opening(HARMONY, "<|start|>assistant", content) == "<|channel|>final<|message|>"
    assert content_opening("<|channel>thought<channel|>", "<|channel>thought\n", "a") == "<channel|>"


def test_parsers_want_their_own_marks_only() -> None:
    parser = parser_for("[TOOL_CALLS]", "", TOOLS)
    assert [parser.wants(name) for name in ("[TOOL_CALLS]", "[ARGS]", "[INST]")] == [True, True, False]
    assert parser_for(HARMONY, "", TOOLS).wants("<|channel|>")
    assert not parser_for("<tool_call>", "", TOOLS).wants("<|im_start|>")


def test_a_message_goes_back_into_the_conversation() -> None:
    answer = Answer("Looking.", "why", [ToolCall("now", "{}", "abc")])
    assert answer.message() == {
        "role": "assistant",
        "content": "Looking.",
        "reasoning_content": "why",
        "tool_calls": [{"id": "abc", "type": "function", "function": {"name": "now", "arguments": "{}"}}],
    }
    assert Answer("x").message() == {"role": "assistant", "content": "x"}
    ids = {ToolCall("now", "{}").id for _ in range(50)}
    assert len(ids) == 50
    assert all(len(id_) == 9 and id_.isalnum() for id_ in ids)


def test_what_public_templates_write_is_read_again(request: pytest.FixtureRequest) -> None:
    """The last answer of each conversation, as its template writes it, gives the message that it was."""
    wrong, checked, calls = [], 0, set()
    for data in public_templates(request):
        special = {name: data[name] or "" for name in ("bos_token", "eos_token", "unk_token")}
        template = ChatTemplate(data["template"], data["family"], special)
        ends = [
            e
            for e in (
                data["eos_token"],
                "<|call|>",
                "<|eot_id|>",
                "<end_of_turn>",
                "<|end|>",
                "<turn|>",
                "<|im_end|>",
            )
            if e
        ]
        for case in data["cases"]:
            messages = case["messages"]
            last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
            if (
                last < 0
                or case["kwargs"]
                or messages[last].get("content") not in (None, "", "4", "Let me look.")
            ):
                continue
            arguments = {"tools": case["tools"], "now": datetime.datetime.fromisoformat(data["now"])}
            try:
                prompt = template.render(messages[:last], **arguments).text
                whole = template.render(messages[: last + 1], add_generation_prompt=False, **arguments).text
            except ChatError:
                continue
            if not whole.startswith(prompt):
                continue  # history is written another way than an answer
            text = whole[len(prompt) :]
            for end in ends:
                text = text.rstrip().removesuffix(end)
            want = messages[last]
            wanted = [(c["function"]["name"], c["function"]["arguments"]) for c in want.get("tool_calls", [])]
            if any(name not in text for name, _ in wanted):
                continue  # this template leaves calls out of the history
            for step in (1, 7, 10**6):
                found = parsed(parser_for(data["template"], prompt, case["tools"] or TOOLS), text, step)
                pairs = [(c.name, json.loads(c.arguments)) for c in found.tool_calls]
                if pairs != [(n, json.loads(a) if isinstance(a, str) else a) for n, a in wanted]:
                    wrong.append(f"{data['family']}: {case['name']}: {text!r} gave {pairs}")
                if found.content not in (want.get("content") or "", ""):
                    wrong.append(f"{data['family']}: {case['name']}: {text!r} gave content {found.content!r}")
                if found.reasoning not in (want.get("reasoning_content", ""), ""):
                    wrong.append(
                        f"{data['family']}: {case['name']}: {text!r} gave thoughts {found.reasoning!r}"
                    )
            if wanted:
                calls.add(data["family"])
            checked += 1
    assert "\n".join(wrong) == ""
    assert len(calls) >= 12, calls
    assert checked > 100


def test_marks_of_known_families() -> None:
    assert marks_of("{{ x }}") is None
    found = marks_of("a <tool_call> b")
    assert found is not None
    assert found.close == "</tool_call>"
