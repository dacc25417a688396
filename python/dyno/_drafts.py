"""Speculation: drafts of the tokens that come next, from n-grams, a smaller model or the model's own head.

The engine checks a draft in one decode: it gives the logits after each drafted token. A token is drawn from
each row in turn, exactly as without a draft, and the draft counts as far as it says the same. So no
distribution and no seed's text changes, but for the rounding of another batch size. The method is known as
prompt lookup decoding.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dyno.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from dyno.engine import Engine

__all__ = ["DraftCounts", "Drafter", "Judge", "Reads", "Speculation"]

_LONGEST, _SHORTEST = 4, 2
"""Tokens of the n-grams that are looked up, the longest first."""
_LEAST_READ = 32
"""Tokens that a draft model reads of a prompt in a step, however small the steps are: it has to catch up."""


@dataclass(frozen=True)
class Speculation:
    """The way in which a scheduler drafts tokens.

    Raises:
        PlanError: A value is impossible.
    """

    most: int = 8
    """Tokens of a draft at most (`spec_max`)."""
    min_p: float = 0.5
    """A draft ends where its next token followed the n-gram less often than this, or where a draft model is
    less certain (`spec_min_p`)."""
    draft: Engine | None = None
    """A smaller model that drafts, with the same vocabulary and at least as many sequences; it belongs to the
    scheduler while that is open. None: the text's own n-grams, or the head."""
    head: bool = False
    """The model's own head drafts (MTP), if the file has one and the model lies on the CPU or one GPU."""

    def __post_init__(self) -> None:
        if not 1 <= self.most <= 64:
            raise PlanError(f"[speculation] spec_max is {self.most}; expected 1 to 64")
        if not 0 <= self.min_p <= 1:
            raise PlanError(f"[speculation] spec_min_p is {self.min_p}; expected 0 to 1")
        if self.head and self.draft is not None:
            raise PlanError(
                "[speculation] the head of the model and a draft model cannot both draft; choose one"
            )


class Drafter:
    """The n-grams of one text, and the tokens that followed them.

    Args:
        speculation: Length and certainty of drafts.
    """

    def __init__(self, speculation: Speculation) -> None:
        self._speculation = speculation
        self._tail: deque[int] = deque(maxlen=_LONGEST)
        self._after: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)

    def extend(self, tokens: Iterable[int]) -> None:
        """Learn the tokens that come next in the text."""
        for token in tokens:
            tail = tuple(self._tail)
            for n in range(_SHORTEST, len(tail) + 1):
                self._after[tail[-n:]][token] += 1
            self._tail.append(token)

    def draft(self, most: int) -> list[int]:
        """The tokens that probably come next, at most so many."""
        tail = list(self._tail)
        found: list[int] = []
        while len(found) < min(most, self._speculation.most):
            token = self._likely(tuple(tail[-_LONGEST:]))
            if token is None:
                break
            found.append(token)
            tail.append(token)
        return found

    def _likely(self, tail: tuple[int, ...]) -> int | None:
        for n in range(len(tail), _SHORTEST - 1, -1):
            followed = self._after.get(tail[-n:])
            if followed is not None:
                ((token, count),) = followed.most_common(1)
                return token if count >= self._speculation.min_p * followed.total() else None
        return None


class Reads:
    """The tokens that a draft model or a head reads in one step, before it drafts.

    A text that it follows lacks as many tokens as a draft has. One that it has not read for long lacks a
    whole prompt, and is read in parts, so that no step of all texts waits for that. A text that ends before
    it is read is not begun.

    Args:
        room: Tokens of such texts at most, of all together.
        most: Tokens of a draft at most.
        to_come: The tokens at most that the text in a slot has still to draw.
    """

    def __init__(self, room: int, most: int, to_come: Mapping[int, int]) -> None:
        self._room, self._usual, self._to_come = max(room, _LEAST_READ), most + 1, to_come
        self._left = self._room
        self.any = False
        """Whether anything was read."""
        self.behind: list[int] = []
        """Slots whose texts lacked more than a draft."""

    def allowed(self, slot: int, lacking: int) -> int:
        """How many of the tokens that the text in a slot lacks may be read now."""
        if lacking <= self._usual:
            self.any = True
            return lacking
        steps = -(-lacking // (self._room - 1))  # each step draws one more token
        if steps >= self._to_come[slot]:
            return 0
        self.any = True
        self.behind.append(slot)
        part = min(lacking, self._left)
        self._left -= part
        return part


@dataclass
class DraftCounts:
    """Drafts since the scheduler was opened."""

    drafts: int = 0
    tokens: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)
    """How often the token at this place of a draft was the one that was drawn."""

    def add(self, drafted: int, accepted: int) -> None:
        """Count one draft."""
        self.drafts += 1
        self.tokens += drafted
        self.accepted += accepted
        self.accepted_at += [0] * (drafted - len(self.accepted_at))
        for place in range(accepted):
            self.accepted_at[place] += 1


