"""The search space: knobs, legal combinations, and configurations that run the same code.

A point of the space is a tuple of value indices, one for each knob. Points of the same class run the same
code. The search never measures two points of one class as different ones.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..core.protocol import METRICS, Configuration, Settings, Value, kind_of
from .knobs import Fidelity, Knob

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

Point = tuple[int, ...]
_ENUMERABLE = 50_000


def with_index(point: Point, n: int, index: int) -> Point:
    """`point` with another value of knob `n`, by index."""
    return (*point[:n], index, *point[n + 1 :])


class Space:
    """A search space: knobs, with an optional constraint on whole settings.

    Args:
        knobs: The knobs, in the order of points.
        legal: A hard constraint. Points that violate it are never proposed. The default point must be legal.
        fixed: Settings that are not searched, but belong to all configurations.
        listed: The only points of the space, if they are known individually.
    """

    def __init__(
        self,
        knobs: Sequence[Knob],
        legal: Callable[[Settings], bool] | None = None,
        fixed: Mapping[str, Value] | None = None,
        listed: Sequence[Point] | None = None,
    ) -> None:
        self.knobs = tuple(knobs)
        self._listed = None if listed is None else dict.fromkeys(listed)
        self.fixed = dict(fixed or {})
        self._legal = legal
        self.default: Point = tuple(k.values.index(k.default) for k in self.knobs)
        if not self.legal(self.default):
            raise ValueError(
                f"the default settings {self.settings(self.default)} break the space's own constraint"
            )

    def __len__(self) -> int:
        """Number of points before constraints and classes."""
        if self._listed is not None:
            return len(self._listed)
        return int(np.prod([len(k.values) for k in self.knobs])) if self.knobs else 1

    def with_knob(self, number: int, knob: Knob) -> Space:
        """The same space with other values of one knob. Points have new indices."""
        knobs = (*self.knobs[:number], knob, *self.knobs[number + 1 :])
        listed = None
        if self._listed is not None:
            every = [self.settings(p) for p in self._listed]
            listed = [
                tuple(k.values.index(s[k.name]) for k in knobs) for s in every if s[knob.name] in knob.values
            ]
        return Space(knobs, self._legal, self.fixed, listed)

    def for_metrics(self, metrics: Sequence[str]) -> Space:
        """The same space with knobs that affect all metrics of their kinds, which are the parts of a mix."""
        if all(m in METRICS for m in metrics):
            return self
        knobs = [
            replace(k, moves=frozenset(m for m in metrics if kind_of(m) in {kind_of(x) for x in k.moves}))
            for k in self.knobs
        ]
        return Space(knobs, self._legal, self.fixed, None if self._listed is None else list(self._listed))

    def settings(self, point: Point) -> dict[str, Value]:
        return {**self.fixed, **{k.name: k.values[i] for k, i in zip(self.knobs, point, strict=True)}}

    def configuration(self, point: Point) -> Configuration:
        return Configuration(self.settings(point))

    def point(self, settings: Settings) -> Point:
        """The point of settings. Missing settings take their defaults. Raises ValueError for a value that is
        not in the space."""
        return tuple(k.values.index(settings.get(k.name, k.default)) for k in self.knobs)

    def allowed(self, settings: Settings) -> bool:
        """Whether the constraint of the space holds."""
        return self._legal is None or self._legal(settings)

    def legal(self, point: Point) -> bool:
        if self._listed is not None and point not in self._listed:
            return False
        return self.allowed(self.settings(point))

    def code_class(self, point: Point) -> Hashable:
        """The class of a point, which is equal for points that run the same code."""
        return self._code_of(self.settings(point))

    def _code_of(self, settings: Mapping[str, Value]) -> Hashable:
        return tuple(k.code(settings[k.name], settings) if k.code else settings[k.name] for k in self.knobs)

    def identity(self, configuration: Configuration) -> Hashable:
        """The class of a whole configuration, including kernels. Raises ValueError for a value that is
        neither in the space nor computable for it."""
        given = configuration.settings
        values = {k.name: given.get(k.name, k.default) for k in self.knobs}
        for knob in self.knobs:
            if knob.value_at is None or not isinstance(values[knob.name], int):
                knob.values.index(values[knob.name])
        return self._code_of({**self.fixed, **values}), configuration.kernels_key()

    def entries(self, point: Point) -> list[int]:
        """The indices of the knobs that differ from the default in `point`, which a profile must set."""
        return [n for n, (i, d) in enumerate(zip(point, self.default, strict=True)) if i != d]

    def without(self, point: Point, n: int) -> Point:
        """`point` with knob `n` at its default."""
        return with_index(point, n, self.default[n])

    def distance(self, point: Point) -> tuple[int, float]:
        """The distance of a point from the default: number of entries, then steps."""
        differ = sum(i != d for i, d in zip(point, self.default, strict=True))
        steps = sum(k.distance(k.values[i]) for k, i in zip(self.knobs, point, strict=True))
        return differ, steps

    def preference(self, point: Point) -> tuple[object, ...]:
        """Sort key for equally good points, so that the choice does not depend on the order of the search.
        The first one is the closest to the default and, among equally close ones, the one whose knobs are
        listed first."""
        return *self.distance(point), tuple(-i for i in point)

    def changed(self, point: Point) -> list[Knob]:
        return [k for k, i, d in zip(self.knobs, point, self.default, strict=True) if i != d]

    def moved(self, a: Point, b: Point) -> frozenset[str]:
        """The metrics that can differ between two points."""
        moved: set[str] = set()
        for knob, i, j in zip(self.knobs, a, b, strict=True):
            if i != j:
                moved |= knob.moves
        return frozenset(moved)

    def fidelity(self, point: Point) -> Fidelity:
        """The worst fidelity of the knobs that differ from the default."""
        order = list(Fidelity)
        return max((k.fidelity for k in self.changed(point)), key=order.index, default=Fidelity.EXACT)

    def points(self) -> Iterator[Point]:
        """All legal points."""
        if self._listed is not None:
            return (p for p in self._listed if self.legal(p))
        return (p for p in itertools.product(*(range(len(k.values)) for k in self.knobs)) if self.legal(p))

    def enumerable(self) -> bool:
        return len(self) <= _ENUMERABLE

    def classes(self) -> dict[Hashable, Point]:
        """All classes, each with its point closest to the default, in a stable order."""
        best: dict[Hashable, Point] = {}
        for point in self.points():
            key = self.code_class(point)
            if key not in best or self.distance(point) < self.distance(best[key]):
                best[key] = point
        return best

    def random(self, rng: np.random.Generator) -> Point:
        """A random legal point; the default if a thousand draws find none."""
        if self._listed is not None:
            listed = list(self.points())
            return listed[int(rng.integers(len(listed)))]
        for _ in range(1000):
            point = tuple(int(rng.integers(len(k.values))) for k in self.knobs)
            if self.legal(point):
                return point
        return self.default

    def neighbours(self, point: Point) -> list[Point]:
        """Legal points that differ in one entry: by one step for ordered values, otherwise by any other
        value."""
        found: list[Point] = []
        for n, knob in enumerate(self.knobs):
            steps = [point[n] - 1, point[n] + 1] if knob.ordinal else range(len(knob.values))
            for i in steps:
                if 0 <= i < len(knob.values) and i != point[n]:
                    other = with_index(point, n, i)
                    if self.legal(other):
                        found.append(other)
        return found

    def features(self, point: Point) -> np.ndarray:
        """Coordinates for a surrogate: ordered knobs as a number in [0, 1], others one-hot. They depend on
        the part of a value that reaches the code: for a bound, on the path that it selects."""
        row: list[float] = []
        settings: dict[str, Value] | None = None
        for knob, i in zip(self.knobs, point, strict=True):
            if not knob.ordinal:
                row.extend(1.0 if i == j else 0.0 for j in range(len(knob.values)))
                continue
            place = i / max(1, len(knob.values) - 1)
            if knob.code is not None:
                settings = settings or self.settings(point)
                code = knob.code(knob.values[i], settings)
                if isinstance(code, bool):
                    place = float(code)
                elif isinstance(code, int | float | str) and code in knob.values:
                    place = knob.values.index(code) / max(1, len(knob.values) - 1)
            row.append(place)
        return np.asarray(row)

    def feature_groups(self) -> list[int]:
        """For each coordinate of `features`, the index of its knob."""
        groups: list[int] = []
        for n, knob in enumerate(self.knobs):
            groups.extend([n] * (1 if knob.ordinal else len(knob.values)))
        return groups
