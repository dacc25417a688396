"""The numbers of the report, all computed from the journal: paired rounds, scores of the screen, effects of
knobs, void blocks, and crossings of paths."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
import re
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.intervals import Estimate, estimate
from ...core.options import MEMORY, SPEED
from ...core.protocol import TrialStatus, changed_text, kind_of, settings_text
from ...decide.answer_check import rounding_limit
from ...measure.measurement import baseline_moved, score, void_over
from ...measure.paired_rounds import Way, beside, both_ways, joined
from ...space.knobs import KNOBS
from ..verdict import UNPROVEN, better, over_defaults
from .read import Run, Seen, mapping, number

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ...core.protocol import Measurement, Value


def estimate_of(data: Mapping[str, Any]) -> Estimate | None:
    """A ratio with its interval, from its form in the journal."""
    interval = data.get("ci95")
    bounds = [number(x) for x in interval] if isinstance(interval, list) and len(interval) == 2 else []
    ratio = number(data.get("ratio"))
    if ratio is None or len(bounds) != 2 or bounds[0] is None or bounds[1] is None:
        return None
    return Estimate(ratio, bounds[0], bounds[1], int(number(data.get("n")) or 0))


def median_rate(seen: Seen, metric: str) -> float | None:
    rates = (
        list(seen.measurement.speeds(metric).values()) if seen.measurement.status is TrialStatus.OK else []
    )
    return statistics.median(rates) if rates else None


# ---- paired rounds


@dataclass
class Paired:
    """The last paired comparison of one configuration with the default."""

    stage: str
    settings: dict[str, Value]
    base: dict[str, list[float]] = field(default_factory=dict)  # tokens/s of the default by metric
    rates: dict[str, list[float]] = field(default_factory=dict)
    ratio: dict[str, Estimate] = field(default_factory=dict)
    rounds: int = 0


_ROUND = re.compile(r"(.*)/r(\d+)((?:/again\d+)?)/(\d+)(?:/(?:tg|pp))?")


def _stages(run: Run) -> dict[str, dict[int, list[list[Seen]]]]:
    """The passes by stage and round, in the order of `paired_rounds.Rounds`: the round `A B C A C B A`
    (without the one in the middle in older journals), and then repeated measurements."""
    found: dict[str, dict[int, dict[str, dict[int, Seen]]]] = {}
    for seen in run.measurements:
        if match := _ROUND.fullmatch(seen.key):
            stage, number, again, position = match.groups()
            way = found.setdefault(stage, {}).setdefault(int(number), {}).setdefault(again, {})
            before = way.get(int(position))
            way[int(position)] = seen if before is None else _both(before, seen)
    whole: dict[str, dict[int, list[list[Seen]]]] = {}
    for stage, rounds in found.items():
        for number, ways in rounds.items():
            orders = [
                _completed([measurements[n] for n in sorted(measurements)])
                for _, measurements in sorted(ways.items())
            ]
            if "" in ways and all(_is_whole(order, run.metrics) for order in orders):
                whole.setdefault(stage, {})[number] = orders
    return whole


def _both(first: Seen, second: Seen) -> Seen:
    """Merge generation and prompts of one position, which rounds may measure in separate passes."""
    if first.measurement.status is not TrialStatus.OK or second.measurement.status is not TrialStatus.OK:
        return first if first.measurement.status is not TrialStatus.OK else second
    return dataclasses.replace(second, measurement=joined(first.measurement, second.measurement))


def _completed(order: list[Seen]) -> list[Seen]:
    """Complete an order of measurements. A profile without one of its entries is not measured in metrics that
    the entry cannot affect. There it has the values of the whole profile, which comes right after the
    default."""
    if len(order) < 5:
        return order
    completed = list(order)
    for place, seen in enumerate(order):
        whole = order[1] if place < len(order) / 2 else order[-2]
        had = {s.metric for s in seen.measurement.samples}
        missing = tuple(s for s in whole.measurement.samples if s.metric not in had)
        if missing and seen.measurement.status is TrialStatus.OK:
            measurement = dataclasses.replace(seen.measurement, samples=(*seen.measurement.samples, *missing))
            completed[place] = dataclasses.replace(seen, measurement=measurement)
    return completed


def _is_whole(order: Sequence[Seen], metrics: Sequence[str]) -> bool:
    measured = all({m.metric for m in s.measurement.samples} >= set(metrics) for s in order)
    mirrored = all(a.configuration == b.configuration for a, b in zip(order, order[::-1], strict=True))
    turn = order[len(order) // 2].configuration == order[0].configuration
    alive = all(s.measurement.status is TrialStatus.OK for s in order)
    return mirrored and alive and measured and len(order) > 2 and (turn or len(order) % 2 == 0)


def _way(order: Sequence[Seen]) -> Way:
    half = len(order) // 2
    own = {
        repr(order[i].configuration): [order[i].measurement, order[-1 - i].measurement]
        for i in range(1, half)
    }
    return Way(
        [order[0].measurement, order[-1].measurement],
        order[half].measurement if len(order) % 2 else None,
        own,
    )


def paired(run: Run, settings: Mapping[str, Any], kernels: int = 0) -> Paired | None:
    """The stage of the outcome, or the last stage with at least two whole rounds of these settings, and this
    number of kernel choices, against the default. Rounds in which the default changed are left out, as in the
    tuner."""
    within = [number(x) or 0.0 for x in mapping(run.last("noise").get("within")).values()]
    limit = void_over(within)

    def moved(halves: Sequence[Measurement]) -> bool:
        return baseline_moved(halves[0], halves[1], run.metrics) > limit

    # If a comparison started again, its earlier rounds are ignored.
    begins = {str(note.get("stage")): number(note.get("first")) or 0.0 for note in run.noted("anew")}
    result: Paired | None = None
    for stage, rounds in _stages(run).items():
        made = Paired(stage, dict(settings))
        logs: dict[str, list[list[float]]] = {m: [] for m in run.metrics}
        for orders in (ways for n, ways in rounds.items() if n >= begins.get(stage, 0.0)):
            first = orders[0][0]
            ours = next((s for s in orders[0] if _is_of(s, settings, kernels) and s is not first), None)
            if first.settings() != run.defaults or first.configuration.kernels or ours is None:
                continue
            ways = [w for w in map(_way, orders) if not moved(w.base)]
            measurements = beside(ways, moved).get(repr(ours.configuration))
            if measurements is None or moved([orders[0][0].measurement, orders[0][-1].measurement]):
                continue
            made.rounds += 1
            for metric in run.metrics:
                base, own = ([v.rates(metric) for v in some] for some in measurements)
                made.base.setdefault(metric, []).extend(r for v in base for r in v.values())
                made.rates.setdefault(metric, []).extend(r for v in own for r in v.values())
                logs[metric].append(both_ways(own, base))
        if made.rounds >= 2:
            made.ratio = {m: estimate(g, "report", stage, m) for m, g in logs.items() if any(g)}
            result = made
            if stage == run.last("outcome").get("stage"):
                break
    return result


def _is_of(seen: Seen, settings: Mapping[str, Any], kernels: int) -> bool:
    return seen.settings() == dict(settings) and len(seen.configuration.kernels) == kernels


# ---- the screen


@dataclass(frozen=True)
class Tried:
    """A trial of the screen."""

    number: int
    settings: dict[str, Any]
    status: str
    ratio: float | None  # to the default, geometric mean of the metrics
    message: str
    t: float | None  # time in the run of its last measurement, in seconds
    by_metric: dict[str, float]


@dataclass(frozen=True)
class Void:
    """A block that was measured again because its baseline changed."""

    block: int
    moved: float
    begin: float
    end: float
    measurements: tuple[Seen, ...]


def _baselines(run: Run, device: int) -> list[Seen]:
    return [
        s for s in run.measurements
        if s.device == device and s.measurement.status is TrialStatus.OK and s.key.startswith("screen/b")
    ]  # fmt: skip


def _stamp(run: Run, baseline: Seen) -> float:
    """The time of a baseline in the screen. For the closing one, it is the time at which it began."""
    if baseline.key.endswith("/before"):
        return baseline.t
    times = run.times[baseline.device]
    at = bisect.bisect_left(times, baseline.t)
    return times[at - 1] if at else baseline.t


def trials(run: Run) -> list[Tried]:
    last: dict[str, Seen] = {}
    for seen in run.measurements:
        parts = seen.key.split("/")
        if len(parts) >= 2 and parts[0] == "screen" and parts[1].startswith("t"):
            last[parts[1][1:]] = seen
    found: dict[int, Tried] = {}
    for note in run.noted("trial"):
        count = number(note.get("number"))
        if count is None:
            continue
        seen_last = last.get(str(int(count)))
        by_metric: dict[str, float] = {}
        if seen_last is not None and seen_last.measurement.status is TrialStatus.OK:
            baselines = _baselines(run, seen_last.device)
            before = [a for a in baselines if a.t < seen_last.t][-1:]
            after = [a for a in baselines if a.t > seen_last.t][:1]
            around = [(_stamp(run, a), a.measurement) for a in (*before, *after)]
            if around and before:
                scored = score(seen_last.measurement, around, seen_last.t, run.metrics)
                by_metric = {m: math.exp(scored.log_ratio(m)) for m, p in scored.pairs.items() if p}
        ratio = number(note.get("ratio"))
        found[int(count)] = Tried(
            int(count), mapping(note.get("settings")), str(note.get("status", "")),
            ratio if ratio is not None and ratio > 0 else None, str(note.get("message", "")),
            seen_last.t if seen_last else None, by_metric,
        )  # fmt: skip
    return [found[n] for n in sorted(found)]


def voids(run: Run) -> list[Void]:
    result: list[Void] = []
    for note in run.noted("void"):
        block, repeat, moved = (number(note.get(k)) for k in ("block", "repeat", "moved"))
        if block is None or repeat is None or moved is None:
            continue
        device = int(number(note.get("device")) or 0)
        baselines = _baselines(run, device)
        closing = "after" if repeat == 0 else f"again{int(repeat) - 1}"
        key = f"screen/b{int(block)}/{closing}"
        at = next((n for n, a in enumerate(baselines) if a.key in (key, f"{key}/retry")), None)
        if at is None or at == 0:
            continue
        begin, end = baselines[at - 1].t, baselines[at].t
        inside = tuple(
            s
            for s in run.measurements
            if s.device == device and begin < s.t < end and s.key.startswith("screen/t")
        )
        result.append(Void(int(block), moved, begin, end, inside))
    return result


# ---- what each knob does


@dataclass(frozen=True)
class Effect:
    """The effect of a single knob in the additive fit: value -> ratio to its default."""

    knob: str
    by_value: dict[str, float]
    counts: dict[str, int]

    @property
    def spread(self) -> float:
        """Best / worst value − 1."""
        return max(self.by_value.values()) / min(self.by_value.values()) - 1


def effects(run: Run, tried: Sequence[Tried]) -> tuple[list[Effect], float | None]:
    """Main effects of the knobs on the combined log ratio, and the share of the variation that they explain
    (None if nothing varied, or if there are too few trials). An additive model is fitted by least squares
    with a small ridge penalty, because a search does not try all values equally often. The unexplained rest
    is interaction and noise."""
    defaults = run.defaults
    rows = [(defaults, 0.0)] + [(t.settings, math.log(t.ratio)) for t in tried if t.ratio is not None]
    columns: list[tuple[str, str]] = []
    for knob in run.knobs:
        values = {str(s.get(knob, defaults.get(knob))): None for s, _ in rows}
        columns += [(knob, v) for v in values if v != str(defaults.get(knob))]
    if len(rows) < 4 or not columns:
        return [], None
    design = np.array(
        [[str(s.get(k, defaults.get(k))) == v for k, v in columns] for s, _ in rows], dtype=float
    )
    observed = np.array([y for _, y in rows])
    ridge = 0.05 * np.eye(len(columns))
    fitted = np.linalg.solve(design.T @ design + ridge, design.T @ observed)
    total = float(((observed - observed.mean()) ** 2).sum())
    left = float(((observed - design @ fitted) ** 2).sum())
    found: list[Effect] = []
    for knob in run.knobs:
        default = str(defaults.get(knob))
        logs = {default: 0.0, **{v: float(c) for (k, v), c in zip(columns, fitted, strict=True) if k == knob}}
        counts = {v: sum(str(s.get(knob, defaults.get(knob))) == v for s, _ in rows) for v in logs}
        if len(logs) > 1:
            found.append(Effect(knob, {v: math.exp(x) for v, x in logs.items()}, counts))
    found.sort(key=lambda e: -e.spread)
    # With hardly more trials than effects, everything fits, and the share would have no meaning.
    told = total > 0 and len(rows) > 1.5 * len(columns) + 1
    return found, (max(0.0, 1 - left / total) if told else None)


# ---- rates over the u-batch


@dataclass(frozen=True)
class Curve:
    """The best median rate of a path at each u-batch."""

    name: str
    points: dict[float, tuple[float, str]]  # u-batch -> (tokens/s, settings)


def threshold_knob(run: Run) -> str | None:
    """The searched knob that sets the largest u-batch of the first path."""
    known = {k.name for k in KNOBS if k.threshold_of == "ubatch"}
    return next((name for name in run.knobs if name in known), None)


def curves(run: Run, metric: str) -> tuple[list[Curve], float | None]:
    """The curves by path, and the u-batch where they cross: the geometric mean of the two neighbours between
    which the better path changes. None if one path wins at all u-batches at which both were measured."""
    knob = threshold_knob(run) if kind_of(metric) == "pp" else None
    best: dict[str, dict[float, tuple[float, str]]] = {}
    for seen in run.measurements:
        rate, size = median_rate(seen, metric), number(seen.settings().get("ubatch"))
        if rate is None or size is None or size <= 0:
            continue
        name = "best measured"
        if knob is not None and (limit := number(seen.settings().get(knob))) is not None:
            name = f"u-batch ≤ {knob}" if size <= limit else f"u-batch > {knob}"
        known = best.setdefault(name, {}).get(size)
        if known is None or rate > known[0]:
            best[name][size] = (rate, changed_text(seen.settings(), run.defaults))
    found = [Curve(n, dict(sorted(best[n].items()))) for n in sorted(best)]
    if len(found) != 2:
        return found, None
    first, second = found
    common = [u for u in first.points if u in second.points]
    sides = [(u, first.points[u][0] > second.points[u][0]) for u in common]
    crossings = [math.sqrt(a * b) for (a, x), (b, y) in itertools.pairwise(sides) if x != y]
    return found, crossings[0] if len(crossings) == 1 else None


# ---- rates over the depth


@dataclass(frozen=True)
class Depths:
    """Median rates of one length at several depths."""

    name: str  # `pp4096`
    default: dict[int, float]  # depth -> tokens/s
    tuned: dict[int, float]  # empty if nothing was compared in rounds
    ahead: dict[int, int]  # depth -> 1 if tuned is surely faster, -1 if the default is, else 0

    @property
    def crossings(self) -> list[float]:
        """Depths between two measured ones at which the faster one changes beyond the noise: the crossings of
        the lines between the rates."""
        found = []
        for a, b in itertools.pairwise(sorted(self.ahead)):
            if self.ahead[a] * self.ahead[b] < 0:
                x, y = (self.tuned[d] - self.default[d] for d in (a, b))
                found.append(a + (b - a) * x / (x - y) if x * y < 0 else (a + b) / 2)
        return found


def over_depth(run: Run, pair: Paired | None) -> list[Depths]:
    """The rates for each length of prompt or answer that the workload measures at two depths or more. The
    default is from the paired rounds or, before them, from A/A. The other one is the configuration that was
    paired with it."""
    lengths: dict[str, dict[int, str]] = {}
    if run.workload is not None:
        for metric in run.metrics:
            part = run.workload.part(metric)
            lengths.setdefault(f"{part.kind}{part.tokens}", {})[part.depth] = metric
    alone = [seen for seen in run.measurements if seen.key.startswith("aa/p")]
    found = []
    for name, metrics in lengths.items():
        if len(metrics) < 2:
            continue
        default: dict[int, float] = {}
        tuned: dict[int, float] = {}
        ahead: dict[int, int] = {}
        for depth, metric in sorted(metrics.items()):
            rates = (pair.base.get(metric) if pair else None) or [
                rate for seen in alone if (rate := median_rate(seen, metric)) is not None
            ]
            if rates:
                default[depth] = statistics.median(rates)
            if pair is not None and pair.rates.get(metric):
                tuned[depth] = statistics.median(pair.rates[metric])
                ratio = pair.ratio.get(metric)
                ahead[depth] = (ratio.low > 1) - (ratio.high < 1) if ratio else 0
        if len(default) > 1:
            found.append(Depths(name, default, tuned, ahead))
    return found


# ---- answers


def kld_limit(run: Run) -> tuple[float | None, float | None]:
    """The limit of the mean KLD for settings that change rounding, and the limit of the user for settings
    that change answers."""
    default = next(
        (q.quality for q in run.qualities if dict(q.configuration.settings) == run.defaults
         and not q.configuration.kernels and q.quality.status is TrialStatus.OK),
        None,
    )  # fmt: skip
    limit = None if default is None else rounding_limit(default.mean_kld)
    return limit, number(run.head.get("approx_limit"))


def left_undone(outcome: Mapping[str, Any]) -> str:
    """Settings that looked faster than the profile, but were not proven for lack of time."""
    missed, told = mapping(outcome.get("missed")), outcome.get("not_proven")
    objective = str(outcome.get("objective", SPEED))
    if objective == MEMORY:
        return ""  # it never takes settings that are only faster
    lines = [line for line in told if isinstance(line, str)] if isinstance(told, list) else []
    if (ratio := number(missed.get("ratio"))) is not None:
        named = settings_text(mapping(missed.get("settings")), ", ")
        whole = f"{named} together looked {ratio:.3f} × {over_defaults(objective)}"
        lines.insert(0, f"{whole}; only part of this gain was proven.")
    elif outcome.get("unproven") is True and not str(outcome.get("verdict", "")).startswith(UNPROVEN):
        why = str(outcome.get("unanswered") or "the time ran out before they could be proven")
        lines.insert(0, f"Some settings looked {better(objective)} than the defaults, but {why}.")
    return " ".join(lines)
