"""Rounds: the paired comparison that decides. A round is a fresh worker process that visits its
configurations there and back again, `A B C C B A`, so that a linear drift cancels in every ratio (ABBA for
two).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from .measure import VisitPolicy, anchor_moved
from .stats import Estimate, estimate, paired_log_ratios
from .target import Configuration, TrialStatus, Visit

# (key, configuration, process, is it the anchor) -> visit
VisitFn = Callable[[str, Configuration, int, bool], Visit]


@dataclass
class Comparison:
    """What rounds gave: for every configuration and metric a list per round of log ratios to the first
    one."""

    names: list[str]
    logs: dict[str, dict[str, list[list[float]]]] = field(default_factory=dict)
    rates: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    failed: dict[str, Visit] = field(default_factory=dict)
    voided: int = 0
    rounds: int = 0

    def ratio(
        self, name: str, metrics: Sequence[str], weights: Mapping[str, float], over: str | None = None
    ) -> Estimate:
        """`name` over the first configuration, or over `over`: weighted geometric mean of `metrics`."""
        groups = self._groups(name, metrics, weights)
        if over is not None and over != self.names[0]:
            base = self._groups(over, metrics, weights)
            groups = [[x - y for x, y in zip(g, b, strict=True)] for g, b in zip(groups, base, strict=True)]
        return estimate(groups, name, over, *metrics)

    def _groups(self, name: str, metrics: Sequence[str], weights: Mapping[str, float]) -> list[list[float]]:
        total = sum(weights[m] for m in metrics)
        if name == self.names[0]:
            first = next(iter(self.logs[n] for n in self.names[1:] if n in self.logs))
            return [[0.0] * len(g) for g in first[metrics[0]]]
        per_metric = [self.logs[name][m] for m in metrics]
        return [
            [
                sum(weights[m] / total * x for m, x in zip(metrics, pair, strict=True))
                for pair in zip(*groups, strict=True)
            ]
            for groups in zip(*per_metric, strict=True)
        ]

    def median_rate(self, name: str, metric: str) -> float:
        values = self.rates.get(name, {}).get(metric, [])
        return float(np.median(values)) if values else 0.0


def visits_in_round(configurations: int) -> int:
    """Every configuration is visited on the way there and on the way back."""
    return 2 * configurations


class Rounds:
    """Args:
    visit: carries out one visit.
    next_process: gives the number of a process that has not run yet.
    affordable: whether so many more visits fit into what is left of the budget.
    void_over: by how much a round's anchor may move.
    now, more_seconds: the time, and whether so much more of it is left: a round of slow configurations
        takes longer than so many visits of the default.
    """

    def __init__(
        self,
        visit: VisitFn,
        next_process: Callable[[], int],
        affordable: Callable[[int], bool],
        metrics: Sequence[str],
        void_over: float,
        now: Callable[[], float] = lambda: 0.0,
        more_seconds: Callable[[float], bool] = lambda seconds: True,
    ) -> None:
        self._visit = visit
        self._next_process = next_process
        self.affordable = affordable
        self._metrics = tuple(metrics)
        self._void_over = void_over
        self._now = now
        self._more_seconds = more_seconds

    def compare(
        self, key: str, configurations: Mapping[str, Configuration], rounds: int, *, insist: bool = False
    ) -> Comparison:
        """Runs up to `rounds` rounds, fewer where the budget ends first, and none where it does not last
        for two, because one decides nothing; with `insist` two are run all the same. Whatever kills its
        worker or fails otherwise is left out from then on."""
        result = Comparison(list(configurations))
        if not insist and not self.affordable(2 * visits_in_round(len(configurations))):
            return result
        voids = 0
        number = 0
        took = 0.0
        while result.rounds < rounds:
            alive = [n for n in configurations if n not in result.failed]
            if len(alive) < 2 or (number > 1 and not self.affordable(visits_in_round(len(alive)))):
                break
            if number > 0 and not (insist and number < 2) and not self._more_seconds(took):
                break
            begun = self._now()
            visits = self._round(f"{key}/r{number}", {n: configurations[n] for n in alive}, result)
            number += 1
            took = max(took, self._now() - begun)
            if visits is None:
                continue  # someone failed; the round is repeated without it
            anchor = visits[alive[0]]
            if anchor_moved(anchor[0], anchor[1], self._metrics) > self._void_over and voids < rounds:
                voids += 1
                continue
            self._record(alive, visits, result)
        result.voided = voids
        for name in [n for n in result.logs if n in result.failed]:
            del result.logs[name]
        return result

    def _round(
        self, key: str, configurations: Mapping[str, Configuration], result: Comparison
    ) -> dict[str, list[Visit]] | None:
        process = self._next_process()
        names = list(configurations)
        visits: dict[str, list[Visit]] = {n: [] for n in names}
        for position, name in enumerate([*names, *reversed(names)]):
            visit = self._visit(f"{key}/{position}", configurations[name], process, name == names[0])
            if visit.status is not TrialStatus.OK:
                result.failed[name] = visit
                return None
            visits[name].append(visit)
        return visits

    def _record(
        self, alive: Sequence[str], visits: Mapping[str, Sequence[Visit]], result: Comparison
    ) -> None:
        result.rounds += 1
        base = visits[alive[0]]
        for name in alive:
            for metric in self._metrics:
                rates = [v.rates(metric) for v in visits[name]]
                result.rates.setdefault(name, {}).setdefault(metric, []).extend(
                    r for half in rates for r in half.values()
                )
                if name == alive[0]:
                    continue
                there = paired_log_ratios(rates[0], base[0].rates(metric))
                back = paired_log_ratios(rates[1], base[1].rates(metric))
                pairs = [(x + y) / 2 for x, y in zip(there, back, strict=True)]
                result.logs.setdefault(name, {}).setdefault(metric, []).append(pairs)


@dataclass(frozen=True, slots=True)
class Bar:
    """What an entry has to clear."""

    margin: Mapping[str, float]  # by metric

    def of(self, metrics: Sequence[str]) -> float:
        """For a geometric mean of several metrics: their noises average."""
        if len(metrics) == 1:
            return self.margin[metrics[0]]
        spread = math.sqrt(sum(self.margin[m] ** 2 for m in metrics)) / len(metrics)
        return max(0.01, spread)

    def beats(
        self,
        comparison: Comparison,
        name: str,
        moves: Sequence[str],
        weights: Mapping[str, float],
        over: str | None = None,
        touched: Collection[str] | None = None,
    ) -> tuple[bool, Estimate]:
        """Whether `name` gains at least the margin on `moves`, its interval excludes 1, and nothing that the
        workload measures falls by more than its margin.

        Args:
            touched: the metrics that what differs can move, as far as is known; default: all.
        """
        gain = comparison.ratio(name, moves, weights, over)
        harmed = any(
            self.harms(
                comparison.ratio(name, [m], weights, over), m, touched is None or m in touched or m in moves
            )
            for m in weights
            if weights[m] > 0
        )
        return gain.ratio >= 1 + self.of(moves) and gain.low > 1 and not harmed, gain

    def harms(self, ratio: Estimate, metric: str, touched: bool = True) -> bool:
        """Whether a metric falls by more than its margin, or, where noise has made the margin wide, by more
        than 1 % beyond doubt. Where nothing that differs is known to touch the metric, only a fall by the
        margin beyond doubt says otherwise: noise in what cannot have changed must not hide a gain."""
        if not touched:
            return ratio.high < 1 - self.margin[metric]
        return ratio.ratio < 1 - self.margin[metric] or ratio.high < 0.99


DEFAULT_POLICY = VisitPolicy()
