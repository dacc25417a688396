"""Readers of tool calls: one for each format that public chat templates use.

A reader parses the text between the marks of a call into names and arguments. It raises ValueError for text
that is not a call, and RecursionError for text that is nested too deeply. The caller then shows it as plain
text, so nothing that a model wrote is lost.
"""

from __future__ import annotations

import ast
import json
import re
import secrets
import string
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = ["CallMarks", "Schemas", "ToolCall", "marks_of", "read_any", "read_json", "schemas_of"]

Schemas = dict[str, dict[str, Any]]
"""The `properties` of the parameters of each tool, by the name of the tool."""


def _new_id() -> str:
    # Nine letters and digits, because some templates refuse other ids.
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(frozen=True)
class ToolCall:
    """A call of a function that the model requests."""

    name: str
    arguments: str
    """The arguments: the text of a JSON object."""
    id: str = field(default_factory=_new_id, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """The call as an entry of `tool_calls` in a message of the public chat API."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


def schemas_of(tools: Sequence[Mapping[str, Any]] | None) -> Schemas:
    """The schemas of the parameters of the offered tools, as far as they are described."""
    found: Schemas = {}
    for tool in tools or ():
        function = tool.get("function", tool)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            continue
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        found[function["name"]] = properties if isinstance(properties, dict) else {}
    return found


def _call(name: object, arguments: object, id_: object = None) -> ToolCall:
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"{name!r} is not the name of a function")
    for _ in range(2):  # some models write the object as a JSON string that contains it
        if isinstance(arguments, str):
            arguments = json.loads(arguments or "{}")
    if not isinstance(arguments, dict):
        raise ValueError(f"arguments must be an object, not {arguments!r:.60}")
    # Python accepts NaN and Infinity, which are not JSON. They raise ValueError.
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    call = ToolCall(name.strip(), text, id_) if isinstance(id_, str) and id_ else ToolCall(name.strip(), text)
    for each in (call.name, call.arguments, call.id):
        each.encode()  # raises ValueError for a lone surrogate, which is not text
    return call


def _value(text: str, schema: Any) -> Any:
    """A value written without quotes: a string if its schema says so; otherwise parsed as JSON if
    possible."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


# ---- readers ----
#
# A reader runs again at each mark that may end a call, so its time must be proportional to its text.
# Therefore no expression here searches the end of a part from each possible beginning.

_BETWEEN_VALUES = re.compile(r"[ \t\r\n,;]*")


def _enclosed(text: str, opening: str, closing: str) -> Iterator[tuple[re.Match[str], str]]:
    """Each match of `opening`, with the text up to the next match of `closing`."""
    opens, closes, at = re.compile(opening), re.compile(closing), 0
    while (begin := opens.search(text, at)) and (end := closes.search(text, begin.end())):
        yield begin, text[begin.end() : end.start()]
        at = end.end()


def _between(text: str, *marks: str, to_end: bool = False) -> Iterator[list[str]]:
    """The texts between `marks`. With `to_end`, the last one needs no closing mark."""
    at = 0
    while (at := text.find(marks[0], at)) >= 0:
        at += len(marks[0])
        parts: list[str] = []
        for mark in marks[1:]:
            end = text.find(mark, at)
            if end < 0 and not (to_end and len(parts) == len(marks) - 2):
                return
            parts.append(text[at:] if end < 0 else text[at:end])
            at = len(text) if end < 0 else end + len(mark)
        yield parts


def _some(found: list[ToolCall]) -> list[ToolCall]:
    if not found:
        raise ValueError("no call")
    return found


def read_json(body: str, schemas: Schemas) -> list[ToolCall]:
    """The format `{"name": …, "arguments": {…}}`: one object, several or a list. `parameters` may replace
    `arguments`."""
    decoder, found, at = json.JSONDecoder(), [], 0
    body = body.strip()
    while at < len(body):
        value, at = decoder.raw_decode(body, at)
        for each in value if isinstance(value, list) else [value]:
            if not isinstance(each, dict) or not {"arguments", "parameters"} & set(each):
                raise ValueError(f"{each!r:.60} is not a call")
            arguments = each["arguments"] if "arguments" in each else each["parameters"]
            found.append(_call(each.get("name"), arguments, each.get("id")))
        between = _BETWEEN_VALUES.match(body, at)
        assert between is not None  # never None, but possibly empty
        at = between.end()
    return found


def _read_functions(body: str, schemas: Schemas) -> list[ToolCall]:
    """`<function=NAME><parameter=KEY>value</parameter></function>`."""
    found = []
    for function, inside in _enclosed(body, r"<function=([^<>\n]+)>", r"</function>|\Z"):
        known = schemas.get(function[1].strip(), {})
        pairs = _enclosed(inside, r"<parameter=([^<>\n]+)>\n?", r"\n?</parameter>")
        found.append(_call(function[1], {key[1]: _value(text, known.get(key[1])) for key, text in pairs}))
    return _some(found)


def _read_argument_pairs(body: str, schemas: Schemas) -> list[ToolCall]:
    """`NAME<arg_key>KEY</arg_key><arg_value>value</arg_value>`."""
    name = body.partition("<arg_key>")[0].strip()
    known = schemas.get(name, {})
    arguments = {}
    for key, blanks, text in _between(body, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"):
        if blanks.strip():
            raise ValueError(f"between a key and its value stands {blanks!r:.60}")
        arguments[key.strip()] = _value(text, known.get(key.strip()))
    return [_call(name, arguments)]


def _read_invocations(body: str, schemas: Schemas) -> list[ToolCall]:
    """`<invoke name="NAME"><parameter name="KEY">value</parameter></invoke>`, perhaps with a prefix."""
    found = []
    prefix = r"(?:｜DSML｜|\w+:)?"
    parameter = rf'<{prefix}parameter name="([^"]+)"(?: string="(true|false)")?>'
    for invoke, inside in _enclosed(body, rf'<{prefix}invoke name="([^"]+)">', f"</{prefix}invoke>"):
        known = schemas.get(invoke[1], {})
        arguments = {}
        for begin, text in _enclosed(inside, parameter, f"</{prefix}parameter>"):
            key, is_string = begin.groups()
            arguments[key] = text if is_string == "true" else _value(text, known.get(key))
        found.append(_call(invoke[1], arguments))
    return _some(found)


def _read_separated(body: str, schemas: Schemas) -> list[ToolCall]:
    """`<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜>`. The object may be in a code block."""
    found = []
    marks = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
    for first, rest in _between(body, *marks, to_end=True):
        if first.strip() == "function":
            name, _, arguments = rest.partition("\n")
        else:
            name, arguments = first, rest
        block = arguments.strip()
        if block.startswith("```"):
            block = block.removeprefix("```").removeprefix("json")
        found.append(_call(name, block.removesuffix("```").strip()))
    return _some(found)


def _read_numbered(body: str, schemas: Schemas) -> list[ToolCall]:
    """`<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}<|tool_call_end|>`."""
    marks = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
    found = []
    for id_, arguments in _between(body, *marks):
        name = re.sub(r":\d+$", "", id_.strip().removeprefix("functions."))
        found.append(_call(name, arguments.strip(), id_.strip()))
    return _some(found)


def _read_python(body: str, schemas: Schemas) -> list[ToolCall]:
    """The format `[NAME(key="value"), …]`: calls in Python syntax with literal keyword arguments."""
    try:
        tree = ast.parse(body.strip(), mode="eval").body
        calls = tree.elts if isinstance(tree, ast.List) else [tree]
        found = []
        for call in calls:
            if not isinstance(call, ast.Call) or call.args:
                raise ValueError("no call with keyword arguments")
            arguments = {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg}
            found.append(_call(ast.unparse(call.func), arguments))
    except (SyntaxError, RecursionError, MemoryError, TypeError) as error:
        raise ValueError(f"no list of calls: {error}") from error
    return found


def _read_bare_keys(body: str, schemas: Schemas) -> list[ToolCall]:
    """`call:NAME{key:<|"|>text<|"|>,other:1}`."""
    begin = re.match(r"\s*call:([^{\s]+)\s*(?=\{)", body)
    if begin is None:
        raise ValueError("no call")
    pieces = body[begin.end() :].split('<|"|>')
    if len(pieces) % 2 == 0:
        raise ValueError("a string has no end")
    for i, piece in enumerate(pieces):
        if i % 2:
            pieces[i] = json.dumps(piece)
        else:
            pieces[i] = re.sub(r"([{,]\s*)([\w.-]+)(\s*:)", r'\1"\2"\3', piece)
    return [_call(begin[1], "".join(pieces))]


def _read_named_or_list(body: str, schemas: Schemas) -> list[ToolCall]:
    """The text after `[TOOL_CALLS]`: a JSON list, or `NAME[CALL_ID]id[ARGS]{…}`, again after each mark."""
    if body.lstrip().startswith(("[{", "{", "[ {")):
        return read_json(body, schemas)
    found = []
    for each in body.split("[TOOL_CALLS]"):
        head, mark, arguments = each.partition("[ARGS]")
        if not mark:
            raise ValueError("a call without [ARGS]")
        name, _, id_ = head.partition("[CALL_ID]")
        found.append(_call(name, arguments.strip(), id_.strip()))
    return found


def read_any(body: str, schemas: Schemas) -> list[ToolCall]:
    """Calls in any of the three formats that models write between `<tool_call>` tags."""
    if "<function=" in body:
        return _read_functions(body, schemas)
    if "<arg_key>" in body:
        return _read_argument_pairs(body, schemas)
    if not body.lstrip().startswith(("{", "[")) and re.fullmatch(r"\s*[\w.-]+\s*", body):
        return [_call(body, {})]  # a call without arguments
    return read_json(body, schemas)


# ---- marks ----


@dataclass(frozen=True)
class CallMarks:
    """The marks of calls in a model's answer."""

    open: str
    close: str
    """The closing mark. Empty: the calls extend to the end of the answer."""
    read: Callable[[str, Schemas], list[ToolCall]]
    hint: str = ""
    """Text that shows that a template uses these marks, if it does not contain `open` itself."""
    inner: tuple[str, ...] = ()
    """Marks inside a call, which may be control tokens."""


_MARKS = (
    CallMarks(
        "<｜DSML｜function_calls>", "</｜DSML｜function_calls>", _read_invocations, "｜DSML｜", ("｜DSML｜",)
    ),
    CallMarks("<minimax:tool_call>", "</minimax:tool_call>", _read_invocations),
    CallMarks("<atem:function_calls>", "</atem:function_calls>", _read_invocations),
    CallMarks("<seed:tool_call>", "</seed:tool_call>", read_any),
    CallMarks(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        _read_separated,
        inner=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    ),
    CallMarks(
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        _read_numbered,
        inner=("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ),
    CallMarks("<|tool_call_start|>", "<|tool_call_end|>", _read_python, "<|tool_list_start|>"),
    CallMarks("<|tool_call>", "<tool_call|>", _read_bare_keys, inner=('<|"|>',)),
    CallMarks("[TOOL_CALLS]", "", _read_named_or_list, inner=("[CALL_ID]", "[ARGS]")),
    CallMarks("<|tool_call|>", "", read_json),
    CallMarks("<tool_call>", "</tool_call>", read_any),
)


def marks_of(template: str) -> CallMarks | None:
    """The marks that the model of a chat template writes; None if the template shows no known marks."""
    return next((marks for marks in _MARKS if (marks.hint or marks.open) in template), None)
