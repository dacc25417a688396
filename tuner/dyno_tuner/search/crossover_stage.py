"""The stage that solves thresholds, before anything else is searched.

A threshold is a bound on the u-batch that selects one of two paths. Both paths are measured at u-batches of
the grid, one right after the other in one process, and `crossover.solve` bisects. A path that does not run
loses. The solution is not yet an entry of a profile. The knob keeps its default and the value that takes the
faster path at all u-batches, and the following search decides between them. So a larger u-batch is never
judged with the slower path.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ..core.crossing import Solved, Verdict
from ..core.intervals import paired_log_ratios
from ..core.protocol import Configuration, TrialStatus
from ..measure.baseline_block import rested_alike
from ..space.search_space import with_index
from .crossover import solve, solve_by_curves

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from ..core.protocol import Measurement, Value
    from ..record.context import Context
    from ..space.knobs import Knob
    from ..space.search_space import Point, Space
    from .crossover import Crossing

LIMIT = 12  # most measurements per threshold; two make a ratio
MARGIN = 0.01  # smaller differences between the paths do not count, in log units
_BEATEN = 3.0  # log ratio for a path that does not run


class OutOfTimeError(Exception):
    """The error that the stage's share of the budget is used up."""


@dataclass(frozen=True)
class Sizes:
    """The sizes at which both paths of a threshold can be measured, with the points for the first and the
    second path."""

    tokens: tuple[int, ...]
    first: tuple[Point, ...]
    second: tuple[Point, ...]


