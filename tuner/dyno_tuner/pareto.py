"""Several answers instead of one: what speed costs in memory.

Among what the search has tried, the configurations that no other one beats in both speed and planned memory
are confirmed in one paired comparison with the default and the fastest. What remains is written as a profile
each, with a plot of all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from .confirm import visits_in_round
from .memory import gib

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .outcome import Outcome
    from .space import Point
    from .stats import Estimate
    from .target import Value
    from .tune import Tune

MOST = 3  # profiles beside the fastest
TOO_SHORT = "no time was left to confirm anything; give a longer --budget"
LEAST_ROUNDS = 2  # that prove anything


@dataclass(frozen=True)
class Variant:
    """A configuration that was confirmed. Ratios are to the default."""

    name: str  # "fastest", "default", or by its memory
    point: Point
    settings: Mapping[str, Value]
    size: int  # bytes, by the engine's plan
    overall: Estimate  # weighted geometric mean over the metrics
    gain: Mapping[str, Estimate]
    tuned: Mapping[str, float]  # tokens/s by metric


def front(found: Sequence[tuple[Point, float, int]], below: int) -> list[Point]:
    """The points that need less than `below` bytes and that none beats in both speed and memory; at most
    MOST, from the largest to the smallest.

    Args:
        found: (point, log ratio to the default, bytes).
    """
    kept: list[tuple[Point, float, int]] = []
    best = -float("inf")
    for point, speed, size in sorted(found, key=lambda f: (f[2], -f[1])):
        if size < below and speed > best:
            kept.append((point, speed, size))
            best = speed
    kept.reverse()
    if len(kept) > MOST:  # the ends and the middle say most
        kept = [kept[round(i * (len(kept) - 1) / (MOST - 1))] for i in range(MOST)]
    return [p for p, _, _ in kept]


def worthwhile(variants: Sequence[Variant], margin: float) -> list[Variant]:
    """From large to small what is left when everything is dropped that another one of no more memory is as
    fast as, within the margin."""
    kept: list[Variant] = []
    for v in sorted(variants, key=lambda v: (v.size, -v.overall.ratio)):
        if not kept or v.overall.ratio > max(k.overall.ratio for k in kept) * (1 + margin):
            kept.append(v)
    return kept[::-1]


def _named(variants: Sequence[Variant]) -> list[Variant]:
    """From large to small. The largest is the fastest, also where it is not the tune's own winner but as fast
    and smaller."""
    names = ["fastest", *(f"memory{i}" for i in range(1, len(variants)))]
    return [
        v if v.name == "default" else replace(v, name=name) for v, name in zip(variants, names, strict=True)
    ]


def plot(variants: Sequence[Variant], title: str) -> str:
    """SVG: speed over memory, with the interval of every point."""
    width, height, left, top = 640, 400, 70, 50
    wide, high = width - left - 150, height - top - 60
    sizes = [v.size for v in variants]
    low, most = min(sizes), max(sizes)
    edge = 0.08 * (most - low) or 0.05 * most
    bottom = min(v.overall.low for v in variants)
    highest = max(v.overall.high for v in variants)
    room = 0.08 * (highest - bottom) or 0.05

    def at(size: float, ratio: float) -> tuple[float, float]:
        x = left + wide * (size - low + edge) / (most - low + 2 * edge)
        return x, top + high * (highest + room - ratio) / (highest - bottom + 2 * room)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">',
        "<style>text{font:12px system-ui,sans-serif;fill:#333}.a{stroke:#777}.p{fill:#1668b8;stroke:#1668b8}"
        "@media(prefers-color-scheme:dark){text{fill:#ddd}.p{fill:#6ab0f3;stroke:#6ab0f3}}</style>",
        f'<text x="20" y="24" font-weight="600">{escape(title)}</text>',
        f'<line class="a" x1="{left}" y1="{top + high}" x2="{left + wide}" y2="{top + high}"/>',
        f'<line class="a" x1="{left}" y1="{top}" x2="{left}" y2="{top + high}"/>',
        f'<text x="{left + wide / 2:.0f}" y="{height - 12}" text-anchor="middle">memory by the plan</text>',
        f'<text x="14" y="{top - 10}">speed / default</text>',
    ]
    for v in variants:
        x, y = at(v.size, v.overall.ratio)
        y1, y2 = at(v.size, v.overall.high)[1], at(v.size, v.overall.low)[1]
        parts.append(f'<line class="p" x1="{x:.1f}" y1="{y1:.1f}" x2="{x:.1f}" y2="{y2:.1f}"/>')
        parts.append(f'<circle class="p" cx="{x:.1f}" cy="{y:.1f}" r="4"/>')
        label = f"{v.name}: {v.overall.ratio:.3f} ×, {gib(v.size)}"
        parts.append(f'<text x="{x + 8:.1f}" y="{y - 6:.1f}">{escape(label)}</text>')
    return "\n".join(parts) + "\n</svg>\n"


def trade_memory(tune: Tune, needs: Callable[[Mapping[str, Value]], int | None]) -> tuple[list[Variant], str]:
    """The fastest settings and what needs less memory, confirmed together, from large to small; else nothing,
    and why. Call it after `tune.run()`.

    Args:
        needs: bytes of settings by the engine's plan; None where it refuses them.
    """
    space, winner = tune.space, tune.winner
    sizes = {winner: needs(space.settings(winner)), space.default: needs(space.settings(space.default))}
    whole = sizes[winner]
    if whole is None or tune.status == "interrupted" or not tune.noise:
        return [], TOO_SHORT
    tune.stage("pareto")
    tune.schedule.until("pareto")
    found = []
    for trial in tune.trials:
        size = needs(space.settings(trial.point))
        if size is not None and trial.log_ratio is not None:
            sizes[trial.point] = size
            found.append((trial.point, trial.log_ratio, size))
    names = {"fastest": winner} if winner != space.default else {}
    smaller = _right(tune, found, whole)
    nothing_smaller = not smaller
    rounds = tune.rounds()
    while smaller and not rounds.affordable(LEAST_ROUNDS * visits_in_round(1 + len(names) + len(smaller))):
        smaller.remove(smaller[len(smaller) // 2])  # the ends say most
    names |= {f"memory{i}": p for i, p in enumerate(smaller, 1)}
    if not names and not nothing_smaller:
        return [], TOO_SHORT
    if not names:
        return [], "the default is the fastest, and nothing that was tried needs less memory"
    points = {"default": space.default, **names}
    configurations = {n: space.configuration(p) for n, p in points.items()}
    result = rounds.compare("pareto", configurations, tune.round_count)
    if result.rounds < LEAST_ROUNDS:
        return [], TOO_SHORT
    metrics = list(tune.weights)
    variants = [
        Variant(
            name, point, space.settings(point), int(sizes[point] or 0),
            result.ratio(name, metrics, tune.weights),
            {m: result.ratio(name, [m], tune.weights) for m in metrics},
            {m: result.median_rate(name, m) for m in metrics},
        )
        for name, point in points.items()
        if name == "default" or name in result.logs
    ]  # fmt: skip
    kept = _named(worthwhile(variants, tune.bar(result.rounds).of(metrics)))
    for v in kept:
        settings = dict(v.settings)
        tune.ledger.note("pareto", name=v.name, settings=settings, size=v.size, **v.overall.to_dict())
    return kept, ""


def _right(tune: Tune, found: Sequence[tuple[Point, float, int]], below: int) -> list[Point]:
    """The front of those whose answers are right. Only what would be on it is asked: comparing the answers of
    everything that was tried takes longer than confirming the front."""
    left = [f for f in found if f[0] != tune.space.default]
    while True:
        chosen = front(left, below)
        wrong = next((p for p in chosen if tune.gate.admit_fully(p) is not None), None)
        if wrong is None:
            return chosen
        left = [f for f in left if f[0] != wrong]


def variant_outcome(tune: Tune, variant: Variant) -> Outcome:
    """What a profile of this variant says: its entries were proven together."""
    outcome = tune.outcome()
    numbers = tune.space.entries(variant.point)
    judge = tune.judge()
    group = "g1" if len(numbers) > 1 else None
    outcome.settings = dict(variant.settings)
    outcome.entries = [judge.entry(variant.point, n, variant.overall, group) for n in numbers]
    outcome.kernels, outcome.kernel_defaults = [], []
    outcome.gain, outcome.tuned = dict(variant.gain), dict(variant.tuned)
    outcome.quality = tune.gate.of(variant.point)
    return outcome
