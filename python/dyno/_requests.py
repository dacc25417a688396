"""The requests of a scheduler, with their settings, their tokens and their times."""

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
"""Number of random numbers that a request makes at once."""


@dataclass(frozen=True)
class Handling:
    """Options of a generation other than its sampling settings."""

    reuse: bool = True
    """Whether the prompt may reuse a prefix that is already in the cache."""
    prompt_logprobs: int | None = None
    """Report log-probabilities of the prompt tokens, and this many of the most probable tokens for each;
    None: report none. The whole prompt is then computed."""
    ignore_end: bool = False
    """Whether to continue after an end-of-generation token, so that all texts of a benchmark have the same
    length."""
    follows: bool = False
    """Whether the text follows an ended text of the same request. That request was already admitted, so a
    full queue does not refuse the text."""
    wake: Callable[[], None] | None = None
    """Called in a thread of the scheduler when a token is ready. The caller of `Scheduler.drawn` then never
    waits, and gets `NOTHING_YET` if no token has arrived."""


@dataclass(frozen=True)
class Drawn:
    """One token of a generation."""

    token: int
    logprobs: TokenLogprobs | None = None
    cached: int = 0
    """Number of prompt tokens that were reused from the cache; given with the first token."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Log-probabilities of the prompt tokens from the second one on, if requested; given with the first
    token."""


NOTHING_YET = Drawn(-1)
"""A value that stands for no token; see `Handling.wake`."""


@dataclass(frozen=True)
class Step:
    """The facts of one decode of a scheduler."""

    sequences: int
    tokens: int
    prompt_tokens: int
    """Number of prompt tokens among them."""
    deepest: int
    """Length in tokens of the longest of its sequences after the step."""
    seconds: float
    """Duration in seconds, from the decode until its tokens are drawn."""


class SchedulerEvents:
    """Hooks for the events of a scheduler. They do nothing unless a subclass overrides them.

    Threads of the scheduler call them: `stepped` and `admitted` between two steps, the others while the
    engine computes. A hook must return at once and must not raise.
    """

    def stepped(self, step: Step) -> None:
        """Called after each step."""

    def admitted(self, queued_s: float) -> None:
        """Called when a request gets a sequence, after `queued_s` seconds in the queue."""

    def first_token(self, seconds: float) -> None:
        """Called at the first token of a request, `seconds` after the request arrived."""

    def next_token(self, seconds: float) -> None:
        """Called at each further token of a request, `seconds` after the previous one."""

    def ended(self, request: Request, reason: str, seconds: float) -> None:
        """Called when a request that had a sequence has ended.

        Args:
            request: The request, with its counts.
            reason: `stop`, `length`, `abort` or `error`.
            seconds: Time since it arrived.
        """


