"""Whole texts with their tokens, for callers that want more of a generation than its pieces."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dyno._writing import drawn_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dyno._generate import StopFilter
    from dyno._sampling import Sampling, TokenLogprobs
    from dyno.engine import Engine

__all__ = ["Completion", "completed"]


@dataclass(frozen=True)
class Completion:
    """A text that continues a prompt."""

    text: str
    tokens: list[int]
    """All that were drawn, also the one that ended the text and those of a stop string."""
    finish_reason: str
    """`stop`: the model's end or a stop string; `length`: max_tokens or the context."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of each token, if they were asked for."""


def completed(
    engine: Engine,
    prompt: Sequence[int],
    sampling: Sampling,
    stop: StopFilter,
    max_tokens: int,
    slot: int | None,
) -> Completion:
    """The text after a prompt; arguments as in `dyno._writing.written`."""
    stream, ends = engine.tokenizer.stream(), engine.tokenizer.end_of_generation
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] = []
    text, reason = "", "length"
    drawn = drawn_tokens(engine, prompt, sampling, max_tokens, slot)
    try:
        for each in drawn:
            tokens.append(each.token)
            if each.logprobs is not None:
                logprobs.append(each.logprobs)
            if each.token in ends:
                reason = "stop"
                break
            text += stop.push(stream.push(each.token))
            if stop.stopped:
                reason = "stop"
                break
    finally:
        drawn.close()
    if not stop.stopped:
        text += stop.push(stream.finish())
    if not stop.stopped:
        text += stop.finish()
    return Completion(text, tokens, "stop" if stop.stopped else reason, logprobs)
