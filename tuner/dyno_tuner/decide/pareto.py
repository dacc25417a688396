"""The trade of speed for memory: several profiles instead of one (`--pareto`, `--objective memory`).

From the tried points, only settings that affect memory are taken. The other settings are those of the proven
winner. The configurations that no other one beats in both speed and planned memory are confirmed in a paired
comparison with the default and the fastest one. The comparison also has each of them without each entry that
saves no memory, because a point that saves much may have entries that save nothing and cost speed. Each
confirmed one is written as a profile, with a plot of all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol
from xml.sax.saxutils import escape

from ..core.options import MEMORY
from ..measure.paired_rounds import measurements_in_round
from ..search.surrogate import predicted
from ..space.knobs import Fidelity
from ..space.memory_limits import gib
from ..space.search_space import with_index
from .ablation import LeftOut, left_out
from .acceptance import LEAST_ROUNDS, Choice, Evidence, Judge, accept, of_default

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ..core.intervals import Estimate
    from ..core.outcome import Outcome
    from ..core.protocol import Value
    from ..measure.comparison import Comparison
    from ..record.context import Context
    from ..search.observation import Trial
    from ..space.search_space import Point, Space

MOST = 3  # most profiles in addition to the fastest and the default
TOO_SHORT = "the time ran out before anything could be confirmed; give a longer --budget"

LEAST_SAVING = 0.001  # share of the default's memory; smaller savings are rounding of the plan
ATTEMPTS = 3
SLOW = 2.5  # factor on the time of a measurement of the default, after which a measurement is cut
DEFAULT = "default"
FASTEST = "fastest"
# All names that may be written, or that earlier versions wrote (memory4). No other file in the folder is
# changed.
FILES = (
    *(f"{n}.yaml" for n in (FASTEST, DEFAULT, *(f"memory{i + 1}" for i in range(MOST + 1)))),
    "pareto.svg",
    "pareto.html",
)


class FinishedTune(Protocol):
    """The part of a finished tune that this stage uses; see `run.tune`."""

    @property
    def context(self) -> Context: ...
    @property
    def winner(self) -> Point: ...
    @property
    def evidence(self) -> Evidence | None: ...
    @property
    def status(self) -> str: ...
    @property
    def trials(self) -> Sequence[Trial]: ...
    def stage(self, name: str) -> None: ...
    def outcome(self) -> Outcome: ...


@dataclass(frozen=True)
class Variant:
    """A confirmed configuration. Its ratios are relative to the default."""

    name: str  # FASTEST, DEFAULT, or a name by its memory
    point: Point
    settings: Mapping[str, Value]
    size: int  # planned bytes
    overall: Estimate  # weighted geometric mean over the metrics
    gain: Mapping[str, Estimate]
    tuned: Mapping[str, float]  # tokens/s by metric
    evidence: Evidence | None = None  # None: the default
    joules: Mapping[str, float] = field(default_factory=dict)  # joules per token by metric, if counted
    harmless: bool = True  # whether no metric is slower than the default


def front(found: Sequence[tuple[Point, float, int]], below: int) -> list[Point]:
    """The Pareto front: points that need less than `below` bytes and that no other one beats in both speed
    and memory. At most MOST, from the largest to the smallest.

    Args:
        found: Tuples of point, log ratio to the default, and bytes.
    """
    kept: list[tuple[Point, float, int]] = []
    best = -float("inf")
    for point, speed, size in sorted(found, key=lambda f: (f[2], -f[1])):
        if size < below and speed > best:
            kept.append((point, speed, size))
            best = speed
    kept.reverse()
    if len(kept) > MOST:  # the ends and the middle are the most useful ones
        kept = [kept[round(i * (len(kept) - 1) / (MOST - 1))] for i in range(MOST)]
    return [p for p, _, _ in kept]


def worthwhile(variants: Sequence[Variant], as_good: Callable[[Variant, Variant], bool]) -> list[Variant]:
    """The variants from large to small, without those for which another one with at most the same memory is
    as good.

    Args:
        as_good: Whether the first one can replace the second one.
    """
    kept: list[Variant] = []
    for v in sorted(variants, key=lambda v: (v.size, -v.overall.ratio)):
        if not any(as_good(k, v) for k in kept):
            kept.append(v)
    return kept[::-1]


def named(kept: Sequence[Variant], best: Variant | None) -> list[Variant]:
    """Name the variants: `best` is the fastest, and the others are numbered by memory, from large to
    small."""
    names = iter(f"memory{i}" for i in range(1, len(kept) + 1))
    return [v if v.name == DEFAULT else replace(v, name=FASTEST if v is best else next(names)) for v in kept]


def plot(variants: Sequence[Variant], title: str) -> str:
    """A plot of speed over memory as SVG, with the interval of each point."""
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
        f'<text x="{left + wide / 2:.0f}" y="{height - 12}" text-anchor="middle">planned memory</text>',
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


class Sizes:
    """The planned memory of points.

    Args:
        needs: Gives the bytes of settings; None if the engine refuses them.
    """

    def __init__(self, space: Space, needs: Callable[[Mapping[str, Value]], int | None]) -> None:
        self._space = space
        self._needs = needs
        self._known: dict[Point, int | None] = {}

    def of(self, point: Point) -> int | None:
        if point not in self._known:
            self._known[point] = self._needs(self._space.settings(point))
        return self._known[point]

    def saves(self, point: Point, n: int) -> bool:
        """Whether an entry saves memory, or is needed so that the others run."""
        without = self._space.without(point, n)
        own, other, usual = self.of(point), self.of(without), self.of(self._space.default)
        if other is None or not self._space.legal(without):
            return True
        return own is not None and other - own >= LEAST_SAVING * (usual or 0) and other > own

    def savings(self, point: Point) -> Point:
        """`point` with all entries that save no memory at their defaults. Entries are removed one by one,
        because two entries may save only together, or each as much as both."""
        while idle := [n for n in self._space.entries(point) if not self.saves(point, n)]:
            point = self._space.without(point, next((n for n in idle if self.changes(n)), idle[-1]))
        return point

    def beside(self, point: Point, winner: Point) -> Point:
        """The settings of `point` that affect memory, and the other settings of the winner. A setting that
        changes answers stays only if it saves memory. Settings without effect are removed."""
        space = self._space
        for n, value in enumerate(winner):
            other = with_index(point, n, value)
            own, size = self.of(point), self.of(other)
            if value == point[n] or own is None or size is None or size > own or not space.legal(other):
                continue
            if point[n] == space.default[n] or not self.saves(point, n):
                point = other
        while idle := [n for n in space.entries(point) if self._pointless(point, n)]:
            point = space.without(point, idle[0])
        return point

    def _pointless(self, point: Point, n: int) -> bool:
        space = self._space
        if self.changes(n):
            return self.savings(point)[n] == space.default[n] or not self.saves(point, n)
        without = space.without(point, n)
        return space.code_class(without) == space.code_class(point) and not self.saves(point, n)

    def changes(self, n: int) -> bool:
        """Whether a knob may change answers by more than rounding."""
        return self._space.knobs[n].fidelity is Fidelity.APPROX


@dataclass(frozen=True)
class Step:
    """A configuration with less memory than the winner."""

    full: Point
    plain: Point  # the entries that save memory
    unproven: tuple[int, ...]  # the other entries, which must be needed


def _step(space: Space, sizes: Sizes, full: Point) -> Step:
    plain = sizes.savings(full)
    unproven = (n for n in space.entries(full) if plain[n] != full[n] or not sizes.saves(full, n))
    return Step(full, plain, tuple(unproven))


def trade_memory(
    tune: FinishedTune, needs: Callable[[Mapping[str, Value]], int | None]
) -> tuple[list[Variant], str]:
    """Confirm the fastest settings and ones with less memory together. Returns them from large to small, or
    nothing and the reason. Call it after the tune has run.

    Args:
        needs: Gives the planned bytes of settings; None if the engine refuses them.
    """
    space, winner = tune.context.space, tune.winner
    sizes = Sizes(space, needs)
    whole = sizes.of(winner)
    if whole is None or tune.status == "interrupted" or not tune.context.noise:
        return [], TOO_SHORT
    tune.stage("pareto")
    tune.context.budget.until("pareto")
    steps = _right(tune, _found(tune, sizes), whole, sizes)
    if not steps and winner == space.default:
        return [], "the default is the fastest, and nothing that was tried needs less memory"
    steps = _affordable(tune, steps)
    if not steps and winner == space.default:
        return [], TOO_SHORT
    kept = _Confirmed(tune, sizes, steps).variants()
    for v in kept:
        settings = dict(v.settings)
        tune.context.note("pareto", name=v.name, settings=settings, size=v.size, **v.overall.to_dict())
    return kept, "" if kept else TOO_SHORT


def _found(tune: FinishedTune, sizes: Sizes) -> list[tuple[Point, float, int]]:
    """The possible points, with their log ratios from the trials, and their bytes."""
    space = tune.context.space
    history = Judge(tune.context).history(tune.trials)
    seen = {space.code_class(t.point): t.log_ratio for t in tune.trials}
    points = dict.fromkeys(
        sizes.beside(t.point, tune.winner)
        for t in tune.trials
        if t.log_ratio is not None and sizes.of(t.point) is not None
    )
    if tune.context.options.objective == MEMORY:
        points[_joined(tune, sizes)] = None
    legal = [p for p in points if space.legal(p) and p != space.default and sizes.of(p) is not None]
    if not legal:
        return []
    mean, _ = predicted(space, history, legal)
    usual = sizes.of(space.default)
    found = []
    for point, guess in zip(legal, mean, strict=True):
        size, speed = sizes.of(point), seen.get(space.code_class(point), float(guess))
        if tune.context.options.objective == MEMORY and (speed or 0.0) < -_slack(tune):
            continue  # no metric may become slower, so a much slower point is not a candidate
        if size is None or speed is None or (usual is not None and size >= usual and speed <= 0):
            continue  # refused, failed, or worse than the default in both
        found.append((point, speed, size))
    return found


def _joined(tune: FinishedTune, sizes: Sizes) -> Point:
    """A point that combines, for each setting, the value of least memory from trials without a loss. Rounds
    then decide."""
    space = tune.context.space
    point, slack = space.default, _slack(tune)
    fine = [t.point for t in tune.trials if t.log_ratio is not None and t.log_ratio >= -slack]
    for n in range(len(space.knobs)):
        with_it = {p[n]: with_index(point, n, p[n]) for p in fine}
        fitting = [q for q in with_it.values() if space.legal(q) and sizes.of(q) is not None]
        point = min([point, *fitting], key=lambda q: sizes.of(q) or 0)
    return point


def _slack(tune: FinishedTune) -> float:
    """The log ratio by which a trial may look slower than the default although it is not."""
    bar = tune.context.bar(tune.context.round_count())
    return 2 * max(bar.margin.values(), default=0.0)


def _right(
    tune: FinishedTune, found: Sequence[tuple[Point, float, int]], below: int, sizes: Sizes
) -> list[Step]:
    """The front of points with correct answers. Only points that would be on the front are checked, because
    comparing all answers would take longer than confirming the front."""
    left = list(found)
    while True:
        chosen = front(left, below)
        wrong = next((p for p in chosen if tune.context.gate.admit_fully(p) is not None), None)
        if wrong is None:
            return [_step(tune.context.space, sizes, p) for p in chosen]
        left = [f for f in left if f[0] != wrong]


def _points(tune: FinishedTune, steps: Sequence[Step]) -> dict[Point, str]:
    """The points of the comparison by name: the default, the winner, and each step, as a whole, without each
    unproven entry, and without all of them."""
    space = tune.context.space
    points = {space.default: DEFAULT}
    points.setdefault(tune.winner, FASTEST)
    for i, step in enumerate(steps, 1):
        points.setdefault(step.full, f"memory{i}")
        for n in step.unproven:
            points.setdefault(space.without(step.full, n), f"memory{i} without {space.knobs[n].name}")
        points.setdefault(step.plain, f"memory{i} plain")
    return points


def _slowness(log_ratio: float) -> float:
    """An upper bound of the time of a measurement / the time of the default. A single one of two metrics may
    have the whole loss, and measurements that take too long are cut."""
    return min(SLOW, math.exp(max(0.0, -2 * log_ratio)))


def _affordable(tune: FinishedTune, steps: Sequence[Step]) -> list[Step]:
    """As many steps as there is time to confirm. The middle one is dropped first, because the ends are more
    useful, and then the entries that need a proof."""
    rounds, left, space = tune.context.rounds(), list(steps), tune.context.space
    points = list(_points(tune, steps))
    mean, _ = predicted(space, Judge(tune.context).history(tune.trials), points)
    slower = {p: _slowness(float(m)) for p, m in zip(points, mean, strict=True)}

    def seconds(steps: Sequence[Step]) -> float:
        each = [slower[p] for p in _points(tune, steps)]
        return rounds.seconds(LEAST_ROUNDS * measurements_in_round(len(each))) * sum(each) / len(each)

    while left and not tune.context.budget.more_seconds(seconds(left)):
        most = max(left, key=lambda s: len(s.unproven))
        if len(left) < MOST and most.unproven and most.plain != tune.context.space.default:
            left[left.index(most)] = Step(most.plain, most.plain, ())
        else:
            left.remove(left[len(left) // 2])
    return left


class _Confirmed:
    """The comparison of steps, which is repeated without entries that turn out not to be needed."""

    def __init__(self, tune: FinishedTune, sizes: Sizes, steps: list[Step]) -> None:
        self._tune = tune
        self._space = tune.context.space
        self._sizes = sizes
        self._weights = tune.context.weights
        self._steps = steps
        self._names: dict[Point, str] = {}
        self._result: Comparison | None = None
        self._compare()

    def _compare(self) -> None:
        tune, steps = self._tune, self._steps
        for attempt in range(ATTEMPTS):
            names = self._admitted(steps)
            # Comparing answers has used up time.
            while attempt == 0 and (fewer := _affordable(tune, steps)) != steps:
                steps, names = fewer, self._admitted(fewer)
            if len(names) < 2:
                return
            configurations = {name: self._space.configuration(p) for p, name in names.items()}
            key = f"pareto/{attempt}" if attempt else "pareto"
            result = tune.context.rounds().compare(key, configurations, tune.context.round_count)
            if result.rounds < LEAST_ROUNDS:
                return
            self._names, self._result, self._steps = names, result, steps
            steps = [self._without_weak(s) for s in steps]
            if steps == self._steps:
                return

    def _admitted(self, steps: Sequence[Step]) -> dict[Point, str]:
        """The points that may be compared. A point that only leaves out an entry is never written, so its
        bit-exact knobs need no check."""
        tune = self._tune
        written = {tune.winner, *(p for s in steps for p in (s.full, s.plain))}
        return {
            p: name for p, name in _points(tune, steps).items()
            if p == self._space.default or (p in written and self._may_be_written(p))
            or (p not in written and self._space.legal(p) and tune.context.gate.admit(p) is None)
        }  # fmt: skip

    def _may_be_written(self, point: Point) -> bool:
        return self._space.legal(point) and self._tune.context.gate.admit_fully(point) is None

    def _measured(self, point: Point) -> bool:
        name = self._names.get(point)
        return self._result is not None and (name == DEFAULT or name in self._result.logs)

    def _left_out(self, step: Step) -> list[LeftOut]:
        """The results of the measured entries of a step. Other entries save memory, or stay unproven."""
        result, judge = self._result, Judge(self._tune.context)
        assert result is not None
        name, bar = self._names[step.full], self._tune.context.bar(result.rounds)
        found = []
        for n in self._space.entries(step.full):
            without, part = self._space.without(step.full, n), judge.part(n)
            if n not in step.unproven:
                gain = result.ratio(name, part.moves, self._weights)
                found.append(LeftOut(part, gain, missed=False, saves=True))
            elif self._measured(without):
                found.append(left_out(result, part, bar, self._weights, self._names[without], name))
        return found

    def _weak(self, step: Step) -> list[int]:
        """The entries that are not needed, as far as known."""
        if not self._measured(step.full):
            return list(step.unproven)
        holds = {p.part.label for p in self._left_out(step) if p.holds}
        return [n for n in step.unproven if self._space.knobs[n].name not in holds]

    def _without_weak(self, step: Step) -> Step:
        full = step.full
        for n in self._weak(step):
            full = self._space.without(full, n)
        if full == step.full:
            return step
        smaller = _step(self._space, self._sizes, full)
        return smaller if self._may_be_written(full) else Step(step.plain, step.plain, ())

    def variants(self) -> list[Variant]:
        """The variants that are worth their memory, from large to small; empty if there was no time."""
        if self._result is None:
            return []
        proven = [Step(s.plain, s.plain, ()) if self._weak(s) else s for s in self._steps]
        proven = [s for s in proven if self._measured(s.full)]
        evidence: dict[Point, Evidence | None] = {self._space.default: None}
        evidence.setdefault(self._tune.winner, self._tune.evidence)
        for step in proven:
            evidence.setdefault(step.full, self._evidence(step))
        variants = [
            self._variant(p, e) for p, e in evidence.items()
            if self._measured(p) and (p == self._space.default or (e is not None and accept(e)))
        ]  # fmt: skip
        kept = worthwhile(variants, self._as_good)
        best = next((v for v in variants if v.point == self._tune.winner), None)
        if best is not None and best not in kept:
            best = max((k for k in kept if self._as_good(k, best)), key=lambda k: k.overall.ratio)
        return named(kept, best)

    def _evidence(self, step: Step) -> Evidence:
        assert self._result is not None
        found, name = self._left_out(step), self._names[step.full]
        faster = Judge(self._tune.context).gains(self._result, name, step.full)
        return Evidence(self._result, name, self._weights, faster, tuple(found), saves=True)

    def _variant(self, point: Point, evidence: Evidence | None) -> Variant:
        assert self._result is not None
        result, name, metrics = self._result, self._names[point], list(self._weights)
        joules = {m: result.median_joules(name, m) for m in metrics}
        made = Variant(
            name, point, self._space.settings(point), int(self._sizes.of(point) or 0),
            result.ratio(name, metrics, self._weights),
            {m: result.ratio(name, [m], self._weights) for m in metrics},
            {m: result.median_rate(name, m) for m in metrics}, evidence,
            {m: joule for m, joule in joules.items() if joule is not None},
        )  # fmt: skip
        default = self._space.default
        return made if point == default else replace(made, harmless=self._harmless(made, default))

    def _as_good(self, one: Variant, other: Variant) -> bool:
        """Whether one variant can replace another: as fast within the margin, and without changing answers
        unless the other does, too. To replace the default, or the profile that the tune itself has proven, it
        must be as fast in each metric."""
        assert self._result is not None
        margin = self._tune.context.bar(self._result.rounds).of(list(self._weights))
        if one.overall.ratio * (1 + margin) < other.overall.ratio:
            return False
        if self._tune.context.options.objective == MEMORY and other.harmless and not one.harmless:
            return False
        approx = [self._space.fidelity(v.point) is Fidelity.APPROX for v in (one, other)]
        if approx == [True, False]:
            return False
        if other.point not in (self._space.default, self._tune.winner):
            return True
        return self._harmless(one, other.point) and self._harmless(one, self._space.default)

    def _harmless(self, variant: Variant, over: Point) -> bool:
        """Whether no metric is surely slower by more than its margin."""
        assert self._result is not None
        bar, moved = self._tune.context.bar(self._result.rounds), self._space.moved(variant.point, over)
        for m in self._weights:
            ratio = self._result.ratio(self._names[variant.point], [m], self._weights, self._names[over])
            if bar.harms(ratio, m, m in moved) or (m in moved and ratio.low < 1 - bar.margin[m]):
                return False
        return True


def least_memory(
    tune: FinishedTune, variants: Sequence[Variant], needs: Callable[[Mapping[str, Value]], int | None]
) -> Outcome:
    """The outcome of `--objective memory`: the variant with the least memory in which no metric loses speed,
    or the default if no such variant needs less memory.

    Args:
        needs: Gives the planned bytes of settings; None if the engine refuses them.
    """
    usual = needs(tune.context.space.settings(tune.context.space.default))
    fitting = [v for v in variants if v.harmless and v.evidence is not None and accept(v.evidence)]
    best = min(fitting, key=lambda v: v.size, default=None)
    if best is None or usual is None or best.size >= usual:
        return nothing_saved(tune.outcome())
    outcome = variant_outcome(tune, best)
    outcome.memory = (usual, best.size)
    return outcome


def nothing_saved(outcome: Outcome) -> Outcome:
    """The outcome of `--objective memory` without a proven saving: the default. The fastest proven settings
    may need more memory than the default."""
    return replace(
        outcome, settings=dict(outcome.defaults), entries=[], kernels=[], gain={},
        tuned=dict(outcome.baseline), joules=of_default(outcome.joules), quality=outcome.default_quality,
    )  # fmt: skip


def variant_outcome(tune: FinishedTune, variant: Variant) -> Outcome:
    """The outcome for a profile of this variant. Its entries were proven together."""
    outcome = tune.outcome()
    judge, choice = Judge(tune.context), Choice(tune.context.space.default)
    together = [replace(p, gain=variant.overall) for p in variant.evidence.parts] if variant.evidence else []
    entries = judge.entries(variant.point, together)
    if len(entries) > 1:
        entries = [replace(e, group="g1") for e in entries]
    if variant.evidence is not None:
        choice.accept(variant.evidence, variant.point, entries)
    outcome.settings = dict(variant.settings)
    outcome.entries = choice.entries
    outcome.kernels, outcome.kernel_defaults = [], []
    outcome.gain, outcome.tuned = dict(variant.gain), dict(variant.tuned)
    outcome.joules = dict(choice.joules)
    outcome.quality = tune.context.gate.of(variant.point)
    return outcome
