"""One step of a scheduler: it feeds tokens to the engine, and gets tokens, logits or rows of embeddings."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dyno._requests import Step
from dyno.errors import ClosedError, PlanError, StepError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dyno._effective import EffectiveSettings
    from dyno._requests import Request

__all__ = ["Answer", "computed", "described", "is_drafted", "room_of_step", "told_of"]

_log = logging.getLogger("dyno")


@dataclass(slots=True)
class Answer:
    """The result of a step for one request."""

    token: int = -1
    """The token that the engine has drawn; -1 if the logits are not finite."""
    rows: NDArray[np.float32] | None = None
    """Logits [n, n_vocab] after the last tokens, for draws on the host. There is then no token."""
    checked: Checked | None = None
    """The draws for a verified draft. There are then neither token nor rows."""


@dataclass(frozen=True)
class Checked:
    """The draws that verify a draft: one after the last drawn token, and one after each drafted token."""

    answers: list[Answer]
    numbers: list[float]
    """The random number of each draw of the engine. If a draft is rejected, the later ones are given back."""


_NO_DRAW = (0.0, 0, 1.0, 0.0, 0.0)


def room_of_step(settings: EffectiveSettings, step_tokens: int | None) -> int:
    """The most tokens of a step. Each sequence needs one of them.

    Args:
        settings: Of the engine. A value of the caller counts, and so does one of a profile if it is enough.
        step_tokens: Goes before the settings.

    Raises:
        PlanError: The caller's value is less than the sequences.
    """
    sequences = int(settings["sequences"])
    origin, room = "argument", step_tokens
    if room is None:
        origin = settings.origins.get("step_tokens", "default")
        room = int(settings.get("step_tokens", 0))
        if room == 0:
            return max(int(settings["ubatch"]), sequences)
    if room >= sequences:
        return room
    if origin == "argument":
        raise PlanError(
            f"[scheduler] step_tokens is {room}; expected at least one for each of the {sequences} sequences"
        )
    _log.warning("step_tokens is %d (%s); a step has room for the %d sequences", room, origin, sequences)
    return sequences


def computed(session: Any, batch: Sequence[tuple[Request, list[int]]]) -> list[Answer]:
    """Feed the tokens of a step. Texts and embeddings are decoded separately; embedding requests take their
    rows."""
    pooled = [(request.pooler, request, tokens) for request, tokens in batch if request.pooler is not None]
    if not pooled:
        return _decode(session, batch)
    texts = [each for each in batch if each[0].pooler is None]
    answers = iter(_decode(session, texts) if texts else [])
    inputs = [(request.owner.slot, np.array(tokens, np.int32)) for _, request, tokens in pooled]
    hidden = session.decode_hidden(inputs)
    ends = np.cumsum([len(tokens) for _, _, tokens in pooled])
    for (pooler, _, _), rows in zip(pooled, np.split(hidden, ends[:-1]), strict=True):
        pooler.add(rows)
    return [Answer() if request.pooler is not None else next(answers) for request, _ in batch]


def _decode(session: Any, batch: Sequence[tuple[Request, list[int]]]) -> list[Answer]:
    """Feed the tokens of a step. The device draws the tokens, unless settings need the logits on the host."""
    if any(request.wants_all_rows for request, _ in batch):
        arrays = [(request.owner.slot, np.array(tokens, np.int32)) for request, tokens in batch]
        logits = session.decode(arrays, rows="all")[0]
        ends = np.cumsum([len(tokens) for _, tokens in batch])
        return [Answer(rows=rows) for rows in np.split(logits, ends[:-1])]
    # Most sequences of most steps have one token, and an array for it would take longer to make and to read.
    inputs = [
        (request.owner.slot, tokens[0] if len(tokens) == 1 else np.array(tokens, np.int32))
        for request, tokens in batch
    ]
    # One draw after each text, and one after each token of a draft. Nothing is drawn after a part of a
    # prompt, so that it uses up no random number.
    counts: list[int] = []
    settings: list[tuple[float, int, float, float, float]] = []
    here: list[int] = []
    drafted = False
    for request, tokens in batch:
        more = len(tokens) - len(request.pending)
        drafted = drafted or (more > 0 and request.drawn > 0)
        counts.append(max(more, 0) + 1)
        if more >= 0 and request.sampler is None:
            settings += [request.next_draw() for _ in range(more + 1)]
            continue
        if more >= 0:
            here += range(len(settings), len(settings) + more + 1)
        settings += [_NO_DRAW] * counts[-1]
    first = [len(tokens) - n for (_, tokens), n in zip(batch, counts, strict=True)] if drafted else []
    tokens, logits = session.decode_and_draw(inputs, settings, here, first)
    draws = [Answer(token) for token in tokens.tolist()]
    for row, i in enumerate(here):
        draws[i] = Answer(rows=logits[row : row + 1])
    if not drafted:
        return draws  # one for each text
    answers, at = [], 0
    for (request, fed_tokens), count in zip(batch, counts, strict=True):
        if is_drafted(request, fed_tokens):
            numbers = [draw[-1] for draw in settings[at : at + count]]
            answers.append(Answer(checked=Checked(draws[at : at + count], numbers)))
        else:
            answers.append(draws[at])
        at += count
    return answers


def told_of(error: Exception) -> Exception:
    """The error of a step in the form that its requests get. None of them caused it, so it never blames the
    request."""
    if isinstance(error, (PlanError, UnsupportedError)) and not isinstance(error, ClosedError):
        return StepError(f"[scheduler] a step failed: {error}")
    return error


def is_drafted(request: Request, tokens: Sequence[int]) -> bool:
    """Whether a draft follows the last drawn token."""
    return request.drawn > 0 and len(tokens) > len(request.pending)


def described(batch: Sequence[tuple[Request, list[int]]], seconds: float) -> Step:
    fed = of_prompts = deepest = 0
    for request, tokens in batch:
        count = len(tokens)
        fed += count
        if not request.drawn:
            of_prompts += count
        deepest = max(deepest, len(request.held) + count)
    return Step(len(batch), fed, of_prompts, deepest, seconds)
