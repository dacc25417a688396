"""Parsing of a model's answer while it is written, into reasoning, content and tool calls."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dyno.chat.calls import Schemas, ToolCall, marks_of, read_json, schemas_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dyno.chat.calls import CallMarks

__all__ = ["Answer", "AnswerParser", "Part", "content_opening", "parser_for"]

_REASONING = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel>thought", "<channel|>"),
)
_HEADERS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
_HEADERS_TO = ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>")
_MOST_READ = 1 << 21
"""Most characters to parse in vain for one call. Each closing mark inside a call causes one parse of its text
so far."""
_UNREADABLE = (ValueError, RecursionError)
"""The errors of a reader for text that is not a call. A model may nest arguments too deeply for Python."""


@dataclass(frozen=True)
class Part:
    """The next part of an answer. Exactly one field is set."""

    content: str = ""
    reasoning: str = ""
    tool_call: ToolCall | None = None


@dataclass
class Answer:
    """A whole answer, assembled from its parts."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    def add(self, part: Part) -> None:
        """Append one part."""
        self.content += part.content
        self.reasoning += part.reasoning
        if part.tool_call is not None:
            self.tool_calls.append(part.tool_call)

    def message(self) -> dict[str, Any]:
        """The answer as a message of the conversation: `role`, `content`, and further fields if the answer
        has them."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.to_dict() for call in self.tool_calls]
        return message


def parser_for(
    template: str,
    prompt: str,
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    begun: bool = False,
) -> AnswerParser:
    """The parser of answers to a rendered prompt.

    Args:
        template: The chat template. Its marks show the format in which its model answers.
        prompt: The rendered prompt, which may end inside a reasoning section.
        tools: The tools offered to the model. Without tools, no text becomes a call.
        begun: Whether the prompt ends within the content of the answer.
    """
    schemas = schemas_of(tools) if tools else None
    if _has_headers(template):
        marks = _HEADERS if "<|channel|>" in template else _HEADERS_TO
        return _HeaderParser(marks, marks_of(template), schemas, begun=begun)
    reasoning = [pair for pair in _REASONING if pair[1] in template]
    inside = next((pair for pair in reasoning if prompt.rstrip().endswith(pair[0])), None)
    calls = marks_of(template) if tools else None
    bare = calls is None and bool(tools) and '"parameters": ' in template
    return _TagParser(reasoning, inside, calls, schemas or {}, bare, begun=begun)


def content_opening(template: str, prompt: str, content: str | None) -> str:
    """The text that must come between a prompt and content that the model does not choose freely.

    Args:
        template: As in `parser_for`.
        prompt: The rendered prompt up to the answer.
        content: The beginning of the content; None: a call that follows a grammar.

    Returns:
        The header of content, or the end of a reasoning section that the prompt has opened, in the form that
        templates write for an answer without reasoning. Empty if content can begin at once.
    """
    after = parser_for(template, prompt).content_after
    if _has_headers(template):  # before content, such a model could call any function in its own format
        return after
    if content is None or not after or after in content:
        return ""
    return f"\n{after}\n\n" if after.startswith("</") and prompt.endswith("\n") else after


def _has_headers(template: str) -> bool:
    return "<|start|>assistant" in template and "<|message|>" in template


class AnswerParser:
    """The interface of parsers that turn the text of an answer, piece by piece, into parts."""

    words: tuple[str, ...] = ()
    """Names of control tokens that the parser needs to see. Other control tokens are not part of an
    answer."""

    content_after: str = ""
    """The text after which content begins; empty: content begins at once."""

    def push(self, text: str) -> Iterator[Part]:
        """Add `text`, and return the parts that are now certain."""
        raise NotImplementedError

    def finish(self) -> Iterator[Part]:
        """The remaining parts at the end of the answer."""
        raise NotImplementedError

    def wants(self, control: str) -> bool:
        """Whether the name of a control token is one of the marks."""
        return any(control in word for word in self.words)


class _Blanks:
    """A filter that holds back trailing line ends and blanks until other text follows."""

    def __init__(self) -> None:
        self._held = ""
        self.shown = False

    def push(self, text: str) -> str:
        text = self._held + text
        if not self.shown:
            text = text.lstrip("\r\n")
        kept = text.rstrip()
        self._held = text[len(kept) :]
        self.shown = self.shown or bool(kept)
        return kept

    def rest(self) -> str:
        held, self._held = self._held, ""
        return held


class _TagParser(AnswerParser):
    """A parser for answers with reasoning between two tags at the start, and calls between two tags or as
    bare JSON instead of content."""

    def __init__(
        self,
        reasoning: Sequence[tuple[str, str]],
        inside: tuple[str, str] | None,
        calls: CallMarks | None,
        schemas: Schemas,
        bare: bool,
        *,
        begun: bool = False,
    ) -> None:
        self._reasoning = tuple(reasoning)
        self._calls, self._schemas, self._bare = calls, schemas, bare
        self._buffer = ""
        self._close = inside[1] if inside else ""  # end tag of the reasoning section
        self.content_after = self._close
        self._call_begun = -1  # position in the buffer where the text of a call begins
        self._searched = 0  # position up to which its closing marks have been tried
        self._read = 0  # characters parsed at these marks
        self._content, self._thoughts = _Blanks(), _Blanks()
        self._content.shown = begun
        self._called = self._is_bare = False
        marks = [word for pair in reasoning for word in pair] + (["<|python_tag|>"] if bare else [])
        if calls is not None:
            marks += [calls.open, calls.close, *calls.inner]
        self.words = tuple(mark for mark in marks if mark)

    def push(self, text: str) -> Iterator[Part]:
        self._buffer += text
        while True:
            before = (self._buffer, self._close, self._call_begun)
            if self._call_begun >= 0 or self._is_bare:
                yield from self._in_call()
            elif self._close:
                yield from self._in_reasoning()
            else:
                yield from self._in_content()
            if before == (self._buffer, self._close, self._call_begun):
                return

    def finish(self) -> Iterator[Part]:
        if self._close:
            yield from self._thought(self._buffer)
        elif self._is_bare or self._call_begun >= 0:
            begun = 0 if self._is_bare else self._call_begun
            read = read_json if self._calls is None else self._calls.read
            try:
                calls = read(self._buffer[begun:].removeprefix("<|python_tag|>"), self._schemas)
            except _UNREADABLE:
                yield from self._shown(self._buffer)
            else:
                yield from self._made(calls)
        else:
            yield from self._shown(self._buffer)
        self._buffer = ""
        rest = self._content.rest()
        if rest and self._content.shown and not self._called:
            yield Part(content=rest)

    def _in_content(self) -> Iterator[Part]:
        if not self._content.shown and self._begins_bare():
            return
        opens = {} if self._content.shown else dict(self._reasoning)
        marks = [*opens, *([self._calls.open] if self._calls else [])]
        found = _first(self._buffer, marks)
        if found is None:
            keep = _held(self._buffer, marks)
            shown, self._buffer = _cut(self._buffer, len(self._buffer) - keep)
            yield from self._shown(shown)
            return
        at, mark = found
        shown, self._buffer = _cut(self._buffer, at)
        yield from self._shown(shown)
        if mark in opens and not self._content.shown:
            self._buffer, self._close = self._buffer[len(mark) :], opens[mark]
        elif self._calls is not None and mark == self._calls.open:
            self._call_begun = self._searched = len(mark)
            self._read = 0
        else:  # a reasoning tag after content counts as content
            yield from self._shown(mark)
            self._buffer = self._buffer[len(mark) :]

    def _begins_bare(self) -> bool:
        """Whether the answer may be a call in bare JSON. Its text is then held back until the end."""
        if not self._bare:
            return False
        text = self._buffer.lstrip()
        self._is_bare = text.startswith(("{", "<|python_tag|>"))
        return self._is_bare or not text or "<|python_tag|>".startswith(text)

    def _in_reasoning(self) -> Iterator[Part]:
        found = _first(self._buffer, [self._close])
        if found is None:
            keep = _held(self._buffer, [self._close])
            thought, self._buffer = _cut(self._buffer, len(self._buffer) - keep)
            yield from self._thought(thought)
            return
        thought, rest = _cut(self._buffer, found[0])
        self._buffer = rest[len(self._close) :]
        self._close = ""
        yield from self._thought(thought)
        self._thoughts.rest()

    def _in_call(self) -> Iterator[Part]:
        calls = self._calls
        if calls is None or not calls.close:
            return
        # An argument may contain the closing mark, so the call ends at the first mark where it can be parsed.
        # Each mark is tried once, because the text before it does not change. A long text with many marks is
        # not a call.
        while self._read < _MOST_READ and (at := self._buffer.find(calls.close, self._searched)) >= 0:
            self._searched = at + 1
            self._read += at - self._call_begun
            try:
                found = calls.read(self._buffer[self._call_begun : at], self._schemas)
            except _UNREADABLE:
                continue
            self._buffer, self._call_begun = self._buffer[at + len(calls.close) :], -1
            yield from self._made(found)
            return
        # The end of the buffer may be the beginning of a mark.
        self._searched = max(self._searched, len(self._buffer) - len(calls.close) + 1)

    def _made(self, calls: list[ToolCall]) -> Iterator[Part]:
        self._called = True
        self._content.rest()  # blanks between content and a call belong to neither
        yield from (Part(tool_call=call) for call in calls)

    def _shown(self, text: str) -> Iterator[Part]:
        if shown := self._content.push(text):
            yield Part(content=shown)

    def _thought(self, text: str) -> Iterator[Part]:
        if shown := self._thoughts.push(text):
            yield Part(reasoning=shown)


class _HeaderParser(AnswerParser):
    """A parser for answers of several messages, each with a header that names its recipient, as in the
    harmony format.

    A header ends with `<|message|>`. Messages of the channel analysis, and messages of the model to itself,
    are reasoning. A message to a function is a call.
    """

    def __init__(
        self,
        marks: tuple[str, ...],
        calls: CallMarks | None,
        schemas: Schemas | None,
        *,
        begun: bool = False,
    ) -> None:
        self.words = (*marks, *((calls.open, calls.close) if calls else ()))
        self._ends = tuple(m for m in marks if m not in ("<|channel|>", "<|message|>", "<|constrain|>"))
        self._schemas = schemas
        header = "<|channel|>final" if "<|channel|>" in marks else " to=user"
        self.content_after = "" if begun else f"{header}<|message|>"
        self._buffer = ""
        self._header = header if begun else None  # None: the header is being read
        self._body = ""  # text of the current call

    def push(self, text: str) -> Iterator[Part]:
        self._buffer += text
        while True:
            marks = ["<|message|>"] if self._header is None else self._ends
            found = _first(self._buffer, marks)
            if self._header is None:
                if found is None:
                    return
                header, rest = _cut(self._buffer, found[0])
                self._header, self._buffer = header, rest[len(found[1]) :]
            elif found is None:
                shown, self._buffer = _cut(self._buffer, len(self._buffer) - _held(self._buffer, marks))
                yield from self._part(shown)
                return
            else:
                shown, rest = _cut(self._buffer, found[0])
                self._buffer = rest[len(found[1]) :]
                yield from self._part(shown)
                yield from self._end()

    def finish(self) -> Iterator[Part]:
        if self._header is None:
            left = self._buffer.strip()
            self._buffer = ""
            # Without `<|message|>`, this text is an incomplete header, or an answer without a header.
            if left and not any(word in left for word in self.words) and left != "assistant":
                yield Part(content=left)
            return
        shown, self._buffer = self._buffer, ""
        yield from self._part(shown)
        yield from self._end()

    def _recipient(self) -> str:
        found = re.search(r"\bto=([^\s<]+)", self._header or "")
        return found[1] if found else ""

    def _is_call(self) -> bool:
        return self._schemas is not None and self._recipient() not in ("", "user", "self", "assistant")

    def _part(self, text: str) -> Iterator[Part]:
        if not text:
            return
        header = self._header or ""
        if self._is_call():
            self._body += text
        elif "<|channel|>analysis" in header or self._recipient() == "self":
            yield Part(reasoning=text)
        else:
            yield Part(content=text)

    def _end(self) -> Iterator[Part]:
        recipient, body = self._recipient().removeprefix("functions."), self._body
        is_call = self._is_call()
        self._header, self._body = None, ""
        if not is_call:
            return
        schemas = self._schemas or {}
        try:
            if "invoke name=" in body:
                marks = marks_of("<atem:function_calls>")
                assert marks is not None
                calls = marks.read(body, schemas)
            else:
                calls = read_json(
                    '{"name": ' + json.dumps(recipient) + ', "arguments": ' + body + "}", schemas
                )
        except _UNREADABLE:
            yield Part(content=body)
            return
        yield from (Part(tool_call=call) for call in calls)


def _cut(text: str, at: int) -> tuple[str, str]:
    return text[:at], text[at:]


def _first(text: str, marks: Sequence[str]) -> tuple[int, str] | None:
    """The first of `marks` in `text`. If two begin at the same position, the longer one."""
    found = [(at, -len(mark), mark) for mark in marks if (at := text.find(mark)) >= 0]
    if not found:
        return None
    at, _, mark = min(found)
    return at, mark


def _held(text: str, marks: Sequence[str]) -> int:
    """Length of the longest suffix of `text` that is a prefix of one of `marks`."""
    longest = max(map(len, marks), default=0)
    for length in range(min(longest - 1, len(text)), 0, -1):
        if any(len(mark) > length and mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0
