"""Chat completions and completions: from a request body to texts, and from texts to objects of the API."""

from __future__ import annotations

import itertools
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dyno._completion import TextRun
from dyno._generate import StopFilter
from dyno._sampling import Sampling
from dyno._writing import most_tokens, prompt_tokens
from dyno.chat import Part, Reply
from dyno.chat.reply import chat_prompt
from dyno.server.conversation import conversation, functions
from dyno.server.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dyno._sampling import TokenLogprobs
    from dyno.chat import ChatTemplate
    from dyno.engine import Engine
    from dyno.server.bodies import ChatBody, CompletionBody
    from dyno.tokenizer import Tokenizer

__all__ = ["Chat", "Completions", "Head", "joined"]


_MOST_SCORED = 1 << 20
"""Most log-probabilities of prompts in one answer. Each needs about 150 bytes of memory until its end."""
_LEAST_LOGPROB = -9999.0
"""Log-probability of an excluded token in the public API, because JSON has no infinite numbers."""


@dataclass(frozen=True)
class Head:
    """The common fields of all objects of one response."""

    id: str
    kind: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, prefix: str, kind: str, model: str) -> Head:
        """A head with a new identifier."""
        return cls(f"{prefix}-{uuid.uuid4().hex[:24]}", kind, model)

    def object(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """A whole object."""
        head = {"id": self.id, "object": self.kind, "created": self.created, "model": self.model}
        return {**head, "choices": choices, **more}


def _usage(prompt: int, cached: int, drawn: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": drawn,
        "total_tokens": prompt + drawn,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class Chat:
    """The answers of one chat request.

    Args:
        engine: The engine, whose scheduler is open.
        body: The request.
        template: The chat template; None: the one of the model.
        model: Model name in responses.

    Raises:
        ApiError: A message has no role or a content that is not text, or a tool is no function.
        ChatError, PlanError: As in `Engine.chat`.
    """

    scores_prompts = False

    def __init__(self, engine: Engine, body: ChatBody, template: ChatTemplate | None, model: str) -> None:
        self._engine, self._body = engine, body
        messages, tools = conversation(body.messages), functions(body.tools)
        if body.tool_choice == "none":
            tools = None
        template = template or engine.chat_template(tools=bool(tools))
        # Rendered once for all answers, because one process renders for all clients.
        prompt = chat_prompt(
            engine,
            messages,
            template,
            tools,
            body.variables(),
            continues=body.continue_final_message,
            calls=body.call is not None,
        )
        self.texts = [
            Reply(
                engine,
                messages,
                template,
                tools,
                body.variables(),
                Sampling(seed=seed, **body.sampling()),
                body.limit,
                body.stops,
                slot=None,
                handling=body.handling,
                call=body.call,
                one_call=body.parallel_tool_calls is False,
                continues=body.continue_final_message,
                prompt=prompt,
            )
            for seed in body.seeds()
        ]
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        self._head = Head.of("chatcmpl", kind, model)
        self._calls = [0] * len(self.texts)
        self._one_call = body.parallel_tool_calls is False
        self._told = [0] * len(self.texts)

    def whole(self, pieces: Sequence[Sequence[Part]]) -> dict[str, Any]:
        """The response.

        Args:
            pieces: Pieces of each answer, which the answers already have.
        """
        choices = []
        for index, reply in enumerate(self.texts):
            message = reply.answer.message()
            if self._one_call and "tool_calls" in message:
                del message["tool_calls"][1:]
            if not message["content"] and "tool_calls" in message:
                message["content"] = None
            choice = {"index": index, "message": message, "finish_reason": reply.finish_reason}
            if self._body.logprobs:
                choice["logprobs"] = self._new_logprobs(index)
            choices.append(choice)
        return self._head.object(choices, usage=self._used())

    def first(self) -> Iterator[dict[str, Any]]:
        """The objects with which a stream begins."""
        for index in range(len(self.texts)):
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def chunk(self, index: int, part: Part | None) -> Iterator[dict[str, Any]]:
        """The object for one part of a stream; None: the end of its answer."""
        if part is None:
            yield self._chunk(index, {}, self.texts[index].finish_reason)
        elif part.tool_call is not None:
            call = {"index": self._calls[index], **part.tool_call.to_dict()}
            self._calls[index] += 1
            if not self._one_call or self._calls[index] == 1:
                yield self._chunk(index, {"tool_calls": [call]})
        elif part.reasoning:
            yield self._chunk(index, {"reasoning_content": part.reasoning})
        else:
            yield self._chunk(index, {"content": part.content})

    def last(self) -> Iterator[dict[str, Any]]:
        """The objects with which a stream ends."""
        if self._body.reports_usage:
            yield self._head.object([], usage=self._used())

    def _used(self) -> dict[str, Any]:
        first = self.texts[0]
        return _usage(len(first.prompt), first.cached_tokens, sum(len(each.tokens) for each in self.texts))

    def _chunk(self, index: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "finish_reason": reason}
        if self._body.logprobs and "role" not in delta:
            choice["logprobs"] = self._new_logprobs(index)
        return self._head.object([choice])

    def _new_logprobs(self, index: int) -> dict[str, Any]:
        """Log-probabilities of those tokens of an answer that no earlier object had."""
        known = self.texts[index].logprobs
        new = known[self._told[index] : len(known)]
        self._told[index] += len(new)
        return {"content": [self._logprob(each) for each in new]}

    def _logprob(self, each: TokenLogprobs) -> dict[str, Any]:
        return {
            **self._token(each.token, each.logprob),
            "top_logprobs": [self._token(token, logprob) for token, logprob in each.top],
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        piece = self._engine.tokenizer.piece(token, special=True)
        name = piece.decode(errors="replace")
        return {"token": name, "logprob": max(logprob, _LEAST_LOGPROB), "bytes": list(piece)}


class Completions:
    """The texts of one completion request; arguments and errors as in `Chat`.

    It also raises ApiError for too many log-probabilities of prompts.
    """

    def __init__(self, engine: Engine, body: CompletionBody, model: str) -> None:
        self._engine, self._body = engine, body
        self.texts: list[TextRun] = []
        self.scores_prompts = body.echo and body.logprobs is not None
        scored = 0
        for given in body.prompts:
            prompt = prompt_tokens(engine, given, parse_special=True)
            limit = min(most_tokens(engine, prompt, body.limit), most_tokens(engine, prompt, None))
            self._scores_only = limit == 0 and self.scores_prompts
            scored += body.n * len(prompt) * ((body.logprobs or 0) + 1)
            if self.scores_prompts and scored > _MOST_SCORED:
                raise ApiError(
                    400,
                    f"echo with logprobs {body.logprobs} asks for more than {_MOST_SCORED} log-probabilities "
                    "of prompts; send fewer prompts at a time, or request fewer log-probabilities per token",
                    param="logprobs",
                    code="invalid_value",
                )
            for sampling in body.samplings():
                run_limit = max(limit, int(self._scores_only))
                run = TextRun(
                    engine, prompt, sampling, StopFilter(body.stops), run_limit, handling=body.handling
                )
                self.texts.append(run)
        self._echoed = [engine.detokenize(run.prompt) if body.echo else "" for run in self.texts]
        self._begun = [False] * len(self.texts)
        self._told = [0] * len(self.texts)
        self._places = [_Places(engine.tokenizer) for _ in self.texts]
        self._head = Head.of("cmpl", "text_completion", model)

    def whole(self, pieces: Sequence[Sequence[str]]) -> dict[str, Any]:
        """The response.

        Args:
            pieces: Pieces of each text.
        """
        choices = []
        for index, run in enumerate(self.texts):
            written = "" if self._scores_only else "".join(pieces[index])
            reason = "length" if self._scores_only else run.finish_reason
            choices.append(
                {
                    "index": index,
                    "text": self._echoed[index] + written,
                    "logprobs": self._new_logprobs(index),
                    "finish_reason": reason,
                }
            )
        return self._head.object(choices, usage=self._used())

    def first(self) -> Iterator[dict[str, Any]]:
        """The objects with which a stream begins."""
        return iter(())

    def chunk(self, index: int, piece: str | None) -> Iterator[dict[str, Any]]:
        """The object for one piece of a stream; None: the end of its text."""
        text = "" if piece is None or self._scores_only else piece
        if not self._begun[index]:
            self._begun[index] = True
            text = self._echoed[index] + text
        reason = None
        if piece is None:
            reason = "length" if self._scores_only else self.texts[index].finish_reason
        choice = {"index": index, "text": text, "logprobs": self._new_logprobs(index)}
        yield self._head.object([{**choice, "finish_reason": reason}])

    def last(self) -> Iterator[dict[str, Any]]:
        """The objects with which a stream ends."""
        if self._body.reports_usage:
            yield self._head.object([], usage=self._used())

    def _used(self) -> dict[str, Any]:
        each_prompt = self.texts[:: self._body.n]
        return _usage(
            sum(len(run.prompt) for run in each_prompt),
            sum(run.cached_tokens for run in each_prompt),
            0 if self._scores_only else sum(len(run.tokens) for run in self.texts),
        )

    def _new_logprobs(self, index: int) -> dict[str, Any] | None:
        """Log-probabilities of those tokens of a text that no earlier object had, beginning with the
        prompt."""
        if self._body.logprobs is None:
            return None
        run = self.texts[index]
        known = run.logprobs
        new: list[TokenLogprobs | int] = []
        offsets: list[int] = []
        if self._body.echo and not self._told[index]:
            new += [run.prompt[0], *run.prompt_logprobs]
            offsets += self._places[index].of_prompt(run.prompt[: len(new)], self._echoed[index])
        drawn = [] if self._scores_only else known[self._told[index] : len(known)]
        new += drawn
        offsets += [self._places[index].of(each.token) for each in drawn]
        if known:
            self._told[index] = len(known)
        names = [self._name(each if isinstance(each, int) else each.token) for each in new]
        scored = [None if isinstance(each, int) else each for each in new]
        return {
            "tokens": names,
            "token_logprobs": [
                None if each is None else max(each.logprob, _LEAST_LOGPROB) for each in scored
            ],
            "top_logprobs": [None if each is None else self._most_probable(each) for each in scored],
            "text_offset": offsets,
        }

    def _most_probable(self, each: TokenLogprobs) -> dict[str, float]:
        """The most probable tokens, and the token of the text, as in the public API."""
        found = {self._name(token): max(logprob, _LEAST_LOGPROB) for token, logprob in each.top}
        found.setdefault(self._name(each.token), max(each.logprob, _LEAST_LOGPROB))
        return found

    def _name(self, token: int) -> str:
        piece = self._engine.tokenizer.piece(token, special=True)
        try:
            return piece.decode()
        except UnicodeDecodeError:  # part of a character, written as in the public API
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


class _Places:
    """The places of tokens in the text of a completion, in characters.

    A token that continues a character has the place of this character. A control token takes no room.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream, self._end = tokenizer.stream(), 0

    def of(self, token: int) -> int:
        """The place of the next token."""
        place = self._end
        self._end += len(self._stream.push(token))
        return place

    def of_prompt(self, tokens: Sequence[int], text: str) -> list[int]:
        """The places of the tokens of a prompt with this text. The next token follows the text."""
        places = [self.of(token) for token in tokens]
        blank = self._end + len(self._stream.finish()) - len(text)  # some vocabularies put one in front
        self._stream, self._end = self._tokenizer.stream(), len(text)
        return [max(place - blank, 0) for place in places]


def joined(pieces: Sequence[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
    """Merge neighbouring pieces of one kind that came at the same time.

    Args:
        pieces: Pairs of the number of the text, and a string, a part of an answer, or None for its end.
    """

    def kind(each: tuple[int, Any]) -> object:
        index, piece = each
        if isinstance(piece, str):
            return index, "text"
        if isinstance(piece, Part) and piece.tool_call is None:
            return index, bool(piece.reasoning)
        return object()  # alone

    for _, group in itertools.groupby(pieces, kind):
        (index, first), *rest = group
        if not rest:
            yield index, first
        elif isinstance(first, str):
            yield index, first + "".join(piece for _, piece in rest)
        else:
            parts = [first, *(piece for _, piece in rest)]
            yield (
                index,
                Part(
                    content="".join(part.content for part in parts),
                    reasoning="".join(part.reasoning for part in parts),
                ),
            )
