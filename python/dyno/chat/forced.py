"""Answers that must call a function: the grammar of their text, and the parser of the calls in it.

The grammar does not use the marks that the model was trained to write. The text is a JSON list of calls
instead of content, so it works with any template.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from dyno.chat.answer import AnswerParser, Part
from dyno.chat.calls import read_json
from dyno.errors import ChatError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dyno.chat.calls import ToolCall

__all__ = ["ForcedCalls", "call_grammar"]

_ANY = {"type": "object"}
_MOST_CALLS = 16
_LAYOUT = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
"""The layout of JSON, as templates show it. If blanks were allowed anywhere, a weak model would write only
blanks."""


def call_grammar(tools: Sequence[Mapping[str, Any]] | None, function: str | None, *, one: bool) -> str:
    """The grammar of a list of calls, in the syntax of Lark.

    Args:
        tools: The tools offered to the model.
        function: The function to call; None: any of the tools.
        one: Whether the list has exactly one call.

    Raises:
        ChatError: There is no such function.
    """
    known = dict(_described(tools))
    if not known:
        raise ChatError("[chat] tool_choice requires a call, but the request has no tools")
    if function is not None and function not in known:
        raise ChatError(f"[chat] tool_choice asks for {function!r}; the tools are {', '.join(known)}")
    wanted = known if function is None else {function: known[function]}
    more = "" if one else f' (", " call){{0,{_MOST_CALLS - 1}}}'
    lines = [f'start: "[" call{more} "]"']
    lines.append("call: " + " | ".join(f"call_{i}" for i in range(len(wanted))))
    for i, (name, parameters) in enumerate(wanted.items()):
        opening = json.dumps(f'{{"name": {json.dumps(name)}, "arguments": ')
        lines.append(f'call_{i}: {opening} arguments_{i} "}}"')
        lines.append(f"arguments_{i}: %json {json.dumps({**parameters, **_LAYOUT})}")
    return "\n".join(lines)


def _described(tools: Sequence[Mapping[str, Any]] | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name of each function, and the schema of its arguments."""
    for tool in tools or ():
        function = tool.get("function", tool)
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            parameters = function.get("parameters")
            yield function["name"], parameters if isinstance(parameters, dict) and parameters else _ANY


def _complete(text: str) -> tuple[list[ToolCall], str]:
    """The complete calls of a list that may be cut off, and the text of the call that is not complete."""
    decoder, calls, at = json.JSONDecoder(), [], text.find("[") + 1
    try:
        while (begin := text.find("{", at)) >= 0:
            _, end = decoder.raw_decode(text, begin)
            calls += read_json(text[begin:end], {})
            at = end
    except (ValueError, RecursionError):
        return calls, text[begin:] if calls else text
    return calls, "" if calls else text


class ForcedCalls(AnswerParser):
    """A parser of answers that follow `call_grammar`: their content is a list of calls.

    Args:
        inner: The parser that separates reasoning and content.
    """

    def __init__(self, inner: AnswerParser) -> None:
        self._inner, self._content = inner, ""
        self.words, self.content_after = inner.words, inner.content_after

    def push(self, text: str) -> Iterator[Part]:
        yield from self._without_content(self._inner.push(text))

    def finish(self) -> Iterator[Part]:
        yield from self._without_content(self._inner.finish())
        if not self._content:
            return
        calls, rest = _complete(self._content)
        yield from (Part(tool_call=call) for call in calls)
        if rest:  # a call that was cut off is shown as text, so that nothing is lost
            yield Part(content=rest)

    def _without_content(self, parts: Iterator[Part]) -> Iterator[Part]:
        for part in parts:
            self._content += part.content
            if not part.content:
                yield part
