"""The starting points of a search.

All engines are slow in corners of the space: one thread, tiny u-batches, weights that are not packed. The
first measurements are the most valuable ones of a short budget. So a search begins with the few changes
that matter most, and random points avoid settings that are presumably slower than the default. Later,
measurements decide.
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
CACHES = ("kv_type_k", "kv_type_v")
UNPACKED = 3  # steps; kernels that read weights in the order of the file are a third as fast
FEW = 2  # fewer threads than the default divided by this are few


def leads(space: Space, known: Collection[Point], *, few: bool) -> list[Point]:
    """Points that a search must include because they matter most, apart from the default and `known`.

    Args:
        space: The space to search.
        known: Points that are tried in any case.
        few: Whether there is time for a few trials only. Then the largest u-batch is one of the points.
    """
    classes = {space.code_class(p) for p in (space.default, *known)}
    found = []
    for line in ([_half_cache(space)], _larger_ubatches(space) if few else []):
        fresh = (p for p in line if space.legal(p) and space.code_class(p) not in classes)
        found += list(fresh)[:1]
    return found


def _half_cache(space: Space) -> Point:
    """The default with f16 in place of an f32 cache, which is the default for latents. An f32 cache has twice
    the bytes, and a GPU reads it as pairs of halves. Random points rarely change the cache alone."""
    point = space.default
    for number, knob in enumerate(space.knobs):
        if knob.name in CACHES and knob.default == "f32" and "f16" in knob.values:
            point = with_index(point, number, knob.values.index("f16"))
    return point


def _larger_ubatches(space: Space) -> list[Point]:
    """The default with larger u-batches, the largest first."""
    for number, knob in enumerate(space.knobs):
        if knob.name == "ubatch":
            sizes = range(len(knob.values) - 1, space.default[number], -1)
            return [with_index(space.default, number, i) for i in sizes]
    return []


def nearest(space: Space, settings: Mapping[str, Any]) -> Point:
    """`settings` with the solution instead of a ruled-out threshold."""
    point = []
    for knob in space.knobs:
        value = settings[knob.name]
        if value not in knob.values:
            value = next((v for v in knob.values if v != knob.default), knob.default)
        point.append(knob.values.index(value))
    return tuple(point)


class Doubts:
    """The settings that are presumably slower than the default."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._steps = [_slower(knob) for knob in space.knobs]

    def of(self, point: Point) -> int:
        """The number of steps by which the values of a point exceed what may be as fast as the default."""
        return sum(steps.get(i, 0) for i, steps in zip(point, self._steps, strict=True))

    def least(self, points: Sequence[Point]) -> list[Point]:
        """The points with the least doubt. If all have doubt, at most one step of one setting."""
        doubts = [self.of(p) for p in points]
        least = min(doubts)
        return [p for p, d in zip(points, doubts, strict=True) if d == least]

    def without(self, point: Point) -> Point:
        """`point` with defaults for presumably slower values; unchanged if that is not legal."""
        sides = zip(point, self._space.default, self._steps, strict=True)
        mended = tuple(default if i in steps else i for i, default, steps in sides)
        return mended if self._space.legal(mended) else point


def _slower(knob: Knob) -> dict[int, int]:
    """For each presumably slower value, by number: its steps beyond values that may be as fast as the
    default. Empty for a knob without such an expectation."""
    at = knob.values.index(knob.default)
    if knob.values in ((False, True), (True, False)):
        # Switches that are on by default are on because they are faster, above all packed weights.
        weight = UNPACKED if knob.name == "cpu_repack" else 1
        return {knob.values.index(False): weight} if knob.default else {}
    if knob.name == "compute_type":  # products in float32 are a reference
        return {i: UNPACKED for i, v in enumerate(knob.values) if v == "f32" and i != at}
    if knob.name == "mla_mode":  # `auto` takes the faster mode for each number of tokens
        return {i: 1 for i in range(len(knob.values)) if knob.default == "auto" and i != at}
    if knob.name not in ("ubatch", *THREADS) or not knob.ordinal:
        return {}
    fast = knob.default  # weights are read once per u-batch
    if knob.name in THREADS:
        # The default is the number of cores. Generation is often faster with slightly fewer. One of two is
        # already half.
        fast = max(2, math.ceil(int(knob.default) / FEW))
    slow = sorted((v for v in knob.values if int(v) < int(fast)), reverse=True)
    steps = {knob.values.index(v): step for step, v in enumerate(slow, 1)}
    return {i: step for i, step in steps.items() if i != at}
