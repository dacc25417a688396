"""The search over builds: each switch compared with the default build, and then all gaining switches
together.

Each variant is built and measured before the next one is built, so a short budget still gives verdicts. If
the commands of a switch, or the code that they produce, equal another build, the switch is not measured. A
gain counts only if it passes the acceptance rule of all tunes (`decide.acceptance.accept`) and fresh rounds
confirm it. Switches without a decision stay `default`.
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
MOST_RESTLESS = 2  # consecutive comparisons that other programs may prevent before the search stops


class Builds(Protocol):
    """The protocol of a builder; `builder.Builder` implements it."""

    def configured(self, defines: Mapping[str, str], deadline: float = ...) -> Commands: ...

    def known(self, defines: Mapping[str, str]) -> Built | None: ...

    def build(
        self, defines: Mapping[str, str], name: str, link_mib: int = 0, deadline: float = ...
    ) -> Built: ...


@dataclass
class Outcome:
    """The verdict on one switch, with the cost of its build."""

    switch: Switch
    verdict: str = DEFAULT
    reason: str = ""
    measured: Measured | None = None
    built: Built | None = None
    loading: Loading | None = None
    tuned: Tuned | None = None
    """The comparison after knobs were searched again in both builds."""
    tried: bool = True
    """Whether a verdict was possible; False: no time was left, or the machine did not become quiet."""

    @property
    def gains(self) -> bool:
        return self.verdict in (ON, OFF)


@dataclass
class Search:
    """The result of a search: the default build, the verdicts, and the defines to use."""

    base: Built | None
    """None if no switch needed a build."""
    base_loading: Loading | None = None
    outcomes: list[Outcome] = field(default_factory=list)
    chosen: list[Switch] = field(default_factory=list)
    confirmed: Measured | None = None
    """The comparison of the chosen build with the default one, in fresh rounds."""
    together: Measured | None = None
    """The comparison of all gaining switches together with the default build."""
    built: Built | None = None
    """The chosen build; None for the default one."""
    knobs: dict[str, Any] = field(default_factory=dict)
    """Runtime knobs whose best value in the chosen build is not the default."""


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
        """Seconds for one of `parts` comparisons that are still to be made.

        Args:
            builds: Seconds that builds still need. They get at most half of the remaining time.
        """
        if self.budget is None:
            return None
        return max(1.0, max(self.left / 2, self.left - builds) / max(1, parts))


def search(
    builds: Builds, bench: Bench, switches: Sequence[Switch], clock: Clock, record: Record,
    say: Callable[[str], None], *, knob_values: Mapping[str, Sequence[int]] | None = None,
    longest_build: float = 6 * 3600.0,
) -> Search:  # fmt: skip
    """Search switches, with verdicts on each and the best combination.

    Args:
        builds: The builder.
        bench: Measures builds.
        clock: The budget. If a switch needs a build, the default build and the rounds that confirm a gain are
            made in any case.
        record: Stores results, so that a killed run can continue.
        knob_values: By knob, the values to try in both builds in addition to the default.
        longest_build: Maximum seconds of one build if there is no budget.

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
        self._process = 0.0  # seconds per process of a comparison; 0: no comparison yet
        self._restless = 0  # consecutive comparisons that other programs prevented

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
        """Seconds of the shortest comparison with a verdict; 0 before the first one."""
        return (1 + 4 * LEAST_ROUNDS) * self._process

    def _build(self, row: Outcome, seen: list[tuple[str, Commands, Built]], base: Built) -> bool:
        """Build a variant, unless its commands equal those of an existing build.

        Returns:
            Whether it must be measured.
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
        except TuneError as error:  # the build fails, or its link does not fit
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
        """Compare two builds, or take the result from the record.

        Args:
            profile: Profile for both builds; "" for the engine's defaults.

        Raises:
            VariantFailed: B does not run.
            DisturbedError: Other programs used the machine.
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
        """Measure the variant of a switch, and give the verdict.

        Args:
            parts: Number of comparisons that may follow, including this one.
            builds: Seconds for the builds of the following switches.
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
        """Search knobs again, if there is time for it."""
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
        """Find the best value of the knobs that interact with this switch, in both builds."""
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
        """The metric of prompts, which the knobs change; "" if the workload has none."""
        return next((m for m in self.bench.workload.metrics if m.startswith("pp")), "")

    def _rate(self, metric: str, build: Built, settings: Mapping[str, Any]) -> float:
        key = f"rate {build.key} {dict(settings)} {metric}"
        return float(self.record.once(key, lambda: self.bench.rate(build, settings, metric)))

    def _loading_of_variant(self, build: Built, profile: str) -> Loading | None:
        """Measure the loading of a variant. Raises VariantFailed if it does not load."""
        try:
            return self._loading(build, profile)
        except Interrupted:
            raise
        except TuneError as error:
            raise VariantFailed(str(error)) from error

    def _loading_of_base(self, build: Built) -> Loading | None:
        """Measure the loading of the default build; None if it fails now although it ran before, which
        decides nothing."""
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
        """Measure the gaining switches together, and then confirm the chosen build in fresh rounds."""
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
        """The build with all gaining switches; None if the best one alone is as good, which is noted.

        Raises:
            TuneError: The build cannot be made or measured.
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
        # Empty searched knobs are a result, too: the build is fastest at its default.
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
    """Product of the ratios that differ from 1 by more than the noise."""
    product = 1.0
    for name, e in measured.ratios.items():
        product *= e.ratio if measured.verdicts[name] != "no difference" else 1.0
    return product


def _knobs(row: Outcome) -> dict[str, Any]:
    return dict(row.tuned.variant) if row.tuned is not None else {}


def _mixed(rows: Sequence[Outcome]) -> dict[str, Any]:
    """The knobs of all these switches."""
    return {k: v for row in rows for k, v in _knobs(row).items()}


def _profile(rows: Sequence[Outcome]) -> str:
    """The profile that both sides need, if one of these switches limits the build to it."""
    return next((row.switch.profile for row in rows if row.switch.profile), "")


def _base_knobs(rows: Sequence[Outcome]) -> dict[str, Any]:
    """The knobs of the default build in the comparisons with these switches."""
    return {k: v for row in rows if row.tuned is not None for k, v in row.tuned.base.items()}
