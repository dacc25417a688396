"""The text of one generation of an engine, which owns a slot meanwhile."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from dyno._generate import Sampling, StopFilter, drawn, finite, pieces, uniforms
from dyno._slots import Owner
from dyno._token_array import token_array

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from dyno.engine import Engine

__all__ = ["written"]

_log = logging.getLogger("dyno")
_DRAWS_QUEUED = 64
"""Random numbers that go to the device at once."""
_DRAWS_AHEAD = 4
"""More are queued when no more than these are left: the device is never without."""


def written(
    engine: Engine,
    tokens: Sequence[int],
    sampling: Sampling,
    stop: StopFilter,
    max_tokens: int,
    slot: int | None,
) -> Generator[str, None, None]:
    """Text pieces after a prompt; see `Engine.generate`.

    Args:
        engine: Gives the slot from the first piece until this generator ends, however it ends.
        tokens: Of the prompt.
        sampling: How tokens are drawn.
        stop: Ends the text at a stop string.
        max_tokens: Tokens drawn at most.
        slot: The slot to take; None takes the highest free one.
    """
    if max_tokens == 0:
        return
    owner = Owner()
    try:
        with engine._lock:
            engine._open()
            engine._slots.take(owner, slot, int(engine.settings["sequences"]))
        drawn_tokens = (
            _drawn_on_device(engine, tokens, sampling, max_tokens, owner)
            if engine.draws_on_device
            else _drawn_on_host(engine, tokens, sampling, owner)
        )
        yield from pieces(
            drawn_tokens, engine.tokenizer.stream(), stop, engine.tokenizer.end_of_generation, max_tokens
        )
    finally:
        engine._slots.give_back(owner)


def _is_full(engine: Engine, slot: int) -> bool:
    """Whether no further token can be fed; if so, says that the text ends."""
    if engine.position(slot) < int(engine.settings["ctx"]):
        return False
    _log.warning("the context of %d tokens is full; the text ends here", engine.settings["ctx"])
    return True


def _drawn_on_host(engine: Engine, prompt: Sequence[int], sampling: Sampling, owner: Owner) -> Iterator[int]:
    slot = owner.slot

    def after(tokens: Sequence[int], reset: bool) -> NDArray[np.float32]:
        logits = engine._decode({slot: tokens}, reset=reset, rows="last", owner=owner)[0][slot][-1]
        return finite(logits, engine.position(slot) - 1)

    def step(token: int) -> NDArray[np.float32] | None:
        return None if _is_full(engine, slot) else after([token], False)

    return drawn(after(prompt, True), step, sampling.sampler())


def _drawn_on_device(
    engine: Engine, prompt: Sequence[int], sampling: Sampling, max_tokens: int, owner: Owner
) -> Iterator[int]:
    """Tokens that the device draws after `prompt`, which starts at position 0 of the owner's slot.

    Other slots may be used between two of them: the session then goes on at the end of the sequence, as
    feeding token by token would.
    """
    slot = owner.slot
    tokens = token_array(prompt)
    random = sampling.random()
    generation = None
    for left in range(max_tokens, 0, -1):
        if generation is not None and _is_full(engine, slot):
            return
        with engine._lock:
            session = engine._open()
            if generation is None:
                engine._check_batch(session, [(slot, tokens)], True, owner)
                session.reset(slot)
                generation = session.generation(
                    tokens,
                    slot=slot,
                    temperature=sampling.temperature,
                    top_k=sampling.top_k,
                    top_p=sampling.top_p,
                    min_p=sampling.min_p,
                )
            queued = int(generation.queued)
            if queued <= _DRAWS_AHEAD and queued < left:
                generation.queue(uniforms(random, min(_DRAWS_QUEUED, left - queued)))
            token = int(generation.next())
            engine._tell_failed_captures(session)
        yield token
