"""The context of a run: recorder, budget, space, noise, quality gate and process counter.

All stages get this object. Stages in lower packages use it through the protocol `record.context.Context`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from ..core.errors import TuneError
from ..core.intervals import LEAST_MARGIN, Noise
from ..core.protocol import Configuration, TrialStatus, kind_of
from ..decide.acceptance import Choice, Judge
from ..decide.finalists import beyond_doubt, surely_faster, worth_proving
from ..decide.quality_gate import QualityGate
from ..measure.measurement import rested_longer, void_over
from ..measure.paired_rounds import Bar, Rounds
from ..measure.round_spread import RoundSpread
from ..record.context import Processes
from ..space.knobs import Kind
from .budget import Schedule
from .shortage import SPARE, Shortage

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from ..core.options import MeasurementPolicy, Options
    from ..core.protocol import Measurement, Value, Workload
    from ..record.recorder import Recorder
    from ..search.observation import Trial
    from ..space.search_space import Point, Space

NOISY = 3  # factor on the most rounds, on a machine on which the usual number proves nothing


class RunContext:
    """The state that all stages of a run share.

    `choice` is the profile that is proven so far. `noise` is the result of A/A by metric.
    """

    def __init__(self, recorder: Recorder, space: Space, options: Options) -> None:
        self.recorder = recorder
        self.space = space.for_metrics(options.workload.metrics)
        self.options = options
        self.weights = options.metric_weights()
        self.budget = Schedule(recorder, options, len({kind_of(m) for m in self.weights}))
        self.shortage = Shortage(options, self.budget)
        self.processes = Processes()
        self.gate = QualityGate(recorder, self.space, options, self.processes)
        self.policy = options.policy
        self.noise: dict[str, Noise] = {}
        self.too_short: dict[str, Any] = {}  # as in Outcome
        self.spread = RoundSpread()
        self.choice = Choice(self.space.default)
        self.unstable = 0  # number of measurements that were not stable at their cap
        self.resting = False  # whether the schedule includes rests of the GPU
        self._measured_in = -1  # the process of the last measurement
        self._loaded: tuple[Value, ...] = ()  # its load settings
        self._load_between = False  # whether `_costs` include a reload
        self._costs: dict[tuple[str, ...], float] = {}  # seconds of the default, until all are measured

    def note(self, kind: str, /, **data: Any) -> None:
        self.recorder.note(kind, **data)

    def change_space(self, space: Space) -> None:
        """Continue with a smaller space, whose default is the same."""
        self.space = space
        self.gate.change_space(space)
        self.choice.point = space.default

    # ---- measurements

    def measure(self, key: str, configuration: Configuration, metrics: Sequence[str]) -> Measurement:
        """Measure a configuration in the running process."""
        return self.measure_in(key, configuration, self.processes.number, False, metrics)

    def measure_in(
        self, key: str, configuration: Configuration, process: int, baseline: bool,
        metrics: Sequence[str] = (),
    ) -> Measurement:  # fmt: skip
        """Measure a configuration in a given process, and update the cost of a measurement.

        Args:
        baseline: Whether a failure is measured again instead of counted.
        metrics: Metrics to measure; default: all of the run.
        """
        metrics = metrics or tuple(self.weights)
        point = self.space.point(configuration.settings)
        fresh, self._measured_in = process != self._measured_in, process
        loaded, self._loaded = self._loaded, self._loads(configuration)
        loads_again = not fresh and loaded != self._loaded
        self.gate.met(point)
        begun = self.recorder.useful
        policy = self.policy_for(baseline=baseline)
        measurement = self.recorder.measurement(
            key, configuration, metrics, policy, process=process, baseline=baseline
        )
        if baseline and point == self.space.default and measurement.status is TrialStatus.OK:
            self._costs[tuple(metrics)] = self.recorder.useful - begun
            self._load_between |= loads_again
            if {m for measured in self._costs for m in measured} == set(self.weights):
                if self.budget.measurement_cost and not fresh:
                    learn = self.budget.loaded if self._load_between else self.budget.follow
                    learn(sum(self._costs.values()))
                self._costs.clear()
                self._load_between = False
        self.plan_rests()
        self.processes.follow(measurement.status, process)
        self.unstable += not measurement.stable
        return measurement

    def policy_for(self, *, baseline: bool) -> MeasurementPolicy:
        """The policy for measuring a baseline or a candidate. With a short budget, candidates are measured
        briefly."""
        return self.policy if baseline else self.shortage.brief(self.policy)

    def glance(
        self, key: str, configuration: Configuration, workload: Workload, policy: MeasurementPolicy,
        baseline: bool,
    ) -> Measurement:  # fmt: skip
        """A short measurement in the running process, for trials for which the whole workload would take too
        long."""
        policy = dataclasses.replace(policy, energy=self.options.policy.energy)
        if self.processes.number == self._measured_in:
            self._loaded = self._loads(configuration)  # in seconds that do not count as a cost
        measurement = self.recorder.measurement(
            key, configuration, workload.metrics, policy, process=self.processes.number, baseline=baseline,
            workload=workload,
        )  # fmt: skip
        self.processes.follow(measurement.status)
        return measurement

    def baseline(self, key: str) -> Measurement:
        """A measurement of the default in the running process.

        The default must run. It may fail once. The end of the budget is no failure.

        Raises:
            TuneError: It failed twice.
        """
        default = self.space.configuration(self.space.default)
        measurement = self.measure_in(key, default, self.processes.number, True)
        late = measurement.status is TrialStatus.TIMEOUT and self.budget.over
        if measurement.status is TrialStatus.OK or (late and not self.budget.measurement_cost):
            return measurement
        again = self.measure_in(f"{key}/retry", default, self.processes.number, True)
        if again.status is not TrialStatus.OK:
            raise TuneError(f"the engine's default settings do not run ({again.status}): {again.message}")
        return again

    def plan_rests(self) -> None:
        """Update the schedule when the GPU begins to rest, because measurements then take longer."""
        rates = self.choice.baseline
        if self.recorder.resting and not self.resting and rates:
            self.resting = True
            runs = {m: self.options.workload.tokens(m) / rate for m, rate in rates.items() if rate > 0}
            self.budget.lengthen(rested_longer(runs))

    # ---- the search

    def goes_on(self, now: float, measurements: float, trials: Sequence[Trial]) -> bool:
        """Whether the search has time for this many more measurements, by the clock of a device. One of them,
        and the default after it, may need a load."""
        measurements += 2 * (self.budget.loading - 1)
        if self.shortage.ends_search(now, measurements, self._kept_proofs(trials)):
            return False
        if self.budget.more_at(now, measurements):
            return True
        judge, count = self.judge(), self.round_count()
        found = worth_proving(trials, self.bar(count), self.weights)
        rounds = min(count, self.options.rounds)
        return self.shortage.goes_on(
            now, measurements, found, trials,
            lambda best: math.ceil(judge.ablation_measurements(best.point, rounds)),
        )  # fmt: skip

    def loading(self, point: Point) -> float:
        """The cost of a measurement in units of a measurement of the default, if the engine loads between
        them."""
        default = self.space.configuration(self.space.default)
        alike = self._loads(self.space.configuration(point)) == self._loads(default)
        return 1.0 if alike else self.budget.loading

    def _kept_proofs(self, trials: Sequence[Trial]) -> list[float]:
        """The numbers of measurements that prove the best sure trial, and then fewer and fewer of its
        entries. Empty if the shares of the stages suffice for them: the budget is long, and the noise
        requires no more rounds than usual, or allows no proof at all."""
        best = beyond_doubt(trials, self.weights, self.sigma) if self.options.budget is not None else None
        if best is None:
            return []
        judge = self.judge()
        rounds = judge.proof_rounds(best.point)
        usual = rounds <= self.shortage.least_rounds
        if usual and not self.shortage.few:
            return []
        proofs = judge.ever_smaller_proofs(best.point, rounds, surely_faster(best.log_ratio, self.sigma))
        return [SPARE * proofs[0], *proofs] if usual else proofs

    def joined(self, process: int, costs: Sequence[float], unstable: int) -> None:
        """Take over the results of joint work of several devices: the process with which the first one
        continues, the seconds of their baselines, and the number of unstable measurements."""
        self.processes.number = process
        for seconds in costs:
            self.budget.follow(seconds)
        self.unstable += unstable
        self.plan_rests()

    # ---- comparisons

    def rounds(self) -> Rounds:
        return Rounds(
            self.measure_in, self.processes.next, self.budget, tuple(self.weights), self.void_over,
            self._apart, self.spread, lambda: self.recorder.resting, self.recorder.forgive,
            lambda key, first: self.note("anew", stage=key, first=first), self.recorder.begin_round,
        )  # fmt: skip

    def _apart(self, configurations: Collection[Configuration]) -> bool:
        """Whether these configurations have the same load settings."""
        return self.options.apart and len({self._loads(c) for c in configurations}) == 1

    def _loads(self, configuration: Configuration) -> tuple[Value, ...]:
        """The values of a configuration that require a load."""
        loads = [k.name for k in self.space.knobs if k.kind in (Kind.LOAD, Kind.BUILD)]
        return tuple(configuration.settings[name] for name in loads)

    def judge(self) -> Judge:
        return Judge(self)

    def bar(self, rounds: int) -> Bar:
        """The margin after this many rounds. A/A includes all differences between processes. Rounds show the
        part that remains in a ratio."""
        rounds = max(1, rounds)
        return Bar(
            {
                metric: max(LEAST_MARGIN, self.spread.margin(metric, rounds, noise.margin(rounds)))
                for metric, noise in self.noise.items()
            },
            self.weights,
        )

    def round_count(self) -> int:
        """The number of rounds that reduces the margin to the aim, as far as known, within limits. If the
        margin is then still too wide for a proof, enough more rounds to allow one, for all metrics or at
        least for one."""
        o = self.options
        for count in range(self.shortage.least_rounds, o.max_rounds):
            if max(self.bar(count).margin.values(), default=0.0) <= o.aim:
                return count
        most = max(o.rounds, o.max_rounds)
        whole = self.proving_rounds(most, list(self.noise))
        single = [self.proving_rounds(most, [m]) for m in self.noise] if whole is None else []
        return whole or min((n for n in single if n is not None), default=most)

    def proving_rounds(self, least: int, metrics: Sequence[str]) -> int | None:
        """The least number of rounds that can prove a gain in any of these metrics; None if no number can, as
        far as the noise is known."""
        most = NOISY * max(self.options.rounds, self.options.max_rounds)
        bars = ((count, self.bar(count)) for count in range(least, most + 1))
        return next((n for n, bar in bars if all(bar.proves([m]) for m in metrics)), None)

    @property
    def quiet(self) -> bool:
        """Whether the noise requires no more rounds than usual."""
        return max(self.bar(self.options.rounds).margin.values(), default=0.0) <= self.options.aim

    @property
    def short_of_time(self) -> bool:
        return self.shortage.few

    @property
    def void_over(self) -> float:
        return void_over([n.within for n in self.noise.values()])

    @property
    def sigma(self) -> float:
        return max(0.002, max(1.25 * n.within for n in self.noise.values()))
