"""From the screen's best points to the entries of a profile: finalists in paired rounds, ties towards the
default, then every entry alone against the rest, until what remains is needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .confirm import visits_in_round
from .knobs import Fidelity
from .outcome import Entry

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .confirm import Bar, Comparison, Rounds
    from .space import Point, Space
    from .stats import Estimate
    from .study import Trial
    from .target import Configuration, Visit

DEFAULT = "default"
FULL = "full"


@dataclass
class Choice:
    """Where the choosing stands. Valid after every step, so that an interrupt can take it as it is."""

    point: Point
    entries: list[Entry] = field(default_factory=list)
    gain: dict[str, Estimate] = field(default_factory=dict)
    baseline: dict[str, float] = field(default_factory=dict)
    tuned: dict[str, float] = field(default_factory=dict)
    failed: list[tuple[Point, Visit]] = field(default_factory=list)
    voided: int = 0


@dataclass
class Chooser:
    """Args:
    bar: the margin to clear after so many rounds.
    until: sets the share of the budget that the next step may use.
    admit: the check of answers for one point; None is a pass, else a reason.
    """

    space: Space
    rounds: Rounds
    weights: Mapping[str, float]
    bar: Callable[[int], Bar]
    until: Callable[[str], None]
    admit: Callable[[Point], object]
    note: Callable[..., None]
    count: int = 4  # rounds of a comparison
    finalists: int = 3

    def run(self, trials: Sequence[Trial], choice: Choice) -> None:
        """Fills in `choice`, step by step."""
        self.until("confirm")
        finalists = self.pick(trials)
        if not finalists:
            return
        # Rather few finalists in enough rounds than many in one.
        while len(finalists) > 1 and not self.rounds.affordable(3 * visits_in_round(len(finalists) + 1)):
            # What changes answers goes first: without its twin in the race it could not win anyhow.
            changing = [p for p in finalists if self._faithful(p) != p]
            finalists.remove(changing[-1] if changing else finalists[-1])
        winner = self._race(finalists, choice)
        if winner is None:
            return
        self.until("walk")
        winner = self._towards_default(winner, choice)
        self.until("leave_one_out")
        self._leave_one_out(winner, choice)

    # ---- finalists

    def pick(self, trials: Sequence[Trial]) -> list[Point]:
        """The best points of the screen, and the point that joins what is best for each metric alone."""
        bar = self.bar(self.count)
        worth = [
            t for t in trials
            if t.log_ratio is not None and t.score is not None and t.log_ratio > 0
            and any(t.score.log_ratio(m) > bar.margin[m] / 2 for m in self.weights)
        ]  # fmt: skip
        worth.sort(key=lambda t: (-(t.log_ratio or 0.0), self.space.distance(t.point)))
        points: dict[Point, None] = dict.fromkeys(t.point for t in worth[: self.finalists])
        joined = self._join(trials)
        if joined is not None and worth and joined not in points:
            points = dict.fromkeys([joined, *list(points)[: self.finalists - 1]])
        # What changes answers has to beat the same without it, so both race.
        both = {q: None for p in points for q in (p, self._faithful(p))}
        chosen = [p for p in both if p != self.space.default and self.admit(p) is None]
        self.note("finalists", settings=[self.space.settings(p) for p in chosen])
        return chosen

    def _faithful(self, point: Point) -> Point:
        """`point` with every knob that changes answers at its default."""
        for n in self.space.entries(point):
            if self.space.knobs[n].fidelity is Fidelity.APPROX:
                point = self.space.without(point, n)
        return point

    def _earned(self, result: Comparison, names: Mapping[str, Point], name: str, bar: Bar) -> bool:
        """Whether what changes answers in a finalist gains by itself: noise must never choose it."""
        faithful = self._faithful(names[name])
        if faithful == names[name]:
            return True
        if faithful == self.space.default:
            return True  # it has just beaten the default
        twin = next((n for n, p in names.items() if p == faithful), None)
        if twin is None or twin not in result.logs:
            return False
        moved = [m for m in self.weights if m in self.space.moved(names[name], faithful)]
        return bar.beats(result, name, moved or list(self.weights), self.weights, twin)[0]

    def _join(self, trials: Sequence[Trial]) -> Point | None:
        """Knobs that move one metric only take their value from the trial that was best for that metric."""
        scored = [t for t in trials if t.score is not None and t.log_ratio is not None]
        if len(self.weights) < 2 or not scored:
            return None
        best = max(scored, key=lambda t: t.log_ratio or 0.0)
        by_metric: dict[str, Trial] = {
            m: max(scored, key=lambda t: t.score.log_ratio(m) if t.score else 0.0) for m in self.weights
        }
        values = []
        for n, knob in enumerate(self.space.knobs):
            measured = [m for m in self.weights if m in knob.moves]
            source = by_metric[measured[0]] if len(measured) == 1 else best
            values.append(source.point[n])
        point = tuple(values)
        return point if self.space.legal(point) else None

    def _race(self, finalists: Sequence[Point], choice: Choice) -> Point | None:
        """Finalists against the default; the winner, or the one nearest the default of those that tie with
        it."""
        names = {f"f{i}": p for i, p in enumerate(finalists)}
        result = self._compare("confirm", {DEFAULT: self.space.default, **names}, choice, insist=True)
        bar = self.bar(result.rounds)
        passed: list[tuple[float, str, Point]] = []
        for name, point in names.items():
            if name not in result.logs:
                continue
            combined = result.ratio(name, list(self.weights), self.weights)
            ok = result.rounds >= 2 and self._beats_somehow(result, name, point, bar)
            ok = ok and self._earned(result, names, name, bar)
            self.note(
                "finalist",
                settings=self.space.settings(point),
                **combined.to_dict(),
                beats=ok,
                rounds=result.rounds,
            )
            if ok:
                passed.append((combined.ratio, name, point))
        if not passed:
            return None
        passed.sort(key=lambda entry: -entry[0])
        best_name = passed[0][1]
        tied = []
        for _, name, point in passed:
            behind = (
                1.0
                if name == best_name
                else result.ratio(name, list(self.weights), self.weights, best_name).ratio
            )
            if behind >= 1 - bar.of(list(self.weights)) / 2:
                tied.append((self.space.distance(point), name, point))
        _, name, winner = min(tied)
        self._accept(choice, result, name, winner, [])
        # Until entries are known one by one, what is left of it stands as one group.
        winner, choice.entries = self._as_group(result, name, winner)
        choice.point = winner
        return winner

    def _beats_somehow(self, result: Comparison, name: str, point: Point, bar: Bar) -> bool:
        """Whether a whole point gains on any metric it moves, or on their mean, and harms none."""
        moved = [m for m in self.weights if m in self.space.moved(point, self.space.default)] or list(
            self.weights
        )
        choices = [[m] for m in moved] + ([moved] if len(moved) > 1 else [])
        return any(bar.beats(result, name, metrics, self.weights, touched=moved)[0] for metrics in choices)

    def _as_group(self, result: Comparison, name: str, point: Point) -> tuple[Point, list[Entry]]:
        """The point without the entries that move only what has not gained, and the rest as one group: all
        that can be said where no entry was left out alone."""
        bar = self.bar(result.rounds)
        touched = self.space.moved(point, self.space.default)
        gained = {m for m in self.weights if bar.beats(result, name, [m], self.weights, touched=touched)[0]}
        for n in self.space.entries(point):
            without = self.space.without(point, n)
            if gained and not gained & set(self._moves(n)) and self.space.legal(without):
                point = without
        moved = [m for m in self.weights if m in self.space.moved(point, self.space.default)] or list(
            self.weights
        )
        gain = result.ratio(name, moved, self.weights)
        numbers = self.space.entries(point)
        return point, [self.entry(point, n, gain, "g1" if len(numbers) > 1 else None) for n in numbers]

    # ---- ties go towards the default

    def _towards_default(self, point: Point, choice: Choice) -> Point:
        numbers = [n for n in self.space.entries(point) if self.space.knobs[n].ordinal]
        for n in numbers:
            knob = self.space.knobs[n]
            target, value = self.space.default[n], point[n]
            step = 1 if target > value else -1
            between = [(*point[:n], i, *point[n + 1 :]) for i in range(value + step, target, step)]
            kinds = {self.space.code_class(point)}
            nearer: list[Point] = []
            for p in between:
                if self.space.legal(p) and self.space.code_class(p) not in kinds and self.admit(p) is None:
                    kinds.add(self.space.code_class(p))
                    nearer.append(p)
            if not nearer:
                continue
            names = {f"v{p[n]}": p for p in nearer[:4]}
            result = self._compare(f"walk/{knob.name}", {FULL: point, **names}, choice)
            if result.rounds < 2:
                return point
            bar = self.bar(result.rounds)
            moves = self._moves(n)
            for name, candidate in reversed(list(names.items())):  # the nearest to the default first
                if name not in result.logs:
                    continue
                ratio = result.ratio(name, moves, self.weights).ratio
                # All the ties together may cost half a margin.
                if ratio >= 1 - bar.of(moves) / 2 / len(numbers) and not self._harms(
                    result, name, bar, moves
                ):
                    self.note("tie", knob=knob.name, value=knob.values[candidate[n]], ratio=ratio)
                    point = candidate
                    break
        return point

    def _harms(self, result: Comparison, name: str, bar: Bar, touched: Sequence[str]) -> bool:
        return any(bar.harms(result.ratio(name, [m], self.weights), m, m in touched) for m in self.weights)

    # ---- every entry alone

    def _leave_one_out(self, point: Point, choice: Choice) -> None:
        """Drops what the rest does as well without; ends when every entry that is left is needed."""
        restored: set[int] = set()
        for attempt in range(4):
            numbers = self.space.entries(point)
            if not numbers:
                self._clear(choice)
                return
            variants = {f"without {self.space.knobs[n].name}": self.space.without(point, n) for n in numbers}
            variants = {name: p for name, p in variants.items() if self.admit(p) is None}
            if len(numbers) == 1:
                # Leaving out the only entry gives the default, which is compared with anyhow.
                variants = {}
            configurations = {DEFAULT: self.space.default, FULL: point, **variants}
            result = self._compare(f"without/{attempt}", configurations, choice)
            if result.rounds < 2 or FULL not in result.logs:
                if FULL in result.failed:
                    self._clear(choice)
                return
            bar = self.bar(result.rounds)
            entries, weak = [], []
            for n in numbers:
                name = f"without {self.space.knobs[n].name}"
                over = DEFAULT if len(numbers) == 1 else name
                if over != DEFAULT and over not in result.logs:
                    # It does not run without this entry, or may not be tried: the whole gain speaks for it.
                    estimate = result.ratio(FULL, self._moves(n), self.weights)
                    ok = self.space.knobs[n].fidelity is not Fidelity.APPROX
                else:
                    moves = self._moves(n)
                    ok, estimate = bar.beats(result, FULL, moves, self.weights, over, touched=moves)
                entries.append(self.entry(point, n, estimate, None))
                if not ok and n not in restored:
                    weak.append((estimate.ratio, n))
            whole_ok = self._beats_somehow(result, FULL, point, bar)
            self.note(
                "without", settings=self.space.settings(point),
                entries={e.name: e.estimate.to_dict() for e in entries},
                weak=[self.space.knobs[n].name for _, n in weak],
            )  # fmt: skip
            if not whole_ok:
                self._clear(choice)
                return
            if not weak:
                self._accept(choice, result, FULL, point, self._grouped(result, entries))
                return
            weak.sort()
            # Entries that lose together what neither loses alone must not go together.
            loss = sum(max(0.0, math.log(ratio)) for ratio, _ in weak)
            drop = [n for _, n in weak] if loss < bar.of(list(self.weights)) / 2 else [weak[0][1]]
            for n in drop:
                point = self.space.without(point, n)
        # Four passes and still something weak: what is left stands or falls as one.
        numbers = self.space.entries(point)
        result = self._compare("without/last", {DEFAULT: self.space.default, FULL: point}, choice)
        if result.rounds < 2 or not numbers or FULL not in result.logs:
            self._clear(choice)
            return
        if self._beats_somehow(result, FULL, point, self.bar(result.rounds)):
            point, entries = self._as_group(result, FULL, point)
            self._accept(choice, result, FULL, point, entries)
        else:
            self._clear(choice)

    def _grouped(self, result: Comparison, entries: list[Entry]) -> list[Entry]:
        """Marks as one group the entries whose losses, one by one, add up to more than the whole gain."""
        if len(entries) < 2:
            return entries
        groups: list[list[Entry]] = []
        for entry in entries:
            home = next((g for g in groups if set(g[0].moves) & set(entry.moves)), None)
            if home is None:
                groups.append([entry])
            else:
                home.append(entry)
        marked: list[Entry] = []
        number = 0
        for group in groups:
            moves = sorted({m for e in group for m in e.moves})
            whole = math.log(result.ratio(FULL, moves, self.weights).ratio)
            parts = sum(math.log(e.estimate.ratio) for e in group)
            together = len(group) > 1 and parts > whole + self.bar(result.rounds).of(moves)
            number += together
            for e in group:
                marked.append(
                    Entry(e.name, e.value, e.default, e.moves, e.estimate, f"g{number}" if together else None)
                )
        return sorted(marked, key=lambda e: [k.name for k in self.space.knobs].index(e.name))

    # ---- common

    def _moves(self, n: int) -> list[str]:
        return [m for m in self.weights if m in self.space.knobs[n].moves] or list(self.weights)

    def entry(self, point: Point, n: int, estimate: Estimate, group: str | None) -> Entry:
        knob = self.space.knobs[n]
        default = knob.values[self.space.default[n]]
        return Entry(knob.name, knob.values[point[n]], default, tuple(self._moves(n)), estimate, group)

    def _compare(
        self, key: str, points: Mapping[str, Point], choice: Choice, *, insist: bool = False
    ) -> Comparison:
        configurations: dict[str, Configuration] = {n: self.space.configuration(p) for n, p in points.items()}
        result = self.rounds.compare(key, configurations, self.count, insist=insist)
        choice.voided += result.voided
        choice.failed += [(points[n], v) for n, v in result.failed.items()]
        return result

    def _accept(
        self, choice: Choice, result: Comparison, name: str, point: Point, entries: list[Entry]
    ) -> None:
        base = result.names[0]
        choice.point = point
        choice.entries = entries
        choice.gain = {m: result.ratio(name, [m], self.weights) for m in self.weights}
        choice.baseline = {m: result.median_rate(base, m) for m in self.weights}
        choice.tuned = {m: result.median_rate(name, m) for m in self.weights}

    def _clear(self, choice: Choice) -> None:
        choice.point = self.space.default
        choice.entries = []
        choice.gain = {}
        choice.tuned = dict(choice.baseline)
