"""Chat templates of a model file: finding them, rendering them, and encoding the result as tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dyno.chat._built_in import BUILT_IN
from dyno.chat._control_names import control_names
from dyno.chat._forms import are_texts
from dyno.chat._rendering import Limits, Renderer
from dyno.chat.answer import content_opening
from dyno.errors import ChatError

if TYPE_CHECKING:
    import datetime
    import os
    from collections.abc import Iterator, Mapping, Sequence

    from dyno._vocabulary import Metadata, Vocabulary
    from dyno.chat._control_names import ControlNames
    from dyno.tokenizer import Tokenizer

__all__ = ["BUILT_IN", "ChatTemplate", "Rendered", "encode", "find_template", "template_names"]

_KEY = "tokenizer.chat_template"
_NAMES_KEY = "tokenizer.chat_templates"
_REASONING = ("reasoning_content", "thinking")


@dataclass(frozen=True)
class Rendered:
    """A rendered prompt as text."""

    text: str
    own: tuple[tuple[int, int], ...]
    """Begin and end, in characters, of each part that the template wrote. The rest came from the messages."""
    begun: bool = False
    """Whether it ends within the content of the answer."""


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template, which is rendered in a separate process.

    Example:
        >>> template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
        >>> template.render([{"role": "user", "content": "Hello"}]).text
        '<user>Hello'
    """

    text: str
    """The template text in Jinja2."""
    name: str = "given"
    """Name of the variant in the file or of the built-in template, or the path; for messages."""
    tokens: Mapping[str, str] = field(default_factory=dict)
    """Names of special tokens by template variable: bos_token, eos_token, unk_token."""
    limits: Limits = field(default_factory=Limits)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        now: datetime.datetime | None = None,
        **variables: Any,
    ) -> Rendered:
        """The prompt of a conversation, whose messages have the form that the template expects.

        Args:
            messages: Dicts with `role` and `content`, and `tool_calls` or reasoning if a message has them.
            tools: Definitions of functions that the model may call, as JSON values.
            documents: Documents, for templates that quote them.
            add_generation_prompt: Whether to end with the header of the model's answer.
            now: Time that the template sees; None: the current time.
            **variables: Further variables of the template, such as `enable_thinking`.

        Raises:
            ChatError: The template is wrong, refuses the messages, fails on them or exceeds a limit.
        """
        more = {
            **variables,
            **({"documents": list(documents)} if documents else {}),
            "add_generation_prompt": add_generation_prompt,
        }
        return self._rendered(messages, tools, more, now, fits=False)

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        now: datetime.datetime | None = None,
        *,
        continues: bool = False,
        calls: bool = False,
    ) -> Rendered:
        """The prompt of a conversation of the public API, for the model's answer.

        Templates differ in the form of messages. Arguments of tool calls become objects, or JSON text if the
        template needs that. Content of several text parts becomes one text, unless the template accepts
        parts.

        Args:
            messages, tools, now: As in `render`.
            variables: Further variables of the template.
            continues: Whether the last message is the beginning of the answer.
            calls: Whether the answer must be a call instead of content.

        Raises:
            ChatError: As in `render`, or a variable is impossible, or the last message cannot be continued.
        """
        begun = _begun(messages) if continues else ""
        before = self._asked(messages[:-1] if continues else messages, tools, variables, now)
        if not begun and not calls:
            return before
        opening = content_opening(self.text, before.text, begun or None)
        end = len(before.text) + len(opening)
        own = (*before.own, (len(before.text), end)) if opening else before.own
        return Rendered(before.text + opening + begun, own, begun=bool(begun or opening))

    def _asked(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
        now: datetime.datetime | None,
    ) -> Rendered:
        """The prompt up to the answer."""
        given = variables or {}
        for name in ("messages", "tools"):
            if name in given:
                raise ChatError(f"[chat] the conversation gives the template's variable {name} its value")
        documents = given.get("documents")
        listed = isinstance(documents, list) and all(isinstance(each, dict) for each in documents)
        if documents is not None and not listed:
            raise ChatError(f"[chat] documents is {documents!r:.80}; expected a list of objects")
        return self._rendered(messages, tools, {"add_generation_prompt": True, **given}, now, fits=True)

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        now: datetime.datetime | None,
        *,
        fits: bool,
    ) -> Rendered:
        request = {
            "template": self.text,
            "messages": [_prepared(message) for message in messages],
            "variables": {
                "tools": None,
                "documents": None,
                **variables,
                **({"tools": list(tools)} if tools else {}),
            },
            "tokens": dict(self.tokens),
            "now": None if now is None else now.isoformat(),
            "fits": fits,
        }
        reply = _renderer(self.limits).render(request, self.name)
        if "text" in reply:
            return Rendered(reply["text"], tuple((begin, end) for begin, end in reply["own"]))
        raise ChatError(f"[chat] the template {self.name} {_FAILURES[reply['kind']]}: {reply['error']}")


_FAILURES = {
    "syntax": "is not valid Jinja2 (pass another one with --chat-template FILE)",
    "refused": "refuses these messages",
    "failed": "fails on these messages",
    "memory": "exceeds its limit (pass another one with --chat-template FILE)",
    "output": "exceeds its limit (pass another one with --chat-template FILE)",
}


