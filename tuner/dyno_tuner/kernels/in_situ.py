"""Kernels of token generation, screened where they run: one at a time, on top of what is chosen so far, by
short runs of the whole engine.

The launches of a token are short and overlap, so the time of one alone misleads: a kernel that is faster by
itself can hold up those around it, and one that is slower can let them in. Times alone only say here in
which order to try, and what is hopeless.

A block is `incumbent, candidates…, incumbent`, and every candidate is scored against the two, interpolated
in time (`measurement.score`), so that drift does not decide. The best of a block is measured again beside the
incumbent, and on those samples alone it is kept. A kept kernel is a candidate still: the group has to gain
in the whole profile (`decide.end_to_end`).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.intervals import estimate
from ..core.options import MeasurementPolicy
from ..core.outcome import Screened
from ..core.protocol import (
    Configuration,
    KernelChoice,
    KernelOp,
    Measurement,
    TrialStatus,
    Value,
    Workload,
    kind_of,
)
from ..measure.baseline_block import Baseline, Block, BlockPlan
from ..measure.measurement import score

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ..core.intervals import Estimate
    from ..record.context import Context

KEY = "kernels/in_place/"  # of all measurements
MIN_GAIN = 0.003  # in log; what generation gains by one op is small, and the gains of several add up
HOPELESS = 0.5  # of the default's speed alone; overlap hides less than that
BLOCK = 4  # candidates between two measurements of the incumbent
CHECKS = 4  # measurements of a winner, each between two of the incumbent, that decide whether it is kept
PASSES = 3
NEARLY = 0.01  # in log; what lost by less is tried again on top of what was kept
FAR = 0.03  # in log; a variant that lost by more is tried again after all others
SHORT_SECONDS = 0.1  # of a run, about
FEWEST_TOKENS = 8
POLICY = MeasurementPolicy(prompts=3, cap=5)

Place = tuple[str, str]  # op key and bucket
Config = tuple[tuple[str, Value], ...]  # sorted, so that it can be looked up


def frozen(config: Mapping[str, Value]) -> Config:
    return tuple(sorted(config.items()))


def shortened(workload: Workload, rates: Mapping[str, float]) -> Workload:
    """Only generation, of so many tokens as take about SHORT_SECONDS at these rates."""

    def few(metric: str) -> int:
        most = workload.tokens(metric)
        rate = rates.get(metric)
        return min(most, max(FEWEST_TOKENS, math.ceil(SHORT_SECONDS * rate))) if rate else most

    kept = [m for m in workload.metrics if kind_of(m) == "tg"]
    if not workload.parts:
        return dataclasses.replace(workload, pp=0, tg=few("tg"))
    return Workload.mix([dataclasses.replace(workload.part(m), tokens=few(m)) for m in kept])


@dataclass
class Contest:
    """An op and the configs that it could run with.

    Args:
    alone: by config, what its launch gains over the default's by itself; what is not in it was not timed.
    share: seconds of a token that the op takes alone, as far as is known.
    """

    op: KernelOp
    alone: Mapping[Config, Estimate]
    share: float
    waiting: list[Config] = field(default_factory=list)
    blocks: int = 0
    changes: int = 0  # how often a kernel had been replaced when this op was last looked at
    seen: dict[Config, float] = field(default_factory=dict)  # log ratio to the incumbent of its time

    @property
    def place(self) -> Place:
        return self.op.key, self.op.tokens

    def order(self) -> list[Config]:
        """Fastest alone first, the variants in turn: what overlap changes is likelier to differ between
        variants than between their numbers. The hopeless are left out."""
        configs = [c for c in dict.fromkeys(map(frozen, self.op.candidates)) if c != frozen(self.op.default)]
        gains = {c: self.alone[c].ratio if c in self.alone else 0.0 for c in configs}
        hopeful = [c for c in configs if c not in self.alone or gains[c] >= HOPELESS]
        hopeful.sort(key=lambda c: -gains[c])
        turn: dict[object, int] = {}
        ranked = []
        for position, config in enumerate(hopeful):
            variant = dict(config).get("variant")
            turn[variant] = turn.get(variant, -1) + 1
            ranked.append((turn[variant], position, config))
        return [config for _, _, config in sorted(ranked, key=lambda r: r[:2])]

    def lost(self, config: Config, far: float) -> bool:
        """Whether every config of its variant that was tried in situ lost by more than `far`: others of it
        can wait."""
        variant = dict(config).get("variant")
        seen = [ratio for c, ratio in self.seen.items() if dict(c).get("variant") == variant]
        return bool(seen) and max(seen) < -far


@dataclass
class InSituScreen:
    """The screen of kernels where they run.

    Args:
    workload: of the short measurements, with the weights of its metrics.
    settings: of the engine, under which the kernels are tried.
    cost: seconds of a measurement; learned from what they take.
    """

    context: Context
    workload: Workload
    settings: Mapping[str, Value]
    cost: float
    chosen: dict[Place, tuple[KernelOp, Config, Screened]] = field(default_factory=dict)
    failed: set[tuple[Place, Config]] = field(default_factory=set)  # never tried again
    tried: int = 0
    voided: int = 0
    ended: str = ""
    gained: float = 1.0  # by what is chosen over the defaults, at most; what is kept gains on top of what was
    sure: float = 1.0  # the same, at least

    def __post_init__(self) -> None:
        self.weights = self.workload.weights
        self._void_over = self.context.void_over
        self._more: Callable[[float], bool] = lambda seconds: True
        # the incumbent's last measurement, if it still is one
        self._before: Baseline | None = None
        self._measurements = 0
        self._changes = 0
        self._defaults: dict[Place, Config] = {}
        self._together: Mapping[Place, Config] = {}  # tried as one
        sigma = max(0.001, *(n.within for n in self.context.noise.values()))
        # As if so much had been seen already: half of a normal distribution lies within 0.67 of its sigma.
        self._moves = [0.6745 * math.sqrt(2) * sigma] * 3

    def run(
        self, contests: Sequence[Contest], together: Mapping[Place, Config], more: Callable[[float], bool]
    ) -> None:
        """Screens the kernels of all contests, as long as there is time.

        Args:
            together: is tried first, as one: what won alone. If it was before, it is not again.
            more: whether so many more seconds are left for this.
        """
        self.ended, self._more = "", more
        for contest in contests:
            contest.waiting = contest.order()
            self._defaults[contest.place] = frozen(contest.op.default)
        if len(together) > 1 and together != self._together:
            self._try_together(contests, together)
        else:
            self._question(contests)
        for number in range(PASSES):
            kept = self._pass(contests)
            if self.ended or not kept:
                break
            for contest in contests:
                again = number + 1 < PASSES and contest.changes < self._changes
                contest.waiting = self._once_more(contest) if again else []
                contest.blocks = 0
        self.ended = self.ended or "complete"
        self.context.note(
            "kernels_in_place", ops=sum(1 for c in contests if c.blocks or c.seen), of=len(contests),
            trials=self.tried, failed=len(self.failed), kept=len(self.chosen), voided=self.voided,
            ended=self.ended,
        )  # fmt: skip

    def look(
        self, contests: Sequence[Contest], together: Mapping[Place, Config], more: Callable[[float], bool]
    ) -> None:
        """Tries the winners of launches alone, as one, and nothing else; `more` as in `run`."""
        self._more = more
        self._defaults |= {c.place: frozen(c.op.default) for c in contests}
        self._try_together(contests, together)

    def move_to(self, settings: Mapping[str, Value]) -> None:
        """Goes on with other settings of the engine; what is chosen stays."""
        if dict(settings) != dict(self.settings):
            self.settings, self._before = settings, None

    def configuration(self, other: Mapping[Place, Config]) -> Configuration:
        """The kernels that are chosen so far, with `other` on top."""
        now = {place: config for place, (_, config, _) in self.chosen.items()} | dict(other)
        kernels = [
            KernelChoice(*place, dict(config))
            for place, config in sorted(now.items())
            if config != self._defaults[place]
        ]
        return Configuration(self.settings, tuple(kernels))

    # ---- what is tried

    def _pass(self, contests: Sequence[Contest]) -> bool:
        """Whether anything was kept. Blocks are dealt like seats, by the root of what an op takes of a token:
        the heavy ones come first and oftenest, and the many light ones, which overlap most, come too."""
        kept = False
        while not self.ended and (open_ := [c for c in contests if c.waiting]):
            contest = max(open_, key=lambda c: math.sqrt(c.share) / (1 + c.blocks))
            kept |= self._contend(contest)
        return kept

    def _once_more(self, contest: Contest) -> list[Config]:
        """The configs that might win now that others have changed; the default, too, if it was replaced."""
        near = sorted((c for c, r in contest.seen.items() if r > -NEARLY), key=lambda c: -contest.seen[c])
        if contest.place in self.chosen:
            near = list(dict.fromkeys([self._defaults[contest.place], *near]))
        return near[: 2 * BLOCK]

    def _contend(self, contest: Contest) -> bool:
        """One block of an op; whether its winner was kept."""
        default = self._defaults[contest.place]
        present = self.chosen[contest.place][1] if contest.place in self.chosen else default
        waiting = [c for c in contest.waiting if c != present and (contest.place, c) not in self.failed]
        waiting.sort(key=lambda c: contest.lost(c, max(FAR, 3 * self._spread)))
        block, contest.waiting = waiting[:BLOCK], waiting[BLOCK:]
        contest.blocks += 1
        contest.changes = self._changes
        if not block:
            return False
        found = self._block({c: {contest.place: c} for c in block})
        for config in block:
            if config in found:
                contest.seen[config] = found[config]
                self._tell(contest.place, config, ratio=math.exp(found[config]))
        missing = [c for c in block if c not in found and (contest.place, c) not in self.failed]
        contest.waiting = [*missing, *contest.waiting]
        for config in sorted(found, key=lambda c: -found[c])[:2]:
            if found[config] < self._threshold:
                break
            gain = self._check({contest.place: config})
            if gain is None:
                continue
            how = Screened(contest.alone.get(config), gain)
            if config == default:
                self.chosen.pop(contest.place, None)
            else:
                self.chosen[contest.place] = (contest.op, config, how)
            contest.seen[present] = -math.log(gain.ratio)
            self._count(gain)
            self._replaced(contest)
            return True
        return False

    def _try_together(self, contests: Sequence[Contest], together: Mapping[Place, Config]) -> None:
        self._together = dict(together)
        found = self._block({"together": together})
        if not found or found["together"] < self._threshold or (gain := self._check(together)) is None:
            self.context.note("kernels_together", choices=len(together), kept=False)
            return
        for contest in contests:
            if (config := together.get(contest.place)) is not None:
                how = Screened(contest.alone.get(config), gain, len(together))
                self.chosen[contest.place] = (contest.op, config, how)
        self._question(contests)
        self._count(gain)
        self._replaced()
        self.context.note("kernels_together", choices=len(together), kept=True, **gain.to_dict())

    def _question(self, contests: Sequence[Contest]) -> None:
        """Of what is chosen as one, a kernel that only the others carry has to go."""
        for contest in contests:
            if contest.place in self.chosen and contest.place in self._together:
                contest.waiting.insert(0, self._defaults[contest.place])

    def _count(self, gain: Estimate) -> None:
        self.gained *= gain.high
        self.sure *= gain.low

    def _replaced(self, contest: Contest | None = None) -> None:
        """There is another incumbent from now on."""
        self._before = None
        self._changes += 1
        if contest is not None:
            contest.changes = self._changes

    # ---- how it is measured

    @property
    def _spread(self) -> float:
        """Of a candidate's score, in log: that of one measurement of the incumbent over the one before."""
        return float(np.median(self._moves)) / 0.6745

    @property
    def _threshold(self) -> float:
        return max(MIN_GAIN, 1.5 * self._spread)

    def _now(self) -> float:
        return self.context.recorder.now

    def _affordable(self, measurements: int) -> bool:
        if not self.ended and not self._more(measurements * self.cost):
            self.ended = "budget"
        return not self.ended

    def _measure(self, configuration: Configuration, incumbent: bool) -> Measurement:
        begun = self._now()
        measurement = self.context.glance(
            f"{KEY}{self._measurements}", configuration, self.workload, POLICY, incumbent
        )
        self._measurements += 1
        if measurement.status is TrialStatus.OK:
            self.cost += max(0.2, 1 / self._measurements) * (self._now() - begun - self.cost)
        else:
            self._before = None  # the engine may have been started anew
        return measurement

    def _incumbent(self) -> Baseline | None:
        """It has run before; one failure is forgiven."""
        for _ in range(2):
            measurement = self._measure(self.configuration({}), True)
            if measurement.status is TrialStatus.OK:
                return self._now(), measurement
        self.ended = f"failed: {measurement.message}"
        self.chosen.clear()
        return None

    def _plan(self, others: Mapping[Any, Mapping[Place, Config]], block: Block[Any]) -> BlockPlan[Any]:
        """How a block of `others` measures; after a failure the engine may have been started anew."""

        def baseline(voided: int) -> Baseline | None:
            found = self._incumbent()
            if found is not None:
                self._before = found
                self._moves.append(abs(self._score(found[1], [block.before], found[0])))
            return found

        def candidate(name: Any, repeat: int) -> Measurement:
            self.tried += 1
            measurement = self._measure(self.configuration(others[name]), False)
            if measurement.status is not TrialStatus.OK and len(others[name]) == 1:
                ((place, config),) = others[name].items()
                self.failed.add((place, config))
                self._tell(place, config, status=str(measurement.status), message=measurement.message)
            return measurement

        return BlockPlan(
            baseline, candidate, self._now, self._affordable, list(self.weights), self._void_over, 1,
            failure_ends=True,
        )  # fmt: skip

    def _block(self, others: Mapping[Any, Mapping[Place, Config]]) -> dict[Any, float]:
        """Log ratios to the incumbent, by the names of `others`; those that are missing were not measured,
        for want of time or because one before them failed."""
        if not self._affordable(len(others) + 2):
            return {}
        before = self._before or self._incumbent()
        if before is None:
            return {}
        block: Block[Any] = Block(before)
        plan = self._plan(others, block)
        block.taken = plan.measure_all(list(others), 0)
        block.close(plan)
        self.voided += block.voided
        ran = [t for t in block.taken if t.measurement.status is TrialStatus.OK]
        if block.after is None and len(ran) == len(block.taken):
            return {}  # the incumbent does not run any more
        if block.after is not None and not block.settled:
            self.voided += 1
            return {}
        return {t.candidate: self._score(t.measurement, block.baselines(), t.when) for t in ran}

    def _check(self, other: Mapping[Place, Config]) -> Estimate | None:
        """The gain on fresh samples; None where there is none to rely on."""
        groups: list[Sequence[float]] = []
        if not self._affordable(2 * CHECKS + 1):
            return None
        before = self._before or self._incumbent()
        while before is not None and len(groups) < CHECKS:
            block: Block[str] = Block(before)
            (taken,) = self._plan({"again": other}, block).measure_all(["again"], 0)
            after = self._incumbent() if taken.measurement.status is TrialStatus.OK else None
            if after is None:
                return None
            self._before = after
            scored = score(taken.measurement, [before, after], taken.when, list(self.weights))
            groups.append(self._pairs(scored.pairs.values()))
            if len(groups) == CHECKS // 2 and np.mean([np.median(g) for g in groups]) <= 0:
                break
            before = after
        if before is None:
            return None
        gain = estimate(groups, "in place", self._measurements)
        kept = len(groups) == CHECKS and gain.low > 1 and gain.ratio >= math.exp(MIN_GAIN)
        for place, config in other.items() if len(other) == 1 else ():
            self._tell(place, config, kept=kept, **gain.to_dict())
        return gain if kept else None

    def _pairs(self, by_metric: Iterable[Sequence[float]]) -> list[float]:
        """Of several metrics the weighted mean, prompt by prompt."""
        weights = list(self.weights.values())
        return [float(np.average(pair, weights=weights)) for pair in zip(*by_metric, strict=True)]

    def _score(self, measurement: Measurement, baselines: Sequence[Baseline], when: float) -> float:
        return score(measurement, baselines, when, list(self.weights)).combined(self.weights)

    def _tell(self, place: Place, config: Config, **data: Any) -> None:
        self.context.note(
            "kernel_trial",
            number=self._measurements,
            key=place[0],
            tokens=place[1],
            config=dict(config),
            **data,
        )
