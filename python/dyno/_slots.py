"""The slots of an engine: the generation that owns each one, and the check that tokens fit."""

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
    """The part of a generation that slots know."""

    slot: int = -1
    """The slot that it owns or has owned; -1 if it never had one."""


class Slots:
    """The slots of one engine.

    All methods except `give_back` are called under the engine's lock. `give_back` needs no lock, because the
    garbage collector may call it at any time and in any thread.
    """

    def __init__(self) -> None:
        self._owners: dict[int, Owner] = {}
        self._prompt_ends: dict[int, _core.Checkpoint] = {}
        self.foreign: set[int] = set()
        """Slots that calls outside of the scheduler have fed or cleared. The scheduler empties this set."""

    def take(self, owner: Owner, slot: int | None, count: int) -> int:
        """Give `owner` a slot, and return it.

        Args:
            owner: A generation without a slot.
            slot: The requested slot; None takes the highest free one, so that slot 0 stays free the longest.
            count: Number of sequences of the engine.

        Raises:
            PlanError: The slot does not exist or has an owner, or no slot is free.
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
        # The owner learns its slot first: after an interrupt between the two lines it gives the slot back.
        owner.slot = slot
        self._owners[slot] = owner
        return slot

    def give_back(self, owner: Owner) -> None:
        """Free the slot of `owner`, if it has one."""
        if self._owners.get(owner.slot) is owner:
            del self._owners[owner.slot]

    def mark_prompt_end(self, session: _core.Session, slot: int) -> None:
        """Record that a generation has read its prompt. If layers keep only their windows, the window at its
        end is kept.

        The next turn of a chat often continues there, because the template leaves reasoning out. Checkpoints
        of callers have priority over it.
        """
        self._prompt_ends[slot] = session.checkpoint(slot, spare=True)

    def is_free(self, slot: int) -> bool:
        """Whether no generation owns `slot`."""
        return slot not in self._owners

    def free(self, count: int) -> list[int]:
        """The free slots among the first `count`."""
        return [slot for slot in range(count) if self.is_free(slot)]

    def check_exists(self, slot: int, count: int) -> None:
        """Raises PlanError if the engine was not opened with this slot."""
        if isinstance(slot, bool) or not isinstance(slot, numbers.Integral) or not 0 <= slot < count:
            raise PlanError(
                f"[engine] slot {slot!r} does not exist: the engine was opened with sequences={count}, "
                f"which are the slots 0 to {count - 1}"
            )

    def check_free(self, slot: int | None, count: int, owner: Owner | None = None) -> None:
        """Raises PlanError if a generation other than `owner` owns `slot`; for None: if one owns any slot."""
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
        """Check that tokens may be fed.

        Args:
            session: The session of the engine.
            batch: Slot and tokens of each sequence.
            reset: Whether the sequences start at position 0.
            settings: The settings of the engine that are in force.
            n_ctx_train: Context length that the model was made for, in tokens.
            owner: The generation that feeds them, if there is one.

        Raises:
            PlanError: A slot does not exist, another generation owns it, or the tokens do not fit.
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
    """Advice for tokens that do not fit: the `ctx` that holds `count` tokens, if the model allows it."""
    if count <= n_ctx_train:
        return (
            f"open the engine with ctx={count} or more, on a command line -c {count} "
            f"(the model was made for {n_ctx_train})"
        )
    return f"no ctx is long enough: the model supports at most {n_ctx_train} positions"
