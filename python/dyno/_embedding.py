"""Embeddings: one vector for a text, pooled from the rows that the output layer of the model would read."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final, Literal, cast, get_args

import numpy as np

from dyno._slots import Owner
from dyno._writing import prompt_tokens
from dyno.errors import ModelError, PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dyno.engine import Engine

__all__ = ["EmbedMethods", "Pooler", "Pooling", "pooling_of"]

Pooling = Literal["mean", "last", "cls"]
POOLINGS: Final[tuple[Pooling, ...]] = get_args(Pooling)
_OF_FILE: Final[dict[int, Pooling]] = {1: "mean", 2: "cls", 3: "last"}
"""Pooling by the number of the key `pooling_type` of a model file. 0 (no pooling) and 4 (ranking) give no
vector."""


class Pooler:
    """The pooling of one text, fed with its rows as they are computed.

    Args:
        pooling: `mean` of all rows, the `last` one, or the first one (`cls`).
        normalize: Scale the vector to length 1.
    """

    def __init__(self, pooling: Pooling, normalize: bool) -> None:
        self.pooling, self._normalize = pooling, normalize
        self._sum: NDArray[np.float64] | None = None
        self._rows = 0

    def add(self, rows: NDArray[np.float32]) -> None:
        """Add the next rows [n, n_embd] of the text; for `last`, the last row suffices."""
        if self.pooling == "last" or self._sum is None:
            picked = {"mean": rows, "last": rows[-1:], "cls": rows[:1]}[self.pooling]
            self._sum, self._rows = picked.sum(axis=0, dtype=np.float64), len(picked)
        elif self.pooling == "mean":
            self._sum += rows.sum(axis=0, dtype=np.float64)
            self._rows += len(rows)

    def clear(self) -> None:
        """Forget all rows, because the text is computed again."""
        self._sum, self._rows = None, 0

    def vector(self) -> NDArray[np.float32]:
        """The vector [n_embd] of the rows so far.

        Raises:
            ModelError: A number of the vector is not finite.
        """
        assert self._sum is not None  # a text has at least one token
        vector = self._sum / self._rows
        if not np.isfinite(vector).all():
            raise ModelError("[embed] the model gives an embedding that is not finite")
        length = float(np.linalg.norm(vector))
        if self._normalize and length > 0:
            vector /= length
        return vector.astype(np.float32)


def pooling_of(engine: Engine, pooling: str | None) -> Pooling:
    """The requested pooling; None takes the pooling of the model file, or else `mean`.

    Raises:
        PlanError: There is no such pooling.
    """
    if pooling is None:
        return engine._file_pooling
    if pooling not in POOLINGS:
        raise PlanError(f"[embed] pooling is {pooling!r:.80}; expected {', '.join(POOLINGS)}")
    return pooling


def file_pooling(kind: object) -> Pooling:
    """The pooling that a number in a model file stands for."""
    return _OF_FILE.get(kind, "mean") if isinstance(kind, int) else "mean"


class EmbedMethods:
    """The part of `Engine` that computes embeddings."""

    def embed(
        self,
        texts: str | Sequence[str | Sequence[int]],
        pooling: Pooling | None = None,
        normalize: bool = True,
        *,
        cancelled: threading.Event | None = None,
    ) -> NDArray[np.float32]:
        """One vector for each text, pooled from the rows of the last layer after the last norm.

        Texts are computed side by side in free sequences of the engine, together with the generations of its
        scheduler, if one is open.

        Args:
            texts: Texts or lists of token ids; a single string is one text.
            pooling: `mean` of the rows of all tokens, the `last` row, or the first one (`cls`). None takes
            the pooling that the model file names, or `mean`.
            normalize: Scale each vector to length 1.
            cancelled: An event; if any thread sets it, the work ends with PlanError.

        Returns:
            float32 [n_texts, n_embd].

        Raises:
            PlanError: A text is empty or longer than the context, no sequence is free, or there is no such
            pooling.
            QueueFullError: As many requests wait in the scheduler as may.
            ModelError: The file has no vocabulary, or a vector is not finite.
        """
        engine = cast("Engine", self)
        engine._open()
        chosen = pooling_of(engine, pooling)
        given: Sequence[str | Sequence[int]] = [texts] if isinstance(texts, str) else texts
        tokens = [prompt_tokens(engine, text, parse_special=False) for text in given]
        poolers = [Pooler(chosen, normalize) for _ in tokens]
        stop = cancelled or threading.Event()
        scheduler = engine._scheduler  # read once, because its thread removes it at the end
        if scheduler is not None:
            scheduler.embed(tokens, poolers, stop)
        else:
            _embed_here(engine, tokens, poolers, stop)
        if stop.is_set():
            raise PlanError("[embed] the work was cancelled")
        width = int(engine.model["n_embd"])
        return np.stack([p.vector() for p in poolers]) if poolers else np.empty((0, width), np.float32)


def _embed_here(
    engine: Engine, texts: Sequence[Sequence[int]], poolers: Sequence[Pooler], stop: threading.Event
) -> None:
    """Compute texts in the free sequences of an engine, in batches of the u-batch size."""
    count = int(engine.settings["sequences"])
    room = max(int(engine.settings["ubatch"]), count)
    waiting = list(range(len(texts)))[::-1]
    owners: list[Owner] = []
    left: dict[int, tuple[int, list[int]]] = {}
    """By slot: the index of its text, and the tokens still to feed."""
    try:
        with engine._lock:
            engine._open()
            while len(owners) < len(texts) and (not owners or _has_free(engine, count)):
                owners.append(Owner())
                engine._slots.take(owners[-1], None, count)
        while (waiting or left) and not stop.is_set():
            with engine._lock:
                session = engine._open()
                for owner in owners:
                    if owner.slot not in left and waiting:
                        session.reset(owner.slot)
                        number = waiting.pop()
                        left[owner.slot] = number, list(texts[number])
                batch: list[tuple[int, NDArray[np.int32]]] = []
                free = room
                for slot, (_, tokens) in left.items():
                    if free > 0:
                        batch.append((slot, np.array(tokens[:free], np.int32)))
                        free -= len(batch[-1][1])
                rows = session.decode_hidden(batch)
            begin = 0
            for slot, fed in batch:
                number, tokens = left[slot]
                poolers[number].add(rows[begin : begin + len(fed)])
                begin += len(fed)
                del tokens[: len(fed)]
                if not tokens:
                    del left[slot]
    finally:
        for owner in owners:
            engine._slots.give_back(owner)


def _has_free(engine: Engine, count: int) -> bool:
    return any(engine._slots.is_free(slot) for slot in range(count))