class ThresholdStage:
    """The stage that solves the thresholds one after the other.

    `solved` has the results. `seeds` has the fastest settings found on the way.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self.space = context.space
        self.weights = context.weights
        self.more = context.budget.more
        self.note = context.note
        self.solved: list[Solved] = []
        self.seeds: list[dict[str, Value]] = []
        self._best: dict[Hashable, tuple[float, Point]] = {}

    def run(self) -> Space:
        """Solve the thresholds. Returns the space that is left to search, in which a solved threshold has
        only its default and its solution."""
        for name in [k.name for k in self.space.knobs if k.threshold_of and k.code]:
            number = next(n for n, k in enumerate(self.space.knobs) if k.name == name)
            sizes = self._sizes(number)
            if not sizes.tokens:
                continue
            try:
                # An incomplete bisection has no result, so its time is left to the search.
                if not self.more(2 * len(sizes.tokens).bit_length()):
                    raise OutOfTimeError
                crossing = self._solve(number, sizes)
            except OutOfTimeError:
                self.note("threshold", knob=name, verdict="budget")
                self._race_unsolved(sizes)
                break
            value = self._value(number, sizes, crossing)
            value = self._computed(number, value, sizes, crossing)
            knob = self.space.knobs[number]
            self.note(
                "threshold", knob=name, verdict=str(crossing.verdict), value=knob.values[value],
                default=knob.default, measurements=crossing.measurements, tokens=list(sizes.tokens),
                below=crossing.below, **({} if crossing.at is None else {"at": round(crossing.at, 1)}),
                seen={sizes.tokens[i]: [math.exp(x) for x in xs] for i, xs in sorted(crossing.seen.items())},
            )  # fmt: skip
            self.solved.append(_solved(name, sizes, crossing))
            self._remember(number, value)
            self._reduce(number, value)
        return self.space

    # ---- what is measured

    def _sizes(self, number: int) -> Sizes:
        """The u-batches at which the threshold can select either path, with other knobs at their defaults."""
        knob = self.space.knobs[number]
        units = [n for n, k in enumerate(self.space.knobs) if k.name == knob.threshold_of]
        tokens: list[int] = []
        firsts: list[Point] = []
        seconds: list[Point] = []
        seen: set[Hashable] = set()
        base = self.space.default
        for index in range(len(self.space.knobs[units[0]].values)) if units else [None]:
            at = base if index is None else with_index(base, units[0], index)
            by_code = self._by_code(at, number)
            if len(by_code) < 2:
                continue
            first, second = list(by_code.values())[-1], next(iter(by_code.values()))
            kinds = (self.space.code_class(first), self.space.code_class(second))
            if kinds in seen:
                continue
            seen.add(kinds)
            tokens.append(0 if index is None else int(self.space.knobs[units[0]].values[index]))
            firsts.append(first)
            seconds.append(second)
        return Sizes(tuple(tokens), tuple(firsts), tuple(seconds))

    def _by_code(self, at: Point, number: int) -> dict[Hashable, Point]:
        """For each path at this u-batch, the legal value closest to the default, in the order of values. The
        largest one selects the first path."""
        knob = self.space.knobs[number]
        assert knob.code is not None
        found: dict[Hashable, Point] = {}
        for j in range(len(knob.values)):
            point = with_index(at, number, j)
            if not self.space.legal(point):
                continue
            code = knob.code(knob.values[j], self.space.settings(point))
            if code not in found or self.space.distance(point) < self.space.distance(found[code]):
                found[code] = point
        return found

    def _metrics(self, knob: Knob) -> list[str]:
        return [m for m in self.weights if m in knob.moves] or list(self.weights)

    def _solve(self, number: int, sizes: Sizes) -> Crossing:
        knob = self.space.knobs[number]
        metrics = self._metrics(knob)
        times: dict[int, list[tuple[float, float]]] = {}

        def measure(index: int, repeat: int) -> tuple[float, float]:
            if not self.more(2):
                raise OutOfTimeError
            pair = (sizes.first[index], sizes.second[index])
            key = f"thresholds/{knob.name}/{sizes.tokens[index]}/{repeat}"
            order = (0, 1) if repeat % 2 == 0 else (1, 0)  # alternating, so that drift favours neither path
            measurements = rested_alike(
                lambda again: self._pair(pair, order, f"{key}/again" if again else key, metrics),
                lambda: self._context.recorder.resting,
            )
            ran = [v is not None and v.status is TrialStatus.OK for v in measurements]
            if not all(ran):
                return (_BEATEN if ran[0] else -_BEATEN if ran[1] else 0.0), self._context.sigma
            logs = []
            for metric in metrics:
                pairs = paired_log_ratios(measurements[0].rates(metric), measurements[1].rates(metric))  # type: ignore[union-attr]
                logs.append((self.weights[metric], float(np.median(pairs)) if pairs else 0.0))
            total = sum(w for w, _ in logs)
            first, second = (self._token_seconds(m, metrics) for m in measurements)
            times.setdefault(index, []).append((first, second))
            return sum(w * x for w, x in logs) / total, math.sqrt(2) * self._context.sigma

        def seconds(index: int) -> tuple[float, float] | None:
            found = times.get(index)
            return (
                None
                if not found
                else (float(np.median([a for a, _ in found])), float(np.median([b for _, b in found])))
            )

        if knob.value_at is None:
            return solve(sizes.tokens, measure, margin=MARGIN, limit=LIMIT)
        return solve_by_curves(sizes.tokens, measure, seconds, margin=MARGIN, limit=LIMIT)

    def _token_seconds(self, measurement: Measurement | None, metrics: Sequence[str]) -> float:
        """Seconds per token; for several metrics, their weighted geometric mean."""
        assert measurement is not None
        total = sum(self.weights[m] for m in metrics)
        logs = [
            self.weights[m] / total * math.log(float(np.median(list(measurement.rates(m).values()))))
            for m in metrics
        ]
        return math.exp(-sum(logs))

    def _pair(
        self, pair: tuple[Point, Point], order: Sequence[int], key: str, metrics: Sequence[str]
    ) -> list[Measurement | None]:
        """The measurements of both paths; None for a path with wrong answers."""
        measurements: list[Measurement | None] = [None, None]
        for side in order:
            settings = self.space.settings(pair[side])
            if self._context.gate.admit(self._context.space.point(settings)) is None:
                measurement = self._context.measure(f"{key}/{side}", Configuration(settings), metrics)
                measurements[side] = self._seen(pair[side], measurement, metrics)
        return measurements

    def _seen(self, point: Point, measurement: Measurement, metrics: Sequence[str]) -> Measurement:
        if measurement.status is TrialStatus.OK:
            total = sum(self.weights[m] for m in metrics)
            level = 0.0
            for metric in metrics:
                rates = [math.log(r) for r in measurement.rates(metric).values()]
                level += self.weights[metric] / total * float(np.median(rates))
            self._best[self.space.code_class(point)] = (level, point)
        return measurement

    # ---- what follows from it

    def _value(self, number: int, sizes: Sizes, crossing: Crossing) -> int:
        """Number of the value that takes the faster path at most sizes; among several, the one closest to the
        default. A tie keeps the default."""
        knob = self.space.knobs[number]
        assert knob.code is not None
        if crossing.verdict is Verdict.TIE:
            return self.space.default[number]
        wanted = [
            self.space.code_class(sizes.first[i] if i < crossing.below else sizes.second[i])
            for i in range(len(sizes.tokens))
        ]

        def fit(j: int) -> tuple[int, float]:
            points = [with_index(p, number, j) for p in sizes.first]
            right = sum(self.space.code_class(p) == w for p, w in zip(points, wanted, strict=True))
            return -right, knob.distance(knob.values[j])

        return min(range(len(knob.values)), key=fit)

    def _computed(self, number: int, value: int, sizes: Sizes, crossing: Crossing) -> int:
        """The number of the computed value, which is added to the space if the sizes next to the crossing
        have confirmed it; otherwise `value`, the closest one of the grid."""
        knob = self.space.knobs[number]
        if knob.value_at is None or crossing.verdict is not Verdict.CROSSING or crossing.at is None:
            return value
        exact = knob.value_at(crossing.at)
        assert knob.code is not None
        for point in sizes.first:
            settings = self.space.settings(point)
            if knob.code(exact, settings) != knob.code(knob.values[value], settings):
                return value
        if exact in knob.values:
            return knob.values.index(exact)
        self._extend(number, exact)
        return self.space.knobs[number].values.index(exact)

    def _extend(self, number: int, exact: Value) -> None:
        knob = self.space.knobs[number]
        best = {code: (level, self.space.settings(point)) for code, (level, point) in self._best.items()}
        self.space = self.space.with_knob(
            number, replace(knob, values=tuple(sorted((*knob.values, exact), key=float)))
        )
        self._best = {code: (level, self.space.point(s)) for code, (level, s) in best.items()}

    def _race_unsolved(self, sizes: Sizes) -> None:
        """The starting points of the search if there was no time to solve: the fastest measured point, and
        the path of the largest thresholds at the largest u-batch."""
        best = [max(self._best.values(), key=lambda entry: entry[0])[1]] if self._best else []
        self.seeds += [self.space.settings(p) for p in dict.fromkeys([sizes.first[-1], *best])]

    def _remember(self, number: int, value: int) -> None:
        """Remember the fastest measured point, with the solution instead of its threshold, as a start of the
        search."""
        knob = self.space.knobs[number]
        if not self._best:
            return
        _, point = max(self._best.values(), key=lambda entry: entry[0])
        solution = with_index(point, number, value)
        if self.space.code_class(solution) == self.space.code_class(point) and self.space.legal(solution):
            self.seeds.append({**self.space.settings(solution), knob.name: knob.values[value]})

    def _reduce(self, number: int, value: int) -> None:
        """Reduce the space to one or two values of this knob. The default does not change."""
        knob = self.space.knobs[number]
        kept = tuple(v for j, v in enumerate(knob.values) if j in (value, self.space.default[number]))
        self._best = {}  # points have new numbers
        self.space = self.space.with_knob(number, replace(knob, values=kept))


def _solved(name: str, sizes: Sizes, crossing: Crossing) -> Solved:
    located = crossing.verdict in (Verdict.CROSSING, Verdict.ALWAYS)
    return Solved(
        name, crossing.verdict, sizes.tokens[crossing.below - 1] if located else None,
        {sizes.tokens[i]: math.exp(float(np.mean(logs))) for i, logs in sorted(crossing.seen.items())},
    )  # fmt: skip
