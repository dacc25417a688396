"""The prefix cache: the tokens that each sequence holds, from running texts and from ended texts in order of
their last use."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dyno import _core
    from dyno._requests import Request
    from dyno._slots import Slots

__all__ = ["Place", "Prefixes", "common_prefix"]

_CHECKPOINTS = 2
"""Checkpoints of recurrent state per sequence: positions that a sequence can return to."""
_WORTH_WAITING = 32
"""Least number of shared tokens for which a prompt waits until a running prompt has computed them."""


def common_prefix(held: Sequence[int], prompt: Sequence[int]) -> int:
    """Length of the common prefix in tokens. It never includes the last token of the prompt, whose logits are
    needed."""
    low, high = 0, min(len(held), len(prompt) - 1)
    while low < high:  # comparing slices is faster than comparing their items
        middle = (low + high + 1) // 2
        if held[low:middle] == prompt[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(frozen=True)
class Place:
    """The sequence for a prompt, and the sequence that already holds the beginning of the prompt."""

    slot: int
    source: int
    """The sequence that holds the beginning; `slot` itself if no copy is needed."""
    tokens: int
    """Number of tokens that it holds."""
    branch: int
    """Position where the prompt departs from a text that a sequence holds, if no sequence can return to it;
    else 0."""


class Prefixes:
    """The tokens of ended texts, which stay in their sequences until a new text needs the sequence.

    Args:
        plan: The plan of the session, with `window_checkpoints`, `window_slack` and `window_stride`.
        sequences: Number of sequences of the engine.
        cache_tokens: The most tokens of all sequences together; 0: no limit.
        stateful: Whether the model has recurrent state.
    """

    def __init__(self, plan: Mapping[str, Any], sequences: int, cache_tokens: int, *, stateful: bool) -> None:
        self._sequences, self._cache_tokens = sequences, cache_tokens
        windows = int(plan["window_checkpoints"])
        self.marks_ends = windows > 0
        """Whether to keep a checkpoint at the end of each prompt, because the cache keeps only windows."""
        self._kept: dict[int, list[int]] = {}
        """Tokens by slot, in order of last use."""
        most = _CHECKPOINTS * sequences if stateful else windows
        self._checkpoints: deque[_core.Checkpoint] = deque(maxlen=most)
        """Checkpoints in order of last use."""
        self._goes_back = 0 if stateful else int(plan["window_slack"]) if windows else None
        """Number of tokens by which a sequence can be rewound without a checkpoint; None: any number."""
        self._stride = 0 if stateful else int(plan["window_stride"])
        """Distance between further positions that a sequence can be rewound to; 0: there are none."""

    def keep(self, slot: int, tokens: list[int]) -> None:
        """Record that a text has ended, and that its sequence holds these tokens."""
        self.drop(slot)
        self._kept[slot] = tokens

    def drop(self, slot: int) -> None:
        """Forget what a sequence holds."""
        self._kept.pop(slot, None)

    def clear(self) -> None:
        """Forget what all sequences hold."""
        self._kept.clear()
        self._checkpoints.clear()

    def lacks(self, session: Any, tokens: int) -> bool:
        """Whether the cache has no room for this many more tokens."""
        if not self._cache_tokens:
            return False
        held = sum(int(session.position(slot)) for slot in range(self._sequences))
        return held + tokens > self._cache_tokens

    def forget_oldest(self, session: Any, free: Iterable[int], but: int = -1) -> bool:
        """Free the memory of one of the `free` sequences: of one with unknown tokens, or else of the least
        recently used ended text. False if there is nothing to free.
        """
        unknown = (s for s in free if s not in self._kept and int(session.position(s)) > 0)
        oldest = next((slot for slot in itertools.chain(unknown, self._kept) if slot != but), None)
        if oldest is None:
            return False
        self.drop(oldest)
        session.reset(oldest)
        return True

    def checkpoint(self, session: Any, slot: int) -> None:
        """Keep a checkpoint of the current position of a sequence. The least recently used one may be dropped
        for it."""
        for each in list(self._checkpoints):
            if int(session.rewindable(each.position, each.slot)) != each.position:
                self._checkpoints.remove(each)  # its text is gone
        self._checkpoints.append(session.checkpoint(slot))

    def begin(self, slot: int, tokens: int) -> None:
        """A text begins in a sequence that keeps this many tokens. Checkpoints after them become invalid."""
        for each in list(self._checkpoints):
            if each.slot == slot and each.position > tokens:
                self._checkpoints.remove(each)

    def awaited(self, prompt: Sequence[int], running: Sequence[Request]) -> bool:
        """Whether a running text will soon have read a long enough beginning of `prompt`, so that waiting for
        it pays."""
        if self._goes_back == 0:
            return False  # a running text has recurrent state only at its current position
        held = [*self._kept.values(), *(request.held for request in running)]
        best = max((common_prefix(tokens, prompt) for tokens in held), default=0)
        for request in running:
            if not request.reads:
                continue
            coming = [*request.held, *request.pending]
            same = common_prefix(coming, prompt)
            if self._goes_back is not None and len(coming) - same >= self._goes_back:
                same = same // self._stride * self._stride if self._stride else 0
            if same >= best + _WORTH_WAITING:
                return True
        return False

    def place(
        self,
        session: Any,
        prompt: Sequence[int],
        free: Sequence[int],
        running: Iterable[Request],
        reuse: bool,
    ) -> Place:
        """Choose a sequence of `free` for a prompt, and the sequence with its longest prefix.

        If the prompt continues an ended text and nothing of it is lost, it takes over the sequence of that
        text. Otherwise the common prefix is copied to the least recently used sequence, and the ended text
        stays for others.
        """
        holders = [*self._kept.items(), *((r.owner.slot, r.held) for r in running)] if reuse else []
        source, tokens, branch = -1, 0, 0
        for slot, held in holders:
            same = common_prefix(held, prompt)
            branch = max(branch, same)
            if same > tokens and (same := int(session.rewindable(same, slot))) > tokens:
                source, tokens = slot, same
        self._use_checkpoint(source, tokens)
        empty = (slot for slot in free if slot not in self._kept)
        by_use = (slot for slot in self._kept if slot in free)
        target = next(itertools.chain(empty, by_use))
        if source in free and tokens == len(self._kept[source]):
            target = source
        if source in self._kept:
            self.keep(source, self._kept[source])  # it was used just now
        return Place(target, source if tokens else target, tokens, branch if branch > tokens else 0)

    def give(self, session: Any, request: Request, slots: Slots, running: Sequence[Request]) -> Place | None:
        """Give a request a free sequence, with the tokens of its prompt that any sequence holds; None if no
        sequence is free. The caller holds the engine's lock.
        """
        for slot in slots.foreign:
            self.drop(slot)
        slots.foreign.clear()
        free = slots.free(self._sequences)
        if not free:
            return None
        place = self.place(session, request.pending, free, running, request.reuses)
        place = self.that_fits(session, place, free)
        slots.take(request.owner, place.slot, self._sequences)
        slots.foreign.discard(place.slot)
        self.drop(place.slot)
        if place.source != place.slot:
            session.copy_prefix(place.source, place.slot, place.tokens)
        elif place.tokens:
            session.rewind(place.tokens, place.slot)
        else:
            session.reset(place.slot)
        self.begin(place.slot, place.tokens if place.source == place.slot else 0)
        request.begin(place.tokens, place.branch)
        return place

    def _use_checkpoint(self, slot: int, tokens: int) -> None:
        """Mark the first checkpoint of a sequence at or after this position as recently used."""
        able = [each for each in self._checkpoints if each.slot == slot and each.position >= tokens]
        if able:
            used = min(able, key=lambda each: each.position)
            self._checkpoints.remove(used)
            self._checkpoints.append(used)

    def that_fits(self, session: Any, place: Place, free: Sequence[int]) -> Place:
        """The same place, after older texts were dropped if its copy needs their memory.

        If there is no room for a copy, the prompt takes over the sequence of an ended text, or else is
        computed again.
        """
        if place.source == place.slot:
            return place
        self.drop(place.slot)
        session.reset(place.slot)
        while self.lacks(session, place.tokens):
            if self.forget_oldest(session, free, but=place.source):
                continue
            if place.source in free:
                return Place(place.source, place.source, place.tokens, place.branch)
            return Place(place.slot, place.slot, 0, 0)
        return place
