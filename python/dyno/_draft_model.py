"""Speculative decoding with a second, smaller model of the same vocabulary, which proposes the next tokens.

The draft model always proposes its most probable token, for all texts in one batch. A draft ends at a token
less probable than `spec_min_p`. The large model then verifies the draft with its own logits (see
`dyno._drafts`), so the draft model never changes the distribution.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dyno._prefixes import common_prefix
from dyno._vocabulary import has_vocabulary
from dyno.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dyno._drafts import Reads
    from dyno.engine import Engine

__all__ = ["DraftModel", "check_rewinds", "check_vocabulary", "most_probable"]

_GREEDY = (0.0, 0, 1.0, 0.0, 0.0)


class DraftModel:
    """The draft model of a scheduler, with the texts in its own KV cache.

    Args:
        engine: The engine of the draft model, with at least as many sequences as the scheduler. Nothing else
            uses it.
        target: The engine of the large model.
        min_p: A draft ends where its next token is less probable than this.

    Raises:
        PlanError: The models have different vocabularies, the small one has too few sequences, or it has
            recurrent state, which cannot forget what was rejected.
    """

    def __init__(self, engine: Engine, target: Engine, min_p: float) -> None:
        check_vocabulary(target, engine)
        check_rewinds(engine)
        sequences = int(target.settings["sequences"])
        if int(engine.settings["sequences"]) < sequences:
            raise PlanError(
                f"[speculation] the draft model has {engine.settings['sequences']} sequences; open it with "
                f"sequences={sequences}, like the main model"
            )
        if engine._scheduler is not None:
            raise PlanError("[speculation] the draft model has its own scheduler; close that scheduler first")
        self._engine, self._min_p = engine, min_p
        self._ctx = int(engine.settings["ctx"])
        self._n_vocab = min(int(engine.model["n_vocab"]), int(target.model["n_vocab"]))
        self._held: list[list[int]] = [[] for _ in range(sequences)]

    @property
    def in_call(self) -> bool:
        """Whether the caller is a signal handler that interrupted a call of the draft model."""
        return self._engine._in_call

    def draft(self, texts: Sequence[tuple[int, list[int], int]], reads: Reads) -> list[list[int]]:
        """Draft the most probable continuation of each text.

        Args:
            texts: For each text: its slot, all its tokens, and the most tokens to draft.
            reads: The tokens that the draft model may read in this step.

        Returns:
            A draft for each text. It is empty if the draft model is not certain, its context is full, or it
            has not read the whole text yet.
        """
        drafts: list[list[int]] = [[] for _ in texts]
        with self._engine._lock:
            session = self._engine._open()
            feed: dict[int, list[int]] = {}
            unread: set[int] = set()
            for index, (slot, tokens, most) in enumerate(texts):
                if most <= 0 or len(tokens) > self._ctx:
                    continue
                lacking = self._begin(session, slot, tokens)
                allowed = reads.allowed(slot, len(lacking))
                if allowed < len(lacking):
                    unread.add(index)
                if allowed > 0:
                    feed[index] = lacking[:allowed]
            while feed:
                batch = [(texts[i][0], np.array(tokens, np.int32)) for i, tokens in feed.items()]
                proposed = self._proposed(session, batch)
                following: dict[int, list[int]] = {}
                for (index, tokens), token in zip(feed.items(), proposed, strict=True):
                    slot, _, most = texts[index]
                    self._held[slot] += tokens
                    if token < 0 or index in unread:
                        continue
                    drafts[index].append(token)
                    if len(drafts[index]) < most and len(self._held[slot]) < self._ctx:
                        following[index] = [token]
                feed = following
        return drafts

    def _begin(self, session: Any, slot: int, tokens: list[int]) -> list[int]:
        """Rewind a sequence to its common prefix with a text, and return the tokens that it lacks."""
        same = int(session.rewindable(common_prefix(self._held[slot], tokens), slot))
        session.rewind(same, slot)
        self._held[slot] = tokens[:same]
        return tokens[same:]

    def _proposed(self, session: Any, batch: Sequence[tuple[int, NDArray[np.int32]]]) -> list[int]:
        """The most probable next token of each sequence; -1 if it is not certain enough."""
        if self._min_p <= 0:
            drawn = session.decode_and_draw(batch, [_GREEDY] * len(batch))[0]
            return [int(token) if token < self._n_vocab else -1 for token in drawn]
        return most_probable(session.decode(batch, rows="last")[0], self._min_p, self._n_vocab)


def most_probable(logits: NDArray[np.float32], min_p: float, n_vocab: int) -> list[int]:
    """The most probable token of each row of logits.

    Args:
        logits: `[rows, tokens]`.
        min_p: Least probability of a proposed token.
        n_vocab: Number of ids that may be proposed, from 0.

    Returns:
        Token ids; -1 if the token is not certain enough or not below `n_vocab`, or if the logits are not
        finite.
    """
    best = logits.argmax(axis=1)
    with np.errstate(all="ignore"):
        certainty = 1 / np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1, dtype=np.float64)
    good = (certainty >= min_p) & (best < n_vocab) & np.isfinite(certainty)
    return [int(token) if sure else -1 for token, sure in zip(best, good, strict=True)]


def check_rewinds(engine: Engine) -> None:
    """Raises PlanError if a draft model cannot forget rejected tokens, because it has recurrent state."""
    if int(engine.model["recurrent_layers"]) > 0:
        raise PlanError(
            f"[speculation] {engine.model['architecture']} has recurrent state, which cannot forget rejected "
            "tokens, so it cannot draft; use another draft model"
        )


def check_vocabulary(target: Engine, draft: Engine) -> None:
    """Raises PlanError if a token id stands for different text in two models.

    One vocabulary may be longer, because makers of models pad them. Ids that only one model has are never
    drafted.
    """
    if target._file is None or draft._file is None or not has_vocabulary(target._file):
        same = target.model["n_vocab"] == draft.model["n_vocab"]
        first = None if same else min(int(target.model["n_vocab"]), int(draft.model["n_vocab"]))
    else:
        if not has_vocabulary(draft._file):
            raise PlanError(
                "[speculation] the draft model has no vocabulary, so it cannot be compared with that of "
                "the model"
            )
        ours, theirs = (e.tokenizer.vocabulary.tokens for e in (target, draft))
        first = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    if first is not None:
        raise PlanError(
            f"[speculation] the draft model has another vocabulary, from token {first} on; use a smaller "
            "model of the same family"
        )
