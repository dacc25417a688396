"""The loop from logits to text: sample, decode, stop."""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from dyno._sampling import Sampling as Sampling
from dyno._sampling import uniforms as uniforms
from dyno.errors import ModelError, PlanError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from dyno import _core
    from dyno.tokenizer import TextStream


MOST_STOPS = 32
LONGEST_STOP = 256
"""Characters. Each piece of text is searched for each prefix of a stop string, so long ones would be slow."""


def count_of(name: str, value: int) -> int:
    """Check a number of tokens that a caller gives.

    Raises:
        PlanError: It is not a whole number, or it is below 0.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 0:
        raise PlanError(f"[generate] {name} must be a whole number of at least 0, not {value!r}")
    return int(value)


def finite(logits: NDArray[np.float32], position: int) -> NDArray[np.float32]:
    """Return the logits, if a token can be drawn from them.

    Args:
        logits: [n_vocab]. Minus infinity excludes a token; at least one must remain.
        position: Of the token that they follow, from 0.

    Raises:
        ModelError: One is NaN or infinite, or every token is excluded.
    """
    most = float(logits.max())  # NaN if any logit is NaN
    if not math.isfinite(most):
        raise not_finite(position, f" ({most})")
    return logits


def not_finite(position: int, found: str = "") -> ModelError:
    """The error for logits from which no token can be drawn.

    Args:
        position: Of the token that they follow, from 0.
        found: Text that follows "not finite" in the message.
    """
    return ModelError(
        f"[generate] the logits after position {position} are not finite{found}: the model's weights "
        "are damaged, or its activations overflow"
    )


class StopFilter:
    """A filter that passes text on until a stop string appears. It holds back text that may be the beginning
    of one.

    Args:
        stop: At most 32 strings of 1 to 256 characters, one alone, or None.

    Raises:
        PlanError: `stop` is something else.
    """

    def __init__(self, stop: Sequence[str] | str | None) -> None:
        if isinstance(stop, bytes) or not isinstance(stop, (Iterable, type(None))):
            raise PlanError(f"[generate] stop must be a string or a list of strings, not {stop!r}")
        stop = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
        if not all(isinstance(s, str) for s in stop):
            raise PlanError(f"[generate] stop must be a string or a list of strings, not {stop!r}")
        if any(not s for s in stop):
            raise PlanError("[generate] a stop string must not be empty")
        if len(stop) > MOST_STOPS:
            raise PlanError(f"[generate] stop has {len(stop)} strings; expected at most {MOST_STOPS}")
        if (longest := max(map(len, stop), default=0)) > LONGEST_STOP:
            raise PlanError(
                f"[generate] a stop string has {longest} characters; expected at most {LONGEST_STOP}"
            )
        self._stop = stop
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self.matched is not None

    def push(self, text: str) -> str:
        """Add `text`, and return the text that may now be shown."""
        if not self._stop:
            return text
        self._held += text
        cuts = [(i, s) for i, s in ((self._held.find(s), s) for s in self._stop) if i >= 0]
        if cuts:
            cut, self.matched = min(cuts)
            shown, self._held = self._held[:cut], ""
            return shown
        keep = max(self._overlap(s) for s in self._stop)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def finish(self) -> str:
        """The text that is still held back at the end of the generation."""
        shown, self._held = self._held, ""
        return shown

    def _overlap(self, stop: str) -> int:
        """Length of the longest suffix of the held text that is a prefix of `stop`."""
        for length in range(min(len(stop) - 1, len(self._held)), 0, -1):
            if self._held.endswith(stop[:length]):
                return length
        return 0


def drawn(
    logits: NDArray[np.float32],
    step: Callable[[int], NDArray[np.float32] | None],
    draw: Callable[[NDArray[np.float32]], int],
) -> Iterator[int]:
    """Tokens one after the other, each drawn from logits on the host.

    Args:
        logits: [n_vocab] after the prompt.
        step: Appends a token and returns the logits [n_vocab] after it; None if the context is full.
        draw: Picks a token.
    """
    current: NDArray[np.float32] | None = logits
    while current is not None:
        token = draw(current)
        yield token
        current = step(token)


def greedy_after(session: _core.Session, tokens: NDArray[np.int32], slot: int = 0) -> NDArray[np.int32]:
    """Feed given tokens one by one as a generation does, and return the tokens that greedy sampling draws
    after each.

    Args:
        session: The session of the engine.
        tokens: [n], at least one.
        slot: The sequence to append to.
    """
    generation = session.generation(int(tokens[0]), slot=slot)
    # The token that is drawn after the last one is never fed.
    generation.queue(np.zeros(len(tokens), np.float32), np.append(tokens[1:], np.int32(-1)))
    return np.array([generation.next() for _ in range(len(tokens))], np.int32)


def pieces(
    tokens: Iterator[int],
    text: TextStream,
    stop: StopFilter,
    end_of_generation: frozenset[int],
    max_tokens: int,
) -> Iterator[str]:
    """Text pieces of one answer.

    Args:
        tokens: The tokens, drawn on demand.
        text: Turns tokens into text.
        stop: Ends the answer at a stop string.
        end_of_generation: Tokens that end the answer; not part of the text.
        max_tokens: The most tokens to draw.
    """
    for token in itertools.islice(tokens, max_tokens):
        if token in end_of_generation:
            break
        shown = stop.push(text.push(token))
        if shown:
            yield shown
        if stop.stopped:
            return
    rest = stop.push(text.finish())
    if not stop.stopped:
        rest += stop.finish()
    if rest:
        yield rest
