"""The requests of a scheduler: what each asks for, what it gets, and when."""

from __future__ import annotations

import queue
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dyno import _core
from dyno._generate import finite
from dyno._sampling import TokenLogprobs, uniforms
from dyno._slots import Owner

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from dyno._drafts import Drafter
    from dyno._embedding import Pooler
    from dyno._sampling import HostSampler, Sampling

__all__ = ["NOTHING_YET", "Drawn", "Handling", "Request", "SchedulerEvents", "Step"]

_NUMBERS = 64
"""Random numbers of a request that are made at once."""


@dataclass(frozen=True)
class Handling:
    """The treatment of a generation, beside its draws."""

    reuse: bool = True
    """Whether the sequence may go on from a prefix that the engine holds already."""
    prompt_logprobs: int | None = None
    """Report log-probabilities of the prompt's tokens, and so many of the most probable tokens with each. The
    whole prompt is computed then."""
    ignore_end: bool = False
    """Go on behind the model's end of generation, so that a benchmark's texts are of one length."""
    follows: bool = False
    """Whether the text follows one of its request that has ended. That request was admitted, so a full queue
    does not refuse the text."""
    wake: Callable[[], None] | None = None
    """Called in a thread of the scheduler when there is more to take. The caller of `Scheduler.drawn` then
    never waits: it gets `NOTHING_YET` where no token has come."""


@dataclass(frozen=True)
class Drawn:
    """One token of a generation."""

    token: int
    logprobs: TokenLogprobs | None = None
    cached: int = 0
    """Tokens of the prompt that were not computed again; with the first token."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Of the prompt's tokens from the second one on, if they were asked for; with the first token."""


NOTHING_YET = Drawn(-1)
"""No token; see `Handling.wake`."""


@dataclass(frozen=True)
class Step:
    """One decode of a scheduler."""

    sequences: int
    tokens: int
    prompt_tokens: int
    """Tokens of prompts among them."""
    deepest: int
    """Tokens that the longest of its sequences holds afterwards."""
    seconds: float
    """From the decode to its tokens."""


class SchedulerEvents:
    """Hooks for whoever counts a scheduler's work; by themselves they do nothing.

    Threads of the scheduler call them: `stepped` and `admitted` between two steps, the others while the
    engine computes. They return at once and raise nothing.
    """

    def stepped(self, step: Step) -> None:
        """A step is done."""

    def admitted(self, queued_s: float) -> None:
        """A request has got a sequence, after so many seconds in the queue."""

    def first_token(self, seconds: float) -> None:
        """A request has its first token, so many seconds after it came."""

    def next_token(self, seconds: float) -> None:
        """A request has its next token, so many seconds after the one before."""

    def ended(self, request: Request, reason: str, seconds: float) -> None:
        """A request that had a sequence has ended.

        Args:
            request: With its counts.
            reason: `stop`, `length`, `abort` or `error`.
            seconds: Since it came.
        """


