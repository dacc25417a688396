"""Generation of one text in an engine, which owns a slot while it runs."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dyno._generate import StopFilter, count_of, drawn, finite, pieces
from dyno._requests import Drawn, Handling
from dyno._sampling import HostSampler, Sampling, uniforms
from dyno._slots import Owner, larger_ctx
from dyno._token_array import token_array
from dyno.errors import ContextLengthError, PlanError

if TYPE_CHECKING:
    import threading
    from collections.abc import Generator, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from dyno.engine import Engine

__all__ = [
    "Drawn",
    "check_least",
    "check_length",
    "drawn_tokens",
    "most_tokens",
    "prompt_tokens",
    "reusable",
    "written",
]

_log = logging.getLogger("dyno")
_DRAWS_QUEUED = 64
"""Number of random numbers that go to the device at once."""
_DRAWS_AHEAD = 4
"""If no more than this many are left, more are queued, so that the device never waits for them."""


def prompt_tokens(engine: Engine, prompt: str | Sequence[int], parse_special: bool) -> list[int]:
    """Encode a prompt, and check that it fits the context of the engine.

    Raises:
        ContextLengthError: The prompt is longer than the context.
        PlanError: The prompt is empty, or a token is not in the vocabulary.
    """
    if isinstance(prompt, str):
        check_least("[generate] the prompt", engine, prompt)
        tokens = engine.tokenizer.encode(prompt, parse_special=parse_special)
    else:
        try:
            tokens = token_array(prompt).tolist()
        except PlanError as error:
            raise _no_prompt(prompt) from error
        n_vocab = int(engine.model["n_vocab"])
        wrong = next((token for token in tokens if not 0 <= token < n_vocab), None)
        if wrong is not None:
            raise PlanError(f"[generate] token {wrong} is not one of 0 to {n_vocab - 1}")
    if not tokens:
        raise PlanError("[generate] the prompt is empty and the model has no BOS token to start from")
    check_length("[generate] the prompt", engine, len(tokens))
    return tokens


def _no_prompt(prompt: object) -> PlanError:
    """The error of a prompt that is neither a text nor token ids."""
    advice = ""
    if isinstance(prompt, bytes):
        advice = "; decode the bytes first"
    elif isinstance(prompt, (list, tuple)) and any(isinstance(each, str) for each in prompt):
        advice = "; give each text to a call of its own"
    elif isinstance(prompt, (list, tuple)) and any(isinstance(each, Mapping) for each in prompt):
        advice = "; for messages, use chat()"
    given = f"{prompt!r:.60}"
    return PlanError(f"[generate] the prompt is {given}; expected a text or a list of token ids{advice}")


def check_length(name: str, engine: Engine, tokens: int, words: str = "") -> None:
    """Raises ContextLengthError if `tokens` is more than the context length of an engine.

    Args:
        name: First word of the message.
        engine: The engine with the context.
        tokens: Number of tokens.
        words: Words before the number in the message.
    """
    ctx = int(engine.settings["ctx"])
    if tokens > ctx:
        advice = larger_ctx(tokens, engine._n_ctx_train)
        raise ContextLengthError(f"{name} has {words}{tokens} tokens, ctx is {ctx}; {advice}")


def check_least(name: str, engine: Engine, text: str) -> None:
    """Raises ContextLengthError if a text is too long for the context in any tokenization."""
    check_length(name, engine, engine.tokenizer.least_tokens(text), "at least ")


def most_tokens(engine: Engine, tokens: Sequence[int], max_tokens: int | None) -> int:
    """Number of tokens that may follow a prompt: `max_tokens`, or all that the context has room for."""
    if max_tokens is None:
        return int(engine.settings["ctx"]) - len(tokens) + 1
    return count_of("max_tokens", max_tokens)


def written(
    engine: Engine,
    tokens: Sequence[int],
    sampling: Sampling,
    stop: StopFilter,
    max_tokens: int,
    slot: int | None,
    *,
    ignore_end: bool = False,
) -> Generator[str, None, None]:
    """Text pieces after a prompt; see `Engine.generate`.

    Args:
        engine: The engine. The generation owns a slot of it from the first piece until this generator ends.
        tokens: Tokens of the prompt.
        sampling: Settings for drawing tokens.
        stop: Ends the text at a stop string.
        max_tokens: The most tokens to draw.
        slot: The slot to take; None takes the highest free one.
        ignore_end: Whether to continue after an end-of-generation token.
    """
    handling = Handling(ignore_end=True) if ignore_end else None
    tokens_ = drawn_tokens(engine, tokens, sampling, max_tokens, slot, handling=handling)
    with contextlib.closing(tokens_):
        yield from pieces(
            (each.token for each in tokens_),
            engine.tokenizer.stream(),
            stop,
            frozenset() if ignore_end else engine.tokenizer.end_of_generation,
            max_tokens,
        )


def drawn_tokens(
    engine: Engine,
    tokens: Sequence[int],
    sampling: Sampling,
    max_tokens: int,
    slot: int | None,
    held: Sequence[int] = (),
    cancelled: threading.Event | None = None,
    handling: Handling | None = None,
) -> Generator[Drawn, None, None]:
    """The tokens after a prompt, up to `max_tokens` or the end of the context. Arguments as in `written`.

    `held`: tokens that `slot` holds. The beginning of the prompt that equals them is not computed again.
    `cancelled`: an event that ends the text, for a scheduler.
    `handling`: further options, for a scheduler.

    If the engine has a scheduler and no slot is named, the scheduler draws them.
    """
    if max_tokens == 0:
        return
    scheduler = engine._scheduler  # read once, because its thread removes it at the end
    if scheduler is not None and slot is None:
        yield from scheduler.drawn(tokens, sampling, max_tokens, cancelled, handling)
        return
    owner = Owner()
    try:
        with engine._lock:
            engine._open()
            engine._slots.take(owner, slot, int(engine.settings["sequences"]))
        kept = reusable(engine, tokens, held, owner.slot)
        if engine.diagnostics.draws_on_device and not sampling.needs_logits:
            yield from map(Drawn, _drawn_on_device(engine, tokens, kept, sampling, max_tokens, owner))
        else:
            yield from itertools.islice(_drawn_on_host(engine, tokens, kept, sampling, owner), max_tokens)
    finally:
        engine._slots.give_back(owner)


def reusable(engine: Engine, tokens: Sequence[int], held: Sequence[int], slot: int) -> int:
    """Number of prompt tokens that the slot holds and can be rewound to. It excludes the last token, whose
    logits are needed."""
    most = min(len(tokens) - 1, len(held), engine.position(slot))
    same = next((i for i in range(most) if tokens[i] != held[i]), max(most, 0))
    return int(engine._open().rewindable(same, slot))


def _begin(session: Any, kept: int, slot: int) -> None:
    """Forget all but the first `kept` tokens of a slot. The caller holds the engine's lock."""
    if kept:
        session.rewind(kept, slot)
    else:
        session.reset(slot)


