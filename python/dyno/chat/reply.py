"""One answer of a model: from messages to a prompt, from tokens to parts of a message."""

from __future__ import annotations

import dataclasses
import logging
import threading
from typing import TYPE_CHECKING, Any

from dyno._generate import StopFilter, count_of
from dyno._requests import NOTHING_YET, Handling
from dyno._slots import larger_ctx
from dyno._vocabulary import TokenType
from dyno._writing import drawn_tokens
from dyno.chat.answer import Answer, Part, parser_for
from dyno.chat.template import encode
from dyno.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from dyno._sampling import Sampling, TokenLogprobs
    from dyno.chat.template import ChatTemplate
    from dyno.engine import Engine

__all__ = ["Reply"]

_log = logging.getLogger("dyno.chat")


class Reply:
    """An answer that is being written: an iterator of its parts; see `Engine.chat`.

    Args:
        engine: Draws the tokens.
        messages: The conversation.
        template: Makes the prompt of it.
        tools: Offered to the model.
        variables: For the template.
        sampling: How tokens are drawn.
        max_tokens: Tokens drawn at most; None goes on to the end of the context.
        stop: Strings that end the answer.
        slot: The sequence to write into; None takes the highest free one.
        held: Tokens that `slot` holds from before, if nothing else has used it since; the part of the prompt
        that agrees with them is not computed again.
        handling: Of the prompt and the end, for an engine with a scheduler.

    Raises:
        ChatError: The template refuses the messages.
        PlanError: An argument is impossible, or the prompt is longer than the context.
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
        stop: Sequence[str] | str,
        slot: int | None,
        held: Sequence[int] = (),
        handling: Handling | None = None,
    ) -> None:
        self._engine, self._sampling, self._slot, self._held = engine, sampling, slot, held
        self._handling = handling
        self._stop = StopFilter([stop] if isinstance(stop, str) else stop)
        if slot is not None:
            engine._slots.check_exists(slot, int(engine.settings["sequences"]))
        rendered = template.render(messages, tools=tools, **variables)
        self.prompt: list[int]
        """Tokens of the prompt."""
        self.prompt, as_text = encode(engine.tokenizer, rendered)
        _warn_of_lost_tokens(as_text, messages, tools, template.name)
        ctx = int(engine.settings["ctx"])
        if not self.prompt:
            raise PlanError(f"[chat] the template {template.name} gives an empty prompt")
        if len(self.prompt) > ctx:
            advice = larger_ctx(len(self.prompt), engine._n_ctx_train)
            raise PlanError(f"[chat] the conversation has {len(self.prompt)} tokens, ctx is {ctx}; {advice}")
        most = ctx - len(self.prompt) + 1
        self._limit = most if max_tokens is None else min(most, count_of("max_tokens", max_tokens))
        self._parser = parser_for(template.text, rendered.text, tools)
        if sampling.has_rules:  # they hold for the content, not for reasoning before it
            self._sampling = dataclasses.replace(sampling, rules_after=self._parser.content_after)
        self.answer = Answer()
        """What has been written so far."""
        self.tokens: list[int] = []
        """Drawn so far, also those that are no text."""
        self.logprobs: list[TokenLogprobs] = []
        """Of each token, if they were asked for."""
        self.cached_tokens = 0
        """Tokens of the prompt that the engine held from before; known with the first part."""
        self.finish_reason: str | None = None
        """Why the answer ended: `stop`, `length` (max_tokens or context), `tool_calls`; None before that."""
        self._cancelled = threading.Event()
        self._parts = self._written()

    @property
    def stop_string(self) -> str | None:
        """The string of `stop` that ended the answer."""
        return self._stop.matched

    @property
    def has_rules(self) -> bool:
        """Whether the answer follows rules, which are compiled before its first token."""
        return self._sampling.has_rules

    def __iter__(self) -> Iterator[Part]:
        return self

    def __next__(self) -> Part:
        part = next(self._parts)
        assert part is not None  # only one who listens gets that
        return part

    def listen(self, wake: Callable[[], None]) -> Iterator[Part | None]:
        """The parts, without waiting for them; see `TextRun.listen`."""
        self._handling = dataclasses.replace(self._handling or Handling(), wake=wake)
        return self._parts

    def close(self) -> None:
        """End the answer here and free its slot."""
        self._parts.close()

    def cancel(self) -> None:
        """End the answer after its next token, from any thread."""
        self._cancelled.set()

    def message(self) -> dict[str, Any]:
        """Read to the end; the whole message, ready to be appended to the conversation.

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
        """The raw text, marks of the parser included, up to a stop string or the end; None: nothing yet."""
        tokenizer = self._engine.tokenizer
        vocabulary, stream = tokenizer.vocabulary, tokenizer.stream()
        ignores = self._handling is not None and self._handling.ignore_end
        ends = frozenset() if ignores else tokenizer.end_of_generation
        # After a control token, the first word of such a vocabulary begins with a blank that nobody wrote.
        begins = vocabulary.add_space_prefix
        drawn = drawn_tokens(
            self._engine,
            self.prompt,
            self._sampling,
            self._limit,
            self._slot,
            held=self._held,
            cancelled=self._cancelled,
            handling=self._handling,
        )
        reason = "length"
        try:
            for each in drawn:
                if each is NOTHING_YET:
                    yield None
                    continue
                if not self.tokens:
                    self.cached_tokens = each.cached
                self.tokens.append(each.token)
                if each.logprobs is not None:
                    self.logprobs.append(each.logprobs)
                if each.token in ends:
                    reason = "stop"
                    break
                if self._cancelled.is_set():
                    break
                if vocabulary.types[each.token] in (TokenType.CONTROL, TokenType.UNKNOWN):
                    name = vocabulary.tokens[each.token]
                    text = stream.finish() + (name if self._parser.wants(name) else "")
                else:
                    text = stream.push(each.token)
                if begins and text:
                    text, begins = text.removeprefix(" "), False
                yield self._stop.push(text)
                if self._stop.stopped:
                    reason = "stop"
                    break
            else:
                yield self._stop.push(stream.finish())
        finally:
            drawn.close()
        if not self._stop.stopped:
            yield self._stop.finish()
        self.finish_reason = reason


def _warn_of_lost_tokens(
    as_text: frozenset[str],
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    name: str,
) -> None:
    """Say so if the template computed control tokens in a way that hides that it wrote them."""
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