@dataclass(eq=False)
class Request:
    """One generation of a scheduler."""

    prompt: list[int]
    max_tokens: int
    sampling: Sampling
    sampler: HostSampler | None
    """Draws from logits on the host, if the settings need them there."""
    cancelled: threading.Event
    handling: Handling = field(default_factory=Handling)
    out: queue.SimpleQueue[Drawn | BaseException | None] = field(default_factory=queue.SimpleQueue)
    owner: Owner = field(default_factory=Owner)
    held: list[int] = field(default_factory=list)
    """Tokens that the slot holds."""
    pending: list[int] = field(default_factory=list)
    """Tokens to be fed next: the rest of the prompt, or the token that was drawn last."""
    branch: int = 0
    """Where a checkpoint is worth its memory, in tokens of the prompt; 0: nowhere."""
    taken_back: int = 0
    """Tokens among the pending ones that a rejected draft took back from a recurrent state."""
    drafter: Drafter | None = None
    pooler: Pooler | None = None
    """Takes the rows of an embedding, for which no token is drawn."""
    drawn: int = 0
    cached: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    came: float = field(default_factory=time.monotonic)
    admitted: float = 0.0
    last_token: float = 0.0

    def __post_init__(self) -> None:
        # Here, in the caller's thread: what cannot be converted is the fault of this request alone.
        self._settings = self.sampling.for_engine()
        self._random = self.sampling.random()
        self._numbers: list[float] = []
        self._counted = 0
        self.pending = list(self.prompt)

    @property
    def reads(self) -> bool:
        """Whether more is to be fed than the token that was drawn last, and what a draft took back."""
        return not self.drawn or len(self.pending) > 1 + self.taken_back

    def is_written(self, tokens: list[int]) -> bool:
        """Whether a step fed the token that was drawn last and no other, so that no prompt is counted."""
        return self.drawn > 0 and len(tokens) == len(self.pending) == 1 and not self.taken_back

    def ends_prompt(self, tokens: list[int]) -> bool:
        """Whether a step with these tokens reads the last one of a prompt, behind which a text is written."""
        return self.reads and len(tokens) == len(self.pending) and self.pooler is None

    def until_branch(self, most: int) -> int:
        """At most so many tokens, but none behind the place where a checkpoint is wanted."""
        return min(most, self.branch - len(self.held)) if self.branch > len(self.held) else most

    def begin(self, cached: int, branch: int) -> None:
        """The sequence that the request has got holds so many of its tokens."""
        self.held, self.pending = self.pending[:cached], self.pending[cached:]
        self.branch = branch
        if not self.drawn:
            self.cached = cached

    def count(self) -> int:
        """Tokens of the prompt that the sequence holds and that no earlier call has counted."""
        new = max(min(len(self.held), len(self.prompt)) - self._counted, 0)
        self._counted += new
        return new

    def stop(self) -> None:
        """The request has lost its sequence and begins again later; what it has told stays told."""
        self.held, self.pending, self.taken_back = [], self.held + self.pending, 0
        self.prompt_logprobs = []
        if self.pooler is not None:
            self.pooler.clear()

    def tell(self, each: Drawn | BaseException | None) -> None:
        """Give the caller a token, the error that ended the generation, or None for its end."""
        self.out.put(each)
        if self.handling.wake is not None:
            self.handling.wake()

    def take(self) -> Drawn | None:
        """The next token, or None at the end; raises the error that ended the generation."""
        try:
            each = self.out.get(block=self.handling.wake is None)
        except queue.Empty:
            return NOTHING_YET
        if isinstance(each, BaseException):
            raise each
        return each

    def wait(self) -> None:
        """Wait until a request that draws nothing has ended; raises its error."""
        self.take()

    def next_draw(self) -> tuple[float, int, float, float, float]:
        """The settings of the next draw for the engine, and its random number."""
        if not self._numbers:
            self._numbers = uniforms(self._random, _NUMBERS)[::-1].tolist()
        return (*self._settings, self._numbers.pop())

    def give_back(self, numbers: list[float]) -> None:
        """Random numbers of the last draws, which count as never made; in the order of the draws."""
        self._numbers += reversed(numbers)

    def draw(self, logits: NDArray[np.float32]) -> int:
        """The next token, from logits [n_vocab] on the host."""
        if self.sampler is not None:
            return self.sampler.draw(logits)
        return int(_core.sample(logits, *self.next_draw()))

    @property
    def wants_all_rows(self) -> bool:
        """Whether the logits after each of the pending tokens are needed, not only after the last one."""
        return self.handling.prompt_logprobs is not None and not self.drawn

    @property
    def reuses(self) -> bool:
        """Whether the request may begin with tokens that a sequence holds already."""
        return self.handling.reuse and not self.wants_all_rows and self.pooler is None

    def keep_prompt_logprobs(self, rows: NDArray[np.float32]) -> None:
        """Keep the log-probabilities of the prompt's tokens behind those just fed, from rows [n, n_vocab].

        Raises:
            ModelError: A logit of such a row is not finite.
        """
        first = len(self.held) - len(rows)
        top = self.handling.prompt_logprobs or 0
        following = self.prompt[first + 1 : first + 1 + len(rows)]
        for place, (row, token) in enumerate(zip(rows, following, strict=False), first):
            (_, logprob), *most = _core.logprobs(finite(row, place), token, top)
            self.prompt_logprobs.append(TokenLogprobs(token, logprob, tuple(most)))
