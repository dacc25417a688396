"""How far one set of logits is from another: the numbers that every check of answers is made of.

All of them work in float64 on blocks of rows, so that a vocabulary of 150k does not need gigabytes; KL
divergence takes the blocks on several threads, because NumPy releases the interpreter while it computes.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dyno._effective import usable_cores

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

__all__ = ["Comparer", "Comparison", "compare", "kld", "log_softmax", "nmse", "top1_agreement"]

_BLOCK_ELEMENTS = 1 << 20  # 8 MiB of float64
_MOST_THREADS = 16  # each holds some blocks of its own


def log_softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    """Natural log-probabilities of `logits` [..., n_vocab], in float64."""
    x = np.asarray(logits, dtype=np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    result: NDArray[np.float64] = x - np.log(np.exp(x).sum(axis=-1, keepdims=True))
    return result


def kld_rows(reference_logits: NDArray[Any], logits: NDArray[Any]) -> NDArray[np.float64]:
    """Kullback-Leibler divergence KL(reference || other) of each row, in nats.

    Args:
        reference_logits: [n, n_vocab] logits (or log-probabilities) taken as the truth.
        logits: [n, n_vocab] logits to judge.

    Returns:
        float64 [n]. Infinite for a row that gives no probabilities on either side: it holds a NaN or plus
        infinity, or nothing but minus infinity.

    Raises:
        ValueError: The shapes differ, or hold no row.
    """
    reference, other = _same_shape(reference_logits, logits)
    rows = np.empty(len(reference), dtype=np.float64)

    def fill(part: slice) -> None:
        with np.errstate(invalid="ignore"):
            log_p = log_softmax(reference[part])
            log_q = log_softmax(other[part])
            p = np.exp(log_p)
            # p = 0 contributes nothing, also where the log-probability is -inf.
            terms = np.where(p > 0, p * (log_p - log_q), 0.0)
        # Never below zero; where one token has all the probability, the rest may round to less.
        distances = np.maximum(terms.sum(axis=-1), 0.0)
        # A NaN in the reference is no p above 0: without this line such a row would be a perfect one.
        rows[part] = np.where(_usable(reference[part]) & _usable(other[part]), distances, np.inf)

    parts = list(_blocks(reference.shape))
    threads = min(len(parts), usable_cores(), _MOST_THREADS)
    if threads < 2:
        for part in parts:
            fill(part)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(fill, parts))
    return rows


def kld(reference_logits: NDArray[Any], logits: NDArray[Any]) -> float:
    """Mean Kullback-Leibler divergence KL(reference || other) over the rows, in nats.

    Args:
        reference_logits: [n, n_vocab] logits taken as the truth.
        logits: [n, n_vocab] logits to judge.

    Raises:
        ValueError: The shapes differ, or hold no row.
    """
    return float(kld_rows(reference_logits, logits).mean())


def top1_agreement(reference_logits: NDArray[Any], logits: NDArray[Any]) -> float:
    """Fraction of rows whose most probable token is the same; a row without probabilities has none.

    Raises:
        ValueError: The shapes differ, or hold no row.
    """
    reference, other = _same_shape(reference_logits, logits)
    same = reference.argmax(axis=-1) == other.argmax(axis=-1)
    return float((same & _usable(reference) & _usable(other)).mean())


def nmse(reference: NDArray[Any], other: NDArray[Any]) -> float:
    """Normalised mean square error: sum((other - reference)²) / sum((reference - mean(reference))²).

    Raises:
        ValueError: The shapes differ, or the reference is constant.
    """
    r, o = np.asarray(reference, dtype=np.float64), np.asarray(other, dtype=np.float64)
    if r.shape != o.shape:
        raise ValueError(f"shapes differ: reference {r.shape}, other {o.shape}")
    spread = float(((r - r.mean()) ** 2).sum())
    if spread == 0.0:
        raise ValueError("the reference is constant, so an error cannot be normalised by its spread")
    return float(((o - r) ** 2).sum()) / spread


@dataclass(frozen=True)
class Comparison:
    """What `compare` found over all rows."""

    rows: int
    mean_kld: float
    """KL(reference || other), nats per row."""
    kld_stderr: float
    max_kld: float
    top1_agreement: float
    """Fraction of rows with the same most probable token."""


class Comparer:
    """Collects a comparison block by block, for logits that do not fit in memory at once."""

    def __init__(self) -> None:
        self._kld: list[NDArray[np.float64]] = []
        self._agree = 0

    def add(self, reference_logits: NDArray[Any], logits: NDArray[Any]) -> None:
        """Take in [n, n_vocab] rows of both sides.

        Raises:
            ValueError: The shapes differ, or hold no row.
        """
        self._kld.append(kld_rows(reference_logits, logits))
        self._agree += round(top1_agreement(reference_logits, logits) * len(logits))

    def result(self) -> Comparison:
        """The comparison of everything that was added.

        Raises:
            ValueError: Nothing was added.
        """
        if not self._kld:
            raise ValueError("nothing was compared")
        rows = np.concatenate(self._kld)
        with np.errstate(invalid="ignore"):  # the spread of infinite distances is no number
            stderr = float(rows.std(ddof=1) / np.sqrt(len(rows))) if len(rows) > 1 else 0.0
        return Comparison(len(rows), float(rows.mean()), stderr, float(np.max(rows)), self._agree / len(rows))


def compare(reference_logits: NDArray[Any], logits: NDArray[Any]) -> Comparison:
    """KLD and top-1 agreement of two [n, n_vocab] arrays in one pass.

    Raises:
        ValueError: The shapes differ, or hold no row.
    """
    comparer = Comparer()
    comparer.add(reference_logits, logits)
    return comparer.result()


def _same_shape(reference: NDArray[Any], other: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    r, o = np.asarray(reference), np.asarray(other)
    if r.shape != o.shape or r.ndim != 2 or r.size == 0:
        raise ValueError(f"expected two arrays of the same shape [n, n_vocab], not {r.shape} and {o.shape}")
    return r, o


def _usable(logits: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether each row of [n, n_vocab] gives probabilities: its largest value is NaN if any of it is."""
    result: NDArray[np.bool_] = np.isfinite(logits.max(axis=-1))
    return result


def _blocks(shape: tuple[int, ...]) -> Iterator[slice]:
    step = max(1, _BLOCK_ELEMENTS // shape[1])
    for start in range(0, shape[0], step):
        yield slice(start, start + step)
