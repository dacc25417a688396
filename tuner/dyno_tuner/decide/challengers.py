"""Settings that do as well as the winner, or better: a search looks closely where it has found its winner,
and guesses elsewhere.

Of two settings that gain the same, and not both at once, every tune has to take the same one, whichever it
has met first: the one nearer the default, and of two as near the one whose knob is listed first. So a winner
is measured beside what could stand in its place.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..measure.paired_rounds import measurements_in_round
from ..search.surrogate import predicted
from ..space.search_space import with_index
from .ablation import DEFAULT, FULL, left_out
from .acceptance import Choice
from .elimination import Elimination

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ..measure.comparison import Comparison
    from ..search.observation import Trial
    from ..space.search_space import Point
    from .acceptance import Judge

MOST = 4  # challengers that are measured in rounds
MOST_UNSEEN = 8  # points that are tried first
TIMES = 3  # a winner is replaced, at most
DOUBT = 2.0  # standard deviations by which a prediction may fall short


@dataclass
class Challengers:
    """The search for settings that are to be taken instead of the winner.

    Args:
    explore: tries points as the search did, where there is time; gives all trials.
    """

    judge: Judge
    explore: Callable[[Sequence[Point]], Sequence[Trial]]

    def run(self, choice: Choice) -> None:
        """Brings `choice` to a challenger that is to be taken instead, as long as there is one."""
        self.judge.until("leave_one_out")
        for attempt in range(TIMES):
            if not self._replaced(f"rivals/{attempt}", choice):
                return

    def _replaced(self, key: str, choice: Choice) -> bool:
        judge, space = self.judge, self.judge.space
        trials = self.explore(self.unseen(self.explore([]), choice.point))
        challengers = self.candidates(trials, choice.point)
        while challengers and not judge.rounds.affordable(2 * measurements_in_round(2 + len(challengers))):
            challengers.pop()  # before their answers are compared: that takes time, too
        challengers = [p for p in challengers if judge.admit(p) is None]
        if not challengers:
            return False
        names = {f"r{i}": p for i, p in enumerate(sorted(challengers, key=lambda p: space.preference(p)))}
        points = {DEFAULT: space.default, FULL: choice.point, **names}
        result = judge.compare(key, points, choice)
        if result.rounds >= 2 and FULL in result.logs and self._close(result, names, choice.point):
            result = judge.compare(key, points, choice, into=result)
        if result.rounds < 2 or FULL not in result.logs:
            return False
        found = [n for n in names if n in result.logs and self._stands(result, n, names[n], choice.point)]
        # The better points go first, then the ones to prefer among ties.
        better = [n for n in found if self._better(result, n)]
        better.sort(key=lambda n: -result.ratio(n, list(judge.weights), judge.weights).ratio)
        before = space.settings(choice.point)
        for name in dict.fromkeys([*better, *found]):
            if self._take(key, result, name, names[name], choice, name in better):
                ratio = result.ratio(name, list(judge.weights), judge.weights, FULL).ratio
                judge.note(
                    "rival", settings=space.settings(choice.point), instead_of=before, ratio=ratio,
                    better=name in better,
                )  # fmt: skip
                return True
        return False

    def _better(self, result: Comparison, name: str) -> bool:
        bar, weights = self.judge.bar(result.rounds), self.judge.weights
        return bar.beats(result, name, list(weights), weights, FULL)[0]

    def _stands(self, result: Comparison, name: str, point: Point, winner: Point) -> bool:
        """Whether a challenger is better than the winner, or ties with it and is to be taken before it."""
        judge = self.judge
        if self._better(result, name):
            return True
        bar, metrics = judge.bar(result.rounds), list(judge.weights)
        harmed = any(bar.harms(result.ratio(name, [m], judge.weights, FULL), m) for m in metrics)
        first = judge.space.preference(point) < judge.space.preference(winner)
        return first and not harmed and judge.ties(result, name, FULL, metrics)

    def _close(self, result: Comparison, names: Mapping[str, Point], winner: Point) -> bool:
        """Whether as many rounds again are to tell if something that is to be taken before the winner ties
        with it: half the margin is two standard errors, so of twenty ties one seems to be none."""
        judge, metrics = self.judge, list(self.judge.weights)
        margin = judge.bar(result.rounds).of(metrics)
        before = [
            n for n, p in names.items()
            if n in result.logs and judge.space.preference(p) < judge.space.preference(winner)
        ]  # fmt: skip
        behind = [1 - result.ratio(n, metrics, judge.weights, FULL).ratio for n in before]
        return any(margin / 4 < x < margin for x in behind)

    def _take(
        self, key: str, result: Comparison, name: str, point: Point, choice: Choice, better: bool
    ) -> bool:
        """Whether a challenger is proven, by rounds of its own: of several that were compared at once the
        best one looks better than it is.

        Where there is no time for them, one of a single entry that ties stands by what was compared: it is
        taken for its place in the order, not for its ratio."""
        judge = self.judge
        numbers = judge.space.entries(point)
        if (
            len(numbers) == 1
            and not better
            and not judge.rounds.affordable(judge.ablation_measurements(point))
        ):
            part = judge.part(numbers[0])
            found = [left_out(result, part, judge.bar(result.rounds), judge.weights, None, name)]
            evidence = judge.evidence(result, point, found, name)
            return choice.accept(evidence, point, judge.entries(point, found))
        tried = Choice(judge.space.default)
        proven = Elimination(judge).run(point, tried, f"{key}/{name}")
        choice.voided += tried.voided
        choice.failed += tried.failed
        if proven:
            choice.take(tried)
        return proven

    # ---- which

    def lines(self, trials: Sequence[Trial], winner: Point) -> list[list[Point]]:
        """By pair of knobs: points with another entry in the place of one of the winner's, or with another
        value of an unordered one. The new entry has to move all that the other did."""
        space = self.judge.space
        entries = space.entries(winner)
        failed = {space.code_class(t.point) for t in trials if t.log_ratio is None}
        known = {space.code_class(winner), space.code_class(space.default)} | failed
        found: list[list[Point]] = []
        for n, m in itertools.product(entries, range(len(space.knobs))):
            knob = space.knobs[m]
            own = n == m and not knob.ordinal
            if not own and (m in entries or not set(self.judge.moves(n)) <= set(self.judge.moves(m))):
                continue
            without = space.without(winner, n)
            line: list[Point] = []
            for i in range(len(knob.values)):
                point = with_index(without, m, i)
                if i != space.default[m] and space.legal(point) and space.code_class(point) not in known:
                    known.add(space.code_class(point))
                    line.append(point)
            found.append(line)
        return [line for line in found if line]

    def unseen(self, trials: Sequence[Trial], winner: Point) -> list[Point]:
        """Points that the search has not tried: the winner with one of its entries a step farther from the
        default, and the ends of the lines."""
        space = self.judge.space
        tried = {space.code_class(t.point) for t in trials}
        farther = [p for p in space.neighbours(winner) if space.distance(p)[1] > space.distance(winner)[1]]
        steps = [p for p in farther if space.entries(p) == space.entries(winner)]
        ends = [p for line in self.lines(trials, winner) for p in (line[-1], line[0])]
        found = {space.code_class(p): p for p in (*steps, *ends)}
        return [p for kind, p in found.items() if kind not in tried][:MOST_UNSEEN]

    def candidates(self, trials: Sequence[Trial], winner: Point) -> list[Point]:
        """Points that may tie and come before the winner, or that seem to be better; the most promising
        first."""
        judge, space = self.judge, self.judge.space
        failed = {space.code_class(t.point) for t in trials if t.log_ratio is None}
        steps = [p for p in space.neighbours(winner) if space.entries(p) == space.entries(winner)]
        steps = [p for p in steps if space.code_class(p) not in failed]
        challengers = list(dict.fromkeys([*(p for line in self.lines(trials, winner) for p in line), *steps]))
        if not challengers:
            return []
        mean, sigma = predicted(space, judge.history(trials), [winner, *challengers])
        # A trial is a single measurement, in one process with the others: the noise of a single round.
        near, above = (judge.bar(n).of(list(judge.weights)) for n in (1, judge.wanted()))
        hopeful = []
        for x, s, p in zip(mean[1:], sigma[1:], challengers, strict=True):
            first = space.preference(p) < space.preference(winner) and p not in steps
            if x >= mean[0] + above / 2 or (first and x + DOUBT * s >= mean[0] - near):
                hopeful.append((-float(x), p))
        return [p for _, p in sorted(hopeful)[:MOST]]
