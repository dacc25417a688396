"""The ABBA rounds of a comparison, and the verdict.

A round is four fresh processes, A B B A, so that a linear drift cancels in the ratio. The difference between
the two processes of one side gives the noise for the verdict.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..core.errors import Interrupted
from ..core.intervals import Estimate, estimate
from .run import Energy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ..core.protocol import Workload
    from .run import Run

FASTER, SLOWER, SAME = "faster", "slower", "no difference"
LEAST_ROUNDS = 2


@dataclass(frozen=True)
class Options:
    workload: Workload
    rounds: int = 6
    budget: float | None = None  # seconds; no round starts that would exceed it
    least: float = 0.01  # smaller differences do not count
    seed: int = 0
    unit: str = "t/s"  # unit of the rates in the lines about rounds


@dataclass(frozen=True)
class Metric:
    """The comparison of B with A on one metric."""

    a: float  # median tokens/s
    b: float
    ratio: Estimate
    margin: float  # least |ratio - 1| of a difference
    verdict: str

    def to_dict(self) -> dict[str, Any]:
        return {
            "a": self.a, "b": self.b, **self.ratio.to_dict(), "margin": self.margin, "verdict": self.verdict,
        }  # fmt: skip


@dataclass(frozen=True)
class Objective:
    """The comparison of B with A on a whole mix: the weighted geometric mean of the ratios."""

    ratio: Estimate
    margin: float
    verdict: str

    def to_dict(self) -> dict[str, Any]:
        return {**self.ratio.to_dict(), "margin": self.margin, "verdict": self.verdict}


@dataclass
class Compared:
    metrics: dict[str, Metric] = field(default_factory=dict)
    objective: Objective | None = None  # only for a mix
    memory: dict[str, tuple[float, float]] = field(default_factory=dict)  # MiB of A and B: host, gpu
    energy: dict[str, dict[str, tuple[Energy, Energy]]] = field(default_factory=dict)
    """Energy of A and B by metric and source, as medians over processes."""
    rounds: int = 0
    seconds: float = 0.0
    samples: dict[str, dict[str, list[list[float]]]] = field(default_factory=dict)
    interrupted: bool = False

    @property
    def verdict(self) -> str:
        found = {m.verdict for m in self.metrics.values()} - {SAME}
        return SAME if not found else "mixed" if len(found) > 1 else found.pop()


class TooEarly(Interrupted):
    """The error of a comparison that was interrupted before enough rounds for a verdict."""


def compare(measure: Callable[[str], Run], options: Options, say: Callable[[str], None]) -> Compared:
    """Run rounds until the budget or their number is exhausted, and compare the two sides.

    Args:
        measure: Runs one process of side "A" or "B".
        say: Receives a line about each round.

    Raises:
        TooEarly: Interrupted before two rounds had ended.
    """
    begun = time.monotonic()
    rounds: list[dict[str, list[Run]]] = []
    interrupted = False
    try:
        measure("A")  # the first load of a file does not count
        longest = 0.0
        while len(rounds) < max(LEAST_ROUNDS, options.rounds):
            since = time.monotonic()
            spent = since - begun + longest
            if len(rounds) >= LEAST_ROUNDS and options.budget is not None and spent > options.budget:
                break
            done: dict[str, list[Run]] = {"A": [], "B": []}
            for name in "ABBA":
                done[name].append(measure(name))
            rounds.append(done)
            longest = max(longest, time.monotonic() - since)
            say(_line(len(rounds), done, options))
    except KeyboardInterrupt:
        interrupted = True
    if len(rounds) < LEAST_ROUNDS:
        raise TooEarly(f"interrupted after {len(rounds)} rounds; a verdict needs {LEAST_ROUNDS}")
    result = judge(rounds, options)
    result.seconds = time.monotonic() - begun
    result.interrupted = interrupted
    return result


def judge(rounds: Sequence[Mapping[str, Sequence[Run]]], options: Options) -> Compared:
    """The verdict on rounds, each of the form `{"A": [first, last], "B": [second, third]}`."""
    result = Compared(rounds=len(rounds))
    for metric in options.workload.metrics:
        result.metrics[options.workload.label(metric)] = _metric(metric, rounds, options)
    if options.workload.parts:
        result.objective = _objective(rounds, options)
    for name in ("host_mib", "gpu_mib"):
        sides = [[getattr(run, name) for r in rounds for run in r[side]] for side in "AB"]
        if all(x is not None for side in sides for x in side):
            result.memory[name] = (max(sides[0]), max(sides[1]))
    result.energy = _energy(rounds, options.workload)
    result.samples = {
        side: {m: [list(run.rates[m]) for r in rounds for run in r[side]] for m in options.workload.metrics}
        for side in "AB"
    }
    return result


def _energy(
    rounds: Sequence[Mapping[str, Sequence[Run]]], workload: Workload
) -> dict[str, dict[str, tuple[Energy, Energy]]]:
    """Medians of both sides, for sources that all processes could read."""
    found: dict[str, dict[str, tuple[Energy, Energy]]] = {}
    for metric in workload.metrics:
        told = [[run.energy.get(metric, {}) for r in rounds for run in r[side]] for side in "AB"]
        sources = set.intersection(*(set(by) for side in told for by in side))
        for source in sorted(sources):
            pair = [
                Energy(
                    statistics.median(by[source].joules_per_token for by in side),
                    statistics.median(by[source].watts for by in side),
                )
                for side in told
            ]
            found.setdefault(workload.label(metric), {})[source] = (pair[0], pair[1])
    return found


def _metric(metric: str, rounds: Sequence[Mapping[str, Sequence[Run]]], options: Options) -> Metric:
    found = _judged(rounds, options, lambda run: [math.log(x) for x in run.rates[metric]], metric)
    medians = {
        s: statistics.median(x for r in rounds for run in r[s] for x in run.rates[metric]) for s in "AB"
    }
    return Metric(medians["A"], medians["B"], *found)


def _objective(rounds: Sequence[Mapping[str, Sequence[Run]]], options: Options) -> Objective:
    weights = options.workload.weights
    total = sum(weights.values())

    def logs(run: Run) -> list[float]:
        """Weighted means of log rates over the parts, prompt by prompt."""
        prompts = zip(*(run.rates[m] for m in weights), strict=True)
        return [
            sum(w / total * math.log(x) for w, x in zip(weights.values(), rates, strict=True))
            for rates in prompts
        ]

    return Objective(*_judged(rounds, options, logs, "objective"))


def _judged(
    rounds: Sequence[Mapping[str, Sequence[Run]]], options: Options, logs_of: Callable[[Run], list[float]],
    key: str,
) -> tuple[Estimate, float, str]:  # fmt: skip
    """The ratio with its interval, the margin and the verdict. `logs_of` gives log rates by prompt."""
    groups: list[list[float]] = []
    apart: list[float] = []  # differences of two processes of one side in one round
    for done in rounds:
        logs = {s: [logs_of(run) for run in done[s]] for s in "AB"}
        pairs = min(len(x) for side in logs.values() for x in side)
        mean = {s: [(logs[s][0][i] + logs[s][1][i]) / 2 for i in range(pairs)] for s in "AB"}
        groups.append([mean["B"][i] - mean["A"][i] for i in range(pairs)])
        apart += [statistics.median(logs[s][0]) - statistics.median(logs[s][1]) for s in "AB"]
    # Two processes differ by sqrt(2) sigma. The ratio of a round averages two processes on each side, which
    # halves the variance of each side.
    sigma = math.sqrt(sum(x * x for x in apart) / (2 * len(apart)))
    margin = max(options.least, 2 * 1.96 * sigma / math.sqrt(len(rounds)))
    found = estimate(groups, options.seed, "ab", key)
    verdict = SAME
    if found.ratio > 1 + margin and found.low > 1:
        verdict = FASTER
    elif found.ratio < 1 / (1 + margin) and found.high < 1:
        verdict = SLOWER
    return found, margin, verdict


def _line(number: int, done: Mapping[str, Sequence[Run]], options: Options) -> str:
    parts, workload = [], options.workload
    for metric in workload.metrics:
        a, b = (statistics.fmean(statistics.median(run.rates[metric]) for run in done[s]) for s in "AB")
        shown = f"{_number(a)} and {_number(b)} {options.unit}"
        parts.append(f"{workload.label(metric)} {shown} ({b / a:.3f})")
    return f"round {number}: {', '.join(parts)}"


def _number(rate: float) -> str:
    return f"{rate:,.1f}" if rate >= 10 else f"{rate:.3g}"
