"""The placements that race first, by the cost model of the engine. Measurements decide."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..core.executor import Executor
    from ..core.workload import Workload
    from ..space.search_space import Point, Space

FIRST = 3  # number of configurations that the cost model puts first
MOST = 192  # most configurations that the cost model computes
_COUNTED = ("n_cpu_moe", "n_gpu_layers")


def ordered(executor: Executor, space: Space, workload: Workload) -> list[dict[str, Any]]:
    """The settings that are expected to be faster than the default, the fastest first; at most `FIRST`.

    Only placements are ordered in this way, so without weights on the CPU the list is empty.
    """
    names = [k.name for k in space.knobs]
    if not set(_COUNTED) & set(names) or workload.served is not None:
        return []
    usual = executor.expected(space.settings(space.default), workload)
    if not usual:
        return []
    scored: list[tuple[float, Point]] = []
    for point in _points(space):
        found = executor.expected(space.settings(point), workload)
        if found is None or set(found) != set(usual):
            continue
        gain = sum(math.log(usual[m] / found[m]) * workload.weights[m] for m in usual)
        if gain > 0:
            scored.append((-gain, point))
    return [space.settings(point) for _, point in sorted(scored)[:FIRST]]


def _points(space: Space) -> list[Point]:
    """The legal placements with each u-batch and each offload policy, and other knobs at their defaults. If
    there are too many, u-batches are left out."""

    def product(turned: set[str]) -> list[Point]:
        choices = [
            range(len(k.values)) if k.name in turned else (i,)
            for k, i in zip(space.knobs, space.default, strict=True)
        ]
        return list(itertools.product(*choices))

    names = {k.name for k in space.knobs}
    offloads = {n for n in names if n.startswith("op_offload.")}
    for turned in ({*_COUNTED, "ubatch", *offloads}, {*_COUNTED, "ubatch"}, set(_COUNTED)):
        found = product(turned)
        if len(found) <= MOST:
            break
    classes = {space.code_class(space.default)}
    kept: list[Point] = []
    for point in found:
        code = space.code_class(point)
        if code not in classes and space.legal(point):
            classes.add(code)
            kept.append(point)
    return kept[:MOST]
