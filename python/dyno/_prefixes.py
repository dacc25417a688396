"""Which sequence holds how much of a prompt: running texts, and texts that have ended, by their last use."""

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
"""For each sequence of a model with recurrent state: copies of states to come back to."""
_WORTH_WAITING = 32
"""Tokens that a running prompt is about to compute for another one, so that the other waits for them."""


def common_prefix(held: Sequence[int], prompt: Sequence[int]) -> int:
    """Tokens at the beginning that agree; never the prompt's last one, whose logits are needed."""
    low, high = 0, min(len(held), len(prompt) - 1)
    while low < high:  # slices are compared faster than their items one by one
        middle = (low + high + 1) // 2
        if held[low:middle] == prompt[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(frozen=True)
class Place:
    """The sequence that a prompt gets, and where its first tokens come from."""

    slot: int
    source: int
    """The sequence that holds them; `slot` itself where they are there already."""
    tokens: int
    """So many of them."""
    branch: int
    """Where the prompt leaves what another sequence held, if recurrent state is not known there; else 0."""


class Prefixes:
    """The tokens of ended texts, which stay in their sequences until these are needed.

    Args:
        plan: Of the session: its `window_checkpoints`, `window_slack` and `window_stride`.
        sequences: Of the engine.
        cache_tokens: That all sequences hold at most; 0: no limit.
        stateful: Whether the model has recurrent state.
    """

    def __init__(self, plan: Mapping[str, Any], sequences: int, cache_tokens: int, *, stateful: bool) -> None:
        self._sequences, self._cache_tokens = sequences, cache_tokens
        windows = int(plan["window_checkpoints"])
        self.marks_ends = windows > 0
        """Whether each prompt's end is a place to come back to: windows alone stay in the cache."""
        self._kept: dict[int, list[int]] = {}
        """By slot; the one that was used last stands at the end."""
        most = _CHECKPOINTS * sequences if stateful else windows
        self._checkpoints: deque[_core.Checkpoint] = deque(maxlen=most)
        """The one that was used last stands at the end."""
        self._goes_back = 0 if stateful else int(plan["window_slack"]) if windows else None
        """By so many tokens a sequence can go back without a checkpoint; None: to any place."""
        self._stride = 0 if stateful else int(plan["window_stride"])
        """Between places to which it can go back besides; 0: there are none."""

    def keep(self, slot: int, tokens: list[int]) -> None:
        """A text has ended, and its sequence holds so many tokens."""
        self.drop(slot)
        self._kept[slot] = tokens

    def drop(self, slot: int) -> None:
        """A sequence holds nothing that is known."""
        self._kept.pop(slot, None)

    def clear(self) -> None:
        """Nothing is known of any sequence."""
        self._kept.clear()
        self._checkpoints.clear()

    def lacks(self, session: Any, tokens: int) -> bool:
        """Whether so many more tokens are too many for the cache, beside all that any sequence holds."""
        if not self._cache_tokens:
            return False
        held = sum(int(session.position(slot)) for slot in range(self._sequences))
        return held + tokens > self._cache_tokens

    def forget_oldest(self, session: Any, free: Iterable[int], but: int = -1) -> bool:
        """Forget what one of the `free` sequences holds: tokens that nobody knows, or else the ended text
        that was not used for the longest time. False if there is nothing to forget.
        """
        unknown = (s for s in free if s not in self._kept and int(session.position(s)) > 0)
        oldest = next((slot for slot in itertools.chain(unknown, self._kept) if slot != but), None)
        if oldest is None:
            return False
        self.drop(oldest)
        session.reset(oldest)
        return True

    def checkpoint(self, session: Any, slot: int) -> None:
        """Keep the place where a sequence is now; the one that was not used for the longest time may go."""
        for each in list(self._checkpoints):
            if int(session.rewindable(each.position, each.slot)) != each.position:
                self._checkpoints.remove(each)  # its text is gone
        self._checkpoints.append(session.checkpoint(slot))

    def begin(self, slot: int, tokens: int) -> None:
        """A text begins in a sequence, of which so many tokens stay: checkpoints behind these are no good."""
        for each in list(self._checkpoints):
            if each.slot == slot and each.position > tokens:
                self._checkpoints.remove(each)

    def awaited(self, prompt: Sequence[int], running: Sequence[Request]) -> bool:
        """Whether a running text is still to read enough tokens that `prompt` begins with too."""
        if self._goes_back == 0:
            return False  # recurrent state is there only where a running text is now
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
        """The sequence for a prompt, one of `free`, and the one with the longest part of its beginning.

        An ended text goes on in its own sequence if nothing of it is lost. Otherwise its beginning is copied
        to the sequence that was not used for the longest time, and it stays for others.
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
        """Give a request a free sequence, and the tokens of its prompt that any sequence holds; under the
        engine's lock. None if no sequence is free.
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
        """Keep the checkpoint that gives so many tokens of a sequence longer than the others."""
        able = [each for each in self._checkpoints if each.slot == slot and each.position >= tokens]
        if able:
            used = min(able, key=lambda each: each.position)
            self._checkpoints.remove(used)
            self._checkpoints.append(used)

    def that_fits(self, session: Any, place: Place, free: Sequence[int]) -> Place:
        """The same place, with older texts forgotten if its copy needs their memory.

        If there is no room for a copy, an ended text goes on in its own sequence, and else the prompt is
        computed.
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
