"""The search: every switch against the default build, then the switches that gain together.

Each variant is built and measured before the next one is built, so that a budget that ends early still
leaves verdicts. A switch costs no measurement if its commands, or the code that they make, are the same as in
another build. A gain counts only if it passes the rule of all tunes (`decide.acceptance.accept`) and fresh
rounds confirm it. Everything that could not be decided stays `default`.
"""

from __future__ import annotations

import functools
import os
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ..core.errors import DisturbedError, Interrupted, TuneError
from ..decide.acceptance import LEAST_ROUNDS, accept
from .builder import BuildLate
from .measure import Loading, Measured, VariantFailed, summary
from .retune import Tuned, retune
from .sections import differing
from .switches import Variant

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .builder import Built
    from .commands import Commands
    from .measure import Bench
    from .record import Record
    from .switches import Switch

DEFAULT, ON, OFF, INERT, REFUSED = "default", "on", "off", "inert", "refused"
MIB = 2**20
MOST_RESTLESS = 2  # comparisons in a row that others may prevent, until no further switch is tried


class Builds(Protocol):
    """The maker of builds; `builder.Builder` is the real one."""

    def configured(self, defines: Mapping[str, str], deadline: float = ...) -> Commands: ...

    def known(self, defines: Mapping[str, str]) -> Built | None: ...

    def build(
        self, defines: Mapping[str, str], name: str, link_mib: int = 0, deadline: float = ...
    ) -> Built: ...


@dataclass
class Outcome:
    """The verdict on one switch, and what its build costs."""

    switch: Switch
    verdict: str = DEFAULT
    reason: str = ""
    measured: Measured | None = None
    built: Built | None = None
    loading: Loading | None = None
    tuned: Tuned | None = None
    """The comparison with knobs set anew in both builds."""
    tried: bool = True
    """Whether there was a verdict to be had; False: no time was left, or the machine did not come to rest."""

    @property
    def gains(self) -> bool:
        return self.verdict in (ON, OFF)


@dataclass
class Search:
    """The result: the default build, the verdicts, and the defines to use."""

    base: Built | None
    """None if no switch needed a build."""
    base_loading: Loading | None = None
    outcomes: list[Outcome] = field(default_factory=list)
    chosen: list[Switch] = field(default_factory=list)
    confirmed: Measured | None = None
    """The chosen build against the default one, in rounds of its own."""
    together: Measured | None = None
    """All switches that gain, against the default build."""
    built: Built | None = None
    """The chosen build; None for the default one."""
    knobs: dict[str, Any] = field(default_factory=dict)
    """Runtime knobs that the chosen build wants other than at their default."""


@dataclass
class Clock:
    """The budget of a run in seconds; None: no limit."""

    budget: float | None
    now: Callable[[], float] = time.monotonic
    begun: float = field(init=False)

    def __post_init__(self) -> None:
        self.begun = self.now()

    @property
    def left(self) -> float:
        return float("inf") if self.budget is None else self.begun + self.budget - self.now()

    def share(self, parts: int, builds: float = 0.0) -> float | None:
        """Seconds for one of so many comparisons that still have to be made.

        Args:
            builds: seconds that builds still take; they get no more than half of what is left.
        """
        if self.budget is None:
            return None
        return max(1.0, max(self.left / 2, self.left - builds) / max(1, parts))


def search(
    builds: Builds, bench: Bench, switches: Sequence[Switch], clock: Clock, record: Record,
    say: Callable[[str], None], *, knob_values: Mapping[str, Sequence[int]] | None = None,
    longest_build: float = 6 * 3600.0,
) -> Search:  # fmt: skip
    """Verdicts on switches and the best combination.

    Args:
        builds: makes them.
        bench: measures them.
        clock: the budget. If a switch needs a build, the default build is made in any case, and so are the
            rounds that confirm a gain.
        record: keeps results for a run that goes on after a kill.
        knob_values: by knob, the values that are tried in both builds beside the default.
        longest_build: seconds that one build may take if there is no budget.

    Raises:
        TuneError: The default build fails or does not run.
    """
    run = _Run(builds, bench, clock, record, say, dict(knob_values or {}), longest_build)
    return run.all(switches)


