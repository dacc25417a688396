"""The public messages API: from a request body to one answer, and from the answer to objects of the API."""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING, Any

from dyno._sampling import Sampling
from dyno._writing import check_length
from dyno.chat import Part, Reply
from dyno.chat.template import encode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dyno.chat import ChatTemplate
    from dyno.engine import Engine
    from dyno.server.messages_body import CountBody, MessagesBody

__all__ = ["Messages", "count_tokens"]

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


def count_tokens(engine: Engine, body: CountBody, template: ChatTemplate | None) -> dict[str, Any]:
    """The number of tokens in the prompt of a conversation. Arguments and errors as in `Messages`."""
    tools = body.functions()
    template = template or engine.chat_template(tools=bool(tools))
    messages = body.conversation()
    check_length("[chat] the conversation", engine, len(messages), "at least ")  # as for an answer
    calls = body.call is not None
    rendered = template.prompt(messages, tools, body.variables(), continues=body.continues, calls=calls)
    return {"input_tokens": len(encode(engine.tokenizer, rendered)[0])}


class Messages:
    """The answer of one request.

    Args:
        engine: The engine, whose scheduler is open.
        body: The request.
        template: The chat template; None: the one of the model.
        model: Model name in responses.

    Raises:
        ChatError, PlanError: As in `Engine.chat`.
    """

    scores_prompts = False

    def __init__(self, engine: Engine, body: MessagesBody, template: ChatTemplate | None, model: str) -> None:
        tools = body.functions()
        self._reply = Reply(
            engine,
            body.conversation(),
            template or engine.chat_template(tools=bool(tools)),
            tools,
            body.variables(),
            Sampling(**body.sampling()),
            body.max_tokens,
            body.stop_sequences,
            slot=None,
            handling=body.handling,
            call=body.call,
            one_call=body.one_call,
            continues=body.continues,
        )
        self.texts = [self._reply]
        self._id, self._model = f"msg_{uuid.uuid4().hex[:24]}", model
        self._open: str | None = None
        """Type of the current block."""
        self._block = -1
        self._one_call, self._calls = body.one_call, 0

    def whole(self, pieces: Sequence[Sequence[Part]]) -> dict[str, Any]:
        """The response.

        Args:
            pieces: Pieces of the answer, which it already has.
        """
        answer = self._reply.answer
        content: list[dict[str, Any]] = []
        if answer.reasoning:
            content.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
        if answer.content:
            content.append({"type": "text", "text": answer.content})
        for call in answer.tool_calls[: 1 if self._one_call else None]:
            content.append({**_tool_use(call), "input": json.loads(call.arguments)})
        return self._message(content) | self._end()

    def first(self) -> Iterator[dict[str, Any]]:
        """The objects with which a stream begins."""
        yield {"type": "message_start", "message": self._message([])}

    def chunk(self, index: int, part: Part | None) -> Iterator[dict[str, Any]]:
        """The objects for one part of a stream; None: the end of the answer."""
        if part is None:
            yield from self._close()
        elif part.tool_call is not None:
            self._calls += 1
            if self._one_call and self._calls > 1:
                return
            yield from self._begin("tool_use", {**_tool_use(part.tool_call), "input": {}})
            arguments = part.tool_call.arguments
            yield self._delta({"type": "input_json_delta", "partial_json": arguments})
            yield from self._close()
        elif part.reasoning:
            yield from self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": part.reasoning})
        else:
            yield from self._begin("text", {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": part.content})

    def last(self) -> Iterator[dict[str, Any]]:
        """The objects with which a stream ends."""
        end = self._end()
        yield {"type": "message_delta", "delta": end, "usage": self._usage()}
        yield {"type": "message_stop"}

    def _begin(self, kind: str, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Open a block, unless the current text or reasoning continues."""
        if self._open == kind:
            return
        yield from self._close()
        self._open, self._block = kind, self._block + 1
        yield {"type": "content_block_start", "index": self._block, "content_block": block}

    def _close(self) -> Iterator[dict[str, Any]]:
        if self._open is not None:
            self._open = None
            yield {"type": "content_block_stop", "index": self._block}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._block, "delta": delta}

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }

    def _end(self) -> dict[str, Any]:
        matched = self._reply.stop_string
        if matched is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": matched}
        reason = self._reply.finish_reason or ""
        return {"stop_reason": _STOP_REASONS.get(reason, "end_turn"), "stop_sequence": None}

    def _usage(self) -> dict[str, int]:
        """The token usage. Tokens from the cache are counted separately, as in the API."""
        reply = self._reply
        return {
            "input_tokens": len(reply.prompt) - reply.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": reply.cached_tokens,
            "output_tokens": len(reply.tokens),
        }


def _tool_use(call: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name}