@dataclass(eq=False)
class Request:
    """One generation of a scheduler."""

    prompt: list[int]
    max_tokens: int
    sampling: Sampling
    sampler: HostSampler | None
    """Draws from logits on the host, if the settings need that."""
    cancelled: threading.Event
    handling: Handling = field(default_factory=Handling)
    out: queue.SimpleQueue[Drawn | BaseException | None] = field(default_factory=queue.SimpleQueue)
    owner: Owner = field(default_factory=Owner)
    held: list[int] = field(default_factory=list)
    """Tokens that the slot holds."""
    pending: list[int] = field(default_factory=list)
    """Tokens to feed next: the rest of the prompt, or the last drawn token."""
    branch: int = 0
    """Position in the prompt where a checkpoint is worth its memory; 0: nowhere."""
    taken_back: int = 0
    """Number of pending tokens that a rejected draft took back from a recurrent state."""
    drafter: Drafter | None = None
    pooler: Pooler | None = None
    """Takes the rows of an embedding request, for which no token is drawn."""
    drawn: int = 0
    cached: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    came: float = field(default_factory=time.monotonic)
    admitted: float = 0.0
    last_token: float = 0.0

    def __post_init__(self) -> None:
        # Converted here, in the thread of the caller, so that an error concerns only this request.
        self._settings = self.sampling.for_engine()
        self._random = self.sampling.random()
        self._numbers: list[float] = []
        self._counted = 0
        self.pending = list(self.prompt)

    @property
    def reads(self) -> bool:
        """Whether more tokens are pending than the last drawn one and the ones that a draft took back."""
        return not self.drawn or len(self.pending) > 1 + self.taken_back

    def is_written(self, tokens: list[int]) -> bool:
        """Whether a step feeds the last drawn token, and no prompt tokens."""
        return self.drawn > 0 and len(tokens) == len(self.pending) == 1 and not self.taken_back

    def ends_prompt(self, tokens: list[int]) -> bool:
        """Whether a step with these tokens reads the last token of the prompt, after which a text is
        drawn."""
        return self.reads and len(tokens) == len(self.pending) and self.pooler is None

    def until_branch(self, most: int) -> int:
        """At most `most` tokens, and none after the position where a checkpoint is wanted."""
        return min(most, self.branch - len(self.held)) if self.branch > len(self.held) else most

    def begin(self, cached: int, branch: int) -> None:
        """Begin in a sequence that already holds this many tokens of the prompt."""
        self.held, self.pending = self.pending[:cached], self.pending[cached:]
        self.branch = branch
        if not self.drawn:
            self.cached = cached

    def count(self) -> int:
        """Number of prompt tokens in the sequence that no earlier call has counted."""
        new = max(min(len(self.held), len(self.prompt)) - self._counted, 0)
        self._counted += new
        return new

    def stop(self) -> None:
        """Take the sequence away, so that the request begins again later. Tokens that were delivered stay
        valid."""
        self.held, self.pending, self.taken_back = [], self.held + self.pending, 0
        self.prompt_logprobs = []
        if self.pooler is not None:
            self.pooler.clear()

    def tell(self, each: Drawn | BaseException | None) -> None:
        """Deliver to the caller a token, the error that ended the generation, or None for its end."""
        self.out.put(each)
        if self.handling.wake is not None:
            self.handling.wake()

    def take(self) -> Drawn | None:
        """The next token, or None at the end. Raises the error that ended the generation."""
        try:
            each = self.out.get(block=self.handling.wake is None)
        except queue.Empty:
            return NOTHING_YET
        if isinstance(each, BaseException):
            raise each
        return each

    def wait(self) -> None:
        """Wait until an embedding request has ended. Raises its error."""
        self.take()

    def next_draw(self) -> tuple[float, int, float, float, float]:
        """The settings of the next draw for the engine, and its random number."""
        if not self._numbers:
            self._numbers = uniforms(self._random, _NUMBERS)[::-1].tolist()
        return (*self._settings, self._numbers.pop())

    def give_back(self, numbers: list[float]) -> None:
        """Return the random numbers of the last draws, in their order, as if those draws had not been
        made."""
        self._numbers += reversed(numbers)

    def draw(self, logits: NDArray[np.float32]) -> int:
        """Draw the next token from logits [n_vocab] on the host."""
        if self.sampler is not None:
            return self.sampler.draw(logits)
        return int(_core.sample(logits, *self.next_draw()))

    @property
    def wants_all_rows(self) -> bool:
        """Whether the logits after each pending token are needed, and not only after the last one."""
        return self.handling.prompt_logprobs is not None and not self.drawn

    @property
    def reuses(self) -> bool:
        """Whether the request may reuse tokens that a sequence already holds."""
        return self.handling.reuse and not self.wants_all_rows and self.pooler is None

    def keep_prompt_logprobs(self, rows: NDArray[np.float32]) -> None:
        """Keep the log-probabilities of the prompt tokens that follow the tokens just fed, from rows [n,
        n_vocab].

        Raises:
            ModelError: A logit of these rows is not finite.
        """
        first = len(self.held) - len(rows)
        top = self.handling.prompt_logprobs or 0
        following = self.prompt[first + 1 : first + 1 + len(rows)]
        for place, (row, token) in enumerate(zip(rows, following, strict=False), first):
            (_, logprob), *most = _core.logprobs(finite(row, place), token, top)
            self.prompt_logprobs.append(TokenLogprobs(token, logprob, tuple(most)))
