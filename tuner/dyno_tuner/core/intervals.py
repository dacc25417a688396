"""Statistics of paired, noisy rates. They are computed with natural logarithms of ratios, so that gains and
losses have the same weight, and reported as plain ratios."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_T975 = (math.inf, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)


def keyed_rng(*key: object) -> np.random.Generator:
    """A random generator that depends only on `key`, so that any draw can be repeated without the previous
    ones."""
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "little"))


def t975(degrees: int) -> float:
    """The 97.5 % quantile of Student's t distribution. With few samples, two standard errors are too few."""
    if degrees < 1:
        return math.inf
    return _T975[degrees] if degrees < len(_T975) else 1.96 + 2.4 / degrees


def t_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t distribution.

    Raises:
        ValueError: The probability is outside (0, 1), or there is no degree of freedom.
    """
    if not 0 < probability < 1 or degrees < 1:
        raise ValueError(f"no quantile for probability {probability} and {degrees} degrees of freedom")
    from scipy.special import stdtrit  # imported here, because it takes a second and workers do not need it

    return float(stdtrit(degrees, probability))


def paired_log_ratios(candidate: Mapping[int, float], base: Mapping[int, float]) -> list[float]:
    """log(candidate / base) for each prompt that both have run."""
    return [math.log(candidate[p] / base[p]) for p in sorted(candidate) if p in base]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A ratio of rates with its 95 % interval and the number of paired samples behind it."""

    ratio: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        """The estimate in words, such as `1.042 × [1.031, 1.054]`."""
        return f"{self.ratio:.3f} × [{self.low:.3f}, {self.high:.3f}]"

    def to_dict(self) -> dict[str, float | int | list[float]]:
        return {"ratio": self.ratio, "ci95": [self.low, self.high], "n": self.n}

    def widened(self, half: float) -> Estimate:
        """The estimate with an interval of at least this half-width (in log) to each side."""
        factor = math.exp(half)
        return replace(self, low=min(self.low, self.ratio / factor), high=max(self.high, self.ratio * factor))


def block_residuals(levels: Sequence[Sequence[float]]) -> tuple[np.ndarray, int]:
    """Residual levels and their degrees of freedom, after removing the effects of configurations and of
    rounds (randomised block design).

    Args:
        levels: By configuration, one level per round; at least two configurations and two rounds.
    """
    table = np.asarray(levels, dtype=float)
    residual = table - table.mean(axis=0) - table.mean(axis=1, keepdims=True) + table.mean()
    return residual, (table.shape[0] - 1) * (table.shape[1] - 1)


