"""With which points a search begins.

Corners of the space are what every engine is slow with: one thread, tiny u-batches, weights not packed. The
first measurements are the dearest of a short budget, so random ones keep to what physics does not expect to
be slower than the default. Measurements decide about all else later.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..space.search_space import with_index

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from typing import Any

    from ..space.knobs import Knob
    from ..space.search_space import Point, Space

THREADS = ("threads", "threads_batch")
UNPACKED = 3  # steps: kernels that read the weights as the file has them are a third as fast
FEW = 2  # less than the default divided by this are few threads


def leads(space: Space, known: Collection[Point]) -> list[Point]:
    """Points that a search of few trials must not miss: the u-batch matters more than all else."""
    number = next((n for n, k in enumerate(space.knobs) if k.name == "ubatch"), None)
    if number is None:
        return []
    base = space.default
    sizes = range(len(space.knobs[number].values) - 1, base[number], -1)
    larger = (with_index(base, number, i) for i in sizes)
    classes = {space.code_class(p) for p in (base, *known)}
    return [p for p in larger if space.legal(p) and space.code_class(p) not in classes][:1]


def nearest(space: Space, settings: Mapping[str, Any]) -> Point:
    """`settings` with the solution in place of a threshold that solving has ruled out."""
    point = []
    for knob in space.knobs:
        value = settings[knob.name]
        if value not in knob.values:
            value = next((v for v in knob.values if v != knob.default), knob.default)
        point.append(knob.values.index(value))
    return tuple(point)


class Doubts:
    """Settings that physics expects to be slower than the default."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._steps = [_slower(knob) for knob in space.knobs]

    def of(self, point: Point) -> int:
        """By how many steps the values of a point are beyond what may be as fast as the default."""
        return sum(steps.get(i, 0) for i, steps in zip(point, self._steps, strict=True))

    def least(self, points: Sequence[Point]) -> list[Point]:
        """The points of the least doubt. If none is free of it, one step of one setting is all of it."""
        doubts = [self.of(p) for p in points]
        least = min(doubts)
        return [p for p, d in zip(points, doubts, strict=True) if d == least]

    def without(self, point: Point) -> Point:
        """`point` with defaults for what should be slower; itself, if that is not legal."""
        sides = zip(point, self._space.default, self._steps, strict=True)
        mended = tuple(default if i in steps else i for i, default, steps in sides)
        return mended if self._space.legal(mended) else point


def _slower(knob: Knob) -> dict[int, int]:
    """By number of a value that physics expects to be slower than the default: how many steps it is beyond
    those that may be as fast. A knob of unknown physics has none."""
    at = knob.values.index(knob.default)
    if knob.values in ((False, True), (True, False)):
        # A switch that an engine has on by default is on because it is faster, packed weights above all.
        weight = UNPACKED if knob.name == "cpu_repack" else 1
        return {knob.values.index(False): weight} if knob.default else {}
    if knob.name not in ("ubatch", *THREADS) or not knob.ordinal:
        return {}
    fast = knob.default  # weights are read once for each u-batch
    if knob.name in THREADS:
        # The default is the number of cores; generation often wants a few less. One of two is half.
        fast = max(2, math.ceil(int(knob.default) / FEW))
    slow = sorted((v for v in knob.values if int(v) < int(fast)), reverse=True)
    steps = {knob.values.index(v): step for step, v in enumerate(slow, 1)}
    return {i: step for i, step in steps.items() if i != at}
