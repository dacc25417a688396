"""The acceptance of profiles: the rule, the choice that obeys it, and the judge of points and entries.

Only what has passed `accept` is written: settings, groups of settings and kernels of a tune and of
`--pareto`, and switches of `tune build`. So a `Choice` takes a profile only by `Choice.accept`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ..core.outcome import Entry
from ..measure.paired_rounds import ALL_DIFFER, Likeness, measurements_in_round
from ..search.observation import Observation
from ..space.knobs import Fidelity
from .ablation import FULL, LeftOut, Part, rests

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from ..core.intervals import Estimate
    from ..core.outcome import KernelEntry
    from ..core.protocol import Configuration, Measurement
    from ..measure.comparison import Comparison
    from ..measure.paired_rounds import Bar, Rounds
    from ..record.context import Context
    from ..search.observation import Trial
    from ..space.search_space import Point, Space

LEAST_ROUNDS = 2  # one round is not enough


class Proof(Protocol):
    """The facts that the acceptance rule needs."""

    @property
    def rounds(self) -> int:
        """Number of rounds in which the candidate was compared with the default."""
        ...

    @property
    def gains(self) -> bool:
        """Whether it beats the default in some metric, or in their mean, and harms none."""
        ...

    @property
    def saves(self) -> bool:
        """Whether it needs less memory than the default. It then need not gain."""
        ...

    @property
    def parts(self) -> tuple[LeftOut, ...]:
        """The result of leaving out each of its parts."""
        ...


@dataclass(frozen=True)
class Evidence:
    """The proof of a profile: rounds with the default, and the result of leaving out each part.

    Args:
        name: the profile in the comparison.
        gains: Whether it beats the default in some metric, or in their mean, and harms none.
        saves: Whether it needs less memory than the default. It then need not gain.
    """

    result: Comparison
    name: str
    weights: Mapping[str, float]
    gains: bool
    parts: tuple[LeftOut, ...]
    saves: bool = False

    @property
    def rounds(self) -> int:
        return self.result.rounds if self.name in self.result.logs else 0


def accept(proof: Proof) -> bool:
    """The acceptance rule for everything that is written. It was measured in two rounds or more, it gains or
    saves memory, and each of its parts holds (see `LeftOut.holds`)."""
    reason = proof.gains or proof.saves
    held = bool(proof.parts) and all(p.holds for p in proof.parts)
    return proof.rounds >= LEAST_ROUNDS and reason and held


def gains(
    result: Comparison, name: str, moved: Sequence[str], bar: Bar, weights: Mapping[str, float]
) -> bool:
    """Whether a profile gains in any metric that it affects, or in their mean, and harms none."""
    choices = [[m] for m in moved] + ([list(moved)] if len(moved) > 1 else [])
    return any(bar.beats(result, name, metrics, weights, touched=moved)[0] for metrics in choices)


@dataclass
class Choice:
    """The profile that is proven so far. It is valid after each step, so an interrupt can write it."""

    point: Point
    entries: list[Entry] = field(default_factory=list)
    kernels: list[KernelEntry] = field(default_factory=list)
    evidence: Evidence | None = None
    gain: dict[str, Estimate] = field(default_factory=dict)
    baseline: dict[str, float] = field(default_factory=dict)
    tuned: dict[str, float] = field(default_factory=dict)
    joules: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Joules per token of the default and of the profile by metric, if energy was counted."""
    failed: list[tuple[Point, Measurement]] = field(default_factory=list)
    voided: int = 0
    stage: str = ""  # key of the comparison with the proof

    def accept(
        self, evidence: Evidence, point: Point, entries: list[Entry], kernels: Sequence[KernelEntry] = ()
    ) -> bool:
        """Take a profile if the rule accepts it. Otherwise nothing changes."""
        if not accept(evidence):
            return False
        proven = {name for p in evidence.parts for name in p.part.names}
        assert {e.name for e in entries} <= proven, "an entry without evidence"
        assert {k.group for k in kernels} <= {p.part.label for p in evidence.parts if p.part.group}
        result, name, weights = evidence.result, evidence.name, evidence.weights
        self.point, self.entries, self.kernels = point, entries, list(kernels)
        self.evidence, self.stage = evidence, result.key
        self.gain = {m: result.ratio(name, [m], weights) for m in weights}
        self.baseline = {m: result.median_rate(result.names[0], m) for m in weights}
        self.tuned = {m: result.median_rate(name, m) for m in weights}
        self.joules = joules_of(result, name, weights)
        return True

    def take(self, other: Choice) -> None:
        """Take the profile that another choice has accepted."""
        names = ("point", "entries", "kernels", "evidence", "gain", "baseline", "tuned", "joules", "stage")
        for name in names:
            setattr(self, name, getattr(other, name))

    def clear(self, default: Point) -> bool:
        """Return to the default, because nothing is proven. Returns False, for the convenience of callers."""
        self.take(self.empty(default))
        return False

    def empty(self, default: Point) -> Choice:
        """A choice without a proven profile, which keeps the rates and the energy of the default."""
        return Choice(
            default, baseline=self.baseline, tuned=dict(self.baseline), joules=of_default(self.joules)
        )

    def count(self, other: Choice) -> None:
        """Add the void blocks and failures of another choice."""
        self.voided += other.voided
        self.failed += other.failed

    def log_gain(self, weights: Mapping[str, float]) -> float:
        """Weighted mean of the log gains of all metrics; 0 if nothing is proven."""
        total = sum(weights.values())
        return sum(w / total * math.log(self.gain[m].ratio) for m, w in weights.items() if m in self.gain)


