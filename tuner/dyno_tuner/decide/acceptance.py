"""What the steps of choosing share: comparisons of points, and what they say about points and entries."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..core.outcome import Entry
from ..measure.paired_rounds import ALL_DIFFER, Likeness, visits_in_round
from ..search.observation import Observation
from ..space.knobs import Fidelity

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from ..core.intervals import Estimate
    from ..core.protocol import Configuration, Visit
    from ..measure.comparison import Comparison
    from ..measure.paired_rounds import Bar, Rounds
    from ..search.screen import Trial
    from ..space.search_space import Point, Space

DEFAULT = "default"
FULL = "full"


@dataclass
class Choice:
    """Where the choosing stands. Valid after every step, so that an interrupt can take it as it is: an entry
    stands here once it has been left out alone and was missed."""

    point: Point
    entries: list[Entry] = field(default_factory=list)
    gain: dict[str, Estimate] = field(default_factory=dict)
    baseline: dict[str, float] = field(default_factory=dict)
    tuned: dict[str, float] = field(default_factory=dict)
    failed: list[tuple[Point, Visit]] = field(default_factory=list)
    voided: int = 0
    stage: str = ""  # key of the comparison that says so

    def accept(self, judge: Judge, result: Comparison, name: str, point: Point, entries: list[Entry]) -> None:
        base, weights = result.names[0], judge.weights
        self.point = point
        self.entries = entries
        self.stage = result.key
        self.gain = {m: result.ratio(name, [m], weights) for m in weights}
        self.baseline = {m: result.median_rate(base, m) for m in weights}
        self.tuned = {m: result.median_rate(name, m) for m in weights}

    def clear(self, default: Point) -> bool:
        """Nothing is proven: False, for those who say so."""
        self.point = default
        self.entries = []
        self.stage = ""
        self.gain = {}
        self.tuned = dict(self.baseline)
        return False


@dataclass
class Judge:
    """Args:
    bar: the margin to clear after so many rounds.
    until: sets the share of the budget that the next step may use.
    admit: the check of answers for one point; None is a pass, else a reason.
    sigma: standard error of a trial's score, log units.
    wanted: rounds that the noise asks for, as far as it is known.
    checking: seconds that the check of answers may take for these points; 0 for what is known.
    """

    space: Space
    rounds: Rounds
    weights: Mapping[str, float]
    bar: Callable[[int], Bar]
    until: Callable[[str], None]
    admit: Callable[[Point], object]
    note: Callable[..., None]
    sigma: float = 0.01
    wanted: Callable[[], int] = lambda: 4
    checking: Callable[[Collection[Point]], float] = lambda points: 0.0

    def compare(
        self,
        key: str,
        points: Mapping[str, Point],
        choice: Choice,
        rounds: int | None = None,
        into: Comparison | None = None,
        alike: Mapping[str, Likeness] = ALL_DIFFER,
    ) -> Comparison:
        """Args: `rounds`: so many, and no more; default: as many as the noise that they show asks for."""
        configurations: dict[str, Configuration] = {n: self.space.configuration(p) for n, p in points.items()}
        voided, failed = (into.voided, set(into.failed)) if into is not None else (0, set())
        result = self.rounds.compare(key, configurations, rounds or self.wanted, into, alike)
        choice.voided += result.voided - voided
        choice.failed += [(points[n], v) for n, v in result.failed.items() if n not in failed]
        return result

    def affordable(self, stage: str, visits: float, checked: Collection[Point] = ()) -> bool:
        """Whether so many visits, and the check of these points, fit into the budget until a stage ends.
        That stage counts from now on."""
        self.until(stage)
        return self.fits(visits, checked)

    def fits(self, visits: float, checked: Collection[Point] = ()) -> bool:
        """Whether so many visits, and the check of these points, fit into what is left for the stage."""
        return self.rounds.affordable(visits, self.checking(checked))

    def compared(self, point: Point) -> list[Point]:
        """A point and what its proof compares it with: without each of its entries."""
        numbers = self.space.entries(point)
        return [point, *(self.space.without(point, n) for n in numbers if len(numbers) > 1)]

    def proof_visits(self, point: Point, rounds: int = 2) -> float:
        """Visits that prove every entry of a point; two rounds are the least."""
        numbers = self.space.entries(point)
        left_out = sum(len(self.moves(n)) for n in numbers) / len(self.weights) if len(numbers) > 1 else 0
        return rounds * visits_in_round(2 + left_out)

    def without(self, n: int) -> Likeness:
        """A profile without one of its entries: it differs from the whole only in what that entry moves."""
        return Likeness(FULL, frozenset(self.weights) - frozenset(self.moves(n)))

    # ---- points and entries

    def moves(self, n: int) -> list[str]:
        return [m for m in self.weights if m in self.space.knobs[n].moves] or list(self.weights)

    def moved(self, point: Point) -> list[str]:
        """The metrics that a point can move; all where that is not known."""
        return [m for m in self.weights if m in self.space.moved(point, self.space.default)] or list(
            self.weights
        )

    def entry(self, point: Point, n: int, estimate: Estimate, group: str | None) -> Entry:
        knob = self.space.knobs[n]
        default = knob.values[self.space.default[n]]
        return Entry(knob.name, knob.values[point[n]], default, tuple(self.moves(n)), estimate, group)

    def faithful(self, point: Point) -> Point:
        """`point` with every knob that changes answers at its default."""
        for n in self.space.entries(point):
            if self.space.knobs[n].fidelity is Fidelity.APPROX:
                point = self.space.without(point, n)
        return point

    # ---- what a comparison says

    def gains(self, result: Comparison, name: str, point: Point) -> bool:
        """Whether a whole point gains on any metric it moves, or on their mean, and harms none."""
        bar, moved = self.bar(result.rounds), self.moved(point)
        choices = [[m] for m in moved] + ([moved] if len(moved) > 1 else [])
        return any(bar.beats(result, name, metrics, self.weights, touched=moved)[0] for metrics in choices)

    def harms(self, result: Comparison, name: str, touched: Sequence[str]) -> bool:
        return bool(self.harmed(result, name, touched))

    def harmed(self, result: Comparison, name: str, touched: Sequence[str]) -> dict[str, float]:
        """The metrics that are slower than the default's by more than the noise, with their ratios."""
        bar = self.bar(result.rounds)
        ratios = {m: result.ratio(name, [m], self.weights) for m in self.weights}
        return {m: r.ratio for m, r in ratios.items() if bar.harms(r, m, m in touched)}

    def ties(
        self, result: Comparison, name: str, over: str, metrics: Sequence[str], share: float = 1.0
    ) -> bool:
        """Whether a point is behind another by no more than half the margin, or a share of that."""
        if name == over:
            return True
        behind = result.ratio(name, metrics, self.weights, over).ratio
        return behind >= 1 - share * self.bar(result.rounds).of(metrics) / 2

    def history(self, trials: Sequence[Trial]) -> list[Observation]:
        return [Observation(t.point, t.log_ratio, self.sigma) for t in trials]