def _is_full(engine: Engine, slot: int) -> bool:
    """Whether the context is full. If so, a log message says that generation stops."""
    if engine.position(slot) < int(engine.settings["ctx"]):
        return False
    _log.warning("the context of %d tokens is full; generation stops here", engine.settings["ctx"])
    return True


def _drawn_on_host(
    engine: Engine, prompt: Sequence[int], kept: int, sampling: Sampling, owner: Owner
) -> Iterator[Drawn]:
    slot = owner.slot

    def after(tokens: Sequence[int]) -> NDArray[np.float32]:
        logits = engine._decode({slot: tokens}, reset=False, rows="last", owner=owner)[0][slot][-1]
        return finite(logits, engine.position(slot) - 1)

    def after_prompt() -> NDArray[np.float32]:
        logits = after(prompt[kept:])
        if not engine._recurrent:  # otherwise it would copy the recurrent state
            with engine._lock:
                engine._slots.mark_prompt_end(engine._open(), slot)
        return logits

    def step(token: int) -> NDArray[np.float32] | None:
        return None if _is_full(engine, slot) else after([token])

    with engine._lock:
        _begin(engine._open(), kept, slot)
    if not sampling.needs_logits:
        return map(Drawn, drawn(after_prompt(), step, sampling.sampler()))
    tokenizer = engine.tokenizer if sampling.needs_vocabulary else None
    sampler = HostSampler(sampling, tokenizer, int(engine.model["n_vocab"]), prompt)
    return (Drawn(t, sampler.logprobs) for t in drawn(after_prompt(), step, sampler.draw))


def _drawn_on_device(
    engine: Engine, prompt: Sequence[int], kept: int, sampling: Sampling, max_tokens: int, owner: Owner
) -> Iterator[int]:
    """The tokens that the device draws after `prompt`, which starts at position 0 of the owner's slot. The
    slot already holds the first `kept` tokens of it.

    Between two tokens, other slots may be used. The session then continues at the end of the sequence, as if
    tokens were fed one by one.
    """
    slot = owner.slot
    tokens = token_array(prompt[kept:])
    temperature, top_k, top_p, min_p = sampling.for_engine()
    random = sampling.random()
    generation = None
    for left in range(max_tokens, 0, -1):
        if generation is not None and _is_full(engine, slot):
            return
        with engine._lock:
            session = engine._open()
            if generation is None:
                _begin(session, kept, slot)
                engine._check_batch(session, [(slot, tokens)], False, owner)
                generation = session.generation(
                    tokens, slot=slot, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
                )
            queued = int(generation.queued)
            if queued <= _DRAWS_AHEAD and queued < left:
                generation.queue(uniforms(random, min(_DRAWS_QUEUED, left - queued)))
            token = int(generation.next())
            engine._tell_failed_captures(session)
        yield token
