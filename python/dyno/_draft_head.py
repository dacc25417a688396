"""Speculation with the head that a model file has for it (MTP): it reads the model's own hidden rows.

The head proposes the most probable token each time, for all texts in one batch. It gives one token for
sure; for the ones behind it, it reads its own row in place of the model's, which is not computed yet. The
model then draws from its own logits at each place, as for every draft (see `dyno._drafts`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dyno._drafts import Reads
    from dyno.engine import Engine

__all__ = ["DraftHead"]


class DraftHead:
    """The head of a scheduler's model.

    Args:
        engine: Of the scheduler. Its head is loaded if it is not yet there.
        min_p: A draft ends where its next token is less probable than this.

    Raises:
        UnsupportedError: The file has no head, the engine does not know it, or the model
            lies on a GPU and another device.
        OutOfMemoryError: The head does not fit.
    """

    def __init__(self, engine: Engine, min_p: float) -> None:
        self._engine, self._min_p = engine, min_p
        self._n_vocab = int(engine.model["n_vocab"])
        with engine._lock:
            session = engine._open()
            self._loaded = not session.has_draft_head
            if self._loaded:
                session.load_draft_head()

    def close(self) -> None:
        """Forget the head if it was loaded here. A closed engine has none."""
        with self._engine._lock:
            if self._loaded and self._engine._session is not None:
                self._engine._session.drop_draft_head()

    def draft(self, texts: Sequence[tuple[int, int, int]], reads: Reads) -> list[list[int]]:
        """The tokens that the head expects.

        Args:
            texts: Slot, the token that follows its sequence next, and how many may be drafted behind it at
                most, of each.
            reads: The tokens of the sequences that it may read now.

        Returns:
            A draft for each; without tokens where the head is not certain, does not know the sequence, or has
            not read the whole of it yet.
        """
        drafts: list[list[int]] = [[] for _ in texts]
        with self._engine._lock:
            session = self._engine._open()
            feed: dict[int, tuple[int, int]] = {}
            for index, (slot, token, most) in enumerate(texts):
                if most <= 0 or not session.can_draft(slot):
                    continue
                lacking = session.draft_lacks(slot)
                allowed = reads.allowed(slot, lacking)
                if allowed < lacking:
                    session.read_for_draft(slot, allowed)
                else:
                    feed[index] = (slot, token)
            further = False
            while feed:
                proposed = session.draft_tokens(list(feed.values()), further, self._min_p)
                following: dict[int, tuple[int, int]] = {}
                for (index, (slot, _)), token in zip(feed.items(), map(int, proposed), strict=True):
                    if not 0 <= token < self._n_vocab:
                        continue
                    drafts[index].append(token)
                    if len(drafts[index]) < texts[index][2]:
                        following[index] = (slot, token)
                feed, further = following, True
        return drafts