class Judge:
    """The judge of whether drafts pay: tokens per second of steps with them and without, side by side.

    Speeds differ by the number of running texts, so each number, rounded down to a power of two, has a
    verdict of its own. Where drafts win, every 16th step goes without one. Where they lose, they pause for
    `PAUSE` steps and then try again.

    Drafts also lose if their steps are slower in sum with the steps that read prompts for them. One reading
    does not decide that: drafts may win back the time of `READINGS` for each running text.
    """

    WINDOW = 16
    PAUSE = 512
    READINGS = 4

    def __init__(self) -> None:
        self._rates: defaultdict[tuple[int, bool], deque[tuple[int, float]]] = defaultdict(
            lambda: deque(maxlen=self.WINDOW)
        )
        self._steps: Counter[int] = Counter()
        self._pause: Counter[int] = Counter()
        self._sums: defaultdict[int, _Sum] = defaultdict(_Sum)

    def wants(self, texts: int) -> bool:
        """Whether the next step should have drafts.

        Args:
            texts: Running in it.
        """
        bucket = texts.bit_length()
        if self._pause[bucket] > 0:
            self._pause[bucket] -= 1
            return False
        self._steps[bucket] += 1
        plain = self._rates[bucket, False]
        # The plain speed is learned first, and kept fresh.
        return len(plain) == self.WINDOW and self._steps[bucket] % self.WINDOW != 0

    def pause(self, texts: int) -> None:
        """No drafts for so many texts in the next `PAUSE` steps."""
        self._pause[texts.bit_length()] = self.PAUSE

    def stepped(
        self, texts: int, drafted: bool, tokens: int, seconds: float, *, behind: bool = False, begun: int = 0
    ) -> tuple[float, float] | None:
        """Learn from a step.

        Args:
            texts: Running in it.
            drafted: Whether it checked a draft, or its duration holds the time of a model that made none.
            tokens: Drawn in it.
            seconds: Its duration, with the time that the draft took.
            behind: Whether its duration holds the reading of a prompt for drafts.
            begun: Texts whose reading began in it.

        Returns:
            Tokens per second with drafts and without, if drafts have lost just now and pause; else None.
        """
        bucket = texts.bit_length()
        if not behind:
            self._rates[bucket, drafted].append((tokens, seconds))
        plain = _speed(self._rates[bucket, False])
        if not drafted or len(self._rates[bucket, False]) < self.WINDOW:
            return None
        total = self._sums[bucket]
        total.add(tokens, seconds, begun)
        lost = total.speed if total.speed < plain and total.begun > self.READINGS * texts else None
        if total.speed >= plain:
            del self._sums[bucket]
        window = self._rates[bucket, True]
        if not behind and len(window) == self.WINDOW and _speed(window) < plain:
            lost = _speed(window)
        if lost is None:
            return None
        self.pause(texts)
        window.clear()
        self._sums.pop(bucket, None)
        return lost, plain


@dataclass
class _Sum:
    """Steps with drafts since they were last as fast as plain ones, in sum."""

    tokens: int = 0
    seconds: float = 0.0
    begun: int = 0

    def add(self, tokens: int, seconds: float, begun: int) -> None:
        self.tokens += tokens
        self.seconds += seconds
        self.begun += begun

    @property
    def speed(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)


def _speed(steps: Collection[tuple[int, float]]) -> float:
    """Tokens per second of steps, each with its tokens and seconds."""
    return sum(t for t, _ in steps) / max(sum(s for _, s in steps), 1e-9)
