"""One answer of a model: from messages to the prompt, and from tokens to the parts of a message."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from typing import TYPE_CHECKING, Any

from dyno._completion import PieceRun
from dyno._generate import StopFilter, count_of
from dyno._vocabulary import TokenType
from dyno._writing import check_least, check_length
from dyno.chat.answer import Answer, Part, parser_for
from dyno.chat.forced import ForcedCalls, call_grammar
from dyno.chat.template import encode
from dyno.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence

    from dyno._requests import Handling
    from dyno._sampling import Sampling
    from dyno.chat.template import ChatTemplate
    from dyno.engine import Engine

__all__ = ["ChatPrompt", "Reply", "chat_prompt"]

_log = logging.getLogger("dyno.chat")


@dataclasses.dataclass(frozen=True)
class ChatPrompt:
    """The prompt of a conversation, for one answer or several."""

    text: str
    begun: bool
    """Whether it ends within the content of the answer."""
    tokens: list[int]


def chat_prompt(
    engine: Engine,
    messages: Sequence[Mapping[str, Any]],
    template: ChatTemplate,
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any],
    *,
    continues: bool,
    calls: bool,
) -> ChatPrompt:
    """Make the prompt of a conversation. Arguments and errors as in `Reply` and `ChatTemplate.prompt`."""
    check_length("[chat] the conversation", engine, len(messages), "at least ")  # one token or more each
    rendered = template.prompt(messages, tools, variables, continues=continues, calls=calls)
    check_least("[chat] the conversation", engine, rendered.text)
    tokens, as_text = encode(engine.tokenizer, rendered)
    _warn_of_lost_tokens(as_text, messages, tools, template.name)
    if not tokens:
        raise PlanError(f"[chat] the template {template.name} gives an empty prompt")
    check_length("[chat] the conversation", engine, len(tokens))
    return ChatPrompt(rendered.text, rendered.begun, tokens)


class Reply(PieceRun[Part]):
    """An answer in progress: an iterator over its parts; see `Engine.chat`.

    Args:
        engine: The engine that draws the tokens.
        messages: The conversation.
        template: The chat template.
        tools: The tools offered to the model.
        variables: Variables for the template.
        sampling: Settings for drawing tokens.
        max_tokens: Maximum number of tokens; None: up to the end of the context.
        stop: Strings that end the answer.
        slot: The sequence to write into; None takes the highest free one.
        held, handling: As in `PieceRun`.
        call: The function that the answer must call; empty: any of the tools. None: calls are optional.
        continues: Whether the answer continues the last message, which is the assistant's. It is then only
            the rest of that message.
        one_call: Whether a forced answer has exactly one call.
        prompt: The prompt for these arguments, if the caller has already made it for several answers.

    Raises:
        ChatError: The template refuses the messages.
        ContextLengthError: The prompt is longer than the context.
        PlanError: An argument is impossible.
    """

    def __init__(
        self,
        engine: Engine,
        messages: Sequence[Mapping[str, Any]],
        template: ChatTemplate,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        sampling: Sampling,
        max_tokens: int | None,
        stop: Sequence[str] | str | None,
        slot: int | None,
        held: Sequence[int] = (),
        handling: Handling | None = None,
        call: str | None = None,
        one_call: bool = False,
        continues: bool = False,
        prompt: ChatPrompt | None = None,
    ) -> None:
        self._stop = StopFilter(stop)
        if slot is not None:
            engine._slots.check_exists(slot, int(engine.settings["sequences"]))
        calls = call is not None
        made = prompt or chat_prompt(
            engine, messages, template, tools, variables, continues=continues, calls=calls
        )
        most = int(engine.settings["ctx"]) - len(made.tokens) + 1
        limit = most if max_tokens is None else min(most, count_of("max_tokens", max_tokens))
        self._begun = continues and made.begun
        if self._begun and (calls or sampling.json_schema is not None):
            raise PlanError(
                "[chat] the last message begins the answer, so neither a schema nor tool_choice can hold for "
                "all of it; leave one of them out"
            )
        self._parser = parser_for(template.text, made.text, tools, begun=made.begun)
        if call is not None:
            sampling = _calling(sampling, call_grammar(tools, call or None, one=one_call or bool(call)))
            self._parser = ForcedCalls(self._parser)
        if sampling.has_rules:  # the rules apply to the content, not to reasoning before it
            sampling = dataclasses.replace(sampling, rules_after=self._parser.content_after)
        self.answer = Answer()
        """The answer so far."""
        super().__init__(engine, made.tokens, sampling, limit, slot, handling, held)

    @property
    def stop_string(self) -> str | None:
        """The string of `stop` that ended the answer."""
        return self._stop.matched

    def message(self) -> dict[str, Any]:
        """Read to the end, and return the whole message, ready to be appended to the conversation.

        Returns:
            `role` and `content`; `reasoning_content` and `tool_calls` if the answer has them.
        """
        for _ in self:
            pass
        return self.answer.message()

    def _written(self) -> Generator[Part | None, None, None]:
        for text in self._texts():
            if text is None:
                yield None
                continue
            for part in self._parser.push(text):
                self.answer.add(part)
                yield part
        for part in self._parser.finish():
            self.answer.add(part)
            yield part
        if self.answer.tool_calls and self.finish_reason == "stop":
            self.finish_reason = "tool_calls"

    def _texts(self) -> Iterator[str | None]:
        """The raw text with the marks of the parser, up to a stop string or the end; None: no text yet."""
        tokenizer = self._engine.tokenizer
        vocabulary, stream = tokenizer.vocabulary, tokenizer.stream()
        # With such a vocabulary, the first word after a control token begins with a spurious blank.
        begins = vocabulary.add_space_prefix and not self._begun
        reason = "length"
        with contextlib.closing(self._drawn()) as drawn:
            for token in drawn:
                if token is None:
                    yield None
                    continue
                if token in self._ends:
                    reason = "stop"
                    break
                if self._cancelled.is_set():
                    break
                if vocabulary.types[token] in (TokenType.CONTROL, TokenType.UNKNOWN):
                    name = vocabulary.tokens[token]
                    text = stream.finish() + (name if self._parser.wants(name) else "")
                else:
                    text = stream.push(token)
                if begins and text:
                    text, begins = text.removeprefix(" "), False
                yield self._stop.push(text)
                if self._stop.stopped:
                    reason = "stop"
                    break
            else:
                yield self._stop.push(stream.finish())
        if not self._stop.stopped:
            yield self._stop.finish()
        self.finish_reason = reason


def _warn_of_lost_tokens(
    as_text: frozenset[str],
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    name: str,
) -> None:
    """Warn if the template computed control tokens in a way that hides that it wrote them."""
    if not as_text:
        return
    given = "\0".join(_strings([messages, tools]))
    lost = sorted(token for token in as_text if token not in given)
    if lost:
        _log.warning(
            "the template %s computes %s in a way that hides its origin; the model reads it as plain text",
            name,
            ", ".join(lost),
        )


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield str(key)
            yield from _strings(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _strings(each)


def _calling(sampling: Sampling, grammar: str) -> Sampling:
    """The settings of an answer that must be a call. A schema cannot apply, because there is no content."""
    for name in ("grammar", "regex"):
        if getattr(sampling, name) is not None:
            raise PlanError(f"[chat] tool_choice asks for a call, so {name} cannot hold; give one of them")
    return dataclasses.replace(sampling, json_schema=None, grammar=grammar)
