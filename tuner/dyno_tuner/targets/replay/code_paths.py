"""Groups of recorded configurations that ran the same code.

A bound such as ik_llama.cpp's `mmq-id-size`, times the number of experts, is compared with the u-batch. Only
the outcome changes the code. If the file does not give the number of experts, it follows from the rates:
records of one path differ by the noise between processes only.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from ...core.protocol import Value

# Settings with the maximum number of tokens for the first of two paths: per expert on average, or in total.
PER_EXPERT = ("mmq_id_size",)
IN_TOKENS = ("mmq_id_max_tokens", "mmq_max_tokens", "matvec_max_tokens", "matvec_id_max_tokens")
EXPERT_COUNTS = (
    2,
    4,
    8,
    16,
    24,
    32,
    40,
    48,
    60,
    64,
    72,
    80,
    96,
    128,
    144,
    160,
    192,
    256,
    384,
    512,
    768,
    1024,
)
INERT = math.inf  # with this factor, each bound except 0 is above any u-batch
_SPREAD = 0.01  # standard deviation between processes of the same code, in log units


def partition_cost(groups: Mapping[Hashable, Sequence[float]]) -> float:
    """The cost of a partition of log rates: the Bayesian information criterion with known variance. It adds
    squared residuals within groups, in units of the spread between processes, and a penalty for each
    group."""
    count = sum(len(g) for g in groups.values())
    residual = sum((x - statistics.fmean(g)) ** 2 for g in groups.values() for x in g)
    return residual / _SPREAD**2 + len(groups) * math.log(max(2, count))


def infer_factor(
    rows: Sequence[tuple[Mapping[str, Value], float]], bound: str, named: float | None
) -> float | None:
    """The factor of a bound before its comparison with the u-batch.

    Args:
        rows: complete settings and rate (tokens/s) of each record.
        bound: name of the setting.
        named: the factor that the model's name suggests; taken unless the rates contradict it.

    Returns:
        A number of experts; INERT if the rates do not depend on the bound; None if no factor explains how
        they depend on it.
    """

    def cost(path: object) -> float:
        groups: dict[Hashable, list[float]] = defaultdict(list)
        for settings, rate in rows:
            others = tuple((n, v) for n, v in sorted(settings.items()) if n != bound)
            groups[(others, _path_of(path, settings, bound))].append(math.log(rate))
        return partition_cost(groups)

    costs: dict[float, float] = {f: cost(f) for f in (*EXPERT_COUNTS, INERT)}
    if named is not None:
        costs[named] = cost(named)
    best = min(costs, key=lambda f: (costs[f], f != named, abs(math.log(f) - math.log(64))))
    if named is not None and costs[named] <= costs[best] + 2 * math.log(max(2, len(rows))):
        best = named
    return best if costs[best] <= cost(None) else None


def merges(
    rows: Sequence[tuple[Mapping[str, Value], float]],
    name: str,
    code: Callable[[Value, Mapping[str, Value]], Hashable],
) -> bool:
    """Whether the rates agree that a setting changes the code only as `code` says."""

    def cost(of: Callable[[Value, Mapping[str, Value]], Hashable]) -> float:
        groups: dict[Hashable, list[float]] = defaultdict(list)
        for settings, rate in rows:
            others = tuple((n, v) for n, v in sorted(settings.items()) if n != name)
            groups[(others, of(settings[name], settings))].append(math.log(rate))
        return partition_cost(groups)

    return cost(code) <= cost(lambda value, settings: value)


def _path_of(factor: object, settings: Mapping[str, Value], bound: str) -> Hashable:
    """The path that runs; without a factor each value of the bound is its own path."""
    if factor is None:
        return settings[bound]
    if factor == INERT:
        return True
    return float(settings["ubatch"]) <= float(settings[bound]) * float(str(factor))
