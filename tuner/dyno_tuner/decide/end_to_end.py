"""The end-to-end comparison of the whole profile, settings and kernels together, with the default.

Results that stages have proven separately need not hold together. So the written profile comes from a last
comparison: ABBA rounds of the default, the whole profile, and the whole profile without each of its parts. A
part is a group of kernel choices, a setting, or a group of settings.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..core.outcome import KernelEntry
from ..core.protocol import Configuration, KernelChoice, kind_of
from ..measure.paired_rounds import measurements_in_round
from .ablation import DEFAULT, FULL, LeftOut, Part, left_out, rest_of, rests, variants, without
from .acceptance import LEAST_ROUNDS, Choice, Evidence, gains

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..core.intervals import Estimate
    from ..core.outcome import Entry, Screened
    from ..measure.comparison import Comparison
    from ..record.context import Context
    from ..space.search_space import Point

ALONE = "settings alone"


@dataclass(frozen=True, slots=True)
class Whole:
    """A point, with its groups of kernels by metric."""

    point: Point
    groups: frozenset[str]


class EndToEnd:
    """The last comparison: the whole profile, the default, and the profile without each part.

    Args:
        kernels: By metric, each choice with the measurements that made it a candidate.
    """

    def __init__(
        self, context: Context, kernels: Mapping[str, Sequence[tuple[KernelChoice, Screened]]]
    ) -> None:
        self._context = context
        self.space = context.space
        self.rounds = context.rounds()
        self.weights = context.weights
        self.note = context.note
        self.bar = context.bar
        self.candidates = kernels
        self.unmeasured = False  # for lack of time, after failures, or because answers could not be compared
        self.unanswered = ""  # the reason, if it was not lack of time
        self.seen: dict[str, Estimate] = {}  # the last result of the rounds for each part

    def run(self, choice: Choice) -> None:
        """Bring `choice` to the kernels by which the whole profile gains, and to the measurements with them.
        Without such kernels it does not change."""
        whole = Whole(choice.point, frozenset(self.candidates))
        for attempt in range(3):
            if not whole.groups or self._wrong(whole):
                return
            parts = self._parts(whole, choice.entries)
            result = self._compare(f"whole/{attempt}", whole, parts, choice)
            ended = result.failed.get(FULL) or next(iter(result.halted.values()), None)
            why = f"the rounds with them failed twice: {ended.message or ended.status}" if ended else ""
            if result.rounds < LEAST_ROUNDS or FULL not in result.logs:
                self.unmeasured, self.unanswered = True, why
                self.note("whole", rounds=result.rounds, taken=False, reason="not measured")
                return
            found = self._left_out(result, parts)
            # If the profile without a part failed and then ran, it has no rounds. So another comparison
            # decides.
            self.unmeasured = any(result.untold(without(p.label)) for p in parts)
            if self.unmeasured and attempt < 2:
                continue
            self.unanswered = why if self.unmeasured else ""
            weak = [p.part for p in found if not p.holds]
            taken = not weak and self._gains(result, FULL, whole)
            self.note(
                "whole", attempt=attempt, rounds=result.rounds, taken=taken,
                settings=self.space.settings(whole.point), groups=sorted(whole.groups),
                parts={p.part.label: p.gain.to_dict() for p in found}, weak=[p.label for p in weak],
                gain={m: result.ratio(FULL, [m], self.weights).to_dict() for m in self.weights},
            )  # fmt: skip
            if not weak:
                self._accept(choice, result, FULL, whole, found)
                return
            smaller = self._without(whole, weak)
            again = 2 + len(parts) - len(weak)
            if attempt == 2 or not self.rounds.affordable(2 * measurements_in_round(again)):
                self._settle(choice, result, smaller, parts, weak)
                return
            whole = smaller

    # ---- what is compared

    @property
    def kinds(self) -> list[str]:
        """The kinds `pp` and `tg`, by which kernels are grouped. A mix has several metrics of each kind."""
        return list(dict.fromkeys(kind_of(m) for m in self.weights))

    def _of(self, kind: str) -> tuple[str, ...]:
        return tuple(m for m in self.weights if kind_of(m) == kind)

    def configuration(self, whole: Whole) -> Configuration:
        """The configuration of a whole. Kernels are in the order of the metrics, so that equal choices give
        equal configurations."""
        chosen = [c for m in self.kinds if m in whole.groups for c, _ in self.candidates[m]]
        return Configuration(self.space.settings(whole.point), tuple(chosen))

    def _wrong(self, whole: Whole) -> bool:
        configuration = self.configuration(whole)
        reason = self._context.gate.why_not(configuration)
        if self._context.gate.undecided(configuration):
            self.unmeasured, self.unanswered = True, reason
        elif reason:
            self.note("incorrect", settings=self.space.settings(whole.point), reason=reason)
        return bool(reason)

    def _parts(self, whole: Whole, entries: Sequence[Entry]) -> list[Part]:
        parts = [Part(f"kernels_{m}", self._of(m), group=m) for m in self.kinds if m in whole.groups]
        changed = {self.space.knobs[n].name for n in self.space.entries(whole.point)}
        grouped: dict[str, list[Entry]] = {}
        for entry in entries:
            if entry.name in changed:
                grouped.setdefault(entry.group or f"={entry.name}", []).append(entry)
        for members in grouped.values():
            names = tuple(e.name for e in members)
            moves = tuple(m for m in self.weights if any(m in e.moves for e in members))
            part = Part("+".join(names), moves or tuple(self.weights), names=names)
            if self.space.legal(self._without(whole, [part]).point):
                parts.append(part)
        return parts

    def _without(self, whole: Whole, parts: Sequence[Part]) -> Whole:
        groups = whole.groups - {p.group for p in parts}
        dropped = {name for p in parts for name in p.names}
        point = tuple(
            d if k.name in dropped else i
            for k, i, d in zip(self.space.knobs, whole.point, self.space.default, strict=True)
        )
        return Whole(point, groups)

    def _compare(self, key: str, whole: Whole, parts: list[Part], choice: Choice) -> Comparison:
        """Compare a whole and its parts. If the budget is too short for the parts of settings, they are left
        out, and their earlier proof without the kernels counts."""
        default = Whole(self.space.default, frozenset())

        def named() -> dict[str, Whole]:
            found = variants(default, whole, parts, lambda part: self._without(whole, [part]))
            alone = Whole(whole.point, frozenset())
            return found | ({ALONE: alone} if len(whole.groups) > 1 and alone != default else {})

        if not self.rounds.affordable(self._context.round_count() * measurements_in_round(len(named()))):
            parts[:] = [p for p in parts if p.group]
        points = {n: w.point for n, w in named().items()}
        configurations = {n: self.configuration(w) for n, w in named().items()}
        result = self.rounds.compare(
            key, configurations, self._context.round_count, rests=rests(configurations)
        )
        choice.voided += result.voided
        failed = {**{n: v for n, v in result.failed.items() if n == FULL}, **result.halted}
        choice.failed += [(points[n], v) for n, v in failed.items()]
        return result

    # ---- what it says

    def _left_out(self, result: Comparison, parts: Sequence[Part]) -> list[LeftOut]:
        bar = self.bar(result.rounds)
        found = []
        for part in parts:
            one = left_out(result, part, bar, self.weights, rest_of(result, part))
            found.append(one)
            self.seen[part.label] = one.gain
            if part.group:
                self.note(
                    "kernels", group=part.group, beats=one.missed, choices=len(self.candidates[part.group]),
                    screened=self.candidates[part.group][0][1].how, **one.gain.to_dict(),
                )  # fmt: skip
        return found

    def _gains(self, result: Comparison, name: str, whole: Whole) -> bool:
        """Whether the whole beats the default in a metric that it affects, or in their mean, and harms
        none."""
        touched = {m for g in whole.groups for m in self._of(g)}
        touched |= self.space.moved(whole.point, self.space.default)
        moved = [m for m in self.weights if m in touched] or list(self.weights)
        return gains(result, name, moved, self.bar(result.rounds), self.weights)

    def _settle(
        self, choice: Choice, result: Comparison, smaller: Whole, parts: Sequence[Part], weak: Sequence[Part]
    ) -> None:
        """Settle without another comparison, for lack of time. The profile without the weak parts is accepted
        if it was already measured, which is true if only one part is weak. The remaining kernels must again
        be needed there."""
        name = without(weak[0].label)
        if len(weak) > 1 or name not in result.logs or not smaller.groups or self._wrong(smaller):
            return
        if len(smaller.groups) > 1:
            return
        (part,) = (p for p in parts if p.group in smaller.groups)
        over = ALONE if ALONE in result.logs else DEFAULT
        if over == DEFAULT and smaller.point != self.space.default:
            return
        found = [left_out(result, part, self.bar(result.rounds), self.weights, over, name)]
        if self._accept(choice, result, name, smaller, found):
            self.note("whole", taken=True, settings=self.space.settings(smaller.point),
                      groups=sorted(smaller.groups), without=weak[0].label)  # fmt: skip

    def _accept(
        self, choice: Choice, result: Comparison, name: str, whole: Whole, found: Sequence[LeftOut]
    ) -> bool:
        """Accept a whole. For settings that were not left out here, their earlier proof counts."""
        changed = {self.space.knobs[n].name for n in self.space.entries(whole.point)}
        measured = {n: p.gain for p in found for n in p.part.names}
        before = choice.evidence.parts if choice.evidence is not None else ()
        earlier = [p for p in before if changed.intersection(p.part.names) - set(measured)]
        entries = [
            replace(e, estimate=measured[e.name], note="") if e.name in measured else e
            for e in choice.entries
            if e.name in changed
        ]
        kernels = [
            KernelEntry(kernel, p.gain, p.part.label, screened)
            for p in found if p.part.group
            for kernel, screened in self.candidates[p.part.group]
        ]  # fmt: skip
        proven = self._gains(result, name, whole)
        evidence = Evidence(result, name, self.weights, proven, (*found, *earlier))
        return choice.accept(evidence, whole.point, entries, kernels)
