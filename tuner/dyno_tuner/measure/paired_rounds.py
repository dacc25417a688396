"""Paired rounds: the comparison that decides. A round is a fresh worker process that measures its
configurations forth and back, `A B C A C B A`, so that a linear drift cancels in all ratios. A disturbed
measurement is repeated.

Generation is measured forth and back first, and then prompts, each in a separate pass. A GPU that has just
processed prompts generates more slowly for a while (on an H200 by 2 % at first, and by 0.3 % half a second
later). The effect is larger the faster the prompts were. If one measurement had prompts and then generation,
faster prompts would make generation slower: a u-batch that cannot affect generation had `tg64` at 0.995 times
the default. With generation before prompts, it would follow the prompts of the previous configuration, which
turns the error around. In a separate pass, generation always follows generation.

This needs one more switch per measurement, which costs nothing if settings change between two calls. If a
measurement loads weights or starts a process, there is only one pass, with generation first in each
measurement. A load then separates it from the prompts before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from ..core.intervals import LEAST_MARGIN, Estimate
from ..core.protocol import Configuration, Measurement, TrialStatus, kind_of
from .comparison import Comparison
from .measurement import baseline_moved, generation_first
from .round_spread import RoundSpread

OVERTIME = 2  # rounds beyond the time of a stage, if fewer than two were measured
REPEATS = 2  # most repetitions of disturbed measurements in a round

# (key, configuration, process, is it the baseline, metrics) -> measurement
MeasurementFn = Callable[[str, Configuration, int, bool, Sequence[str]], Measurement]


def measurements_in_round(configurations: float) -> float:
    """The number of measurements in a round. Each configuration is measured on the way forth and back, and
    the first one also at the turn. A configuration that is measured for some metrics counts by their
    share."""
    return 2 * configurations + 1


@dataclass(frozen=True, slots=True)
class Likeness:
    """A configuration that cannot differ from another one in some metrics. For example, a profile without its
    threads for prompts cannot differ in generation. These metrics are not measured again, and the values of
    the other one count for both."""

    to: str
    metrics: frozenset[str]


ALL_DIFFER: Mapping[str, Likeness] = {}


@dataclass(frozen=True)
class Way:
    """The measurements of one pass forth and back."""

    base: list[Measurement]  # of the first configuration, forth and back
    turn: Measurement | None  # of the first configuration, at the turn
    own: dict[str, list[Measurement]]  # of the others, forth and back
    lasts: tuple[str, ...] = ()  # the configurations next to the turn; default: the last one of `own`


# the base next to a configuration, and its own measurements
Paired = tuple[list[Measurement], list[Measurement]]
Moved = Callable[[Sequence[Measurement]], bool]


def shaken(way: Way, moved: Moved) -> list[str]:
    """The configurations whose speeds on the way forth and back differ, because the machine has changed. Both
    measurements of the last configuration are next to the turn, so a change there shows only in the turn
    itself."""
    found = [n for n, own in way.own.items() if moved(own)]
    lasts = way.lasts or (list(way.own)[-1],)
    return [*found, *(n for n in lasts if n not in found)] if _turn_moved(way, moved) else found


def _turn_moved(way: Way, moved: Moved) -> bool:
    return way.turn is not None and all(moved([half, way.turn]) for half in way.base)


def beside(ways: Sequence[Way], moved: Moved) -> dict[str, Paired]:
    """The measurements that count by configuration: the last undisturbed ones of a round and its
    repetitions."""
    paired: dict[str, Paired] = {}
    for way in ways:
        turn = [] if way.turn is None or _turn_moved(way, moved) else [way.turn]
        base = [way.base[0], *turn, way.base[1]]
        again = shaken(way, moved)
        paired |= {n: (base, own) for n, own in way.own.items() if n not in again or n not in paired}
    return paired


class Time(Protocol):
    """The budget, as far as rounds need it."""

    @property
    def now(self) -> float: ...

    def of_rounds(self, measurements: float) -> float:
        """Expected seconds of this many measurements in rounds."""
        ...

    def took_round(self, measurements: float, seconds: float) -> None:
        """Record the duration of a round."""
        ...

    def more_seconds(self, seconds: float) -> bool:
        """Whether this many more seconds are left for the stage."""
        ...

    def in_time(self, seconds: float | None = None) -> bool:
        """Whether this much more work, by default one measurement, ends before the whole budget."""
        ...


class Rounds:
    """The comparison of configurations in paired rounds.

    Args:
    measurement: Makes one measurement.
    next_process: Gives the number of a new process.
    void_over: Largest allowed change of a configuration between the way forth and back.
    apart: Whether switching between these configurations is so cheap that generation and prompts have
        separate passes.
    spread: The spread of rounds, updated by each comparison.
    resting: Whether the GPU now rests before prompts. When it begins to, a comparison starts again.
    forgive: Allows one more try of a configuration that has killed its worker: once in a run, or always.
    begins: Called before each round with its key, process and configurations.
    anew: Called with a comparison that starts again, and the number of its first round that counts.
    """

    def __init__(
        self,
        measurement: MeasurementFn,
        next_process: Callable[[], int],
        time: Time,
        metrics: Sequence[str],
        void_over: float,
        apart: Callable[[Collection[Configuration]], bool] = lambda configurations: True,
        spread: RoundSpread | None = None,
        resting: Callable[[], bool] = lambda: False,
        forgive: Callable[[Configuration, bool], None] = lambda configuration, always: None,
        anew: Callable[[str, int], None] = lambda key, first: None,
        begins: Callable[[str, int, Collection[Configuration]], None] = lambda key, process, named: None,
    ) -> None:
        self._measurement = measurement
        self._next_process = next_process
        self._time = time
        self._metrics = self._touched = tuple(metrics)
        self._void_over = void_over
        self._apart = apart
        self._spread = spread if spread is not None else RoundSpread()
        self._resting = resting
        self._forgive, self._anew, self._begins = forgive, anew, begins
        self._rests: frozenset[str] = frozenset()
        self.running = Comparison([])  # the last comparison; it contains only whole rounds

    def seconds(self, measurements: float) -> float:
        """Expected seconds of this many measurements in rounds."""
        return self._time.of_rounds(measurements)

    def affordable(self, measurements: float, seconds: float = 0.0) -> bool:
        """Whether this many more measurements, and these seconds of other work, fit into the rest of the
        stage."""
        return self._time.more_seconds(self.seconds(measurements) + seconds)

    def compare(
        self,
        key: str,
        configurations: Mapping[str, Configuration],
        rounds: int | Callable[[], int],
        into: Comparison | None = None,
        alike: Mapping[str, Likeness] = ALL_DIFFER,
        touched: Collection[str] | None = None,
        rests: Collection[str] = (),
    ) -> Comparison:
        """Run up to `rounds` rounds, or fewer if the time of the stage ends. If there is no time for two,
        none is run, because one round decides nothing (one is enough in addition to carried rounds). If
        rounds take longer than planned, up to OVERTIME of them may use the rest of the whole budget until
        there are two. A configuration that kills its worker, or fails otherwise, is measured once more in a
        fresh process. If it fails again, it is left out from then on. The first configuration may fail once.
        Its second failure ends the comparison.

        Args:
            rounds: Number of rounds, or a function that is asked before each round.
            into: A comparison of the same key and configurations that gets further rounds.
            alike: By configuration, the metrics in which it cannot differ from another one.
            touched: The metrics that the differences can affect, as far as known; default: all. Only these
                can make a round void or a measurement disturbed, because noise in generation says nothing
                about prompts.
            rests: Configurations (profiles without a part) whose rounds are never dropped. If one of them has
                run in a round and then fails twice, the comparison ends with the rounds so far. If it fails
                twice before that, it is left out, and tried once more after the rounds. Only a third failure
                counts.
        """
        self._rests = frozenset(rests)
        self._touched = tuple(m for m in self._metrics if touched is None or m in touched) or self._metrics
        result = self.running = into or Comparison(list(configurations), key)
        self._spread.add(result)
        before, first_name = result.rounds, next(iter(configurations))

        def wanted() -> int:
            return before + (rounds if isinstance(rounds, int) else rounds())

        least = 1 if result.carried >= 2 else 2
        if not self.affordable(least * self.measurements(configurations, alike)):
            return result
        voids = 0
        first = result.begun
        overtime = 0
        took = 0.0  # seconds of a round, which takes longer if its configurations are slow
        forgiven = False
        while result.rounds < wanted():
            alive = [n for n in configurations if n not in result.failed and n not in result.unsettled]
            if first_name in result.failed or result.halted or len(alive) < 2:
                break
            late = result.begun > first and not self._time.more_seconds(took)
            measurements = self.measurements(alive, alike)
            late = late or (result.begun > first + 1 and not self.affordable(measurements))
            overtime += late
            if late and (result.rounds >= 2 or overtime > OVERTIME or not self._time.in_time(took)):
                break
            begun = self._time.now
            number, result.begun = result.begun, result.begun + 1
            named = {n: configurations[n] for n in alive}
            process, rested = self._next_process(), self._resting()
            self._begins(f"{key}/r{number}", process, named.values())
            own = {n: a for n, a in alike.items() if n in alive and a.to in alive}
            way = self._there_and_back(f"{key}/r{number}", named, process, result, own)
            moved = way is not None and self._moved(way.base) and voids < wanted()
            paired = None
            # A rate that changes all the time is measured as it is.
            if way is not None and not moved and self._resting() == rested:
                paired = self._steadied(f"{key}/r{number}", named, process, way, result, own)
            if self._resting() != rested:
                result.begin_anew()
                self._anew(key, result.begun)
                before = 0
            elif moved:
                voids += 1
                result.voided += 1
            elif paired is not None:
                self._record(paired, result, own)
            elif way is None and not self._time.in_time():
                break
            if not forgiven and first_name in result.failed:
                forgiven = True
                del result.failed[first_name]
            took = max(took, self._time.now - begun)
            if way is not None:
                self._time.took_round(measurements, self._time.now - begun)
        self._settle(key, configurations, result, alike)
        return result

    def measurements(
        self, configurations: Collection[str], alike: Mapping[str, Likeness] = ALL_DIFFER
    ) -> float:
        """The number of whole measurements in one round of these configurations."""
        less = sum(len(a.metrics) for n, a in alike.items() if n in configurations and a.to in configurations)
        return measurements_in_round(len(configurations) - less / len(self._metrics))

    def _there_and_back(
        self, key: str, configurations: Mapping[str, Configuration], process: int, result: Comparison,
        alike: Mapping[str, Likeness], again: bool = False,
    ) -> Way | None:  # fmt: skip
        """Measure one pass forth and back; None if something failed, or the budget ended.

        Args: `again`: prompts were processed right before, so an uncounted measurement generates first.
        """
        names = list(configurations)
        order = [*names, *names[:1], *reversed(names)]
        measurements: dict[int, Measurement] = {}  # by position in the order, combined over all passes
        lasts: dict[str, None] = {}
        ways = self._ways(configurations.values())
        if again and len(ways) > 1:
            self._measurement(f"{key}/before", configurations[names[0]], process, True, ways[0])
        for metrics in ways:
            suffix = f"/{kind_of(metrics[0])}" if len(ways) > 1 else ""
            own = {n: tuple(m for m in metrics if n not in alike or m not in alike[n].metrics) for n in names}
            if not any(own[n] for n in names[1:]):
                continue
            lasts |= dict.fromkeys([n for n in names[1:] if own[n]][-1:])
            for position, name in enumerate(order):
                if not own[name]:
                    continue
                if not self._time.in_time():
                    return None
                at = f"{key}/{position}{suffix}"
                measurement = self._measurement(
                    at, configurations[name], process, name == names[0], own[name]
                )
                if measurement.status is not TrialStatus.OK:
                    if name == names[0] or not self._may_run(
                        at, name, configurations[name], own[name], measurement.status, result
                    ):
                        self._leave_out(name, measurement, result)
                    return None
                measurements[position] = (
                    joined(measurements[position], measurement) if position in measurements else measurement
                )
        found: dict[str, list[Measurement]] = {}
        for position in sorted(measurements):
            found.setdefault(order[position], []).append(measurements[position])
        there, turn, back = found.pop(names[0])
        return Way([there, back], turn, found, tuple(lasts))

    def _leave_out(self, name: str, measurement: Measurement, result: Comparison) -> None:
        """Leave a configuration out. A profile without a part that has run in whole rounds keeps them,
        because it can run."""
        if name in self._rests and name in result.logs:
            result.halted[name] = measurement
        elif name in self._rests and measurement.status is not TrialStatus.INVALID:
            result.unsettled[name] = measurement
        else:
            result.failed[name] = measurement
            result.logs.pop(name, None)

    def _settle(
        self, key: str, configurations: Mapping[str, Configuration], result: Comparison,
        alike: Mapping[str, Likeness],
    ) -> None:  # fmt: skip
        """Try a profile without a part that has failed twice once more. The two tries followed each other, so
        another program may have caused both failures. If it really does not run, the missing part is
        proven."""
        for name, failed in list(result.unsettled.items()):
            again = failed
            if self._time.in_time():
                self._forgive(configurations[name], True)
                same = alike[name].metrics if name in alike else frozenset[str]()
                own = generation_first([m for m in self._metrics if m not in same])
                at = f"{key}/settle{result.begun}/{name}"
                again = self._measurement(at, configurations[name], self._next_process(), False, own)
            told = again.status is not TrialStatus.OK and self._time.in_time()
            (result.failed if told else result.halted)[name] = failed
            del result.unsettled[name]

    def _may_run(
        self, key: str, name: str, configuration: Configuration, metrics: Sequence[str], status: TrialStatus,
        result: Comparison,
    ) -> bool:  # fmt: skip
        """Whether a configuration that has failed may run nevertheless, because other programs can kill a
        worker or delay it. Its first failure is tried again in a fresh process. Without time for that, the
        failure decides nothing. A refusal by the engine is final."""
        if status is TrialStatus.INVALID or name in result.forgiven:
            return False
        result.forgiven.add(name)
        if not self._time.in_time():
            return True
        self._forgive(configuration, False)
        again = self._measurement(f"{key}/retry", configuration, self._next_process(), False, metrics)
        result.voided += again.status is TrialStatus.OK
        return again.status is TrialStatus.OK or not self._time.in_time()

    def _ways(self, configurations: Collection[Configuration]) -> list[tuple[str, ...]]:
        """The metrics of each pass."""
        ordered = generation_first(self._metrics)
        kinds = dict.fromkeys(map(kind_of, ordered))
        if len(kinds) < 2 or not self._apart(configurations):
            return [ordered]
        return [tuple(m for m in ordered if kind_of(m) == kind) for kind in kinds]

    def _moved(self, halves: Sequence[Measurement]) -> bool:
        return baseline_moved(halves[0], halves[1], self._touched) > self._void_over

    def _steadied(
        self, key: str, configurations: Mapping[str, Configuration], process: int, way: Way,
        result: Comparison, alike: Mapping[str, Likeness],
    ) -> dict[str, Paired] | None:  # fmt: skip
        """Measure disturbed configurations again, in the same process and together with the first
        configuration; None if that failed or the budget ended."""
        first = next(iter(configurations))
        ways = [way]
        for repeat in range(REPEATS):
            names = shaken(ways[-1], self._moved)
            if not names or not self.affordable(measurements_in_round(1 + len(names))):
                break
            again = {n: configurations[n] for n in (first, *names)}
            repeated = self._there_and_back(f"{key}/again{repeat}", again, process, result, alike, True)
            if repeated is None:
                return None
            result.voided += 1
            if not self._moved(repeated.base):
                ways.append(repeated)
        return beside(ways, self._moved)

    def _record(
        self, paired: Mapping[str, Paired], result: Comparison, alike: Mapping[str, Likeness]
    ) -> None:
        first = result.names[0]
        logs: list[tuple[str, str, list[float]]] = []
        rates: list[tuple[str, str, list[float]]] = []
        for metric in self._metrics:
            for name in paired:
                borrowed = name in alike and metric in alike[name].metrics
                if borrowed:
                    result.borrowed.add((name, metric))
                base, own = paired[alike[name].to if borrowed else name]
                of_own, of_base = ([v.rates(metric) for v in measurements] for measurements in (own, base))
                rates.append((name, metric, _values(of_own)))
                _add_costs(result, name, metric, own)
                logs.append((name, metric, both_ways(of_own, of_base)))
            base = next(iter(paired.values()))[0]
            rates.append((first, metric, _values([v.rates(metric) for v in base])))
            _add_costs(result, first, metric, base)
        result.add_round(logs, rates)


def _add_costs(result: Comparison, name: str, metric: str, measurements: Sequence[Measurement]) -> None:
    by_energy = any(v.by_energy for v in measurements)
    speeds = _values([v.speeds(metric) for v in measurements]) if by_energy else []
    result.add_costs(name, metric, speeds, _values([v.joules(metric) for v in measurements]))


def joined(first: Measurement, second: Measurement) -> Measurement:
    """Merge two measurements of a configuration for different metrics."""
    return replace(
        first,
        samples=(*first.samples, *second.samples),
        warmup=(*first.warmup, *second.warmup),
        stable=first.stable and second.stable,
        seconds=first.seconds + second.seconds,
    )


def _values(rates: Sequence[Mapping[int, float]]) -> list[float]:
    return [r for half in rates for r in half.values()]


def both_ways(own: Sequence[Mapping[int, float]], base: Sequence[Mapping[int, float]]) -> list[float]:
    """Log ratios by prompt to the mean of the base before and after, averaged over forth and back. If a slow
    configuration was not measured with all prompts, there may be no common prompt; then one ratio.

    Args:
        base: The base forth and back, or forth, at the turn, and back.
    """

    def level(
        measurements: Sequence[Mapping[int, float]], weights: Sequence[float], prompt: int | None
    ) -> float:
        logs = [
            math.log(v[prompt]) if prompt is not None else float(np.median([math.log(r) for r in v.values()]))
            for v in measurements
        ]
        return sum(w * x for w, x in zip(weights, logs, strict=True))

    halves, around = (0.5, 0.5), (0.5, 0.5) if len(base) == 2 else (0.25, 0.5, 0.25)
    common: list[int | None] = sorted(set[int].intersection(*(set(v) for v in (*own, *base))))  # type: ignore[assignment]
    return [level(own, halves, p) - level(base, around, p) for p in common or [None]]


WIDEST_MARGIN = 0.10
"""Widest margin that allows a proof. A busy machine once showed 14.955 x for one thread instead of two."""


@dataclass(frozen=True, slots=True)
class Bar:
    """The margin that an entry must exceed."""

    margin: Mapping[str, float]  # by metric
    weights: Mapping[str, float] = field(default_factory=dict)  # by metric; default: all equal

    def of(self, metrics: Sequence[str]) -> float:
        """The margin for a weighted geometric mean of several metrics, whose noises average out."""
        if len(metrics) == 1:
            return self.margin[metrics[0]]
        weights = {m: self.weights.get(m, 1.0) for m in metrics}
        spread = math.sqrt(sum((w * self.margin[m]) ** 2 for m, w in weights.items())) / sum(weights.values())
        return max(LEAST_MARGIN, spread)

    def proves(self, metrics: Sequence[str]) -> bool:
        """Whether a gain in these metrics can be distinguished from noise at all."""
        return self.of(metrics) <= WIDEST_MARGIN

    def beats(
        self,
        comparison: Comparison,
        name: str,
        moves: Sequence[str],
        weights: Mapping[str, float],
        over: str | None = None,
        touched: Collection[str] | None = None,
    ) -> tuple[bool, Estimate]:
        """Whether `name` gains at least the margin in `moves`, its interval excludes 1, and no metric of the
        workload falls by more than its margin. Never true if the margin is wider than WIDEST_MARGIN.

        Args:
            touched: The metrics that the differences can affect, as far as known; default: all.
        """
        gain = comparison.ratio(name, moves, weights, over)
        harmed = any(
            self.harms(
                comparison.ratio(name, [m], weights, over), m, touched is None or m in touched or m in moves
            )
            for m in weights
            if weights[m] > 0
        )
        gains = gain.ratio >= 1 + self.of(moves) and gain.low > 1
        return gains and not harmed and self.proves(moves), gain

    def harms(self, ratio: Estimate, metric: str, touched: bool = True) -> bool:
        """Whether a metric falls by more than its margin, or, if noise makes the margin wide, surely by more
        than 1 %. If no difference is known to affect the metric, only a sure fall by more than the margin
        counts, because noise in an unaffected metric must not hide a gain."""
        if not touched:
            return ratio.high < 1 - self.margin[metric]
        return ratio.ratio < 1 - self.margin[metric] or ratio.high < 0.99
