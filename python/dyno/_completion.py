"""Generated texts together with their tokens and log-probabilities."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from dyno._requests import NOTHING_YET, Handling
from dyno._writing import drawn_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from dyno._generate import StopFilter
    from dyno._sampling import Sampling, TokenLogprobs
    from dyno.engine import Engine

__all__ = ["Completion", "PieceRun", "TextRun", "completed"]


@dataclass(frozen=True)
class Completion:
    """A text that continues a prompt."""

    text: str
    tokens: list[int]
    """All drawn tokens, including the one that ended the text and the tokens of a stop string."""
    finish_reason: str
    """`stop`: an end-of-generation token or a stop string; `length`: `max_tokens` or a full context."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of each token, if they were asked for."""


Piece = TypeVar("Piece")


class PieceRun(ABC, Generic[Piece]):
    """A generation in progress: an iterator over its pieces, which a subclass makes from the tokens.

    Args:
        engine: Draws the tokens.
        prompt: Token ids.
        sampling: How tokens are drawn.
        max_tokens: Tokens drawn at most.
        slot: The sequence to write into; None takes a free one.
        handling: Of the prompt and the end, for an engine with a scheduler.
        held: Tokens that `slot` still holds, if nothing else has used it since. The beginning of the prompt
        that equals them is not computed again.
    """

    def __init__(
        self,
        engine: Engine,
        prompt: Sequence[int],
        sampling: Sampling,
        max_tokens: int,
        slot: int | None = None,
        handling: Handling | None = None,
        held: Sequence[int] = (),
    ) -> None:
        self._engine, self._sampling, self._limit, self._slot = engine, sampling, max_tokens, slot
        self._handling, self._held = handling, held
        ignores = handling is not None and handling.ignore_end
        self._ends = frozenset() if ignores else engine.tokenizer.end_of_generation
        self._cancelled = threading.Event()
        self._listens = False
        self.prompt = list(prompt)
        """Token ids."""
        self.tokens: list[int] = []
        """The tokens drawn so far, including tokens without text, such as the end-of-generation token."""
        self.logprobs: list[TokenLogprobs] = []
        """Of each token, if they were asked for."""
        self.cached_tokens = 0
        """Number of prompt tokens that were already in the cache; known with the first piece."""
        self.prompt_logprobs: list[TokenLogprobs] = []
        """Log-probabilities of the prompt tokens from the second one on, if `handling` asks for them."""
        self.finish_reason: str | None = None
        """Why the text ended: as in `Completion`, or `tool_calls`; None before the end."""
        self._pieces = self._written()

    @abstractmethod
    def _written(self) -> Generator[Piece | None, None, None]:
        """The pieces; None if no token has arrived yet."""

    def _drawn(self) -> Generator[int | None, None, None]:
        """The tokens, which are also kept in `tokens`; None if no token has arrived yet."""
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
        with contextlib.closing(drawn):
            for each in drawn:
                if each is NOTHING_YET:
                    yield None
                    continue
                if not self.tokens:
                    self.cached_tokens = each.cached
                    self.prompt_logprobs = each.prompt_logprobs or []
                self.tokens.append(each.token)
                if each.logprobs is not None:
                    self.logprobs.append(each.logprobs)
                yield each.token

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        piece = next(self._pieces)
        assert piece is not None  # only `listen` yields None
        return piece

    @property
    def has_rules(self) -> bool:
        """Whether the text follows rules, which are compiled before its first token."""
        return self._sampling.has_rules

    def listen(self, wake: Callable[[], None], follows: bool = False) -> Iterator[Piece | None]:
        """The pieces, without waiting for tokens. Only for an engine with a scheduler, instead of iterating.

        Args:
            wake: Called in a thread of the scheduler when there is more to take.
            follows: As of `Handling`.

        Returns:
            An iterator that yields None if no token has arrived yet.
        """
        self._listens = True
        self._handling = dataclasses.replace(self._handling or Handling(), wake=wake, follows=follows)
        return self._pieces

    def cancel(self) -> None:
        """End the text after its next token, from any thread."""
        self._cancelled.set()

    def close(self) -> None:
        """End the text here and free its slot."""
        self._pieces.close()


class TextRun(PieceRun[str]):
    """A generation in progress, in pieces of text. `listen` yields an empty piece if the first token has no
    text.

    Args:
        engine, prompt, sampling, max_tokens, slot, handling: As of `PieceRun`.
        stop: Ends the text at a stop string.
    """

    def __init__(
        self,
        engine: Engine,
        prompt: Sequence[int],
        sampling: Sampling,
        stop: StopFilter,
        max_tokens: int,
        slot: int | None = None,
        handling: Handling | None = None,
    ) -> None:
        self._stop = stop
        super().__init__(engine, prompt, sampling, max_tokens, slot, handling)

    def _written(self) -> Generator[str | None, None, None]:
        stream = self._engine.tokenizer.stream()
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
                shown = self._stop.push(stream.push(token))
                # `listen` reports the first token even if it has no text yet.
                if shown or (len(self.tokens) == 1 and self._listens):
                    yield shown
                if self._stop.stopped:
                    break
        if not self._stop.stopped:
            rest = self._stop.push(stream.finish())
            if not self._stop.stopped:
                rest += self._stop.finish()
            if rest:
                yield rest
        self.finish_reason = "stop" if self._stop.stopped else reason


def completed(
    engine: Engine,
    prompt: Sequence[int],
    sampling: Sampling,
    stop: StopFilter,
    max_tokens: int,
    slot: int | None,
) -> Completion:
    """The text after a prompt; arguments as in `TextRun`."""
    run = TextRun(engine, prompt, sampling, stop, max_tokens, slot)
    text = "".join(run)
    assert run.finish_reason is not None  # it was read to its end
    return Completion(text, run.tokens, run.finish_reason, run.logprobs)
