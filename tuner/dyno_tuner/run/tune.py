"""A whole tune, stage by stage: A/A, incumbents and screen, finalists, entries one by one, kernels.

`Tune.run` is a pure function of the seed, the ledger's results and the ledger's time; see `record.recorder`
for what that buys. At every moment `Tune.outcome` is a valid answer, which is what an interrupt takes.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from ..core.errors import DisturbedError, TuneError
from ..core.intervals import LEAST_MARGIN, Noise, noise_of
from ..core.options import Options as Options  # noqa: TC001  (others import it from here)
from ..core.outcome import Failure, Outcome
from ..core.protocol import Configuration, Quality, TrialStatus, Visit, kind_of
from ..decide.acceptance import Choice, Judge
from ..decide.finalists import Chooser, worth_proving
from ..decide.interrupted import FromScreen
from ..decide.quality_gate import Gate
from ..decide.unproven import best_trial, in_part
from ..kernels import in_situ
from ..kernels.stage import KernelStage
from ..measure.machine_monitor import Conditions
from ..measure.measurement import rested_longer, void_over
from ..measure.paired_rounds import Bar, Rounds
from ..measure.round_spread import RoundSpread
from ..search.crossover_stage import ThresholdStage
from ..search.parallel_screen import ParallelScreen
from ..search.proposers import SAMPLERS, proposer_of
from ..search.screen import Screen, ScreenPlan, Trial
from ..search.starting_points import leads, nearest
from ..space.knobs import Kind
from .budget import PROVING_VISITS, SEARCH_VISITS, Schedule

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from ..core.crossing import Solved
    from ..core.options import VisitPolicy
    from ..core.protocol import Workload
    from ..execution.device_pool import Crew, Lane
    from ..record.recorder import Ledger
    from ..search.shared_study import Study
    from ..space.search_space import Point, Space

SHORT_PATIENCE = 8  # trials without a gain that end the search of such a budget
WIDER = 1.2  # times the margin, that fewer samples may cost
SHORT_ROUNDS = 2  # of a comparison at least, if the budget has room for few visits
SLOW = 2.5  # times a visit of the default; what takes longer gets no more samples


class Tune:
    """Args:
    incumbents: settings that race first: the nearest profile, the user's own command line.
    crew: several devices of one kind that screen together; the first of them is the ledger's.
    shared: a study that other tunes work on, too; it has been joined.
    """

    def __init__(
        self,
        ledger: Ledger,
        space: Space,
        options: Options,
        *,
        incumbents: Sequence[Mapping[str, Any]] = (),
        shared: Study | None = None,
        crew: Crew | None = None,
        on_stage: Callable[[str], None] | None = None,
    ) -> None:
        if options.sampler not in SAMPLERS:
            raise TuneError(f"no sampler {options.sampler!r}; there are {', '.join(SAMPLERS)}")
        self.ledger = ledger
        self.space = space = space.for_metrics(options.workload.metrics)
        self.options = options
        self.weights = options.metric_weights()
        self.schedule = Schedule(ledger, options, len({kind_of(m) for m in self.weights}))
        self.gate = Gate(ledger, space, options, lambda: self._process, self._died)
        self._incumbents = [p for p in (self._known(s) for s in incumbents) if p is not None]
        self._shared = shared
        self._crew = crew
        self._on_stage = on_stage or (lambda stage: None)
        self._process = 0
        self._screen: Screen | None = None
        self._kernels: KernelStage | None = None
        self._left_open = False
        self._measured_in = -1  # the process of the last visit
        self._few = False  # the budget has room for few visits
        self._missed: tuple[Point, float] | None = None  # as Chooser has it
        self._choice = Choice(space.default)
        self._unstable = 0
        self._resting = False  # the time that the GPU rests in a visit is planned for
        self._costs: dict[tuple[str, ...], float] = {}  # seconds of the default, until all is measured
        self._solved: list[Solved] = []  # thresholds
        self._policy = options.policy
        self.noise: dict[str, Noise] = {}
        self.spread = RoundSpread()
        self.routing: dict[str, Any] = {}
        self.status = "complete"
        self.disturbance = ""  # who or what kept the machine from coming to rest, which ended the run

    def _known(self, settings: Mapping[str, Any]) -> Point | None:
        """An incumbent as a point; None where one of its values is not in the space."""
        try:
            return self.space.point({k.name: settings.get(k.name, k.default) for k in self.space.knobs})
        except ValueError:
            return None

    # ---- the run

    def run(self) -> Outcome:
        """Goes through the stages. Ctrl-C (KeyboardInterrupt) and a machine that does not come to rest end
        the run with what is proven so far; `disturbance` then says who used the machine."""
        try:
            self._run()
        except (KeyboardInterrupt, DisturbedError) as error:
            self.status = "interrupted"
            self.disturbance = str(error)
            self._on_stage("interrupted")
        return self.outcome()

    def _run(self) -> None:
        self.stage("noise")
        if not self._measure_noise():
            self.status = "budget"
            return
        if self.options.routing:
            default = self.space.configuration(self.space.default)
            self.routing = self.ledger.routing("routing", default, process=self._process)
        if self.space.knobs:
            self._glimpse()
            self._solve_thresholds()
            self.stage("screen")
            self._run_screen()
            self._keep_for_kernels()
            self.stage("finalists")
            chooser = Chooser(self.judge(), self._explore)
            try:
                chooser.run(self._candidates(), self._choice)
            finally:
                self._left_open, self._missed = chooser.unproven, chooser.missed
            choice = self._choice
            if choice.entries and not self.gate.still_right(choice.point):
                at_default = dict(choice.baseline)
                self._choice = Choice(self.space.default, baseline=choice.baseline, tuned=at_default)
        if self.options.kernels:
            self.stage("kernels")
            self.schedule.reserve(0.0)
            self.schedule.until("kernels")
            self._kernels = self._kernels or self._kernel_stage()
            self._kernels.space = self.space
            self._kernels.run(self._choice)
        untried = self._screen is not None and self._screen.ended == "budget" and len(self.trials) == 1
        cut = untried or self.unproven or (self._kernels is not None and self._kernels.cut)
        if self.schedule.used_up or cut or self._looked_faster():
            self.status = "budget"
        self.stage("done")

    def _kernel_stage(self) -> KernelStage:
        return KernelStage(
            self.ledger, self.space, self.rounds(), self.weights, self.bar, self.schedule.more_seconds,
            self.ledger.note, self.gate.why_not, self.round_count, lambda: self._process,
            lambda: self.schedule.left, self._glance, self.options.workload,
            max(0.001, *(n.within for n in self.noise.values())), self._void_over,
        )  # fmt: skip

    def _glimpse(self) -> None:
        """Where the shares would leave kernels nothing, a look decides whether their proof gets time."""
        if not self.options.kernels or not self._few or self.schedule.kernels_have_time:
            return
        self.stage("glimpse")
        self.schedule.until("kernels")
        self._kernels = self._kernel_stage()
        self.schedule.reserve(self._kernels.glimpse(self._choice))

    def _keep_for_kernels(self) -> None:
        """The larger promise is proven first: if settings promise more, the time is theirs."""
        best = max((t.log_ratio for t in self.trials if t.log_ratio is not None), default=0.0)
        if self._kernels is not None and best > self._kernels.promise():
            self.schedule.reserve(0.0)

    @property
    def unproven(self) -> bool:
        """Whether something that looked faster is not written because there was no time to prove it."""
        return (self._left_open or self.gate.cut) and not self._choice.entries

    def stage(self, name: str) -> None:
        self.ledger.note("stage", name=name, t=round(self.ledger.now, 3))
        self._on_stage(name)

    # ---- visits

    def _died(self) -> None:
        self._process += 1  # whatever comes next has a new worker

    def _next_process(self) -> int:
        self._process += 1
        return self._process

    def _visit(
        self, key: str, configuration: Configuration, process: int, anchor: bool,
        metrics: Sequence[str] = (),
    ) -> Visit:  # fmt: skip
        return self._measured(key, configuration, metrics or tuple(self.weights), process, anchor)

    def _measured(
        self, key: str, configuration: Configuration, metrics: Sequence[str], process: int, anchor: bool
    ) -> Visit:
        point = self.space.point(configuration.settings)
        fresh, self._measured_in = process != self._measured_in, process
        self.gate.met(point)
        begun = self.ledger.useful
        policy = self._policy if anchor else self._brief()
        visit = self.ledger.visit(key, configuration, metrics, policy, process=process, anchor=anchor)
        if anchor and point == self.space.default and visit.status is TrialStatus.OK:
            self._costs[tuple(metrics)] = self.ledger.useful - begun
            if {m for measured in self._costs for m in measured} == set(self.weights):
                if self.schedule.visit_cost and not fresh:
                    self.schedule.follow(sum(self._costs.values()))
                self._costs.clear()
        self._plan_rests()
        if visit.status.kills:
            self._process = max(self._process, process) + 1  # whatever comes next has a new worker
        self._unstable += not visit.stable
        return visit

    def _plan_rests(self) -> None:
        """Once the GPU begins to rest, visits take longer by that at once."""
        baseline = self._choice.baseline
        if self.ledger.resting and not self._resting and baseline:
            self._resting = True
            runs = {m: self.options.workload.tokens(m) / rate for m, rate in baseline.items() if rate > 0}
            self.schedule.lengthen(rested_longer(runs))

    def _glance(self, key: str, configuration: Configuration, workload: Workload, anchor: bool) -> Visit:
        """A short visit of the running process, for what a whole workload is too long to try."""
        visit = self.ledger.visit(
            key, configuration, workload.metrics, in_situ.POLICY, process=self._process, anchor=anchor,
            workload=workload,
        )  # fmt: skip
        if visit.status.kills:
            self._died()
        return visit

    def _brief(self) -> VisitPolicy:
        """For all but the default: where time is short, what is so slow that nothing depends on by how much
        gets no samples beyond those that say so."""
        if self.options.budget is None or not self.schedule.visit_cost:
            return self._policy
        return dataclasses.replace(self._policy, longest=round(SLOW * self.schedule.visit_cost, 6))

    def _anchor(self, key: str) -> Visit:
        """A visit of the default in the running process. The default has to run; one failure is forgiven, and
        that the budget has ended is none."""
        configuration = self.space.configuration(self.space.default)
        visit = self._measured(key, configuration, tuple(self.weights), self._process, True)
        if visit.status is TrialStatus.TIMEOUT and self.schedule.over and not self.schedule.visit_cost:
            return visit
        if visit.status is not TrialStatus.OK:
            again = self._measured(f"{key}/retry", configuration, tuple(self.weights), self._process, True)
            if again.status is not TrialStatus.OK:
                raise TuneError(f"the engine's default settings do not run ({again.status}): {again.message}")
            return again
        return visit

    # ---- stages

    def _plan_visits(self) -> bool:
        """One short visit shows what a visit costs, and with that how many prompts the budget allows for
        each; the first load of a file decides nothing else. False: not even the noise could be measured in
        time."""
        o = self.options
        self._policy = dataclasses.replace(o.policy, prompts=1)
        begun = self.ledger.useful
        first = self._anchor("aa/first")
        sample = (self.ledger.useful - begun) / 2  # a cold and a warm one, with the load
        if o.budget is None:
            self._policy = o.policy
            return True
        if first.status is not TrialStatus.OK:
            self.ledger.note(
                "too_short",
                message=f"a visit of the default takes over {o.budget:.0f} s; give a longer --budget",
            )
            return False
        for prompts in range(o.policy.prompts, 0, -1):
            self._policy = dataclasses.replace(o.policy, prompts=prompts)
            self.schedule.plan(sample * (prompts + 1))
            if 30 * self.schedule.visit_cost <= o.budget:
                break
        enough = self.schedule.noise_fits(2 * o.aa_visits)
        if not enough:
            cost = self.schedule.visit_cost
            self.ledger.note(
                "too_short",
                needed=round(PROVING_VISITS * cost),
                message=f"one visit takes {cost:.1f} s, so {o.budget:.0f} s prove nothing; "
                f"give at least --budget {math.ceil(PROVING_VISITS * cost / 60)}m",
            )
        return enough

    def _measure_noise(self) -> bool:
        """A/A: the default against itself, inside one process and between processes. False: no time for
        it."""
        o = self.options
        enough = self._plan_visits()
        processes: list[list[dict[str, dict[int, float]]]] = []
        fresh: list[float] = []  # seconds of visits that a process begins with, and of those that follow
        warm: list[float] = []
        rested = self.ledger.resting
        for p in range(2 * o.aa_processes):
            # Two visits in each of two processes are the least that tells noise within from noise between.
            done = len(processes)
            in_time = done < 2 or self.schedule.fits(o.aa_visits, 0.25)
            if not enough or done == o.aa_processes or not in_time:
                break
            self._next_process()
            visits = []
            for v in range(o.aa_visits if not done or self.schedule.noise_fits(o.aa_visits) else 1):
                begun = self.ledger.useful
                visit = self._anchor(f"aa/p{p}/v{v}")
                visits.append({m: visit.rates(m) for m in self.weights})
                (warm if v else fresh).append(self.ledger.useful - begun)
                self.schedule.learn_from(fresh, warm)
            if self.ledger.resting != rested:  # those before are of a GPU that did not rest
                rested = True
                for kept in (processes, fresh, warm):
                    kept.clear()
                continue
            processes.append(visits)
        if not enough:
            return False
        self.noise = self._noise(processes)
        if o.budget is not None and self.schedule.visits_left < SEARCH_VISITS:
            self._fewer_samples(processes, fresh, warm)
        self.ledger.note(
            "noise",
            margin=self.bar(self.round_count()).margin,
            within={m: n.within for m, n in self.noise.items()},
            between={m: n.between for m, n in self.noise.items()},
            drift={m: n.drift for m, n in self.noise.items()},
        )
        rates = {m: sorted(r for p in processes for v in p for r in v[m].values()) for m in self.weights}
        self._choice.baseline = {m: r[len(r) // 2] for m, r in rates.items()}
        self._resting = self.ledger.resting  # then what visits take was learned with rests
        self._choice.tuned = dict(self._choice.baseline)
        if o.check:
            self.stage("answers")
            self.gate.check_default()
        self.schedule.prepared()
        if self.space.knobs and (few := self.schedule.few_visits()):
            self.ledger.note("few_visits", **few)
            self._few = True
        return True

    def _noise(
        self, processes: Sequence[Sequence[Mapping[str, Mapping[int, float]]]], prompts: int | None = None
    ) -> dict[str, Noise]:
        """By metric. With `prompts`: as if every visit had kept so many samples."""
        return {
            m: noise_of([[{p: r for p, r in v[m].items() if prompts is None or p < prompts} for v in process]
                         for process in processes])
            for m in self.weights
        }  # fmt: skip

    def _fewer_samples(
        self, processes: Sequence[Sequence[Mapping[str, Mapping[int, float]]]], fresh: Sequence[float],
        warm: Sequence[float],
    ) -> None:  # fmt: skip
        """The visits of a short budget keep as few samples as hardly widen the margin: more visits tell more
        then than longer ones. Samples of one visit do not tell what processes differ by."""
        kept = self._policy.prompts
        for prompts in range(1, kept):
            noise = self._noise(processes, prompts)
            widest = {m: max(LEAST_MARGIN, WIDER * n.margin(SHORT_ROUNDS)) for m, n in self.noise.items()}
            if any(n.margin(SHORT_ROUNDS) > widest[m] for m, n in noise.items()):
                continue
            self.noise, self._policy = noise, dataclasses.replace(self._policy, prompts=prompts)
            saved = (kept - prompts) / (kept + 1) * min(min(fresh), *warm)
            self.schedule.learn_from([s - saved for s in fresh], [s - saved for s in warm])
            self.ledger.note("samples", prompts=prompts, instead_of=kept)
            return

    def bar(self, rounds: int) -> Bar:
        """A/A counts all that processes differ by; rounds show what of it is left in a ratio."""
        rounds = max(1, rounds)
        return Bar(
            {
                metric: max(LEAST_MARGIN, self.spread.margin(metric, rounds, noise.margin(rounds)))
                for metric, noise in self.noise.items()
            }
        )

    def round_count(self) -> int:
        """As many rounds as bring the margin down to what is aimed at, as far as is known, within limits."""
        o = self.options
        least = min(o.rounds, SHORT_ROUNDS) if self._few else o.rounds
        for count in range(least, o.max_rounds):
            if max(self.bar(count).margin.values(), default=0.0) <= o.aim:
                return count
        return max(o.rounds, o.max_rounds)

    @property
    def _void_over(self) -> float:
        return void_over([n.within for n in self.noise.values()])

    def _solve_thresholds(self) -> None:
        """Solved, not searched: what is left of a threshold is its default and the value that takes the
        faster path at every u-batch."""
        o = self.options
        if o.max_distinct is not None or not any(k.threshold_of and k.code for k in self.space.knobs):
            return
        self.stage("thresholds")
        self.schedule.until("thresholds")
        whole = self.space
        stage = ThresholdStage(
            whole,
            lambda key, settings, metrics: self._measured(
                key, Configuration(dict(settings)), metrics, self._process, False
            ),
            lambda settings: self.gate.admit(whole.point(settings)),
            self.schedule.more, self.ledger.note, self.weights, self._visit_sigma,
            resting=lambda: self.ledger.resting,
        )  # fmt: skip
        space = stage.run()
        self._solved = stage.solved
        incumbents = [whole.settings(p) for p in self._incumbents]
        self.space = space
        self.gate.change_space(space)
        self._choice.point = space.default
        # A value that solving has ruled out is none any more; an incumbent without it still races.
        known = [self._known(s) or nearest(space, s) for s in [*incumbents, *stage.seeds]]
        self._incumbents = list(dict.fromkeys(known))

    @property
    def _visit_sigma(self) -> float:
        return max(0.002, max(1.25 * n.within for n in self.noise.values()))

    def _leads(self) -> list[Point]:
        return leads(self.space, self._incumbents) if self._few else []

    def _run_screen(self) -> None:
        o = self.options
        self.schedule.until("screen")
        plan = ScreenPlan(
            visit=lambda key, point, metrics: self._measured(
                key, self.space.configuration(point), metrics, self._process, False
            ),
            anchor=self._anchor,
            admit=self.gate.admit,
            now=lambda: self.ledger.now,
            more=lambda visits: self._more_trials(self.ledger.now, visits),
            note=self.ledger.note,
            weights=self.weights,
            sigma=self._visit_sigma,
            void_over=self._void_over,
            block=o.block,
            max_trials=o.max_trials,
            patience=o.patience,
            resting=lambda: self.ledger.resting,
        )
        proposer = proposer_of(o.sampler, self.space, whole=o.pareto)
        if self._crew is None:
            self._screen = Screen(self.space, proposer, plan, (o.seed, "screen"), self._shared)
        else:
            self._crew.lanes[0].process = self._process
            self._screen = ParallelScreen(
                self.space, proposer, plan, (o.seed, "screen"), self._crew, self._lane_plan(plan),
                self._compare_answers, self._joined, self._shared,
            )  # fmt: skip
        self._screen.run([*self._incumbents, *self._leads()])
        self.ledger.note("screened", trials=len(self._screen.trials), ended=self._screen.ended)

    def _more_trials(self, now: float, visits: int) -> bool:
        """Whether the search goes on: if it has found nothing that is worth proving, the finals that follow
        it have no use for their time. In a short budget it goes on until the proof has to begin."""
        if self.schedule.more_at(now, visits):
            return True
        found = worth_proving(self.trials, self.bar(self.round_count()), self.weights)
        if not found:
            return self.schedule.still_finds(now, visits)
        if not self._few:
            return False
        best = max(found, key=lambda t: t.log_ratio or 0.0)
        if sum(t.number > best.number for t in self.trials) >= SHORT_PATIENCE:
            return False
        rounds = min(self.round_count(), self.options.rounds)
        proof = math.ceil(self.judge().proof_visits(best.point, rounds))
        return self.schedule.more_at(now, visits + proof, "leave_one_out")

    # ---- the screen on several devices

    def _lane_plan(self, plan: ScreenPlan) -> Callable[[Lane, Callable[..., None]], ScreenPlan]:
        default = self.space.configuration(self.space.default)
        every = tuple(self.weights)

        def of(lane: Lane, note: Callable[..., None]) -> ScreenPlan:
            def visit(key: str, point: Point, metrics: Sequence[str]) -> Visit:
                return lane.visit(key, self.space.configuration(point), metrics, self._brief())

            return dataclasses.replace(
                plan,
                visit=visit,
                anchor=lambda key: lane.default(key, default, every, self._policy),
                now=lambda: lane.ledger.now,
                more=lambda visits: self._more_trials(lane.ledger.now, visits),
                note=note,
                resting=lambda: lane.ledger.resting,
            )

        return of

    def _compare_answers(self, points: Sequence[Point]) -> None:
        """Has what `QualityGate.admit` would ask about these points asked on all devices at once."""
        asked = self.gate.questions(points)
        if not asked or self._crew is None:
            return
        size = len(self._crew)

        def work(lane: Lane) -> list[Quality]:
            return [lane.quality(key, config) for _, key, config in asked[lane.number :: size]]

        self._crew.lanes[0].process = self._process
        found = self._crew.together(work)
        self._joined()
        for number, (point, _, _) in enumerate(asked):
            self.gate.learn(point, found[number % size][number // size])

    def _joined(self) -> None:
        """After the devices have done something together: the first goes on alone from where it stands."""
        if self._crew is None:
            return
        self._process = self._crew.lanes[0].process
        for lane in self._crew.lanes:
            for seconds in lane.costs:
                self.schedule.follow(seconds)
            lane.costs.clear()
            self._unstable, lane.unstable = self._unstable + lane.unstable, 0
        self._plan_rests()

    def _explore(self, points: Sequence[Point]) -> Sequence[Trial]:
        assert self._screen is not None
        self._screen.also(points)
        return self._candidates()

    def rounds(self) -> Rounds:
        return Rounds(
            self._visit, self._next_process, self.schedule, tuple(self.weights), self._void_over, self._apart,
            self.spread, lambda: self.ledger.resting,
        )  # fmt: skip

    def _apart(self, configurations: Collection[Configuration]) -> bool:
        """Whether these differ in nothing that is loaded for."""
        loads = [k.name for k in self.space.knobs if k.kind in (Kind.LOAD, Kind.BUILD)]
        alike = {tuple(c.settings.get(name) for name in loads) for c in configurations}
        return self.options.apart and len(alike) == 1

    @property
    def trials(self) -> Sequence[Trial]:
        """What the screen has tried so far."""
        return self._screen.trials if self._screen else []

    def _candidates(self) -> list[Trial]:
        """For the finals: also what other machines have found."""
        others = self._shared.trials(self.space) if self._shared is not None else []
        return [*self.trials, *others]

    @property
    def winner(self) -> Point:
        return self._choice.point

    def judge(self) -> Judge:
        return Judge(
            self.space, self.rounds(), self.weights, self.bar, self.schedule.until, self.gate.admit_fully,
            self.ledger.note, self._visit_sigma, self.round_count, self.gate.seconds,
        )  # fmt: skip

    # ---- the answer, at any moment

    def _searched(self) -> list[str]:
        """Knobs of which another value than the default was tried: of the others nothing can be said, not
        even that their default is best."""
        points = [t.point for t in self._screen.trials] if self._screen else []
        return [
            k.name
            for n, k in enumerate(self.space.knobs)
            if k.name in {s.knob for s in self._solved} or any(p[n] != self.space.default[n] for p in points)
        ]

    def outcome(self) -> Outcome:
        """What is proven now."""
        if self.status == "interrupted" and not self._choice.entries and self._screen is not None:
            FromScreen(self.judge(), self.noise, self.gate.refused).choose(self._screen.trials, self._choice)
        choice = self._choice
        defaults = self.space.settings(self.space.default)
        result = Outcome(
            settings=self.space.settings(choice.point),
            defaults=defaults,
            entries=list(choice.entries),
            searched=self._searched(),
            gain=dict(choice.gain),
            baseline=dict(choice.baseline),
            tuned=dict(choice.tuned),
            noise=dict(self.noise),
            margin=dict(self.bar(self.round_count()).margin),
            quality=self.gate.of(choice.point),
            default_quality=self.gate.of(self.space.default),
            unstable=self._unstable,
            drift=max((abs(n.drift) for n in self.noise.values()), default=0.0),
            seconds=self.ledger.now,
            routing=self.routing,
            crossings=list(self._solved),
            conditions=self._conditions().to_dict(),
            status=self.status,
            stage=choice.stage,
            unproven=self.unproven,
            missed=self._looked_faster(),
            voided=choice.voided + (self._screen.voided if self._screen else 0),
        )
        trials: Sequence[Trial] = self._screen.trials if self._screen else []
        result.trials = len(trials)
        result.failures = [
            Failure(self.space.settings(t.point), t.status, t.message)
            for t in trials
            if t.status is not TrialStatus.OK
        ] + [Failure(self.space.settings(p), v.status, v.message) for p, v in choice.failed]
        if self.noise and not choice.entries:
            result.promises += best_trial(self.judge(), self.trials, self.ledger.now, self.unproven)
        if self._kernels is not None:
            self._kernels.add_to(result)
            if result.kernels:
                whole = Configuration(result.settings, tuple(k.choice for k in result.kernels))
                result.quality = self.gate.of_kernels(whole)
        for metric in result.untouched:
            # It is 1: what the rounds say else is their error, and that of two processes is the least of it.
            result.gain[metric] = result.gain[metric].widened(self.noise[metric].half_width(1))
        return result

    def _looked_faster(self) -> dict[str, Any]:
        return in_part(self.space, self._missed if self._choice.entries else None)

    def _conditions(self) -> Conditions:
        """What was seen of all devices."""
        ledgers = [lane.ledger for lane in self._crew.lanes] if self._crew is not None else [self.ledger]
        return Conditions.of([ledger.conditions for ledger in ledgers])
