"""The search: every switch against the default build, then the switches that gain together.

A switch costs no measurement if its commands, or the code that they make, are the same as in another build. A
gain counts only if it passes the rule of all tunes (`decide.acceptance.accept`) and fresh rounds confirm it.
Everything that could not be decided stays `default`.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ..core.errors import TuneError
from ..decide.acceptance import accept
from .builder import BuildFailed
from .measure import Loading, Measured, summary
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

    @property
    def gains(self) -> bool:
        return self.verdict in (ON, OFF)


@dataclass
class Search:
    """The result: the default build, the verdicts, and the defines to use."""

    base: Built
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
    begun: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        return float("inf") if self.budget is None else self.begun + self.budget - time.monotonic()

    def share(self, parts: int) -> float | None:
        """Seconds for one of so many comparisons that still have to be made."""
        return None if self.budget is None else max(1.0, self.left / max(1, parts))


def search(
    builds: Builds, bench: Bench, switches: Sequence[Switch], clock: Clock, record: Record,
    say: Callable[[str], None], *, knob_values: Mapping[str, Sequence[int]] | None = None,
    longest_build: float = 6 * 3600.0,
) -> Search:  # fmt: skip
    """Verdicts on switches and the best combination.

    Args:
        builds: makes them.
        bench: measures them.
        clock: the budget. The default build and the first comparison are made in any case.
        record: keeps results for a run that goes on after a kill.
        knob_values: by knob, the values that are tried in both builds beside the default.
        longest_build: seconds that one build may take if there is no budget.

    Raises:
        TuneError: The default build fails, or the machine does not come to rest.
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

    def all(self, switches: Sequence[Switch]) -> Search:
        outcomes = [self._without_a_build(row) for row in switches]
        self.say("configuring the default build")
        commands = self.builds.configured({})
        result = Search(self.builds.build({}, "default", deadline=self.longest), outcomes=outcomes)
        pending = [row for row in outcomes if not row.reason]
        seen: list[tuple[str, Commands, Built]] = [("the default build", commands, result.base)]
        for row in pending:
            self._build(row, seen, result.base)
        waiting = [row for row in pending if not row.reason]
        for number, row in enumerate(waiting):
            self._measure(row, result, 2 * (len(waiting) - number) + 1)
        result.base_loading = self._loading(result.base)
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

    def _build(self, row: Outcome, seen: list[tuple[str, Commands, Built]], base: Built) -> None:
        """Builds a variant, unless its commands are those of a build that is there."""
        switch = row.switch
        defines = {switch.name: switch.value}
        try:
            commands = self.builds.configured(defines)
            for name, others, built in seen:
                if commands == others:
                    row.verdict, row.built = INERT, built
                    row.reason = f"every command is that of {name}, so nothing was built"
                    return
            if self.builds.known(defines) is None and self.clock.left < base.seconds:
                row.reason = (
                    f"the budget has {max(0.0, self.clock.left):.0f} s left, and a build takes about "
                    f"{base.seconds:.0f} s: not measured"
                )
                return
            limit = min(self.longest, max(1.0, self.clock.left))
            row.built = self.builds.build(defines, switch.define, switch.link_mib, limit)
        except BuildFailed as error:
            row.verdict, row.reason = REFUSED, str(error)
            return
        except TuneError as error:  # its link does not fit
            row.verdict, row.reason = REFUSED, str(error)
            return
        for name, others, built in seen:
            apart = differing(built.objects, row.built.objects)
            if not apart and others.link == commands.link:
                row.verdict = INERT
                count = len(row.built.objects)
                row.reason = f"the code of all {count} objects is that of {name}, so nothing was measured"
                return
        seen.append((switch.define, commands, row.built))

    # ---- Measuring ----

    def _compare(
        self, key: str, a: Built, b: Built, parts: int, *, answers: bool,
        settings: tuple[Mapping[str, Any], Mapping[str, Any]] = ({}, {}),
    ) -> Measured:  # fmt: skip
        def make() -> dict[str, Any]:
            return self.bench.compare(a, b, *settings, self.clock.share(parts), answers=answers).to_dict()

        return Measured.from_dict(self.record.once(f"{key} {a.key} {b.key} {settings}", make))

    def _measure(self, row: Outcome, result: Search, parts: int) -> None:
        assert row.built is not None
        if self.clock.left <= 0 and any(o.measured for o in result.outcomes):
            row.reason = "the budget had ended: built, but not measured"
            return
        self.say(f"measuring {row.switch.define}")
        row.measured = self._compare("compare", result.base, row.built, parts, answers=True)
        row.loading = self._loading(row.built)
        row.reason = summary(row.measured)
        if row.measured.kld is None:
            row.reason += "; answers could not be compared"
        if row.measured.changed:
            return
        decisive = row.measured
        if self.clock.left > 0:
            row.tuned = self._retune(row, result.base, parts)
        if row.tuned is not None and row.tuned.measured is not None:
            decisive = row.tuned.measured
            row.reason += f"; with {row.tuned.words}: {summary(decisive)}"
        if accept(decisive.proof(row.switch.define)):
            row.verdict = row.switch.turned

    def _retune(self, row: Outcome, base: Built, parts: int) -> Tuned | None:
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
                found = self._compare("retuned", base, built, parts, answers=True, settings=settings)
                return Tuned(tuned.base, tuned.variant, found)
        return None

    def _prompts(self) -> str:
        """The metric of prompts, which the knobs move; "" where the workload has none."""
        return next((m for m in self.bench.workload.metrics if m.startswith("pp")), "")

    def _rate(self, metric: str, build: Built, settings: Mapping[str, Any]) -> float:
        key = f"rate {build.key} {dict(settings)} {metric}"
        return float(self.record.once(key, lambda: self.bench.rate(build, settings, metric)))

    def _loading(self, build: Built) -> Loading | None:
        def make() -> dict[str, Any] | None:
            found = self.bench.loading(build)
            return None if found is None else {
                "seconds": found.seconds, "host_mib": found.host_mib, "gpu_mib": found.gpu_mib,
            }  # fmt: skip

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
        if len(winners) > 1:
            variant = Variant.of([row.switch for row in winners])
            try:
                limit = min(self.longest, max(1.0, self.clock.left))
                most = max(row.switch.link_mib for row in winners)
                both = self.builds.build(variant.defines, variant.name, most, limit)
                assert built is not None
                self.say("measuring the switches that gain, together")
                mixed = {k: v for row in winners for k, v in _knobs(row).items()}
                result.together = self._compare(
                    "together", result.base, both, 2, answers=True, settings=({}, mixed)
                )
                against = self._compare("best", built, both, 2, answers=False, settings=(knobs, mixed))
                every = result.together.proof(*(row.switch.define for row in winners))
                if against.faster and accept(every):
                    chosen, built, knobs = [row.switch for row in winners], both, mixed
                else:
                    self._lose(
                        winners, best, f"together with the others it gains no more than {best.switch.define}"
                    )
            except TuneError as error:
                self._lose(winners, best, f"all together cannot be built: {error}")
        assert built is not None
        self.say(f"confirming {' '.join(s.define for s in chosen)}")
        settings = (_base_knobs(best), knobs) if len(chosen) == 1 else ({}, knobs)
        result.confirmed = self._compare("confirm", result.base, built, 1, answers=False, settings=settings)
        if accept(result.confirmed.proof(*(s.define for s in chosen))):
            result.chosen, result.built, result.knobs = chosen, built, dict(knobs)
            return
        for row in winners:
            if row.gains:
                row.verdict = DEFAULT
                row.reason += f"; fresh rounds do not confirm it: {summary(result.confirmed)}"

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


def _base_knobs(row: Outcome) -> dict[str, Any]:
    return dict(row.tuned.base) if row.tuned is not None else {}
