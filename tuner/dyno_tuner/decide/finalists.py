"""From the best points of the screen to the entries of a profile: finalists in paired rounds, preference for
the default among ties, and then the ablation of each entry, until all remaining entries are needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..core.protocol import TrialStatus
from ..measure.paired_rounds import WIDEST_MARGIN, measurements_in_round
from ..search.surrogate import predicted
from ..space.search_space import with_index
from .ablation import DEFAULT, FULL
from .acceptance import LEAST_ROUNDS
from .challengers import Challengers
from .elimination import Elimination

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from ..core.protocol import Measurement
    from ..measure.comparison import Comparison
    from ..measure.paired_rounds import Bar
    from ..search.observation import Trial
    from ..space.search_space import Point
    from .acceptance import Choice, Judge

FINALISTS = 3
FAR = 3.0  # margins; noise does not reach so far
DOUBT = 2.0  # standard errors of a trial
HOPE = 1.4  # factor by which A/A may overestimate the number of rounds
LAST = "kernels"  # the later stage whose time settings may also use


def worth_proving(trials: Sequence[Trial], bar: Bar, metrics: Collection[str]) -> list[Trial]:
    """The trials with an overall gain, and a gain of at least half the margin in some metric."""
    return [
        t for t in trials
        if t.log_ratio is not None and t.score is not None and t.log_ratio > 0
        and any(t.score.log_ratio(m) > bar.margin[m] / 2 for m in metrics)
    ]  # fmt: skip


def beyond_doubt(trials: Sequence[Trial], metrics: Collection[str], sigma: float) -> Trial | None:
    """The best trial whose gain in some metric exceeds the widest margin, even after subtracting its noise.

    Args:
        sigma: Standard error of the log ratio of a trial.
    """
    least = math.log1p(WIDEST_MARGIN) + DOUBT * sigma
    found = [
        t for t in trials
        if t.log_ratio is not None and t.score is not None and t.log_ratio > 0
        and any(t.score.log_ratio(m) > least for m in metrics)
    ]  # fmt: skip
    return max(found, key=lambda t: t.log_ratio or 0.0, default=None)


def surely_faster(log_ratio: float | None, sigma: float) -> float:
    """A lower bound of the ratio to the default, after subtracting the noise; 1 or more.

    Args:
        sigma: Standard error of the log ratio.
    """
    return math.exp(max(0.0, (log_ratio or 0.0) - DOUBT * sigma))


@dataclass
class Chooser:
    """The stage that leads from the trials of the screen to a proven choice.

    Args:
    explore: Tries more points like the search, and returns all trials.

    `unproven` says whether there was no time to decide about a point that looked faster. If only a part of
    that point was proven, `missed` is the point with its log ratio. `failed` has the knobs of points that
    looked faster and failed twice in rounds, and `failure` has their message. Other programs may have caused
    both failures, so no default has beaten these knobs.
    """

    judge: Judge
    explore: Callable[[Sequence[Point]], Sequence[Trial]]
    unproven: bool = False
    missed: tuple[Point, float] | None = None
    failed: list[str] = field(default_factory=list)
    failure: str = ""

    def run(self, trials: Sequence[Trial], choice: Choice) -> None:
        """Build `choice` step by step."""
        judge = self.judge
        judge.until("confirm")
        self.unproven = True  # until the opposite is known, even after Ctrl-C
        finalists = self.pick(trials)
        if not finalists:
            self.unproven = False
            return
        winner: Point | None
        if self._races(finalists, trials):
            winner = self._race(finalists, choice)
            if winner is not None:
                winner = self._towards_default(winner, choice)
        else:
            winner = finalists[0]  # a race would leave no time to prove its winner
        if winner is None:
            return
        # Settings are proven before kernels, even if no time is left for kernels.
        self.unproven, whole = True, winner
        measurements, compared = self._proof_of(winner, trials), judge.compared(winner)
        if not any(judge.affordable(stage, measurements, compared) for stage in ("leave_one_out", LAST)):
            winner = self._provable(winner, trials)
            if winner is None:
                return
        elimination = Elimination(judge, LAST)
        proven = elimination.run(winner, choice)
        if elimination.cut and (not choice.entries or elimination.apart):
            winner, elimination, proven = self._again(winner, elimination, trials, choice)
        # Perhaps not all points that looked faster were compared.
        self.unproven = not proven and (elimination.cut or winner != whole)
        if not proven and elimination.failed is not None:
            self._note_failed([elimination.failed])
        if proven:
            Challengers(judge, self.explore).run(choice)
            if winner != whole or elimination.apart:
                self.missed = self._missed(whole, choice, trials)

    def _note_failed(self, failed: Sequence[tuple[Point, Measurement]]) -> None:
        """Remember points that failed twice. A refusal by the engine is final."""
        space = self.judge.space
        for point, measurement in failed:
            if measurement.status is not TrialStatus.INVALID:
                self.failed += [space.knobs[n].name for n in space.entries(point)]
                self.failure = measurement.message or str(measurement.status)

    def _again(
        self, winner: Point, elimination: Elimination, trials: Sequence[Trial], choice: Choice
    ) -> tuple[Point, Elimination, bool]:
        """Prove fewer entries, if there was no time for all of them. If the first comparison has proven some
        independent entries, the better of the two results counts.

        Returns:
            The point, its elimination, and whether anything is proven.
        """
        judge, space = self.judge, self.judge.space
        # The answers of the profiles without entries had to be compared first, and are known now.
        judge.until(LAST)
        smaller = self._standing_apart(elimination, trials) or self._provable(winner, trials, learned=True)
        apart = elimination.apart
        if smaller in (None, winner) or (
            apart and set(space.entries(smaller)) <= set(space.entries(choice.point))
        ):
            return winner, elimination, apart
        known = elimination.rounds_of(smaller, "again/0")
        second, other = Elimination(judge, LAST), choice if not apart else choice.empty(space.default)
        proven = second.run(smaller, other, "again", known)
        if not apart:
            return smaller, second, proven
        choice.count(other)
        if proven and other.log_gain(judge.weights) > choice.log_gain(judge.weights):
            choice.take(other)
            return smaller, second, True
        return winner, elimination, True

    def _standing_apart(self, elimination: Elimination, trials: Sequence[Trial]) -> Point | None:
        """The best independent entries of the last comparison for whose missing rounds there is time."""
        judge, space = self.judge, self.judge.space
        points = []
        for point in elimination.standing_apart():
            known = elimination.rounds_of(point, "")
            if known is not None and space.legal(point) and self._fits(point, trials, True, known.rounds):
                points.append(point)
        if not points:
            return None
        mean, _ = predicted(space, judge.history(trials), points)
        point = points[int(mean.argmax())]
        return point if judge.admit(point) is None else None

    def _races(self, finalists: Sequence[Point], trials: Sequence[Trial]) -> bool:
        """Whether there is time for a race and for the proof of its winner.

        A gain far above the margin can be proven without a race. In that case, a race takes place only if
        there is time for all rounds that the noise requires in both, and a single finalist does not race if
        time is short. A small gain must pass both comparisons.
        """
        judge = self.judge
        largest = max(finalists, key=lambda p: len(judge.space.entries(p)))
        race, proof = 2, 3.0
        if self._far_ahead(trials):
            race = proof = judge.wanted()
            if judge.proving_rounds(LEAST_ROUNDS, judge.moved(largest)) is None:
                proof = math.inf  # as far as A/A shows, so rounds are only for the proof
            if len(finalists) == 1 and len(judge.space.entries(largest)) > 1 and judge.short_of_time:
                return False
        measurements = race * measurements_in_round(len(finalists) + 1)
        measurements += judge.ablation_measurements(largest, proof)
        return judge.affordable("leave_one_out", measurements, judge.compared(largest))

    def _far_ahead(self, trials: Sequence[Trial]) -> bool:
        """Whether a trial of the search gained FAR times the margin in some metric, or surely more than any
        margin of a proof."""
        scores = [t.score for t in trials if t.score is not None and (t.log_ratio or 0.0) > 0]
        if not scores:
            return False
        if beyond_doubt(trials, self.judge.weights, self.judge.sigma) is not None:
            return True
        margin = self.judge.bar(LEAST_ROUNDS).margin
        return any(s.log_ratio(m) > FAR * margin[m] for s in scores for m in self.judge.weights)

    def _missed(self, whole: Point, choice: Choice, trials: Sequence[Trial]) -> tuple[Point, float] | None:
        """The point of which only a part could be proven, if it was faster in the search than the profile by
        more than the noise."""
        judge, kind = self.judge, self.judge.space.code_class(whole)
        seen = [t.log_ratio for t in trials if t.log_ratio and judge.space.code_class(t.point) == kind]
        if not seen or not choice.gain:
            return None
        written = choice.log_gain(judge.weights)
        bar = judge.bar(judge.wanted()).of(list(judge.weights))
        return (whole, max(seen)) if max(seen) > written + bar else None

    def _provable(self, point: Point, trials: Sequence[Trial], *, learned: bool = False) -> Point | None:
        """The point with as many entries as there is time to prove. The trials show which entries to drop. If
        the proof of a single entry would take too long because of noise, two rounds show whether the noise is
        as high as it seems.

        Args: `learned`: whether rounds have run, so that their time is known.
        """
        judge, space = self.judge, self.judge.space
        history = judge.history(trials)
        failed = {space.code_class(t.point) for t in trials if t.log_ratio is None}
        while not self._fits(point, trials, learned):
            numbers = space.entries(point)
            smaller = [space.without(point, n) for n in numbers]
            smaller = [p for p in smaller if space.legal(p) and space.code_class(p) not in failed]
            if len(numbers) < 2 or not smaller:
                if not judge.fits(judge.ablation_measurements(point, LEAST_ROUNDS), judge.compared(point)):
                    return None
                break
            mean, _ = predicted(space, history, smaller)
            fit = [self._fits(p, trials, learned) for p in smaller]  # there may be time for one metric
            point = smaller[max(range(len(smaller)), key=lambda i: (fit[i], float(mean[i])))]
        judge.note("provable", settings=space.settings(point))
        return point if judge.admit(point) is None else None

    def _fits(self, point: Point, trials: Sequence[Trial], learned: bool, known: int = 0) -> bool:
        """Whether there is time to prove a point for which this many rounds exist.

        Before the first round, A/A gives the noise and the trials give the speed of a point. An A/A result
        that allows no proof is not believed. Rounds give better values for both.
        """
        judge = self.judge
        if not learned:
            measurements = self._proof_of(point, trials)
        elif (rounds := judge.proving_rounds(LEAST_ROUNDS, judge.moved(point))) is None:
            return False
        else:
            measurements = judge.ablation_measurements(point, max(1, rounds - known))
        return judge.fits(measurements, judge.compared(point))

    def _proof_of(self, point: Point, trials: Sequence[Trial]) -> float:
        """The least number of measurements that prove a point, from its speed in the trials."""
        judge = self.judge
        mean, deviation = predicted(judge.space, judge.history(trials), [point])
        faster = surely_faster(float(mean[0]), float(deviation[0]))
        by_noise = judge.ablation_measurements(point, faster=faster)
        return max(by_noise / HOPE, judge.ablation_measurements(point, LEAST_ROUNDS, faster))

    # ---- finalists

    def pick(self, trials: Sequence[Trial]) -> list[Point]:
        """The best points of the screen, and the combination of the best values for each metric."""
        judge, space = self.judge, self.judge.space
        worth = worth_proving(trials, judge.bar(judge.wanted()), judge.weights)
        worth.sort(key=lambda t: (-(t.log_ratio or 0.0), space.distance(t.point)))
        points: dict[Point, None] = dict.fromkeys(t.point for t in worth[:FINALISTS])
        joined = self._join(trials)
        if joined is not None and worth and joined not in points:
            points = dict.fromkeys([joined, *list(points)[: FINALISTS - 1]])
        # A point that changes answers must beat the same point without that change, so both take part.
        both = {q: None for p in points for q in (p, judge.faithful(p))}
        left = [p for p in both if p != space.default]
        chosen = self._few(left)
        while refused := [p for p in chosen if judge.admit(p) is not None]:
            left = [p for p in left if p not in refused]
            chosen = self._few(left)
        judge.note("finalists", settings=[space.settings(p) for p in chosen])
        return chosen

    def _few(self, finalists: Sequence[Point]) -> list[Point]:
        """Limit the finalists, because few finalists in enough rounds are better than many in one round. Only
        the answers of these are compared."""
        judge, few = self.judge, list(finalists)
        while len(few) > 1 and not judge.fits(3 * measurements_in_round(len(few) + 1), few):
            # A point that changes answers is dropped first, because without its twin in the race it could not
            # win.
            changing = [p for p in few if judge.faithful(p) != p]
            few.remove(changing[-1] if changing else few[-1])
        return few

    def _join(self, trials: Sequence[Trial]) -> Point | None:
        """Combine trials: knobs that affect only one metric take their value from the best trial for that
        metric."""
        space, weights = self.judge.space, self.judge.weights
        scored = [t for t in trials if t.score is not None and t.log_ratio is not None]
        if len(weights) < 2 or not scored:
            return None
        best = max(scored, key=lambda t: t.log_ratio or 0.0)
        by_metric: dict[str, Trial] = {
            m: max(scored, key=lambda t: t.score.log_ratio(m) if t.score else 0.0) for m in weights
        }
        values = []
        for n, knob in enumerate(space.knobs):
            measured = [m for m in weights if m in knob.moves]
            source = by_metric[measured[0]] if len(measured) == 1 else best
            values.append(source.point[n])
        point = tuple(values)
        return point if space.legal(point) else None

    def _race(self, finalists: Sequence[Point], choice: Choice) -> Point | None:
        """Compare the finalists with the default. Returns the winner, or the tying finalist closest to the
        default. Two rounds are run even if the time of this stage is too short for them."""
        judge, space = self.judge, self.judge.space
        names = {f"f{i}": p for i, p in enumerate(finalists)}
        points = {DEFAULT: space.default, **names}
        roomy = judge.affordable("confirm", 2 * measurements_in_round(len(points)))
        if not roomy:
            judge.until("leave_one_out")
        result = judge.compare("confirm", points, choice, None if roomy else 2)
        self.unproven = result.rounds < 2 and any(n not in result.failed for n in names)
        bar = judge.bar(result.rounds)
        passed: list[tuple[float, str]] = []
        unsettled: list[tuple[float, str]] = []  # faster, but the margin is too wide for a proof
        for name, point in names.items():
            if name not in result.logs:
                continue
            combined = result.ratio(name, list(judge.weights), judge.weights)
            ok = result.rounds >= 2 and judge.gains(result, name, point)
            ok = ok and self._earned(result, names, name, bar)
            harmed = {} if ok else judge.harmed(result, name, judge.moved(point))
            judge.note(
                "finalist", settings=space.settings(point), **combined.to_dict(), beats=ok,
                rounds=result.rounds, harmed=harmed,
            )  # fmt: skip
            if ok:
                passed.append((combined.ratio, name))
            elif result.rounds >= 2 and judge.unsettled(result, name, point):
                unsettled.append((combined.ratio, name))
        if not passed:
            # The proof of its entries has its own rounds, which reduce the margin.
            if not unsettled:
                self._note_failed([(names[n], m) for n, m in result.failed.items() if n in names])
            return names[max(unsettled)[1]] if unsettled else None
        best = max(passed)[1]
        tied = [names[n] for _, n in passed if judge.ties(result, n, best, list(judge.weights))]
        winner = min(tied, key=lambda p: space.preference(p))
        if len(space.entries(winner)) == 1:
            name = next(n for n, p in names.items() if p == winner)
            part = [judge.alone(result, winner, name)]
            evidence = judge.evidence(result, winner, part, name)
            choice.accept(evidence, winner, judge.entries(winner, part))
        return winner

    def _earned(self, result: Comparison, names: Mapping[str, Point], name: str, bar: Bar) -> bool:
        """Whether the entries that change answers in a finalist gain by themselves, because noise must never
        choose them."""
        judge = self.judge
        faithful = judge.faithful(names[name])
        if faithful == names[name]:
            return True
        if faithful == judge.space.default:
            return True  # it has just beaten the default
        twin = next((n for n, p in names.items() if p == faithful), None)
        if twin is None or twin not in result.logs:
            return False
        moved = [m for m in judge.weights if m in judge.space.moved(names[name], faithful)]
        return bar.beats(result, name, moved or list(judge.weights), judge.weights, twin)[0]

    # ---- ties go towards the default

    def _towards_default(self, point: Point, choice: Choice) -> Point:
        judge, space = self.judge, self.judge.space
        numbers = [n for n in space.entries(point) if space.knobs[n].ordinal]
        proof = judge.ablation_measurements(point, 3)
        for n in numbers:
            nearer = self._nearer(point, n)
            if not nearer:
                continue
            measurements = 2 * measurements_in_round(1 + len(nearer))
            if not judge.affordable("leave_one_out", measurements + proof):
                return point
            judge.until("walk")
            names = {f"v{p[n]}": p for p in nearer}
            result = judge.compare(f"walk/{space.knobs[n].name}", {FULL: point, **names}, choice)
            if result.rounds < 2:
                return point
            moves = judge.moves(n)
            for name, candidate in reversed(list(names.items())):  # the closest to the default first
                if name not in result.logs or judge.harms(result, name, moves):
                    continue
                # All ties together may cost at most half a margin.
                if judge.ties(result, name, FULL, moves, 1 / len(numbers)):
                    ratio = result.ratio(name, moves, judge.weights).ratio
                    judge.note("tie", knob=space.knobs[n].name, value=space.knobs[n].values[candidate[n]],
                               ratio=ratio)  # fmt: skip
                    point = candidate
                    break
        return point

    def _nearer(self, point: Point, n: int) -> list[Point]:
        """Up to four points with a value of this knob between the default and its value in the point."""
        judge, space = self.judge, self.judge.space
        target, value = space.default[n], point[n]
        step = int(math.copysign(1, target - value))
        kinds = {space.code_class(point)}
        found: list[Point] = []
        for i in range(value + step, target, step):
            p = with_index(point, n, i)
            if len(found) < 4 and space.legal(p) and space.code_class(p) not in kinds:
                kinds.add(space.code_class(p))
                if judge.admit(p) is None:
                    found.append(p)
        return found
