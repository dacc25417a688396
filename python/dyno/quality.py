"""Distances between two sets of logits, which all checks of answers use.

The functions compute in float64 on blocks of rows, so a vocabulary of 150,000 does not need gigabytes. The KL
divergence uses several threads, because NumPy releases the GIL. For arrays of any library that follows the
array API standard, such as CuPy, the KL divergence is computed on their device.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dyno._effective import usable_cores
from dyno.device_array import namespace_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

__all__ = [
    "Comparer",
    "Comparison",
    "compare",
    "kld",
    "kld_rows",
    "log_softmax",
    "nmse",
    "same_top1",
    "top1_agreement",
]

_BLOCK_ELEMENTS = 1 << 20  # 8 MiB of float64
_DEVICE_BLOCK_ELEMENTS = 1 << 22  # a launch costs more on a device, and one block uses the whole device
_MOST_THREADS = 16  # each thread needs memory for a few blocks


def log_softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    """Natural log-probabilities of `logits` [..., n_vocab], in float64."""
    result: NDArray[np.float64] = _log_softmax(np, logits)
    return result


def _log_softmax(xp: Any, logits: Any) -> Any:
    x = xp.asarray(logits, dtype=xp.float64)
    x = x - xp.max(x, axis=-1, keepdims=True)
    return x - xp.log(xp.sum(xp.exp(x), axis=-1, keepdims=True))


def _distances(xp: Any, reference: Any, other: Any) -> Any:
    """KL(reference || other) of each row, with the functions of the namespace `xp`."""
    log_p, log_q = _log_softmax(xp, reference), _log_softmax(xp, other)
    p = xp.exp(log_p)
    terms = p * (log_p - log_q)
    # A term with p = 0 is 0, even if the log-probability is -inf.
    distances = xp.sum(xp.where(p > 0, terms, xp.zeros_like(terms)), axis=-1)
    zero = xp.zeros_like(distances)
    # Never below zero. If one token has nearly all the probability, rounding could make the sum negative.
    distances = xp.where(distances > 0, distances, zero)
    # A NaN in the reference fails the test p > 0. Without this line, such a row would count as perfect.
    return xp.where(_usable(xp, reference) & _usable(xp, other), distances, zero + float("inf"))


def kld_rows(reference_logits: Any, logits: Any) -> Any:
    """Kullback-Leibler divergence KL(reference || other) of each row, in nats.

    Args:
        reference_logits: [n, n_vocab] logits (or log-probabilities) of the reference. NumPy arrays, or arrays
            of a library with `__array_namespace__`, such as CuPy, which then computes on their device.
        logits: [n, n_vocab] logits to compare, from the same library.

    Returns:
        float64 [n], from the same library. A row is infinite if one side has no valid probabilities: it
        contains a NaN or plus infinity, or only minus infinity.

    Raises:
        ValueError: The shapes differ, or hold no row.
        TypeError: The arrays are of different libraries.
    """
    xp = namespace_of(reference_logits, logits)
    if xp is not np:
        return _kld_rows_on_device(xp, reference_logits, logits)
    reference, other = _same_shape(reference_logits, logits)
    rows = np.empty(len(reference), dtype=np.float64)

    def fill(part: slice) -> None:
        with np.errstate(invalid="ignore"):
            rows[part] = _distances(np, reference[part], other[part])

    parts = list(_blocks(reference.shape, _BLOCK_ELEMENTS))
    threads = min(len(parts), usable_cores(), _MOST_THREADS)
    if threads < 2:
        for part in parts:
            fill(part)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(fill, parts))
    return rows


def _kld_rows_on_device(xp: Any, reference: Any, other: Any) -> Any:
    _check_shapes(reference.shape, other.shape)
    with _device_of(reference):
        rows = xp.empty(reference.shape[0], dtype=xp.float64)
        for part in _blocks(reference.shape, _DEVICE_BLOCK_ELEMENTS):
            rows[part] = _distances(xp, reference[part, :], other[part, :])
        return rows


def _device_of(array: Any) -> contextlib.AbstractContextManager[Any]:
    """Make the device of an array the current one. A GPU library computes on the current device, which may be
    another."""
    device: Any = getattr(array, "device", None)
    return device if hasattr(device, "__enter__") else contextlib.nullcontext()


def same_top1(reference_logits: Any, logits: Any) -> int:
    """Number of rows of [n, n_vocab] logits whose most probable token is the same, computed on their device.

    Raises:
        TypeError: The arrays are of different libraries.
    """
    xp = namespace_of(reference_logits, logits)
    with _device_of(reference_logits):
        same = xp.argmax(reference_logits, axis=-1) == xp.argmax(logits, axis=-1)
        return int(xp.sum(same))


def kld(reference_logits: NDArray[Any], logits: NDArray[Any]) -> float:
    """Mean Kullback-Leibler divergence KL(reference || other) over the rows, in nats.

    Args:
        reference_logits: [n, n_vocab] logits of the reference.
        logits: [n, n_vocab] logits to judge.

    Raises:
        ValueError: The shapes differ, or hold no row.
    """
    return float(kld_rows(reference_logits, logits).mean())


def top1_agreement(reference_logits: NDArray[Any], logits: NDArray[Any]) -> float:
    """Fraction of rows whose most probable token is the same. A row without valid probabilities does not
    count as the same.

    Raises:
        ValueError: The shapes differ, or hold no row.
    """
    reference, other = _same_shape(reference_logits, logits)
    same = reference.argmax(axis=-1) == other.argmax(axis=-1)
    return float((same & _usable(np, reference) & _usable(np, other)).mean())


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
    """The result of `compare` over all rows."""

    rows: int
    mean_kld: float
    """Mean KL(reference || other), in nats per row."""
    kld_stderr: float
    max_kld: float
    top1_agreement: float
    """Fraction of rows with the same most probable token."""


class Comparer:
    """A comparison that is computed block by block, for logits that do not fit in memory at once."""

    def __init__(self) -> None:
        self._kld: list[NDArray[np.float64]] = []
        self._agree = 0

    def add(self, reference_logits: NDArray[Any], logits: NDArray[Any]) -> None:
        """Add [n, n_vocab] rows of both sides.

        Raises:
            ValueError: The shapes differ, or hold no row.
        """
        self._kld.append(kld_rows(reference_logits, logits))
        self._agree += round(top1_agreement(reference_logits, logits) * len(logits))

    def result(self) -> Comparison:
        """The comparison of all added rows.

        Raises:
            ValueError: Nothing was added.
        """
        if not self._kld:
            raise ValueError("nothing was compared")
        rows = np.concatenate(self._kld)
        with np.errstate(invalid="ignore"):  # the standard deviation of infinite distances is NaN
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
    _check_shapes(r.shape, o.shape)
    return r, o


def _check_shapes(reference: tuple[int, ...], other: tuple[int, ...]) -> None:
    if reference != other or len(reference) != 2 or 0 in reference:
        raise ValueError(f"expected two arrays of the same shape [n, n_vocab], not {reference} and {other}")


def _usable(xp: Any, logits: Any) -> Any:
    """Whether each row of [n, n_vocab] has valid probabilities. The largest value of a row is NaN if any
    value is NaN."""
    return xp.isfinite(xp.max(logits, axis=-1))


def _blocks(shape: tuple[int, ...], elements: int) -> Iterator[slice]:
    step = max(1, elements // shape[1])
    for start in range(0, shape[0], step):
        yield slice(start, start + step)