@dataclass
class _Run:
    builds: Builds
    bench: Bench
    clock: Clock
    record: Record
    say: Callable[[str], None]
    knob_values: Mapping[str, Sequence[int]]
    longest: float
    base: Built = field(init=False)

    def __post_init__(self) -> None:
        self._process = 0.0  # seconds of one process of a comparison; 0: none was made yet
        self._restless = 0  # comparisons in a row that others' load has prevented

    def all(self, switches: Sequence[Switch]) -> Search:
        outcomes = [self._without_a_build(row) for row in switches]
        pending = [row for row in outcomes if not row.reason]
        if not pending:
            self.say("every switch has its verdict without a build")
            return Search(None, outcomes=outcomes)
        self.say("configuring the default build")
        commands = self.builds.configured({})
        self.base = self.builds.build({}, "default", deadline=self.longest)
        result = Search(self.base, outcomes=outcomes)
        seen: list[tuple[str, Commands, Built]] = [("the default build", commands, self.base)]
        for number, row in enumerate(pending):
            if not self._build(row, seen, self.base):
                continue
            later = [other for other in pending[number + 1 :] if not self._in_cache(other)]
            parts = 2 * (len(pending) - number) + 1
            self._measure(row, result, parts, len(later) * self.base.seconds)
        if self._restless < MOST_RESTLESS:
            result.base_loading = self._loading_of_base(self.base)
        self._combine(result)
        return result

    @staticmethod
    def _without_a_build(row: Switch) -> Outcome:
        if row.refused:
            return Outcome(row, REFUSED, row.refused)
        if row.inert:
            return Outcome(row, INERT, row.inert)
        return Outcome(row, DEFAULT, f"cannot profit here: {row.pointless}" if row.pointless else "")

    # ---- Building ----

    def _in_cache(self, row: Outcome) -> bool:
        return self.builds.known({row.switch.name: row.switch.value}) is not None

    def _least(self) -> float:
        """Seconds of the shortest comparison that decides; 0 before the first one."""
        return (1 + 4 * LEAST_ROUNDS) * self._process

    def _build(self, row: Outcome, seen: list[tuple[str, Commands, Built]], base: Built) -> bool:
        """Builds a variant, unless its commands are those of a build that is there.

        Returns:
            Whether it is to be measured.
        """
        switch = row.switch
        defines = {switch.name: switch.value}
        if self._restless >= MOST_RESTLESS:
            return self._not_tried(row, "other programs use this machine; stop them, or give --force")
        if self.clock.left <= 0:
            return self._not_tried(row, "the budget has ended")
        limit = min(self.longest, self.clock.left)
        try:
            commands = self.builds.configured(defines, limit)
            for name, others, built in seen:
                if commands == others:
                    row.verdict, row.built = INERT, built
                    row.reason = f"every command is that of {name}, so nothing was built"
                    if switch.name in commands.undeclared:
                        row.reason += f"; no CMake file of the source tree declares {switch.name}"
                    return False
            needed = self._least() + (0.0 if self._in_cache(row) else base.seconds)
            if self.clock.left < needed:
                return self._not_tried(
                    row,
                    f"the budget has {max(0.0, self.clock.left):.0f} s left, and a build with its "
                    f"measurements takes about {needed:.0f} s",
                )
            limit = min(self.longest, max(1.0, self.clock.left))
            row.built = self.builds.build(defines, switch.define, switch.link_mib, limit)
        except BuildLate as error:
            why = "its build took too long" if limit == self.longest else "the budget ended during its build"
            return self._not_tried(row, f"{why}: {error}")
        except TuneError as error:  # it does not build, or its link does not fit
            row.verdict, row.reason = REFUSED, str(error)
            return False
        for name, others, built in seen:
            apart = differing(built.objects, row.built.objects)
            if not apart and others.link == commands.link:
                row.verdict = INERT
                count = len(row.built.objects)
                row.reason = f"the code of all {count} objects is that of {name}, so nothing was measured"
                return False
        seen.append((switch.define, commands, row.built))
        return True

    @staticmethod
    def _not_tried(row: Outcome, why: str) -> bool:
        row.tried, row.reason = False, f"not tried: {why}"
        return False

    # ---- Measuring ----

    def _compare(
        self, key: str, a: Built, b: Built, budget: float | None, *, answers: bool,
        settings: tuple[Mapping[str, Any], Mapping[str, Any]] = ({}, {}), profile: str = "",
    ) -> Measured:  # fmt: skip
        """A comparison of two builds, from the record or now.

        Args:
            profile: a profile that both run under; "" for the engine's defaults.

        Raises:
            VariantFailed: B does not run.
            DisturbedError: Others used the machine.
        """

        def make() -> dict[str, Any]:
            begun = self.clock.now()
            found = self.bench.compare(a, b, *settings, budget, answers=answers, profile=profile)
            self._process = (self.clock.now() - begun) / (1 + 4 * max(1, found.rounds))
            return found.to_dict()

        try:
            found = Measured.from_dict(
                self.record.once(f"{key} {a.key} {b.key} {settings} {profile}".rstrip(), make)
            )
        except DisturbedError:
            self._restless += 1
            raise
        self._restless = 0
        return found

    def _measure(self, row: Outcome, result: Search, parts: int, builds: float) -> None:
        """The verdict on a switch whose variant is built.

        Args:
            parts: comparisons that may follow, this one included.
            builds: seconds that the builds of the switches behind it take.
        """
        assert row.built is not None
        profile = row.switch.profile
        self.say(f"measuring {row.switch.define}")
        share = self.clock.share(parts, builds)
        try:
            row.measured = self._compare(
                "compare", self.base, row.built, share, answers=True, profile=profile
            )
            row.loading = self._loading_of_variant(row.built, profile)
        except DisturbedError as error:
            self._not_tried(row, f"{error}; end these programs, or give --force")
            return
        except VariantFailed as error:
            row.verdict, row.reason = REFUSED, f"it builds, but does not run: {error}"
            return
        row.reason = summary(row.measured)
        if profile:
            row.reason += (
                f"; both builds under {os.path.basename(profile)}, "
                f"{row.built.bytes / MIB:.1f} instead of {self.base.bytes / MIB:.1f} MiB"
            )
        row.reason += f"; {row.built.runs_only}" if row.built.runs_only else ""
        if row.measured.kld is None:
            row.reason += "; answers could not be compared"
        if row.measured.disturbed:
            row.reason += "; other programs used the machine meanwhile"
        if row.measured.changed:
            return
        decisive = row.measured
        self._set_anew(row, self.base, parts - 1, builds)
        if row.tuned is not None and row.tuned.measured is not None:
            decisive = row.tuned.measured
            row.reason += f"; with {row.tuned.words}: {summary(decisive)}"
        if accept(decisive.proof(row.switch.define)):
            row.verdict = row.switch.turned

    def _set_anew(self, row: Outcome, base: Built, parts: int, builds: float) -> None:
        """Sets knobs anew if there is time for it."""
        values = max((len(self.knob_values.get(k, ())) for k in row.switch.knobs), default=0)
        if not values or not self._prompts():
            return
        share = self.clock.share(parts, builds)
        if share is not None and share < 2 * (1 + values) * self._process:
            row.reason += "; no time was left to tune settings again"
            return
        try:
            row.tuned = self._retune(row, base, share)
        except Interrupted:
            raise
        except TuneError as error:
            row.reason += f"; settings could not be tuned again: {error}"

    def _retune(self, row: Outcome, base: Built, budget: float | None) -> Tuned | None:
        """Both builds with their own best value of the knobs that interact with this switch."""
        assert row.built is not None
        assert row.measured is not None
        built, measured = row.built, row.measured
        for knob in row.switch.knobs:
            values = self.knob_values.get(knob, ())
            metric = self._prompts()
            if not values or not metric:
                continue
            label = self.bench.workload.label(metric)
            tuned = retune(
                knob, values, measured.margins[label],
                functools.partial(self._rate, metric), base, built,
            )  # fmt: skip
            if tuned.changes:
                settings = (tuned.base, tuned.variant)
                found = self._compare("retuned", base, built, budget, answers=True, settings=settings)
                return Tuned(tuned.base, tuned.variant, found)
        return None

    def _prompts(self) -> str:
        """The metric of prompts, which the knobs move; "" where the workload has none."""
        return next((m for m in self.bench.workload.metrics if m.startswith("pp")), "")

    def _rate(self, metric: str, build: Built, settings: Mapping[str, Any]) -> float:
        key = f"rate {build.key} {dict(settings)} {metric}"
        return float(self.record.once(key, lambda: self.bench.rate(build, settings, metric)))

    def _loading_of_variant(self, build: Built, profile: str) -> Loading | None:
        """Raises VariantFailed where it does not load."""
        try:
            return self._loading(build, profile)
        except Interrupted:
            raise
        except TuneError as error:
            raise VariantFailed(str(error)) from error

    def _loading_of_base(self, build: Built) -> Loading | None:
        """None where the default build does not load now, though it ran: that decides nothing."""
        try:
            return self._loading(build)
        except Interrupted:
            raise
        except TuneError as error:
            self.say(f"the loading of the default build could not be measured: {error}")
            return None

    def _loading(self, build: Built, profile: str = "") -> Loading | None:
        def make() -> dict[str, Any] | None:
            found = self.bench.loading(build, profile)
            return None if found is None else asdict(found)

        told = self.record.once(f"loading {build.key}", make)
        return None if told is None else Loading(**told)

    # ---- Together ----

    def _combine(self, result: Search) -> None:
        """The switches that gain, together; then fresh rounds for what is chosen."""
        winners = [row for row in result.outcomes if row.gains]
        if not winners:
            return
        best = max(winners, key=lambda row: _gain(_decisive(row)))
        chosen, built, knobs = [best.switch], best.built, _knobs(best)
        assert built is not None
        profile = best.switch.profile
        if len(winners) > 1:
            try:
                both = self._together(result, winners, best)
                if both is not None:
                    chosen, built = [row.switch for row in winners], both
                    knobs, profile = _mixed(winners), _profile(winners)
            except Interrupted:
                raise
            except TuneError as error:
                self._lose(winners, best, f"all together cannot be measured: {error}")
        self.say(f"confirming {' '.join(s.define for s in chosen)}")
        settings = (_base_knobs([best] if len(chosen) == 1 else winners), knobs)
        try:
            result.confirmed = self._compare(
                "confirm", self.base, built, self.clock.share(1), answers=False, settings=settings,
                profile=profile,
            )  # fmt: skip
        except Interrupted:
            raise
        except TuneError as error:
            self._unconfirmed(winners, f"new rounds could not confirm it: {error}")
            return
        if accept(result.confirmed.proof(*(s.define for s in chosen))):
            result.chosen, result.built, result.knobs = chosen, built, dict(knobs)
            return
        self._unconfirmed(winners, f"new rounds do not confirm it: {summary(result.confirmed)}")

    def _together(self, result: Search, winners: Sequence[Outcome], best: Outcome) -> Built | None:
        """The build with all switches that gain; None where the best one alone is as good, which is noted.

        Raises:
            TuneError: It cannot be built or measured.
        """
        variant = Variant.of([row.switch for row in winners])
        known = self.builds.known(variant.defines) is not None
        needed = 2 * self._least() + (0.0 if known else self.base.seconds)
        if self.clock.left < needed:
            self._lose(winners, best, "no time was left to build and measure the switches together")
            return None
        limit = min(self.longest, max(1.0, self.clock.left))
        most = max(row.switch.link_mib for row in winners)
        both = self.builds.build(variant.defines, variant.name, most, limit)
        assert best.built is not None
        self.say("measuring the switches that gain, together")
        mixed, profile = _mixed(winners), _profile(winners)
        result.together = self._compare(
            "together", self.base, both, self.clock.share(3), answers=True,
            settings=(_base_knobs(winners), mixed), profile=profile,
        )  # fmt: skip
        # Empty knobs that were set anew are a result, too: the best build reads fastest at its default.
        alone = _knobs(best) if best.tuned is not None else _base_knobs(winners)
        against = self._compare(
            "best", best.built, both, self.clock.share(2), answers=False,
            settings=(alone, mixed), profile=profile,
        )  # fmt: skip
        every = result.together.proof(*(row.switch.define for row in winners))
        if against.faster and accept(every):
            return both
        self._lose(winners, best, f"together with the others it gains no more than {best.switch.define}")
        return None

    @staticmethod
    def _unconfirmed(winners: Sequence[Outcome], why: str) -> None:
        for row in winners:
            if row.gains:
                row.verdict = DEFAULT
                row.reason += f"; {why}"

    @staticmethod
    def _lose(winners: Sequence[Outcome], best: Outcome, why: str) -> None:
        for row in winners:
            if row is not best:
                row.verdict = DEFAULT
                row.reason += f"; {why}"


def _decisive(row: Outcome) -> Measured:
    assert row.measured is not None
    return row.tuned.measured if row.tuned is not None and row.tuned.measured is not None else row.measured


def _gain(measured: Measured) -> float:
    """Product of the ratios that are told from noise."""
    product = 1.0
    for name, e in measured.ratios.items():
        product *= e.ratio if measured.verdicts[name] != "no difference" else 1.0
    return product


def _knobs(row: Outcome) -> dict[str, Any]:
    return dict(row.tuned.variant) if row.tuned is not None else {}


def _mixed(rows: Sequence[Outcome]) -> dict[str, Any]:
    """The knobs of all of these switches."""
    return {k: v for row in rows for k, v in _knobs(row).items()}


def _profile(rows: Sequence[Outcome]) -> str:
    """The profile that both sides need if one of these switches prunes the build to it."""
    return next((row.switch.profile for row in rows if row.switch.profile), "")


def _base_knobs(rows: Sequence[Outcome]) -> dict[str, Any]:
    """The default build's own knobs in the comparisons with these switches."""
    return {k: v for row in rows if row.tuned is not None for k, v in row.tuned.base.items()}
