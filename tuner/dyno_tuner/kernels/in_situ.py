"""The screen in situ for kernels of token generation: one kernel at a time, in addition to the chosen ones,
in short runs of the whole engine.

The launches of a token are short and overlap, so the time of a single launch misleads. A kernel that is
faster by itself can delay its neighbours, and a slower one can let them run in parallel. Here, times of
single launches only decide the order of trials, and which kernels are hopeless.

A block is `incumbent, candidates…, incumbent`. Each candidate is scored against both, interpolated in time
(`measurement.score`), so that drift does not decide. The best of a block is measured again together with the
incumbent, and only these samples decide whether it is kept. A kept kernel is still only a candidate: its
group must gain in the whole profile (`decide.end_to_end`).
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

KEY = "kernels/in_place/"  # prefix of the keys of all measurements
MIN_GAIN = 0.003  # in log; a single op gains little in generation, and the gains of several add up
HOPELESS = 0.5  # share of the default's single-launch speed; overlap hides less than that
BLOCK = 4  # number of candidates between two measurements of the incumbent
CHECKS = 4  # measurements of a winner, each between two of the incumbent, to decide whether it is kept
PASSES = 3
NEARLY = 0.01  # in log; kernels that lost by less are tried again after another one was kept
FAR = 0.03  # in log; variants that lost by more are tried again last
SHORT_SECONDS = 0.1  # approximate seconds of a run
FEWEST_TOKENS = 8
POLICY = MeasurementPolicy(prompts=3, cap=5)

Place = tuple[str, str]  # op key and bucket
Config = tuple[tuple[str, Value], ...]  # sorted, as a key for look-ups


def frozen(config: Mapping[str, Value]) -> Config:
    return tuple(sorted(config.items()))


def shortened(workload: Workload, rates: Mapping[str, float]) -> Workload:
    """A workload of generation only, with as many tokens as take about SHORT_SECONDS at these rates."""

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
    """An op, with its candidate configs.

    Args:
    alone: By config, the gain of its single launch over the default. Configs that were not timed are missing.
    share: Seconds per token of the op alone, as far as known.
    """

    op: KernelOp
    alone: Mapping[Config, Estimate]
    share: float
    waiting: list[Config] = field(default_factory=list)
    blocks: int = 0
    changes: int = 0  # number of replaced kernels when this op was last tried
    seen: dict[Config, float] = field(default_factory=dict)  # log ratio to the incumbent at that time

    @property
    def place(self) -> Place:
        return self.op.key, self.op.tokens

    def order(self) -> list[Config]:
        """The configs in order of their single-launch speed, alternating between variants, because the effect
        of overlap differs more between variants than between their parameters. Hopeless ones are left out."""
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
        """Whether all tried configs of its variant lost by more than `far` in situ, so that its other configs
        can wait."""
        variant = dict(config).get("variant")
        seen = [ratio for c, ratio in self.seen.items() if dict(c).get("variant") == variant]
        return bool(seen) and max(seen) < -far


@dataclass
class InSituScreen:
    """The screen of kernels in situ.

    Args:
    workload: The workload of the short measurements, with the weights of its metrics.
    settings: Settings of the engine during the screen.
    cost: Seconds of a measurement, updated from actual ones.
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
    gained: float = 1.0  # gain of the chosen kernels over the defaults, upper bound
    sure: float = 1.0  # the same, lower bound

    def __post_init__(self) -> None:
        self.weights = self.workload.weights
        self._void_over = self.context.void_over
        self._more: Callable[[float], bool] = lambda seconds: True
        # the last measurement of the incumbent, if it is still valid
        self._before: Baseline | None = None
        self._measurements = 0
        self._changes = 0
        self._defaults: dict[Place, Config] = {}
        self._together: Mapping[Place, Config] = {}  # kernels that were tried together
        sigma = max(0.001, *(n.within for n in self.context.noise.values()))
        # A prior, as if this had already been observed: half of a normal distribution is within 0.67 sigma.
        self._moves = [0.6745 * math.sqrt(2) * sigma] * 3

    def run(
        self, contests: Sequence[Contest], together: Mapping[Place, Config], more: Callable[[float], bool]
    ) -> None:
        """Screen the kernels of all contests, as long as there is time.

        Args:
            together: The winners of single launches, which are tried first, all together, unless that was
                done before.
            more: Says whether this many more seconds are left.
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
        """Try only the winners of single launches, all together; `more` as in `run`."""
        self._more = more
        self._defaults |= {c.place: frozen(c.op.default) for c in contests}
        self._try_together(contests, together)

    def move_to(self, settings: Mapping[str, Value]) -> None:
        """Continue with other settings of the engine. The chosen kernels stay."""
        if dict(settings) != dict(self.settings):
            self.settings, self._before = settings, None

    def configuration(self, other: Mapping[Place, Config]) -> Configuration:
        """The configuration of the chosen kernels, with `other` in addition."""
        now = {place: config for place, (_, config, _) in self.chosen.items()} | dict(other)
        kernels = [
            KernelChoice(*place, dict(config))
            for place, config in sorted(now.items())
            if config != self._defaults[place]
        ]
        return Configuration(self.settings, tuple(kernels))

    # ---- what is tried

    def _pass(self, contests: Sequence[Contest]) -> bool:
        """One pass over the contests. Returns whether a kernel was kept. Blocks are distributed like seats in
        a parliament, by the square root of the time of an op per token. So heavy ops come first and most
        often, and the many light ones, which overlap most, also get some."""
        kept = False
        while not self.ended and (open_ := [c for c in contests if c.waiting]):
            contest = max(open_, key=lambda c: math.sqrt(c.share) / (1 + c.blocks))
            kept |= self._contend(contest)
        return kept

    def _once_more(self, contest: Contest) -> list[Config]:
        """The configs that might win after others have changed, including the default if it was replaced."""
        near = sorted((c for c, r in contest.seen.items() if r > -NEARLY), key=lambda c: -contest.seen[c])
        if contest.place in self.chosen:
            near = list(dict.fromkeys([self._defaults[contest.place], *near]))
        return near[: 2 * BLOCK]

    def _contend(self, contest: Contest) -> bool:
        """Measure one block of an op. Returns whether its winner was kept."""
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
        """Among kernels that were chosen together, remove each one that does not gain itself."""
        for contest in contests:
            if contest.place in self.chosen and contest.place in self._together:
                contest.waiting.insert(0, self._defaults[contest.place])

    def _count(self, gain: Estimate) -> None:
        self.gained *= gain.high
        self.sure *= gain.low

    def _replaced(self, contest: Contest | None = None) -> None:
        """Record that the incumbent has changed."""
        self._before = None
        self._changes += 1
        if contest is not None:
            contest.changes = self._changes

    # ---- how it is measured

    @property
    def _spread(self) -> float:
        """Standard deviation of the score of a candidate, in log, from successive measurements of the
        incumbent."""
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
        """Measure the incumbent. It has run before, and may fail once."""
        for _ in range(2):
            measurement = self._measure(self.configuration({}), True)
            if measurement.status is TrialStatus.OK:
                return self._now(), measurement
        self.ended = f"failed: {measurement.message}"
        self.chosen.clear()
        return None

    def _plan(self, others: Mapping[Any, Mapping[Place, Config]], block: Block[Any]) -> BlockPlan[Any]:
        """The plan of a block of `others`. After a failure, the engine may have been restarted."""

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
        """Log ratios to the incumbent by the names of `others`. Missing ones were not measured, for lack of
        time or because an earlier one failed."""
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
            return {}  # the incumbent no longer runs
        if block.after is not None and not block.settled:
            self.voided += 1
            return {}
        return {t.candidate: self._score(t.measurement, block.baselines(), t.when) for t in ran}

    def _check(self, other: Mapping[Place, Config]) -> Estimate | None:
        """The gain on fresh samples; None if it is not reliable."""
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
        """The weighted mean over several metrics, prompt by prompt."""
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