def _begun(messages: Sequence[Mapping[str, Any]]) -> str:
    """The text of the last message, which the answer continues."""
    last = messages[-1] if messages else {}
    content = last.get("content")
    if isinstance(content, list) and are_texts(content):
        content = "\n".join(part["text"] for part in content)
    if last.get("role") != "assistant" or not isinstance(content, str) or last.get("tool_calls"):
        raise ChatError(
            "[chat] only a text message of the assistant at the end of the conversation can be continued"
        )
    return content


@lru_cache(maxsize=4)
def _renderer(limits: Limits) -> Renderer:
    return Renderer(limits)


def _prepared(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with its reasoning under both names that templates read.

    Content of None is left out, as in the public reference, because templates test whether there is content.
    """
    plain = {name: value for name, value in message.items() if name != "content" or value is not None}
    given = next((plain[name] for name in _REASONING if plain.get(name) is not None), None)
    if given is not None:
        plain.update(dict.fromkeys(_REASONING, given))
    return plain


# ---- where templates are found ----


def template_names(metadata: Metadata) -> list[str]:
    """Names of the templates in a file: `default` for the unnamed one, then the named variants."""
    found = ["default"] if isinstance(metadata.get(_KEY), str) else []
    names = metadata.get(_NAMES_KEY)
    if isinstance(names, list):
        found += [n for n in names if isinstance(n, str) and isinstance(metadata.get(f"{_KEY}.{n}"), str)]
    return found


def find_template(
    metadata: Metadata,
    vocabulary: Vocabulary | None = None,
    wanted: str | os.PathLike[str] | None = None,
    *,
    tools: bool = False,
) -> ChatTemplate:
    """The chat template to use.

    Args:
        metadata: An open GGUF file, or a dict.
        vocabulary: The vocabulary, with the special tokens that the template may use.
        wanted: A file with a template, the name of a template in `metadata` or `BUILT_IN`, or the text of a
        template. None: the template of the model file.
        tools: Whether to prefer the variant `tool_use` of the file, if it has one.

    Raises:
        ChatError: There is no such template, or the file has none.
        OSError: The file `wanted` can't be read.
    """
    tokens = {} if vocabulary is None else _special_tokens(vocabulary)
    names = template_names(metadata)
    if wanted is None:
        if not names:
            raise ChatError(
                "[chat] the model file has no chat template; pass --chat-template FILE with a Jinja2 "
                f"template, or --chat-template NAME with one of: {', '.join(BUILT_IN)}"
            )
        wanted = "tool_use" if tools and "tool_use" in names else names[0]
    name = str(wanted)
    if name in names:
        return ChatTemplate(str(metadata.get(_KEY if name == "default" else f"{_KEY}.{name}")), name, tokens)
    if name in BUILT_IN:
        return ChatTemplate(BUILT_IN[name], name, tokens)
    if "{{" in name or "{%" in name:
        return ChatTemplate(name, tokens=tokens)
    path = Path(wanted)
    if path.is_file():
        return ChatTemplate(path.read_text(encoding="utf-8"), name, tokens)
    known = ", ".join(dict.fromkeys([*names, *BUILT_IN]))
    raise ChatError(f"[chat] {name!r} is neither a file nor a chat template; known names: {known}")


def _special_tokens(vocabulary: Vocabulary) -> dict[str, str]:
    ids = {"bos_token": vocabulary.bos, "eos_token": vocabulary.eos, "unk_token": vocabulary.unknown}
    return {name: "" if token is None else vocabulary.tokens[token] for name, token in ids.items()}


# ---- from text to tokens ----


_SEARCHED = 1 << 16
"""Number of characters of a prompt that are searched for names that remained text. They only serve a
warning."""


def encode(tokenizer: Tokenizer, rendered: Rendered) -> tuple[list[int], frozenset[str]]:
    """Encode a rendered prompt as tokens. Only text of the template becomes control tokens.

    BOS comes first if the model wants it and the template did not write it. Names in the text of messages
    stay text. They are searched only in the first characters of the prompt, for a warning.

    Returns:
        The tokens, and the names of control tokens near the beginning of the prompt that remained text. They
        came from the messages, or the template computed them in a way that hides that it wrote them.
    """
    names, text = control_names(tokenizer), rendered.text
    found: dict[int, str] = {}
    for begin, end in rendered.own:
        while (first := names.first(text, begin, end)) is not None:
            place, name = first
            found[place], begin = name, place + len(name)
    tokens: list[int] = []
    begin = 0
    for place, name in found.items():
        tokens += tokenizer.encode(text[begin:place], add_special=False)
        tokens.append(names.ids[name])
        begin = place + len(name)
    tokens += tokenizer.encode(text[begin:], add_special=False)
    vocabulary = tokenizer.vocabulary
    if vocabulary.add_bos and vocabulary.bos is not None and tokens[:1] != [vocabulary.bos]:
        tokens.insert(0, vocabulary.bos)
    return tokens, frozenset(_left_as_text(names, text[:_SEARCHED], found))


def _left_as_text(names: ControlNames, text: str, found: Mapping[int, str]) -> Iterator[str]:
    at = 0
    while (first := names.first(text, at, len(text))) is not None:
        place, name = first
        if place in found:
            at = place + len(found[place])
        else:
            yield name
            at = place + 1  # a control token of the template may begin inside this foreign text
