"""Chat completions and completions: from a body to texts, from texts to the API's objects."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dyno._completion import TextRun
from dyno._generate import StopFilter
from dyno._writing import most_tokens, prompt_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dyno._sampling import TokenLogprobs
    from dyno.chat import ChatTemplate, Part, Reply
    from dyno.engine import Engine
    from dyno.server.bodies import ChatBody, CompletionBody

__all__ = ["Chat", "Completions", "Head"]


@dataclass(frozen=True)
class Head:
    """The fields with which all objects of one response begin."""

    id: str
    kind: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, prefix: str, kind: str, model: str) -> Head:
        """With an identifier of its own."""
        return cls(f"{prefix}-{uuid.uuid4().hex[:24]}", kind, model)

    def object(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """A whole object."""
        head = {"id": self.id, "object": self.kind, "created": self.created, "model": self.model}
        return {**head, "choices": choices, **more}


def _usage(prompt: int, drawn: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}


class Chat:
    """The answers that one request asks for.

    Args:
        engine: Writes them.
        body: The request.
        template: Makes the prompt; None takes the model's.
        model: The name that responses carry.

    Raises:
        ChatError, PlanError: As `Engine.chat`.
    """

    def __init__(self, engine: Engine, body: ChatBody, template: ChatTemplate | None, model: str) -> None:
        self._engine, self._body = engine, body
        tools = None if body.tool_choice == "none" else body.tools
        self.texts: list[Reply] = [
            engine.chat(
                body.messages,
                tools=tools,
                template=template,
                variables=body.chat_template_kwargs,
                max_tokens=body.limit,
                seed=seed,
                stop=body.stops,
                **body.sampling(),
            )
            for seed in body.seeds()
        ]
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        self._head = Head.of("chatcmpl", kind, model)
        self._calls = 0

    def whole(self) -> dict[str, Any]:
        """The response, when all answers have been read."""
        choices = []
        for index, reply in enumerate(self.texts):
            message = reply.answer.message()
            if not message["content"] and "tool_calls" in message:
                message["content"] = None
            choice = {"index": index, "message": message, "finish_reason": reply.finish_reason}
            if self._body.logprobs:
                choice["logprobs"] = {"content": [self._logprob(each) for each in reply.logprobs]}
            choices.append(choice)
        return self._head.object(choices, usage=self._used())

    def first(self) -> dict[str, Any]:
        """The object with which a stream begins."""
        return self._chunk({"role": "assistant", "content": ""})

    def chunk(self, part: Part) -> dict[str, Any]:
        """One part of a stream."""
        if part.tool_call is not None:
            call = {"index": self._calls, **part.tool_call.to_dict()}
            self._calls += 1
            return self._chunk({"tool_calls": [call]})
        return self._chunk(
            {"reasoning_content": part.reasoning} if part.reasoning else {"content": part.content}
        )

    def last(self) -> Iterator[dict[str, Any]]:
        """The objects with which a stream ends."""
        yield self._chunk({}, self.texts[0].finish_reason)
        if self._body.reports_usage:
            yield self._head.object([], usage=self._used())

    def _used(self) -> dict[str, int]:
        return _usage(len(self.texts[0].prompt), sum(len(each.tokens) for each in self.texts))

    def _chunk(self, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        return self._head.object([{"index": 0, "delta": delta, "finish_reason": reason}])

    def _logprob(self, each: TokenLogprobs) -> dict[str, Any]:
        return {
            **self._token(each.token, each.logprob),
            "top_logprobs": [self._token(token, logprob) for token, logprob in each.top],
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        piece = self._engine.tokenizer.piece(token, special=True)
        return {"token": piece.decode(errors="replace"), "logprob": logprob, "bytes": list(piece)}


class Completions:
    """The texts that one request asks for; arguments and errors as of `Chat`."""

    def __init__(self, engine: Engine, body: CompletionBody, model: str) -> None:
        self._engine, self._body = engine, body
        prompt = prompt_tokens(engine, body.prompt, parse_special=True)
        limit = min(most_tokens(engine, prompt, body.max_tokens), most_tokens(engine, prompt, None))
        self.texts = [
            TextRun(engine, prompt, sampling, StopFilter(body.stops), limit) for sampling in body.samplings()
        ]
        self._head = Head.of("cmpl", "text_completion", model)

    def whole(self, pieces: list[list[str]]) -> dict[str, Any]:
        """The response.

        Args:
            pieces: Of each text.
        """
        choices = []
        for index, (run, text) in enumerate(zip(self.texts, pieces, strict=True)):
            logprobs = None if self._body.logprobs is None else self._logprobs(run)
            choices.append(
                {
                    "index": index,
                    "text": "".join(text),
                    "logprobs": logprobs,
                    "finish_reason": run.finish_reason,
                }
            )
        return self._head.object(choices, usage=self._used())

    def chunk(self, piece: str) -> dict[str, Any]:
        """One piece of a stream."""
        return self._chunk(piece)

    def last(self) -> Iterator[dict[str, Any]]:
        """The objects with which a stream ends."""
        yield self._chunk("", self.texts[0].finish_reason)
        if self._body.reports_usage:
            yield self._head.object([], usage=self._used())

    def _used(self) -> dict[str, int]:
        return _usage(len(self.texts[0].prompt), sum(len(each.tokens) for each in self.texts))

    def _chunk(self, text: str, reason: str | None = None) -> dict[str, Any]:
        return self._head.object([{"index": 0, "text": text, "logprobs": None, "finish_reason": reason}])

    def _logprobs(self, run: TextRun) -> dict[str, Any]:
        def name(token: int) -> str:
            return self._engine.tokenizer.piece(token, special=True).decode(errors="replace")

        return {
            "tokens": [name(each.token) for each in run.logprobs],
            "token_logprobs": [each.logprob for each in run.logprobs],
            "top_logprobs": [{name(t): p for t, p in each.top} for each in run.logprobs],
        }
