"""The method of a measurement, its plausibility check, and scores between two baselines.

A measurement applies a configuration, drops the cold first sample, continues until the rates have stopped
rising, and keeps one sample for each prompt. If a configuration is much slower than the default, it keeps the
samples that it had time for. A GPU that reaches its power limit rests before short prompts. A block is
`baseline, candidates…, baseline`. Each candidate is scored as a ratio to the baseline, interpolated in time
between the two. The whole block is void if the baseline itself has changed.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..core.errors import TargetFailure, TargetUnusable
from ..core.intervals import paired_log_ratios
from ..core.options import DECIDES
from ..core.protocol import (
    Configuration,
    Measurement,
    OpContext,
    Sample,
    Target,
    TrialStatus,
    Workload,
    kind_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..core.options import MeasurementPolicy

BASELINE_DRIFT = 0.03  # a larger change of the baseline makes the block void
# A GPU is held to its power limit on average over about a second. Within that time, the speed of prompts
# depends on earlier work: on an H200 by 2 to 4 % with large u-batches, and not at all with the default. So
# prompts are processed as `dyno bench` does in a fresh process, which draws little power while it loads:
# after a rest. The kept samples are centred on the run that is the middle one there (two for warm-up, five
# that count). If that run begins so late that earlier work no longer matters, there is no rest.
REST_SECONDS = 0.5
RESTED_WARM_UP = 3
SUSTAINED_SECONDS = 0.3  # seconds of a run; four runs come before the middle one
MOST_JOULES = 1e12  # upper bound for a sample
CLOCK_SKEW = 0.05  # a sample that is shorter by more than an independent clock says is implausible


def generation_first(metrics: Sequence[str]) -> tuple[str, ...]:
    """The order of metrics in a measurement: first generation, then prompts, because prompts leave a GPU hot
    and slow for the next work."""
    return tuple(sorted(metrics, key=lambda m: kind_of(m) != "tg"))


def run_measurement(
    target: Target,
    configuration: Configuration,
    workload: Workload,
    metrics: Sequence[str],
    policy: MeasurementPolicy,
    context: OpContext,
) -> Measurement:
    """Measure a configuration in the process of the target, in the order of `metrics`. A TargetFailure
    becomes the status of the measurement. Other errors are raised.

    Raises:
        TargetUnusable: Energy decides, but no counter works.
    """
    uncounted = target.count_energy(policy.energy)
    by_energy = policy.energy == DECIDES
    if by_energy and uncounted:
        raise TargetUnusable(f"--objective energy: {uncounted}")
    started = target.clock()
    samples: list[Sample] = []
    warmup: list[Sample] = []
    stable = True
    try:
        target.apply(configuration, context)
        for metric in metrics:
            taken: list[Sample] = []
            least = policy.prompts + 1
            begun = target.clock()
            while True:
                taken.append(target.measure(workload, metric, len(taken) % policy.prompts))
                rest = policy.rest if len(taken) == 1 else None
                if rest is not None and _depends_on_before(metric, taken[0].seconds):
                    target.rest(rest)
                    begun = target.clock()
                    least += RESTED_WARM_UP
                window = taken[-policy.prompts :]
                if len(taken) >= least and not _rising(window, policy.tolerance):
                    break
                if len(taken) >= max(policy.cap, least):
                    stable = False
                    break
                if policy.longest is not None and target.clock() - begun > policy.longest:
                    window = taken[-min(policy.prompts, max(1, len(taken) - 1)) :]
                    break
            warmup.extend(taken[: -len(window)])
            samples.extend(window)
    except TargetFailure as failure:
        return Measurement(
            TrialStatus(failure.status), tuple(samples), tuple(warmup), stable, failure.message,
            round(target.clock() - started, 6), by_energy,
        )  # fmt: skip
    return Measurement(
        TrialStatus.OK, tuple(samples), tuple(warmup), stable, "", round(target.clock() - started, 6),
        by_energy,
    )  # fmt: skip


def _depends_on_before(metric: str, seconds: float) -> bool:
    """Whether runs of this many seconds end before the power limit makes them independent of earlier work."""
    return kind_of(metric) == "pp" and seconds < SUSTAINED_SECONDS


def rested_longer(runs: Mapping[str, float]) -> float:
    """Additional seconds of a measurement with a rest.

    Args:
        runs: Seconds of one run by metric.
    """
    return sum(REST_SECONDS + RESTED_WARM_UP * s for m, s in runs.items() if _depends_on_before(m, s))


def _rising(window: Sequence[Sample], tolerance: float) -> bool:
    """Whether the first sample of a window is slower than all later ones by more than `tolerance`."""
    if len(window) < 2:
        return False
    return window[0].rate < (1 - tolerance) * min(s.rate for s in window[1:])


def judge_plausibility(
    measurement: Measurement, bounds: Mapping[str, float], elapsed: float | None
) -> Measurement:
    """Mark a measurement whose rates contradict an independent clock or the limits of the hardware.

    Impossible joules mark it only if they decide. Otherwise they are dropped.

    Args:
        bounds: Upper bounds of tokens/s by metric (roofline).
        elapsed: Seconds that passed for the waiting process; None with simulated time.
    """
    if measurement.status is not TrialStatus.OK:
        return measurement
    if not measurement.by_energy:
        measurement = dataclasses.replace(
            measurement, samples=_with_true_joules(measurement.samples),
            warmup=_with_true_joules(measurement.warmup),
        )  # fmt: skip
    message = ""
    everything = (*measurement.warmup, *measurement.samples)
    for sample in everything:
        if not (math.isfinite(sample.seconds) and sample.seconds > 0 and sample.clock_seconds > 0):
            message = f"{sample.metric}: no time has passed ({sample.seconds} s, {sample.clock_seconds} s)"
        elif not _true_joules(sample):
            message = f"{sample.metric}: its energy is {sample.joules} J"
        elif sample.seconds < (1 - CLOCK_SKEW) * sample.clock_seconds - 1e-3:
            two = f"{sample.seconds:.6f} s by one clock, {sample.clock_seconds:.6f} s by another"
            message = f"{sample.metric}: {two}"
        elif sample.rate > (bound := bounds.get(kind_of(sample.metric), math.inf)):
            message = (
                f"{sample.metric}: {sample.rate:,.0f} t/s is above the hardware's bound of {bound:,.0f} t/s"
            )
        if message:
            break
    if not message and elapsed is not None:
        total = sum(s.seconds for s in everything)
        if total > elapsed * (1 + CLOCK_SKEW) + 1e-3:
            message = f"the samples add up to {total:.3f} s, but only {elapsed:.3f} s have passed"
    return (
        dataclasses.replace(measurement, status=TrialStatus.IMPLAUSIBLE, message=message)
        if message
        else measurement
    )


def _true_joules(sample: Sample) -> bool:
    return sample.joules is None or 0 < sample.joules < MOST_JOULES


def _with_true_joules(samples: Sequence[Sample]) -> tuple[Sample, ...]:
    return tuple(s if _true_joules(s) else dataclasses.replace(s, joules=None) for s in samples)


@dataclass(frozen=True, slots=True)
class Score:
    """The score of a candidate: log ratios to the baseline for each metric, paired by prompt."""

    pairs: Mapping[str, tuple[float, ...]]

    def log_ratio(self, metric: str) -> float:
        """Median of the pairs; 0 if the metric was not measured, because the candidate cannot affect it."""
        values = self.pairs.get(metric)
        return float(np.median(values)) if values else 0.0

    def over(self, other: Score | None, metric: str) -> list[float]:
        """Log ratios to another candidate, or to the baseline if that is the default; by sample if both have
        the same number. [0.0] if neither was measured, because they cannot affect the metric."""
        own = self.pairs.get(metric) or (0.0,)
        base = (other.pairs.get(metric) if other is not None else None) or (0.0,)
        if len(own) == len(base):
            return [x - y for x, y in zip(own, base, strict=True)]
        level = float(np.median(base)) if len(own) > 1 else 0.0
        return [x - level for x in own] if len(own) > 1 else [own[0] - y for y in base]

    def combined(self, weights: Mapping[str, float]) -> float:
        """Weighted geometric mean of the ratios of the metrics, as a logarithm."""
        return sum(w * self.log_ratio(m) for m, w in weights.items()) / sum(weights.values())


def score(
    candidate: Measurement,
    baselines: Sequence[tuple[float, Measurement]],
    when: float,
    metrics: Sequence[str],
) -> Score:
    """The score of a candidate against the baselines around it.

    Args: `baselines` are (time, measurement) before the candidate and, if it exists, after it; `when` is the
    time of the candidate."""
    pairs: dict[str, tuple[float, ...]] = {}
    for metric in metrics:
        rates = candidate.rates(metric)
        if not rates:
            continue
        before = baselines[0][1].rates(metric)
        if len(baselines) > 1 and baselines[1][0] > baselines[0][0]:
            after = baselines[1][1].rates(metric)
            share = min(1.0, max(0.0, (when - baselines[0][0]) / (baselines[1][0] - baselines[0][0])))
            base = {p: before[p] ** (1 - share) * after[p] ** share for p in before if p in after}
        else:
            base = before
        pairs[metric] = tuple(paired_log_ratios(rates, base))
    return Score(pairs)


def void_over(within: Sequence[float]) -> float:
    """The largest allowed change of a baseline: 3 %, or more if the noise of a measurement alone causes more.

    Args:
        within: Standard deviation of a measurement within one process by metric, in log units.
    """
    return max([BASELINE_DRIFT, *(3 * math.sqrt(2) * sigma for sigma in within)])


def baseline_moved(before: Measurement, after: Measurement, metrics: Sequence[str]) -> float:
    """The change of a baseline: the largest |median paired ratio − 1| over the metrics."""
    moved = 0.0
    for metric in metrics:
        ratios = paired_log_ratios(after.rates(metric), before.rates(metric))
        if ratios:
            moved = max(moved, abs(math.expm1(float(np.median(ratios)))))
    return moved
