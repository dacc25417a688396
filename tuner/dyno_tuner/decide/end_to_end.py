"""The whole profile, settings and kernels together, against the engine's default.

What stages have proven apart need not hold together, so what is written comes from one last comparison: ABBA
rounds of the default, the whole profile, and the whole profile without each of its parts. A part is a group
of kernel choices, a setting, or a group of settings.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ..core.outcome import KernelEntry
from ..core.protocol import Configuration, KernelChoice, kind_of
from ..measure.paired_rounds import visits_in_round
from .acceptance import DEFAULT, FULL, Choice

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ..core.intervals import Estimate
    from ..core.outcome import Entry, Screened
    from ..measure.comparison import Comparison
    from ..measure.paired_rounds import Bar, Rounds
    from ..space.search_space import Point, Space

ALONE = "settings alone"


@dataclass(frozen=True, slots=True)
class Part:
    """What is left out together. Exactly one of `group` (of kernels) and `names` (of settings) is given."""

    label: str
    moves: tuple[str, ...]
    group: str = ""
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Whole:
    """A point and the groups of kernels, named by the metric they move, that go with it."""

    point: Point
    groups: frozenset[str]


@dataclass
class WholeProfile:
    """Args:
    kernels: by metric, each choice with what made it a candidate.
    check: gives the reason why a configuration's answers are not acceptable, or nothing.
    count: rounds that a comparison wants, as far as the noise is known.
    """

    space: Space
    rounds: Rounds
    weights: Mapping[str, float]
    bar: Callable[[int], Bar]
    note: Callable[..., None]
    check: Callable[[Configuration], str]
    count: Callable[[], int]
    kernels: Mapping[str, Sequence[tuple[KernelChoice, Screened]]]
    unmeasured: bool = False  # for want of time
    seen: dict[str, Estimate] = field(default_factory=dict)  # what rounds gave for each part, at last

    def run(self, choice: Choice) -> list[KernelEntry]:
        """The kernel choices that the whole profile gains by. Where there are any, `choice` is brought to
        what was measured with them; else it stays what it was."""
        whole = Whole(choice.point, frozenset(self.kernels))
        for attempt in range(3):
            if not whole.groups or self._wrong(whole):
                break
            parts = self._parts(whole, choice.entries)
            result = self._compare(f"whole/{attempt}", whole, parts, choice)
            if result.rounds < 2 or FULL not in result.logs:
                self.unmeasured = True
                self.note("whole", rounds=result.rounds, taken=False, reason="not measured")
                break
            estimates, weak = self._judge(result, parts)
            smaller = self._without(whole, weak)
            taken = not weak and self._gains(result, FULL, whole)
            self.note(
                "whole", attempt=attempt, rounds=result.rounds, taken=taken,
                settings=self.space.settings(whole.point), groups=sorted(whole.groups),
                parts={label: e.to_dict() for label, e in estimates.items()}, weak=[p.label for p in weak],
                gain={m: result.ratio(FULL, [m], self.weights).to_dict() for m in self.weights},
            )  # fmt: skip
            if taken:
                return self._accept(choice, result, FULL, whole, parts, estimates)
            if not weak:
                break
            again = 2 + len(parts) - len(weak)
            if attempt < 2 and self.rounds.affordable(2 * visits_in_round(again)):
                whole = smaller
                continue
            return self._settle(choice, result, smaller, parts, weak)
        return []

    # ---- what is compared

    @property
    def kinds(self) -> list[str]:
        """`pp` and `tg`, by which kernels are grouped; a mix has several metrics of each."""
        return list(dict.fromkeys(kind_of(m) for m in self.weights))

    def _of(self, kind: str) -> tuple[str, ...]:
        return tuple(m for m in self.weights if kind_of(m) == kind)

    def configuration(self, whole: Whole) -> Configuration:
        """Kernels in the order of the metrics, so that the same choices are the same configuration."""
        chosen = [c for m in self.kinds if m in whole.groups for c, _ in self.kernels[m]]
        return Configuration(self.space.settings(whole.point), tuple(chosen))

    def _wrong(self, whole: Whole) -> bool:
        reason = self.check(self.configuration(whole))
        if reason:
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
        """Without the settings' parts where the budget does not last for them: what was proven for them
        before kernels were chosen then stands."""
        default = Whole(self.space.default, frozenset())
        alone = Whole(whole.point, frozenset())

        def variants() -> dict[str, Whole]:
            named = {DEFAULT: default, FULL: whole}
            candidates = {f"without {p.label}": self._without(whole, [p]) for p in parts}
            if len(whole.groups) > 1:
                candidates[ALONE] = alone
            return named | {n: w for n, w in candidates.items() if w not in (default, whole)}

        if not self.rounds.affordable(self.count() * visits_in_round(len(variants()))):
            parts[:] = [p for p in parts if p.group]
        configurations = {n: self.configuration(w) for n, w in variants().items()}
        result = self.rounds.compare(key, configurations, self.count)
        choice.voided += result.voided
        choice.failed += [(whole.point, v) for n, v in result.failed.items() if n == FULL]
        return result

    # ---- what it says

    def _over(self, result: Comparison, part: Part) -> str:
        """What the whole is compared with for a part's sake. Where the rest is the default, or does not run,
        that is the default."""
        name = f"without {part.label}"
        return name if name in result.logs else DEFAULT

    def _judge(self, result: Comparison, parts: Sequence[Part]) -> tuple[dict[str, Estimate], list[Part]]:
        bar = self.bar(result.rounds)
        estimates: dict[str, Estimate] = {}
        weak = []
        for part in parts:
            over = self._over(result, part)
            ok, gain = bar.beats(result, FULL, part.moves, self.weights, over, touched=part.moves)
            estimates[part.label] = self.seen[part.label] = gain
            if not ok and f"without {part.label}" not in result.failed:
                weak.append(part)
            if part.group:
                self.note(
                    "kernels", group=part.group, beats=ok, choices=len(self.kernels[part.group]),
                    screened=self.kernels[part.group][0][1].how, **gain.to_dict(),
                )  # fmt: skip
        return estimates, weak

    def _gains(self, result: Comparison, name: str, whole: Whole) -> bool:
        """Whether the whole beats the default on a metric that it moves, or on their mean, and harms none."""
        bar = self.bar(result.rounds)
        touched = {m for g in whole.groups for m in self._of(g)}
        touched |= self.space.moved(whole.point, self.space.default)
        moved = [m for m in self.weights if m in touched] or list(self.weights)
        choices = [[m] for m in moved] + ([moved] if len(moved) > 1 else [])
        return any(bar.beats(result, name, metrics, self.weights, touched=moved)[0] for metrics in choices)

    def _settle(
        self, choice: Choice, result: Comparison, smaller: Whole, parts: Sequence[Part], weak: Sequence[Part]
    ) -> list[KernelEntry]:
        """No time to measure again what is left without the weak parts: it is taken if it was among what has
        been measured, which it was where one part is weak."""
        name = f"without {weak[0].label}"
        if len(weak) > 1 or name not in result.logs or not smaller.groups or self._wrong(smaller):
            return []
        if not self._gains(result, name, smaller):
            return []
        bar = self.bar(result.rounds)
        estimates = {}
        for part in parts:
            if part.group in smaller.groups and len(smaller.groups) == 1:
                over = ALONE if ALONE in result.logs else DEFAULT
                alone_is_default = smaller.point == self.space.default
                if over == DEFAULT and not alone_is_default:
                    return []
                ok, gain = bar.beats(result, name, part.moves, self.weights, over, touched=part.moves)
                if not ok:
                    return []
                estimates[part.label] = gain
        if not estimates:
            return []
        self.note("whole", taken=True, settings=self.space.settings(smaller.point),
                  groups=sorted(smaller.groups), without=weak[0].label)  # fmt: skip
        return self._accept(choice, result, name, smaller, parts, estimates)

    def _accept(
        self, choice: Choice, result: Comparison, name: str, whole: Whole, parts: Sequence[Part],
        estimates: Mapping[str, Estimate],
    ) -> list[KernelEntry]:  # fmt: skip
        changed = {self.space.knobs[n].name for n in self.space.entries(whole.point)}
        measured = {n: estimates[p.label] for p in parts if p.label in estimates for n in p.names}
        choice.entries = [
            replace(e, estimate=measured.get(e.name, e.estimate)) for e in choice.entries if e.name in changed
        ]
        choice.point = whole.point
        choice.stage = result.key
        choice.gain = {m: result.ratio(name, [m], self.weights) for m in self.weights}
        choice.baseline = {m: result.median_rate(DEFAULT, m) for m in self.weights}
        choice.tuned = {m: result.median_rate(name, m) for m in self.weights}
        return [
            KernelEntry(kernel, estimates[f"kernels_{m}"], f"kernels_{m}", screened)
            for m in self.kinds if m in whole.groups
            for kernel, screened in self.kernels[m]
        ]  # fmt: skip
