"""One step of a scheduler in its engine: tokens in, tokens, logits or rows of embeddings out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dyno._requests import Step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dyno._requests import Request

__all__ = ["Answer", "computed", "described", "is_drafted"]


@dataclass(frozen=True)
class Answer:
    """The engine's answer to the tokens of one request in a step."""

    token: int = -1
    """Drawn by the engine; -1 if the logits are not finite."""
    rows: NDArray[np.float32] | None = None
    """Logits [n, n_vocab], of the last tokens, for draws on the host; then there is no token."""


_NO_DRAW = (0.0, 0, 1.0, 0.0, 0.0)


def computed(session: Any, batch: Sequence[tuple[Request, list[int]]]) -> list[Answer]:
    """Feed the tokens of a step. Texts get answers; embeddings take their rows, in a decode of their own."""
    pooled = [(request.pooler, request, tokens) for request, tokens in batch if request.pooler is not None]
    texts = [each for each in batch if each[0].pooler is None]
    answers = iter(_decode(session, texts) if texts else [])
    if pooled:
        inputs = [(request.owner.slot, np.array(tokens, np.int32)) for _, request, tokens in pooled]
        hidden = session.decode_hidden(inputs)
        ends = np.cumsum([len(tokens) for _, _, tokens in pooled])
        for (pooler, _, _), rows in zip(pooled, np.split(hidden, ends[:-1]), strict=True):
            pooler.add(rows)
    return [Answer() if request.pooler is not None else next(answers) for request, _ in batch]


def _decode(session: Any, batch: Sequence[tuple[Request, list[int]]]) -> list[Answer]:
    """Feed the tokens of a step. Tokens are drawn where the logits are, unless settings need those here."""
    fed = np.array([token for _, tokens in batch for token in tokens], np.int32)
    inputs, at = [], 0
    for request, tokens in batch:
        inputs.append((request.owner.slot, fed[at : at + len(tokens)]))
        at += len(tokens)
    if any(request.wants_all_rows or is_drafted(request, tokens) for request, tokens in batch):
        logits = session.decode(inputs, rows="all")[0]
        ends = np.cumsum([len(tokens) for _, tokens in batch])
        return [Answer(rows=rows) for rows in np.split(logits, ends[:-1])]
    # Nothing is drawn behind a part of a prompt: it must use up no random number.
    draws = [len(tokens) == len(request.pending) for request, tokens in batch]
    here = [i for i, (request, _) in enumerate(batch) if draws[i] and request.sampler is not None]
    settings = [
        request.next_draw() if drawn and request.sampler is None else _NO_DRAW
        for (request, _), drawn in zip(batch, draws, strict=True)
    ]
    tokens, logits = session.decode_and_draw(inputs, settings, here)
    answers = [Answer(token) for token in tokens.tolist()]
    for row, i in enumerate(here):
        answers[i] = Answer(rows=logits[row : row + 1])
    return answers


def is_drafted(request: Request, tokens: Sequence[int]) -> bool:
    """Whether a draft follows the token that was drawn last."""
    return not request.reads and len(tokens) > 1


def described(batch: Sequence[tuple[Request, list[int]]], seconds: float) -> Step:
    return Step(
        sequences=len(batch),
        tokens=sum(len(tokens) for _, tokens in batch),
        prompt_tokens=sum(len(tokens) for request, tokens in batch if not request.drawn),
        deepest=max(len(request.held) + len(tokens) for request, tokens in batch),
        seconds=seconds,
    )
