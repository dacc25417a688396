"""With which points a search begins: one change of the default at a time, the likeliest gains first.

Corners of the space are what every engine is slow with: one thread, tiny u-batches, weights not packed. The
first visits are the dearest of a short budget. A change alone also says by itself what it does.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .knobs import Fidelity

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from typing import Any

    from .knobs import Knob
    from .space import Point, Space

THREADS = ("threads", "threads_batch")
LATE = 10.0  # of what is slower by physics: after all else


def leads(space: Space, known: Collection[Point]) -> list[Point]:
    """What a search of few trials must not miss: the u-batch matters more than what else there is."""
    number = next((n for n, k in enumerate(space.knobs) if k.name == "ubatch"), None)
    if number is None:
        return []
    base = space.default
    sizes = range(len(space.knobs[number].values) - 1, base[number], -1)
    larger = ((*base[:number], i, *base[number + 1 :]) for i in sizes)
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


def single_changes(space: Space) -> list[Point]:
    """Every legal point of one change, in the order in which to try them: knobs in turn, in the order of the
    table, and what is slower by physics at the end."""
    base = space.default
    ranked: list[tuple[float, int, Point]] = []
    for n, knob in enumerate(space.knobs):
        for i, rank in _ranks(knob).items():
            point = (*base[:n], i, *base[n + 1 :])
            if space.legal(point):
                ranked.append((rank, n, point))
    return [point for _, _, point in sorted(ranked)]


def _ranks(knob: Knob) -> dict[int, float]:
    """By number of a value: its turn among those of the knob; LATE and more for what should be slower."""
    at = knob.values.index(knob.default)
    others = [i for i in range(len(knob.values)) if i != at]
    if knob.fidelity is Fidelity.APPROX:
        return {i: LATE + turn for turn, i in enumerate(others)}
    if not knob.ordinal:
        # A switch that an engine has on by default is on because it is faster, packed weights above all.
        off = LATE + (2.0 if knob.name == "cpu_repack" else 1.0)
        return {i: off if knob.values[i] is False else float(turn) for turn, i in enumerate(others)}
    if knob.name == "ubatch":
        larger = sorted((i for i in others if i > at), reverse=True)
        turns = {i: float(turn) for turn, i in enumerate(larger)}
        return turns | {i: LATE + at - i for i in others if i < at}
    if knob.name in THREADS:
        return {i: _threads(knob.values[i], knob.default, abs(i - at)) for i in others}
    # Of a scale without known physics: a step up, a step down, the ends.
    return {i: 2.0 * abs(i - at) - (2 if i > at else 1) for i in others}


def _threads(value: Any, default: Any, steps: int) -> float:
    """Near the default first: it is the number of cores, and generation often wants a few less."""
    if 2 * int(value) >= int(default) and int(value) > 1:
        return 2.0 * steps - (1 if value < default else 0)
    return LATE + math.log2(int(default) / int(value))
