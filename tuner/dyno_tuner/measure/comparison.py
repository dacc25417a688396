"""The comparison of configurations by log ratios, round by round."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ..core.intervals import Estimate, block_spread, estimate

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from ..core.protocol import Measurement

ENOUGH_ROUNDS = 4  # rounds from which a ratio's own spread between rounds is known


@dataclass
class Comparison:
    """The result of rounds: for each configuration, metric and round, a list of log ratios to the first
    configuration."""

    names: list[str]
    key: str = ""
    logs: dict[str, dict[str, list[list[float]]]] = field(default_factory=dict)
    rates: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    speeds: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """Tokens per second, if another value decides."""
    joules: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """Joules per token, if energy was counted."""
    failed: dict[str, Measurement] = field(default_factory=dict)
    halted: dict[str, Measurement] = field(default_factory=dict)
    """A profile without a part that failed, but may run nevertheless. It failed twice after whole rounds,
    which ended the comparison. Or it failed twice before any, and a third try after the rounds succeeded or
    had no time."""
    unsettled: dict[str, Measurement] = field(default_factory=dict)
    """Profiles without a part that failed twice before any whole round, until the third try at the end."""
    forgiven: set[str] = field(default_factory=set)  # configurations that have failed once
    borrowed: set[tuple[str, str]] = field(default_factory=set)  # (configuration, metric); see Likeness
    voided: int = 0
    rounds: int = 0
    begun: int = 0  # number of void rounds
    carried: int = 0  # number of `rounds` that were measured for another comparison

    def untold(self, name: str) -> bool:
        """Whether it is unknown if a configuration of the comparison runs, or how fast."""
        return name not in self.logs and (name in self.halted or name in self.unsettled)

    def ratio(
        self, name: str, metrics: Sequence[str], weights: Mapping[str, float], over: str | None = None
    ) -> Estimate:
        """The ratio of `name` to the first configuration, or to `over`: the weighted geometric mean over
        `metrics`."""
        groups = self._groups(name, metrics, weights)
        if over is not None and over != self.names[0]:
            base = self._groups(over, metrics, weights)
            groups = [
                [x - y for x, y in zip(*_alike([g, b]), strict=True)]
                for g, b in zip(groups, base, strict=True)
            ]
        return estimate(groups, name, over, *metrics, spread=self._spread(metrics, weights))

    def of_metrics(self, named: Mapping[str, str], metrics: Collection[str], key: str = "") -> Comparison:
        """The same rounds as a comparison of configurations that differ from the first one only in these
        metrics, in which they equal other configurations.

        Args:
            named: By configuration, the measured one that equals it in `metrics`.
            metrics: Metrics in which they can differ from the first one.
            key: Key of the new comparison.
        """
        first = self.names[0]
        found = Comparison(
            [first, *named], key, rounds=self.rounds, begun=self.begun, carried=self.rounds,
            voided=self.voided,
        )  # fmt: skip
        for name, shown in named.items():
            found.logs[name] = {
                m: list(rounds) if m in metrics else [[0.0] * len(r) for r in rounds]
                for m, rounds in self.logs[shown].items()
            }
            found.borrowed |= {(name, m) for m in self.logs[shown] if m not in metrics}
        for own, whole in (
            (found.rates, self.rates),
            (found.speeds, self.speeds),
            (found.joules, self.joules),
        ):
            for name, shown in {first: first, **named}.items():
                values = {
                    m: list(of[m])
                    for m in self.rates[first]
                    if m in (of := whole.get(shown if m in metrics else first, {}))
                }
                if values:
                    own[name] = values
        return found

    def _spread(self, metrics: Sequence[str], weights: Mapping[str, float]) -> tuple[float, int] | None:
        """The spread of the ratio of two configurations in a round, from all compared ones; None if the
        rounds of the two suffice."""
        if not 2 <= self.rounds < ENOUGH_ROUNDS:
            return None
        names = [n for n in self.names if n == self.names[0] or n in self.logs]
        names = [n for n in names if not any((n, m) in self.borrowed for m in metrics)]
        if len(names) < 2:
            return None
        levels = [[float(np.median(g)) for g in self._groups(n, metrics, weights)] for n in names]
        sigma, freedom = block_spread(levels)
        return math.sqrt(2) * sigma, freedom

    def _groups(self, name: str, metrics: Sequence[str], weights: Mapping[str, float]) -> list[list[float]]:
        total = sum(weights[m] for m in metrics)
        if name == self.names[0]:
            first = next(iter(self.logs[n] for n in self.names[1:] if n in self.logs))
            return [[0.0] * len(g) for g in first[metrics[0]]]
        per_metric = [self.logs[name][m] for m in metrics]
        return [
            [
                sum(weights[m] / total * x for m, x in zip(metrics, pair, strict=True))
                for pair in zip(*_alike(groups), strict=True)
            ]
            for groups in zip(*per_metric, strict=True)
        ]

    def add_round(
        self, logs: Sequence[tuple[str, str, list[float]]], rates: Sequence[tuple[str, str, list[float]]]
    ) -> None:
        """Add one round.

        Args: by configuration and metric, log ratios to the first configuration, and rates."""
        for name, metric, pairs in logs:
            self.logs.setdefault(name, {}).setdefault(metric, []).append(pairs)
        for name, metric, values in rates:
            self.rates.setdefault(name, {}).setdefault(metric, []).extend(values)
        self.rounds += 1

    def begin_anew(self) -> None:
        """Forget all rounds, including the running one, because later ones are measured in another way."""
        self.voided += self.rounds + 1
        self.rounds = self.carried = 0
        self.logs.clear()
        self.rates.clear()
        self.speeds.clear()
        self.joules.clear()
        self.borrowed.clear()

    def add_costs(self, name: str, metric: str, speeds: Sequence[float], joules: Sequence[float]) -> None:
        """Add values that do not decide: tokens per second, and joules per token."""
        for place, values in ((self.speeds, speeds), (self.joules, joules)):
            if values:
                place.setdefault(name, {}).setdefault(metric, []).extend(values)

    def median_rate(self, name: str, metric: str) -> float:
        """Tokens per second."""
        found = self.speeds.get(name, {}).get(metric) or self.rates.get(name, {}).get(metric, [])
        return float(np.median(found)) if found else 0.0

    def median_joules(self, name: str, metric: str) -> float | None:
        """Median joules per token; None if energy was not counted."""
        found = self.joules.get(name, {}).get(metric, [])
        return float(np.median(found)) if found else None


def _alike(groups: Sequence[Sequence[float]]) -> Sequence[Sequence[float]]:
    """The groups, if they have the same length; otherwise the median of each."""
    if len({len(g) for g in groups}) == 1:
        return groups
    return [[float(np.median(g))] for g in groups]
