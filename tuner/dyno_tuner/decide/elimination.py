"""Backward elimination: settings that the profile does not need are removed, until leaving out any remaining
one loses speed. No setting is written before that, however large the gain of the whole profile."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ..core.errors import DisturbedError
from ..measure.paired_rounds import ALL_DIFFER, measurements_in_round
from ..space.knobs import Fidelity
from .ablation import DEFAULT, FULL, left_out, rest_of, variants, without
from .acceptance import LEAST_ROUNDS

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from ..core.intervals import Estimate
    from ..core.outcome import Entry
    from ..core.protocol import Measurement
    from ..measure.comparison import Comparison
    from ..measure.paired_rounds import Likeness
    from ..space.search_space import Point
    from .ablation import LeftOut
    from .acceptance import Choice, Judge

ATTEMPTS = 4
ROUNDS_TELL = 3  # number of rounds that estimate the noise better than A/A

Weak = list[tuple[float, int]]  # ratio and knob of entries that may be removed


@dataclass
class Elimination:
    """The elimination of settings from a point.

    Args:
        last: A later stage whose time may be used, if the time of this stage ends before everything is
            proven.

    `cut` says whether there was no time to prove anything.
    """

    judge: Judge
    last: str | None = None
    cut: bool = False
    weak: set[str] = field(default_factory=set)  # weak entries in the last comparison
    needed: set[str] = field(default_factory=set)  # the rest did not run without these
    hopeless: bool = False  # whether the last comparison ended to begin a smaller proof
    apart: bool = False  # whether only entries are proven whose metrics no other entry affects
    looked: tuple[Comparison, Point, list[LeftOut]] | None = None  # the last comparison with a result
    failed: tuple[Point, Measurement] | None = None  # a whole point that failed twice, which is no loss

    def run(
        self, point: Point, choice: Choice, key: str = "without", known: Comparison | None = None
    ) -> bool:
        """Remove entries that are not needed until all remaining ones are, and bring `choice` to the result.
        Returns False if nothing is proven. `choice` is then the default if that was measured, or unchanged if
        there was no time.

        Args:
            known: Rounds of the first comparison that already exist; see `rounds_of`.
        """
        judge, space = self.judge, self.judge.space
        parts: list[LeftOut] = []
        before: Comparison | None = None
        for attempt in range(ATTEMPTS):
            if not space.entries(point):
                return choice.clear(space.default)
            try:
                result, found, weak = self._look(f"{key}/{attempt}", point, choice, known)
            except (KeyboardInterrupt, DisturbedError):
                self._stop(f"{key}/{attempt}", point, before, parts, choice)
                raise
            # If the profile without an entry ran at first and then failed, the entry is undecided, unless the
            # earlier rounds prove it.
            self.cut |= bool(result.halted)
            if FULL in result.failed:
                self.failed = point, result.failed[FULL]
                return choice.clear(space.default)
            if self.hopeless:
                self.looked = (result, point, found)
                self.cut = True
                return self._split(choice)
            untold = any(result.untold(without(p.part.label)) for p in found)
            if untold:
                # The profile without the entry may run after all, so the entry has no proof yet.
                self.looked = (result, point, found)
                if result.halted and attempt + 1 < ATTEMPTS:
                    continue
            if not found or untold:
                settled = before is not None and self._settled(before, point, parts, choice)
                settled = settled or self._split(choice)
                self.cut |= not settled
                return settled
            parts, known = found, None
            self.looked = (result, point, parts)
            judge.note(
                "without", settings=space.settings(point), rounds=result.rounds,
                entries={p.part.label: p.gain.to_dict() for p in parts},
                weak=[space.knobs[n].name for _, n in weak],
            )  # fmt: skip
            if not weak:
                return self._accept(result, point, parts, choice) or choice.clear(space.default)
            before = result if judge.gains(result, FULL, point) else None
            self.weak = {space.knobs[n].name for _, n in weak}
            point = self._smaller(point, weak, judge.bar(result.rounds).of(list(judge.weights)))
        return self._as_one(point, parts, choice, key)

    def _look(
        self, key: str, point: Point, choice: Choice, known: Comparison | None = None
    ) -> tuple[Comparison, list[LeftOut], Weak]:
        """The entries of a point, and the weak ones among them; no entries if there was no time, or if the
        point does not run. If only intervals speak against entries, the same number of further rounds
        decides.

        The second comparison needs no wider interval, because a worthless entry must also gain the margin
        both times. In 20,000 simulations for each of four noise levels, the first comparison accepted 0.01 to
        0.5 % of such entries and the second one 0 to 0.2 % more. A 95 % interval alone would accept 2.5 %
        each time."""
        result = self._compare(key, point, choice, into=known, told=known.rounds if known else 0)
        for again in (True, False):
            if result.rounds < LEAST_ROUNDS or FULL not in result.logs:
                break
            parts, weak = self._left_out(result, point)
            if not (again and weak and self._unsure(result, weak)):
                return result, parts, weak
            before = result.rounds
            result = self._compare(key, point, choice, into=result)
            self.cut |= result.rounds == before
        return result, [], []

    def _stop(
        self, key: str, point: Point, before: Comparison | None, parts: Sequence[LeftOut], choice: Choice
    ) -> None:
        """Accept what the rounds so far have proven.

        Args: `key`: key of the comparison. Until its first round begins, the last rounds belong to a larger
            point."""
        result = self.judge.rounds.running
        if result.key == key and result.rounds >= LEAST_ROUNDS and FULL in result.logs:
            self._accept(result, point, self._left_out(result, point)[0], choice)
        elif before is not None:
            self._settled(before, point, parts, choice)

    def _accept(
        self, result: Comparison, point: Point, parts: Sequence[LeftOut], choice: Choice, name: str = FULL,
        note: str = "",
    ) -> bool:  # fmt: skip
        judge = self.judge
        entries = [replace(e, note=note) for e in self._grouped(result, judge.entries(point, parts))]
        return choice.accept(judge.evidence(result, point, parts, name), point, entries)

    def _variants(self, point: Point) -> dict[str, Point]:
        """The configurations of a comparison. A profile without an entry is left out if its answers are
        wrong. If its answers could not be compared, the rounds show whether it runs."""
        judge, space = self.judge, self.judge.space
        numbers = {space.knobs[n].name: n for n in space.entries(point)}
        parts = [judge.part(n) for n in numbers.values()]
        named = variants(space.default, point, parts, lambda p: space.without(point, numbers[p.label]))
        refused = {n: judge.admit(p) for n, p in named.items() if n not in (DEFAULT, FULL)}
        return {n: p for n, p in named.items() if (why := refused.get(n)) is None or why[0].kills}

    def _compare(
        self, key: str, point: Point, choice: Choice, into: Comparison | None = None, told: int = 0
    ) -> Comparison:
        """The rounds of a comparison.

        Args:
            into: Earlier rounds to continue.
            told: Number of earlier rounds that count as rounds of this comparison.
        """
        judge, space = self.judge, self.judge.space
        points = self._variants(point)
        alike = {
            name: judge.without(n)
            for n in space.entries(point)
            if (name := without(space.knobs[n].name)) in points
        }
        least, before = self._least(points, alike), into.rounds if into is not None else 0
        self.hopeless = False

        def rounds() -> int:
            done = judge.rounds.running.rounds
            self.hopeless = self._hopeless(point, done, judge.rounds.measurements(points, alike), least)
            return done - before if self.hopeless else max(0, (least or judge.wanted()) - told)

        return judge.compare(key, points, choice, rounds, into, alike)

    def _hopeless(self, point: Point, done: int, measurements: float, least: int | None) -> bool:
        """Whether the noise of the rounds leaves no time to prove all entries, and another round would use up
        the time to prove one of them.

        Args:
            measurements: Number of measurements of a round.
        """
        judge, space = self.judge, self.judge.space
        numbers = space.entries(point)
        if self.last is None or done < ROUNDS_TELL or len(numbers) < 2:
            return False
        needed = judge.proving_rounds(done, judge.moved(point))
        one = min(judge.proving_rounds(done, judge.moves(n)) or math.inf for n in numbers)
        whole = math.inf if needed is None else (needed - done) * measurements
        one *= measurements_in_round(2)
        found = (
            not judge.affordable(self.last, whole) and judge.fits(one) and not judge.fits(one + measurements)
        )
        if least is None:
            judge.until("leave_one_out")
        return found

    def _least(self, points: Mapping[str, Point], alike: Mapping[str, Likeness] = ALL_DIFFER) -> int | None:
        """The least number of rounds, for which the time of a later stage may be used if the time of this
        stage is too short."""
        judge = self.judge
        rounds = judge.proof_rounds(points[FULL])
        if self.last is None or judge.affordable(
            "leave_one_out", rounds * judge.rounds.measurements(points, alike)
        ):
            return None
        judge.until(self.last)
        return rounds

    def _unsure(self, result: Comparison, weak: Weak) -> bool:
        """Whether all weak entries gain the margin, and only their intervals contain 1. Most often, a round
        was then disturbed."""
        judge = self.judge
        bar = judge.bar(result.rounds)
        return all(ratio >= 1 + bar.of(judge.moves(n)) for ratio, n in weak)

    def _left_out(self, result: Comparison, point: Point) -> tuple[list[LeftOut], Weak]:
        judge, space = self.judge, self.judge.space
        bar = judge.bar(result.rounds)
        parts: list[LeftOut] = []
        weak: Weak = []
        numbers = space.entries(point)
        self.needed = set()
        for n in numbers:
            part = judge.part(n)
            over = rest_of(result, part)
            found = left_out(result, part, bar, judge.weights, over)
            if over == DEFAULT and len(numbers) > 1 and not result.untold(without(part.label)):
                # The profile does not run without this entry, or must not be tried without it. So the whole
                # gain counts for it.
                gain = result.ratio(FULL, part.moves, judge.weights)
                faithful = space.knobs[n].fidelity is not Fidelity.APPROX
                found = replace(found, gain=gain, missed=False, needed=faithful)
                self.needed.add(part.label)
            parts.append(found)
            if not found.holds:
                weak.append((found.gain.ratio, n))
        return parts, sorted(weak)

    def _smaller(self, point: Point, weak: Weak, margin: float) -> Point:
        """Choose entries to remove. Two entries that lose speed only if both are missing must not be removed
        together."""
        loss = sum(max(0.0, math.log(ratio)) for ratio, _ in weak)
        for _, n in weak if loss < margin / 2 else weak[:1]:
            point = self.judge.space.without(point, n)
        return point

    def _settled(self, result: Comparison, point: Point, parts: Sequence[LeftOut], choice: Choice) -> bool:
        """Settle without another comparison, for lack of time. If one entry was removed, the remaining point
        was already measured as the whole without it, and each of the others was needed."""
        judge, space = self.judge, self.judge.space
        numbers = space.entries(point)
        kept = {space.knobs[n].name for n in numbers}
        gone = [p.part.label for p in parts if p.part.label not in kept]
        name = without(gone[0])
        if len(gone) != 1 or name not in result.logs:
            return False
        # A profile that did not run without one of them may run without it now.
        left = [replace(p, needed=False) for p in parts if p.part.label in kept]
        note = f"the ratio was measured together with {gone[0]}, which is now at its default"
        if len(numbers) == 1:
            note = ""
            bar = judge.bar(result.rounds)
            left = [left_out(result, judge.part(numbers[0]), bar, judge.weights, None, name)]
        if not self._accept(result, point, left, choice, name, note):
            return False
        judge.note("settled", settings=space.settings(point))
        return True

    def _split(self, choice: Choice) -> bool:
        """Split without another comparison, for lack of time. If no other entry affects the metrics of an
        entry, it was measured as if alone: in those metrics the whole equals the entry, and in all others the
        entry equals the default. So the entries that hold are accepted."""
        if self.looked is None:
            return False
        judge, space = self.judge, self.judge.space
        result, whole, parts = self.looked
        kept = [p for p in parts if p.missed]
        while True:
            others = {m for p in parts if p not in kept for m in p.part.moves}
            left = [p for p in kept if others.isdisjoint(p.part.moves)]
            if len(left) == len(kept):
                break
            kept = left
        point = self._only(whole, {p.part.label for p in kept})
        known = self.rounds_of(point, f"{result.key}/apart")
        if not kept or known is None or not space.legal(point):
            return False
        if not judge.fits(0.0, [point]) or judge.admit(point) is not None:
            return False
        self.apart = self._accept(known, point, kept, choice)
        if self.apart:
            judge.note("apart", settings=space.settings(point), rounds=result.rounds)
        return self.apart

    def standing_apart(self) -> list[Point]:
        """Smaller points of the last comparison: entries that share metrics, directly or indirectly, form one
        point."""
        if self.looked is None:
            return []
        _, whole, parts = self.looked
        groups: list[tuple[set[str], set[str]]] = []  # names, metrics
        for part in parts:
            names, metrics = {part.part.label}, set(part.part.moves)
            for group in [g for g in groups if g[1] & metrics]:
                groups.remove(group)
                names, metrics = names | group[0], metrics | group[1]
            groups.append((names, metrics))
        return [self._only(whole, names) for names, _ in groups] if len(groups) > 1 else []

    def _only(self, whole: Point, names: Collection[str]) -> Point:
        """`whole` with only these entries."""
        space, point = self.judge.space, whole
        for n in space.entries(whole):
            if space.knobs[n].name not in names:
                point = space.without(point, n)
        return point

    def rounds_of(self, point: Point, key: str) -> Comparison | None:
        """The rounds of the last comparison as rounds of a smaller point, if the missing entries affect none
        of its metrics; None otherwise."""
        if self.looked is None:
            return None
        space = self.judge.space
        result, whole, parts = self.looked
        numbers = space.entries(point)
        names = {space.knobs[n].name for n in numbers}
        labels = {p.part.label for p in parts}
        metrics = {m for p in parts if p.part.label in names for m in p.part.moves}
        others = {m for p in parts if p.part.label not in names for m in p.part.moves}
        alike = all(point[n] == whole[n] for n in numbers)
        if not (names and alike and names < labels and metrics.isdisjoint(others)) or FULL not in result.logs:
            return None
        rests = [without(name) for name in names if len(names) > 1]
        if any(rest not in result.logs for rest in rests):
            return None
        return result.of_metrics({n: n for n in (FULL, *rests)}, metrics, key)

    def _as_one(self, point: Point, parts: Sequence[LeftOut], choice: Choice, key: str) -> bool:
        """Judge many entries of which each gains less than the noise. Entries that are not needed at all are
        removed. The others are proven or refuted as one group."""
        judge, space = self.judge, self.judge.space
        # A part may have been needed only together with removed parts. The comparison shows that.
        missed = {p.part.label for p in parts if p.gain.ratio >= 1} - self.needed
        for n in space.entries(point):
            if space.knobs[n].name not in missed:
                point = space.without(point, n)
        numbers = space.entries(point)
        if not numbers or judge.admit(point) is not None:
            return choice.clear(space.default)
        points = {DEFAULT: space.default, FULL: point}
        result = judge.compare(f"{key}/last", points, choice, self._least(points))
        self.cut |= result.rounds < LEAST_ROUNDS and FULL not in result.failed
        if FULL in result.failed:
            self.failed = point, result.failed[FULL]
        if result.rounds < LEAST_ROUNDS or FULL not in result.logs:
            return choice.clear(space.default)
        group = [judge.alone(result, point)]
        entries = judge.entries(point, group, "g1" if len(numbers) > 1 else None)
        evidence = judge.evidence(result, point, group)
        return choice.accept(evidence, point, entries) or choice.clear(space.default)

    def _grouped(self, result: Comparison, entries: list[Entry]) -> list[Entry]:
        """Mark entries as one group if their individual losses add up to more than the whole gain."""
        judge = self.judge
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
            whole: Estimate = result.ratio(FULL, moves, judge.weights)
            parts = sum(math.log(e.estimate.ratio) for e in group)
            together = len(group) > 1 and parts > math.log(whole.ratio) + judge.bar(result.rounds).of(moves)
            number += together
            marked += [replace(e, group=f"g{number}" if together else None) for e in group]
        order = [k.name for k in judge.space.knobs]
        return sorted(marked, key=lambda e: order.index(e.name))