def of_default(joules: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """Joules per token by metric for a profile that equals the default, from the pairs of another profile."""
    return {m: (default, default) for m, (default, _) in joules.items()}


def joules_of(result: Comparison, name: str, metrics: Iterable[str]) -> dict[str, tuple[float, float]]:
    """Joules per token of the first configuration and of `name` by metric, if energy was counted."""
    pairs = {m: (result.median_joules(result.names[0], m), result.median_joules(name, m)) for m in metrics}
    return {m: (a, b) for m, (a, b) in pairs.items() if a is not None and b is not None}


class Judge:
    """The judge of points and entries, which compares them in rounds and evaluates the results.

    It uses the margin, the budget and the quality gate of the run.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self.rounds: Rounds = context.rounds()
        self.weights = context.weights
        self.note = context.note
        self.bar = context.bar
        self.until = context.budget.until
        self.admit = context.gate.admit_fully
        self.wanted = context.round_count
        self.proving_rounds = context.proving_rounds

    @property
    def space(self) -> Space:
        return self._context.space

    @property
    def sigma(self) -> float:
        """Standard error of the log ratio of a trial."""
        return self._context.sigma

    @property
    def most_rounds(self) -> int:
        """Number of rounds of the longest comparison so far."""
        return self._context.spread.most_rounds

    @property
    def short_of_time(self) -> bool:
        return self._context.short_of_time

    def compare(
        self,
        key: str,
        points: Mapping[str, Point],
        choice: Choice,
        rounds: int | Callable[[], int] | None = None,
        into: Comparison | None = None,
        alike: Mapping[str, Likeness] = ALL_DIFFER,
    ) -> Comparison:
        """Compare points in rounds, and count the void blocks and failures in `choice`.

        Args: `rounds`: the exact number of rounds; default: as many as their noise requires."""
        configurations: dict[str, Configuration] = {n: self.space.configuration(p) for n, p in points.items()}
        voided, failed = (into.voided, {*into.failed, *into.halted}) if into is not None else (0, set())
        first = next(iter(points.values()))
        moved = [self.space.moved(p, first) for p in points.values() if p != first]
        touched = set[str]().union(*moved) if all(moved) else None
        result = self.rounds.compare(
            key, configurations, rounds or self.wanted, into, alike, touched, rests(points)
        )
        choice.voided += result.voided - voided
        choice.failed += [
            (points[n], v) for n, v in {**result.failed, **result.halted}.items() if n not in failed
        ]
        return result

    def affordable(self, stage: str, measurements: float, checked: Collection[Point] = ()) -> bool:
        """Whether this many measurements, and the answer checks of these points, fit into the budget until a
        stage ends. That stage counts from now on."""
        self.until(stage)
        return self.fits(measurements, checked)

    def fits(self, measurements: float, checked: Collection[Point] = ()) -> bool:
        """Whether this many measurements, and the answer checks of these points, fit into the rest of the
        stage."""
        return self.rounds.affordable(measurements, self._context.gate.seconds(checked))

    def ever_smaller_proofs(self, point: Point, rounds: int, faster: float) -> list[float]:
        """The numbers of measurements that prove a point in this many rounds, and the point with fewer and
        fewer entries."""
        found, all_of_it = [], len(self.space.entries(point))
        while numbers := self.space.entries(point):
            found.append(self.ablation_measurements(point, rounds, faster ** (len(numbers) / all_of_it)))
            point = self.space.without(point, numbers[-1])
        return found

    def compared(self, point: Point) -> list[Point]:
        """A point, and the points that its proof compares it with: the same without each of its entries."""
        numbers = self.space.entries(point)
        return [point, *(self.space.without(point, n) for n in numbers if len(numbers) > 1)]

    def proof_rounds(self, point: Point) -> int:
        """The least number of rounds that can prove a point. If no number can because of the noise, enough
        rounds to show whether the noise is as high as it seems."""
        return self.proving_rounds(LEAST_ROUNDS, self.moved(point)) or LEAST_ROUNDS

    def ablation_measurements(self, point: Point, rounds: float | None = None, faster: float = 1.0) -> float:
        """The number of measurements that prove all entries of a point, in units of measurements of the
        default.

        Args:
            rounds: Number of rounds; default: the least number that can prove it.
            faster: Speed of the point / speed of the default, as far as known. Without an entry, it loses the
                share of that entry.
        """
        rounds = rounds or self.proof_rounds(point)
        numbers = self.space.entries(point)
        left_out = sum(len(self.moves(n)) for n in numbers) / len(self.weights) if len(numbers) > 1 else 0
        rest = faster ** (1 - 1 / max(1, len(numbers)))
        measurements = measurements_in_round(1 + 1 / faster + left_out / rest)
        return rounds * measurements * self._context.loading(point)

    def without(self, n: int) -> Likeness:
        """The likeness of a profile without one of its entries: it differs from the whole only in the metrics
        of that entry."""
        return Likeness(FULL, frozenset(self.weights) - frozenset(self.moves(n)))

    # ---- points and entries

    def moves(self, n: int) -> list[str]:
        return [m for m in self.weights if m in self.space.knobs[n].moves] or list(self.weights)

    def moved(self, point: Point) -> list[str]:
        """The metrics that a point can affect; all if that is unknown."""
        return [m for m in self.weights if m in self.space.moved(point, self.space.default)] or list(
            self.weights
        )

    def part(self, n: int) -> Part:
        name = self.space.knobs[n].name
        return Part(name, tuple(self.moves(n)), (name,))

    def entries(self, point: Point, parts: Sequence[LeftOut], group: str | None = None) -> list[Entry]:
        """The entries of a point, each with the gain of its part."""
        gain = {name: p.gain for p in parts for name in p.part.names}
        return [
            Entry(
                k.name,
                k.values[point[n]],
                k.values[self.space.default[n]],
                tuple(self.moves(n)),
                gain[k.name],
                group,
            )
            for n in self.space.entries(point)
            if (k := self.space.knobs[n]).name in gain
        ]

    def faithful(self, point: Point) -> Point:
        """`point`, with all knobs that change answers at their defaults."""
        for n in self.space.entries(point):
            if self.space.knobs[n].fidelity is Fidelity.APPROX:
                point = self.space.without(point, n)
        return point

    # ---- what a comparison says

    def gains(self, result: Comparison, name: str, point: Point) -> bool:
        """Whether a whole point gains in any metric that it affects, or in their mean, and harms none."""
        return gains(result, name, self.moved(point), self.bar(result.rounds), self.weights)

    def unsettled(self, result: Comparison, name: str, point: Point) -> bool:
        """Whether a whole point surely gains in some metric that it affects and harms none, but the margin is
        too wide for a proof."""
        bar = self.bar(result.rounds)
        if self.harms(result, name, self.moved(point)):
            return False
        found = [(m, result.ratio(name, [m], self.weights)) for m in self.moved(point)]
        return any(g.ratio >= 1 + bar.of([m]) and g.low > 1 and not bar.proves([m]) for m, g in found)

    def evidence(
        self, result: Comparison, point: Point, parts: Sequence[LeftOut], name: str = FULL
    ) -> Evidence:
        return Evidence(result, name, self.weights, self.gains(result, name, point), tuple(parts))

    def alone(self, result: Comparison, point: Point, name: str = FULL) -> LeftOut:
        """The result of all entries of a point as one part. Without it, only the default remains, so its gain
        is the gain of the whole."""
        names = tuple(self.space.knobs[n].name for n in self.space.entries(point))
        part = Part("+".join(names), tuple(self.moved(point)), names)
        gain = result.ratio(name, part.moves, self.weights)
        return LeftOut(part, gain, self.gains(result, name, point))

    def harms(self, result: Comparison, name: str, touched: Sequence[str]) -> bool:
        return bool(self.harmed(result, name, touched))

    def harmed(self, result: Comparison, name: str, touched: Sequence[str]) -> dict[str, float]:
        """The metrics that are slower than the default by more than the noise, with their ratios."""
        bar = self.bar(result.rounds)
        ratios = {m: result.ratio(name, [m], self.weights) for m in self.weights}
        return {m: r.ratio for m, r in ratios.items() if bar.harms(r, m, m in touched)}

    def ties(
        self, result: Comparison, name: str, over: str, metrics: Sequence[str], share: float = 1.0
    ) -> bool:
        """Whether a point is slower than another by at most half the margin, or a share of that."""
        if name == over:
            return True
        behind = result.ratio(name, metrics, self.weights, over).ratio
        return behind >= 1 - share * self.bar(result.rounds).of(metrics) / 2

    def history(self, trials: Sequence[Trial]) -> list[Observation]:
        return [Observation(t.point, t.log_ratio, self._context.sigma) for t in trials]
