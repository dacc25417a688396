"""Perplexity of a text, and the distance to a saved reference for the same text.

The protocol is the one of llama.cpp. The tokens are cut into chunks of `ctx`. Each chunk starts at position
0, with BOS instead of its first token if the model wants one. The second half is scored: with ctx 512, the
logits at positions 256 to 510 predict the tokens 257 to 511.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dyno.errors import ModelError, PlanError
from dyno.quality import Comparer, Comparison, log_softmax

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from dyno.engine import Engine
    from dyno.reference import ReferenceReader, ReferenceWriter

__all__ = ["Perplexity", "chunk_tokens", "perplexity"]

_MAX_LOGITS_BYTES = 256 << 20


@dataclass(frozen=True)
class Perplexity:
    """The result of one measurement."""

    ppl: float
    """Perplexity: exp of the mean negative log-likelihood of the scored tokens."""
    stderr: float
    """Standard error of `ppl`."""
    tokens: int
    """Number of scored tokens."""
    chunks: int
    ctx: int
    reference_ppl: float | None = None
    """Perplexity of the reference on the same tokens."""
    ppl_ratio: float | None = None
    """ppl / reference_ppl."""
    comparison: Comparison | None = None

    def to_dict(self) -> dict[str, Any]:
        """A flat dict for JSON, without values that were not measured."""
        result = {k: v for k, v in asdict(self).items() if v is not None and k != "comparison"}
        if self.comparison is not None:
            result |= {k: v for k, v in asdict(self.comparison).items() if k != "rows"}
        return result


def chunk_tokens(
    tokens: Sequence[int], ctx: int, chunks: int | None = None, bos: int | None = None
) -> NDArray[np.int32]:
    """The chunks to score, int32 [chunks, ctx].

    Args:
        tokens: Tokens of the whole text.
        ctx: Length of a chunk, at least 4 and even.
        chunks: Maximum number of chunks; None: all complete ones.
        bos: Token that replaces the first token of each chunk; None: no replacement.

    Raises:
        PlanError: The length is impossible, or the text is shorter than one chunk.
    """
    if ctx < 4 or ctx % 2:
        raise PlanError(f"[perplexity] ctx must be even and at least 4, not {ctx}")
    if chunks is not None and chunks < 1:
        raise PlanError(f"[perplexity] chunks must be at least 1, not {chunks}")
    whole = len(tokens) // ctx
    if whole == 0:
        raise PlanError(f"[perplexity] the text has {len(tokens)} tokens; one chunk of ctx={ctx} needs more")
    count = whole if chunks is None else min(whole, chunks)
    result = np.asarray(tokens[: count * ctx], dtype=np.int32).reshape(count, ctx).copy()
    if bos is not None:
        result[:, 0] = bos
    return result


def perplexity(
    engine: Engine,
    chunks: NDArray[np.int32],
    *,
    save: ReferenceWriter | None = None,
    reference: ReferenceReader | None = None,
    on_chunk: Callable[[int, float], None] | None = None,
) -> Perplexity:
    """Score `chunks` [n, ctx] with an engine.

    Args:
        engine: An engine whose `ctx` is at least the chunk length.
        chunks: As `chunk_tokens` makes them.
        save: Receives the log-probabilities of all scored positions.
        reference: Log-probabilities of the same chunks to compare with.
        on_chunk: Called after each chunk with its number from 1 and the perplexity so far.

    Raises:
        PlanError: A chunk does not fit into the context, or the reference has other tokens.
        ModelError: Logits are not finite; the message names the chunk and the position.
    """
    ctx = chunks.shape[1]
    if reference is not None:
        reference.check(chunks)
    total = total_squares = total_reference = 0.0
    scored = 0
    comparer = Comparer() if reference is not None else None
    for number, chunk in enumerate(chunks):
        targets = chunk[ctx // 2 + 1 :]
        row = 0
        theirs = None
        if reference is not None:
            theirs = reference.chunk(number)
            total_reference += float(reference.nll(number).sum())
        for logits in _scored_rows(engine, chunk):
            with np.errstate(invalid="ignore"):
                log_probs = log_softmax(logits)
            part = targets[row : row + len(logits)]
            nll = -log_probs[np.arange(len(part)), part]
            _check_finite(nll, number, ctx // 2 + row)
            total += float(nll.sum())
            total_squares += float((nll**2).sum())
            if save is not None:
                save.add(log_probs, nll)
            if theirs is not None and comparer is not None:
                block = theirs[row : row + len(logits)]
                comparer.add(block, logits)
            row += len(logits)
        scored += row
        if save is not None:
            save.end_chunk()
        if on_chunk is not None:
            on_chunk(number + 1, math.exp(total / scored))
    mean = total / scored
    ppl = math.exp(mean)
    variance = max(0.0, total_squares / scored - mean * mean)
    stderr = ppl * math.sqrt(variance / (scored - 1)) if scored > 1 else 0.0
    if comparer is None:
        return Perplexity(ppl, stderr, scored, len(chunks), ctx)
    reference_ppl = math.exp(total_reference / scored)
    return Perplexity(
        ppl, stderr, scored, len(chunks), ctx, reference_ppl, ppl / reference_ppl, comparer.result()
    )


def _check_finite(nll: NDArray[np.float64], number: int, position: int) -> None:
    """Raise ModelError if a log-likelihood is not finite. One NaN or plus infinity in the logits of a
    position makes all its log-probabilities NaN."""
    wrong = np.flatnonzero(~np.isfinite(nll))
    if wrong.size:
        raise ModelError(
            f"[perplexity] the logits after position {position + int(wrong[0])} of chunk {number + 1} are "
            f"not finite (log-likelihood {-nll[wrong[0]]}): the model's weights are damaged, or its "
            "activations overflow"
        )


def _scored_rows(engine: Engine, chunk: NDArray[np.int32]) -> Iterator[NDArray[np.float32]]:
    """Logits at the positions ctx/2 to ctx-2, in blocks that are small even for large vocabularies."""
    half, last = len(chunk) // 2, len(chunk) - 1
    n_vocab = int(engine.model["n_vocab"])
    step = max(1, _MAX_LOGITS_BYTES // (4 * n_vocab))
    engine.logits(chunk[:half], rows="none")
    for start in range(half, last, step):
        yield engine.logits(chunk[start : min(start + step, last)], reset=False)