def block_spread(levels: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Standard deviation of a residual level, and its degrees of freedom."""
    residual, freedom = block_residuals(levels)
    return math.sqrt(float((residual**2).sum()) / freedom), freedom


def estimate(
    groups: Sequence[Sequence[float]],
    *key: object,
    resamples: int = 400,
    spread: tuple[float, int] | None = None,
) -> Estimate:
    """The median of paired log ratios, with a bootstrap interval over groups (worker processes) and pairs
    within them.

    Groups are resampled first, because differences between processes (such as memory addresses) do not
    average out within one. The interval is never narrower than Student's interval over the medians of groups,
    because a bootstrap over a few groups is too narrow (it contains the true value in 75 to 85 % of cases).

    Args:
        spread: Standard deviation of a group and its degrees of freedom, if they are known from more than
            these groups. Two or three groups are too few to estimate it.
    """
    kept = [np.asarray(g, dtype=float) for g in groups if len(g)]
    if not kept:
        raise ValueError("estimate() needs at least one paired sample")
    pooled = np.concatenate(kept)
    centre = float(np.median(pooled))
    rng = keyed_rng("bootstrap", *key)
    longest = max(len(g) for g in kept)
    padded = np.full((len(kept), longest), np.nan)
    for row, g in zip(padded, kept, strict=True):
        row[: len(g)] = g
    sizes = np.array([len(g) for g in kept])
    chosen = rng.integers(len(kept), size=(resamples, len(kept)))
    inner = (rng.random((resamples, len(kept), longest)) * sizes[chosen][:, :, None]).astype(int)
    values = padded[chosen[:, :, None], inner]
    if (sizes != longest).any():  # a group of n pairs contributes n draws
        values[np.broadcast_to(np.arange(longest), values.shape) >= sizes[chosen][:, :, None]] = np.nan
    draws = np.nanmedian(values.reshape(resamples, -1), axis=1)
    low, high = (float(x) for x in np.quantile(draws, (0.025, 0.975)))
    if len(kept) > 1:
        medians = np.array([np.median(g) for g in kept])
        sigma, freedom = spread or (float(medians.std(ddof=1)), len(kept) - 1)
        half = t975(freedom) * sigma / math.sqrt(len(kept))
        low, high = min(low, centre - half), max(high, centre + half)
    return Estimate(math.exp(centre), math.exp(min(low, centre)), math.exp(max(high, centre)), len(pooled))


LEAST_MARGIN = 0.01  # smaller gains are not worth an entry, even on a quiet machine


@dataclass(frozen=True, slots=True)
class Noise:
    """The noise of a metric from an A/A comparison, in log units (0.01 is 1 %)."""

    within: float  # standard deviation of a measurement within one process
    between: float  # standard deviation between processes, beyond what `within` explains
    drift: float  # change of the level over the stage
    measurements: int
    processes: int

    def standard_error(self, rounds: int) -> float:
        """Standard error (in log) of a ratio from `rounds` ABBA rounds, each in its own process.

        A round measures each side twice. The part of the noise that is common to a process cancels in the
        ratio. It is unknown how much of `between` is common, so all of it counts."""
        return math.sqrt((2 * self.between**2 + self.within**2) / max(rounds, 1))

    def half_width(self, rounds: int) -> float:
        """Half-width of the 95 % interval of such a ratio, if only this noise is known. It uses Student's
        quantile, because three processes estimate the noise between processes badly."""
        freedom = self._freedom(2 * self.between**2, self.within**2)
        return t975(freedom) * self.standard_error(rounds)

    def _freedom(self, between: float, within: float) -> int:
        """Degrees of freedom of the sum of two variances (Welch and Satterthwaite)."""
        # With more than three processes, the line of drift takes one more; see `noise_of`.
        processes = max(1, self.processes - (2 if self.processes > 3 else 1))
        measurements = max(1, self.measurements - self.processes)
        spread = between**2 / processes + within**2 / measurements
        return max(1, int((between + within) ** 2 / spread)) if spread else measurements

    def margin(self, rounds: int) -> float:
        """The margin that a gain must exceed: 1 %, or twice the half-width that the interval would have if
        this noise were known exactly.

        The margin is a threshold and not an interval. For an entry, the interval of its own rounds, which
        uses Student's quantile, must also be above 1. With Student's quantile here too, margins would be more
        than twice as wide, and tunes would not be safer."""
        return max(LEAST_MARGIN, 2 * 1.96 * self.standard_error(rounds))


def noise_of(measurements: Sequence[Sequence[Mapping[int, float]]]) -> Noise:
    """The noise from measurements of the same configuration: for each process, a list of rates by prompt in
    order of time.

    Drift is removed as a straight line over all measurements before the spread is computed, and reported
    separately. With fewer than four processes, drift cannot be separated from differences between processes,
    so it counts as such."""
    reference = {p: math.log(r) for p, r in measurements[0][0].items()}
    levels = [
        [
            float(np.median([math.log(r) - reference[p] for p, r in v.items() if p in reference]))
            for v in process
        ]
        for process in measurements
    ]
    flat = np.array([x for process in levels for x in process])
    time = np.arange(len(flat), dtype=float)
    slope = 0.0
    if len(flat) >= 4:
        steps = [(flat[j] - flat[i]) / (j - i) for i in range(len(flat)) for j in range(i + 1, len(flat))]
        slope = float(np.median(steps))  # Theil-Sen estimator: one throttled measurement does not tilt it
    residual = flat - slope * time
    split: list[np.ndarray] = []
    start = 0
    for process in levels:
        split.append(residual[start : start + len(process)])
        start += len(process)
    inner = [x for process in split for x in (process - process.mean())]
    freedom = len(flat) - len(levels)
    within = math.sqrt(sum(x * x for x in inner) / freedom) if freedom > 0 else 0.0
    # A line through two or three processes would take most of their differences as drift.
    enough = len(split) > 3
    means = np.array([np.mean(process) for process in (split if enough else levels)])
    between = 0.0
    if len(means) > 1:
        per_process = len(flat) / len(means)
        variance = float(means.var(ddof=2 if enough else 1))
        between = math.sqrt(max(0.0, variance - within**2 / per_process))
    return Noise(within, between, slope * (len(flat) - 1), len(flat), len(levels))
