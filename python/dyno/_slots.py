"""Which sequence of an engine belongs to which generation, and whether tokens have room in it."""

from __future__ import annotations

import numbers
from typing import TYPE_CHECKING, Any

from dyno.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from dyno import _core

__all__ = ["Owner", "Slots", "larger_ctx"]


class Owner:
    """A generation, as far as slots are concerned."""

    slot: int = -1
    """The slot that it owns or has owned; -1 before that."""


class Slots:
    """The slots of one engine.

    Everything but `give_back` is called under the engine's lock. `give_back` needs none: the garbage
    collector calls it too, at any time and in any thread.
    """

    def __init__(self) -> None:
        self._owners: dict[int, Owner] = {}
        self._prompt_ends: dict[int, _core.Checkpoint] = {}
        self.foreign: set[int] = set()
        """Slots that calls outside of a scheduler have fed or cleared; the scheduler empties it."""

    def take(self, owner: Owner, slot: int | None, count: int) -> int:
        """The slot that `owner` owns from now on.

        Args:
            owner: A generation without a slot.
            slot: The one it wants; None takes the highest free one, so that slot 0 stays free the longest.
            count: Sequences of the engine.

        Raises:
            PlanError: No such slot, it has an owner, or each of them has one.
        """
        if slot is None:
            free = (s for s in range(count - 1, -1, -1) if s not in self._owners)
            slot = next(free, None)
            if slot is None:
                raise PlanError(
                    f"[generate] no slot is free: a generation that has not ended owns each "
                    f"(sequences={count}); read one to its end, close() it, or open the engine with "
                    f"sequences={count + 1}"
                )
        else:
            self.check_exists(slot, count)
            self.check_free(slot, count)
        # The owner learns of it first: after an interrupt between the two lines it has nothing to give back.
        owner.slot = slot
        self._owners[slot] = owner
        return slot

    def give_back(self, owner: Owner) -> None:
        """Free the slot of `owner`; without one, nothing happens."""
        if self._owners.get(owner.slot) is owner:
            del self._owners[owner.slot]

    def mark_prompt_end(self, session: _core.Session, slot: int) -> None:
        """A generation has read its prompt. If layers keep their windows alone, the one at its end stays.

        The next turn of a chat often goes on there, because its template leaves reasoning out. It gives way
        to checkpoints of callers.
        """
        self._prompt_ends[slot] = session.checkpoint(slot, spare=True)

    def is_free(self, slot: int) -> bool:
        """Whether no generation owns `slot`."""
        return slot not in self._owners

    def free(self, count: int) -> list[int]:
        """The slots of `count` that no generation owns."""
        return [slot for slot in range(count) if self.is_free(slot)]

    def check_exists(self, slot: int, count: int) -> None:
        """Raises PlanError for a slot that the engine was not opened with."""
        if isinstance(slot, bool) or not isinstance(slot, numbers.Integral) or not 0 <= slot < count:
            raise PlanError(
                f"[engine] slot {slot!r} does not exist: the engine was opened with sequences={count}, "
                f"which are the slots 0 to {count - 1}"
            )

    def check_free(self, slot: int | None, count: int, owner: Owner | None = None) -> None:
        """Raises PlanError if a generation other than `owner` owns `slot`, or any slot for None."""
        for each in range(count) if slot is None else (slot,):
            self.foreign.add(each)
            found = self._owners.get(each)
            if found is not None and found is not owner:
                raise PlanError(
                    f"[engine] slot {each} belongs to a generation that has not ended (sequences={count}): "
                    f"read it to its end, close() it, or open the engine with sequences={count + 1} and use "
                    "another slot"
                )

    def check_batch(
        self,
        session: _core.Session,
        batch: Iterable[tuple[int, NDArray[Any]]],
        reset: bool,
        settings: Mapping[str, Any],
        n_ctx_train: int,
        owner: Owner | None = None,
    ) -> None:
        """Whether tokens may be fed.

        Args:
            session: The engine's.
            batch: Slot and tokens of each sequence.
            reset: Whether the sequences start at position 0.
            settings: The engine's, in force.
            n_ctx_train: Context length that the model was made for, in tokens.
            owner: The generation that feeds them, if one does.

        Raises:
            PlanError: No such slot, a generation owns it, or the tokens do not fit.
        """
        count, ctx = int(settings["sequences"]), int(settings["ctx"])
        for slot, tokens in batch:
            self.check_exists(slot, count)
            self.check_free(slot, count, owner)
            start = 0 if reset else int(session.position(slot))
            if start + len(tokens) > ctx:
                raise PlanError(
                    f"[engine] {len(tokens)} tokens from position {start} do not fit into ctx={ctx}; "
                    + larger_ctx(start + len(tokens), n_ctx_train)
                )


def larger_ctx(count: int, n_ctx_train: int) -> str:
    """Advice for tokens that do not fit: the ctx that holds `count`, where the model allows it."""
    if count <= n_ctx_train:
        return f"open the engine with ctx={count} or more (the model was made for {n_ctx_train})"
    return f"no ctx is long enough: the model supports at most {n_ctx_train} positions"
