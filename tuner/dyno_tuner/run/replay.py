"""Replay of a search on a recorded sweep with many seeds, for `tune replay`."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..execution.inline_executor import InlineExecutor
from ..record.recorder import Recorder
from ..targets.replay.code_paths import INERT
from ..targets.replay.target import ReplayTarget, Sweep
from .tune import Options, Tune

if TYPE_CHECKING:
    from ..core.protocol import Value

WITHIN = 0.98


@dataclass(frozen=True)
class ReplayRun:
    """The result of one seed."""

    seed: int
    settings: dict[str, Value]
    rate: float  # rate of the chosen code: median of all its warm samples
    ratio: float  # ratio to the best rate of the sweep
    evaluations: int  # distinct configurations that were measured, in all stages
    to_within: int | None  # number of measured ones when the first within 2 % of the best was found


def replay_once(
    sweep: Sweep,
    metric: str | None,
    tokens: int | None,
    sampler: str,
    seed: int,
    limit: int,
    depth: int | None = None,
) -> ReplayRun:
    """Run one search on a recorded sweep.

    Args: `limit`: most distinct configurations to measure, including the default."""
    target = ReplayTarget(sweep, metric, tokens, seed, depth)
    space = target.space()
    workload = target.workload()
    recorder = Recorder(InlineExecutor(target), workload, identity=space.identity, virtual_time=True)
    options = Options(
        workload,
        seed=seed,
        sampler=sampler,
        max_trials=max(2, limit - 1),
        max_distinct=limit,
        patience=limit,
        check=False,
    )
    outcome = Tune(recorder, space, options).run()
    best = target.best_code()
    rate = target.rate(outcome.settings)
    rates = [target._class_rate(kind) for kind in target.visited]
    to_within = next((n for n, r in enumerate(rates, 1) if r >= WITHIN * best), None)
    return ReplayRun(seed, dict(outcome.settings), rate, rate / best, len(target.visited), to_within)


def replay_many(
    sweep: Sweep,
    *,
    metric: str | None = None,
    tokens: int | None = None,
    depth: int | None = None,
    sampler: str = "guided",
    seeds: int = 100,
    limit: int = 12,
) -> dict[str, Any]:
    """Run a search for each seed, with the results as plain data; see `tune replay --json`."""
    runs = [replay_once(sweep, metric, tokens, sampler, seed, limit, depth) for seed in range(seeds)]
    target = ReplayTarget(sweep, metric, tokens, depth=depth)
    best_settings, best_rate = target.best()
    best_code = target.best_code()
    default = {k.name: k.default for k in target.knobs()}
    counts = Counter(tuple(r.settings.items()) for r in runs)
    choices = [
        {"settings": dict(items), "rate": target.rate(dict(items)),
         "ratio_to_best": target.rate(dict(items)) / best_code, "runs": count,
         "record": target.row(dict(items))}
        for items, count in counts.most_common()
    ]  # fmt: skip
    return {
        "data": sweep.path,
        "model": sweep.model,
        "workload": target.name,
        "sampler": sampler,
        "points": len(list(target.space().points())),
        "distinct": target.classes,
        "runs": len(runs),
        "within_2pct": sum(r.ratio >= WITHIN for r in runs) / len(runs),
        "evaluations_median": statistics.median(r.evaluations for r in runs),
        "evaluations_max": max(r.evaluations for r in runs),
        "evaluations_to_within_2pct_median": statistics.median(
            [r.to_within if r.to_within is not None else target.classes + 1 for r in runs]
        ),
        "default": {"settings": default, "rate": target.rate(default)},
        "best": {
            "settings": best_settings,
            "rate": best_rate,
            "code_rate": best_code,
            "record": target.row(best_settings),
        },
        "experts": {name: factor for name, factor in target.experts.items() if factor != INERT},
        "chosen": choices[0],
        "choices": choices,
        "seeds": [asdict(r) for r in runs],
    }
