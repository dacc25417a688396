"""Speculative decoding: drafts of the next tokens from n-grams, a smaller model or the model's own head.

The engine verifies a draft in one decode, which gives the logits after each drafted token. A token is drawn
from each row in turn, exactly as without a draft. The draft is accepted up to the first token that differs
from the drawn one. So the distribution does not change, and a seed gives the same text, except for the
rounding of another batch size. Drafting from n-grams of the text is known as prompt lookup decoding.
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
"""Lengths of the n-grams that are looked up, the longest first."""
_LEAST_READ = 32
"""Least number of prompt tokens that a draft model reads in a step, so that it catches up even if the steps
are small."""


@dataclass(frozen=True)
class Speculation:
    """The configuration of speculative decoding of a scheduler.

    Raises:
        PlanError: A value is impossible.
    """

    most: int = 8
    """Maximum length of a draft in tokens (`spec_max`)."""
    min_p: float = 0.5
    """A draft ends at a token less probable than this (`spec_min_p`): by its frequency after the n-gram, or
    by the draft model."""
    draft: Engine | None = None
    """A smaller model that drafts, with the same vocabulary and at least as many sequences; it belongs to the
    scheduler while that is open. None: the text's own n-grams, or the head."""
    head: bool = False
    """Whether the multi-token prediction head of the model drafts. The model must lie on the CPU or on one
    GPU."""

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
    """The n-gram index of one text, with the tokens that followed each n-gram.

    Args:
        speculation: Length and certainty of drafts.
    """

    def __init__(self, speculation: Speculation) -> None:
        self._speculation = speculation
        self._tail: deque[int] = deque(maxlen=_LONGEST)
        self._after: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)

    def extend(self, tokens: Iterable[int]) -> None:
        """Add the next tokens of the text to the index."""
        for token in tokens:
            tail = tuple(self._tail)
            for n in range(_SHORTEST, len(tail) + 1):
                self._after[tail[-n:]][token] += 1
            self._tail.append(token)

    def draft(self, most: int) -> list[int]:
        """Draft at most `most` tokens."""
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
    """The budget of tokens that a draft model or a head reads in one step, before it drafts.

    A text that the drafter follows lacks at most the tokens of one draft. A new text lacks its whole prompt,
    which is read in parts, so that no step waits for all of it. A text that will end before it is read is not
    begun.

    Args:
        room: The most tokens to read of new texts, summed over all of them.
        most: Maximum length of a draft in tokens.
        to_come: By slot, the most tokens that its text will still draw.
    """

    def __init__(self, room: int, most: int, to_come: Mapping[int, int]) -> None:
        self._room, self._usual, self._to_come = max(room, _LEAST_READ), most + 1, to_come
        self._left = self._room
        self.any = False
        """Whether anything was read."""
        self.behind: list[int] = []
        """Slots whose texts lacked more tokens than a draft has."""

    def allowed(self, slot: int, lacking: int) -> int:
        """The number of tokens to read now, if the text in a slot lacks `lacking`."""
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
    """By position in the draft: how often its token was accepted."""

    def add(self, drafted: int, accepted: int) -> None:
        """Count one draft."""
        self.drafts += 1
        self.tokens += drafted
        self.accepted += accepted
        self.accepted_at += [0] * (drafted - len(self.accepted_at))
        for place in range(accepted):
            self.accepted_at[place] += 1


class Judge:
    """The decision whether drafts make decoding faster, from the speed of steps with drafts and without.

    Speed depends on the number of running texts. So each number, rounded down to a power of two, has its own
    decision. If drafts are faster, every 16th step still runs without them. If they are slower, they pause
    for `PAUSE` steps and are then tried again.

    Drafts also count as slower if their steps, together with the steps that read prompts for them, are slower
    in sum. One prompt does not decide that: the time of `READINGS` prompts for each running text may first be
    regained.
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
        # The speed without drafts is measured first, and then again from time to time.
        return len(plain) == self.WINDOW and self._steps[bucket] % self.WINDOW != 0

    def pause(self, texts: int) -> None:
        """Make no drafts in the next `PAUSE` steps with this number of texts."""
        self._pause[texts.bit_length()] = self.PAUSE

    def stepped(
        self, texts: int, drafted: bool, tokens: int, seconds: float, *, behind: bool = False, begun: int = 0
    ) -> tuple[float, float] | None:
        """Record a step.

        Args:
            texts: Number of texts that run in it.
            drafted: Whether it verified a draft, or includes the time of a drafter that proposed nothing.
            tokens: Number of tokens drawn in it.
            seconds: Its duration, including the time for drafting.
            behind: Whether its duration includes reading a prompt for drafts.
            begun: Number of texts that the drafter began to read in it.

        Returns:
            Tokens per second with drafts and without, if drafts have just turned out slower and now pause;
            else None.
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
    """The sum over all steps with drafts since drafts were last as fast as plain steps."""

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
    """Tokens per second over steps, each given as tokens and seconds."""
    return sum(t for t, _ in steps) / max(sum(s for _, s in steps), 1e-9)
