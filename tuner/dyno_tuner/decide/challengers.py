"""Challengers: settings that may be as good as the winner or better. The search has looked closely only near
its winner.

If two alternative settings gain the same, all tunes must choose the same one, in whatever order they find
them: the one closer to the default, and among equally close ones the one whose knob is listed first. So the
winner is compared with its possible substitutes.
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

MOST = 4  # most challengers that are measured in rounds
MOST_UNSEEN = 8  # most points that are tried before that
TIMES = 3  # most replacements of a winner
DOUBT = 2.0  # standard deviations by which a predicted challenger may be slower


@dataclass
class Challengers:
    """The search for settings that should replace the winner.

    Args:
    explore: Tries points like the search, if there is time, and returns all trials.
    """

    judge: Judge
    explore: Callable[[Sequence[Point]], Sequence[Trial]]

    def run(self, choice: Choice) -> None:
        """Replace `choice` by a challenger, as long as there is a better one."""
        self.judge.until("leave_one_out")
        for attempt in range(TIMES):
            if not self._replaced(f"rivals/{attempt}", choice):
                return

    def _replaced(self, key: str, choice: Choice) -> bool:
        judge, space = self.judge, self.judge.space
        trials = self.explore(self.unseen(self.explore([]), choice.point))
        challengers = self.candidates(trials, choice.point)
        while challengers and not judge.rounds.affordable(2 * measurements_in_round(2 + len(challengers))):
            challengers.pop()  # before their answers are compared, which takes time, too
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
        # Better points come first, and then the preferred ones among ties.
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
        """Whether a challenger is better than the winner, or ties with it and is preferred."""
        judge = self.judge
        if self._better(result, name):
            return True
        bar, metrics = judge.bar(result.rounds), list(judge.weights)
        harmed = any(bar.harms(result.ratio(name, [m], judge.weights, FULL), m) for m in metrics)
        first = judge.space.preference(point) < judge.space.preference(winner)
        return first and not harmed and judge.ties(result, name, FULL, metrics)

    def _close(self, result: Comparison, names: Mapping[str, Point], winner: Point) -> bool:
        """Whether the same number of further rounds must decide if a preferred challenger ties with the
        winner. Half the margin is two standard errors, so one of twenty ties does not look like one."""
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
        """Whether a challenger is proven in its own rounds. The best of several that were compared at once
        looks better than it is.

        If there is no time for such rounds, a challenger with a single entry that ties is accepted by the
        comparison, because its place in the order decides and not its ratio."""
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
        """By pair of knobs: points in which another entry replaces an entry of the winner, or an unordered
        entry has another value. The new entry must affect all metrics of the old one."""
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
        """Points that the search has not tried: the winner with one entry one step farther from the default,
        and the ends of the lines."""
        space = self.judge.space
        tried = {space.code_class(t.point) for t in trials}
        farther = [p for p in space.neighbours(winner) if space.distance(p)[1] > space.distance(winner)[1]]
        steps = [p for p in farther if space.entries(p) == space.entries(winner)]
        ends = [p for line in self.lines(trials, winner) for p in (line[-1], line[0])]
        found = {space.code_class(p): p for p in (*steps, *ends)}
        return [p for kind, p in found.items() if kind not in tried][:MOST_UNSEEN]

    def candidates(self, trials: Sequence[Trial], winner: Point) -> list[Point]:
        """Points that may tie with the winner and are preferred, or that seem to be better, the most
        promising first."""
        judge, space = self.judge, self.judge.space
        failed = {space.code_class(t.point) for t in trials if t.log_ratio is None}
        steps = [p for p in space.neighbours(winner) if space.entries(p) == space.entries(winner)]
        steps = [p for p in steps if space.code_class(p) not in failed]
        challengers = list(dict.fromkeys([*(p for line in self.lines(trials, winner) for p in line), *steps]))
        if not challengers:
            return []
        mean, sigma = predicted(space, judge.history(trials), [winner, *challengers])
        # A trial is a single measurement in one process with others, so it has the noise of a single round.
        near, above = (judge.bar(n).of(list(judge.weights)) for n in (1, judge.wanted()))
        hopeful = []
        for x, s, p in zip(mean[1:], sigma[1:], challengers, strict=True):
            first = space.preference(p) < space.preference(winner) and p not in steps
            if x >= mean[0] + above / 2 or (first and x + DOUBT * s >= mean[0] - near):
                hopeful.append((-float(x), p))
        return [p for _, p in sorted(hopeful)[:MOST]]
