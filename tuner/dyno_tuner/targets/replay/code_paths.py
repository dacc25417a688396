"""Which recorded configurations ran the same code.

A bound such as ik_llama.cpp's `mmq-id-size` is compared with the u-batch, in units of the number of experts,
and only the outcome reaches the code. Where the file does not tell the number of experts, the rates do:
records of one path lie within the noise between processes, records of two paths do not.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from ...core.protocol import Value

# Settings that bound the tokens up to which the first of two paths runs: of one expert on average, or of all.
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
INERT = math.inf  # a factor with which every bound but 0 is above every u-batch
_SPREAD = 0.01  # log units: how far processes that run the same code are apart, as a standard deviation


def partition_cost(groups: Mapping[Hashable, Sequence[float]]) -> float:
    """How badly a partition explains log rates: squared residuals within groups in units of the spread
    between processes, and a price for every group (the Bayesian information criterion with known
    variance)."""
    count = sum(len(g) for g in groups.values())
    residual = sum((x - statistics.fmean(g)) ** 2 for g in groups.values() for x in g)
    return residual / _SPREAD**2 + len(groups) * math.log(max(2, count))


def infer_factor(
    rows: Sequence[tuple[Mapping[str, Value], float]], bound: str, named: float | None
) -> float | None:
    """By what the bound is multiplied before it is compared with the u-batch.

    Args:
        rows: complete settings and the rate (tokens/s) of every record.
        bound: name of the setting.
        named: the factor that the model's name suggests; taken unless the rates speak against it.

    Returns:
        A number of experts; INERT where the rates do not depend on the bound; None where they depend on it
        in a way that no factor explains.
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
    """Whether the rates allow that a setting reaches the code only as `code` says."""

    def cost(of: Callable[[Value, Mapping[str, Value]], Hashable]) -> float:
        groups: dict[Hashable, list[float]] = defaultdict(list)
        for settings, rate in rows:
            others = tuple((n, v) for n, v in sorted(settings.items()) if n != name)
            groups[(others, of(settings[name], settings))].append(math.log(rate))
        return partition_cost(groups)

    return cost(code) <= cost(lambda value, settings: value)


def _path_of(factor: object, settings: Mapping[str, Value], bound: str) -> Hashable:
    """Which path runs; without a factor every value of the bound counts as one of its own."""
    if factor is None:
        return settings[bound]
    if factor == INERT:
        return True
    return float(settings["ubatch"]) <= float(settings[bound]) * float(str(factor))
