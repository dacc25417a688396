"""Speculative decoding with the multi-token prediction head (MTP) of the model, which reads the model's
hidden rows.

The head always proposes the most probable token, for all texts in one batch. For the first token of a draft
it reads a hidden row of the model. For later tokens it reads its own row, because the row of the model is not
computed yet. The model then verifies the draft (see `dyno._drafts`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dyno._drafts import Reads
    from dyno.engine import Engine

__all__ = ["DraftHead"]


class DraftHead:
    """The drafting head of a scheduler's model.

    Args:
        engine: The engine of the scheduler. Its head is loaded if that has not happened yet.
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
        """Unload the head if this object loaded it. A closed engine has no head."""
        with self._engine._lock:
            if self._loaded and self._engine._session is not None:
                self._engine._session.drop_draft_head()

    def draft(self, texts: Sequence[tuple[int, int, int]], reads: Reads) -> list[list[int]]:
        """Draft the most probable continuation of each text.

        Args:
            texts: For each text: its slot, the token that follows its sequence, and the most tokens to draft
                after that.
            reads: The tokens that the head may read in this step.

        Returns:
            A draft for each text. It is empty if the head is not certain, does not know the sequence, or has
            not read all of it yet.
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
