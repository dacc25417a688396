"""A whole tune, stage by stage: A/A, incumbents and screen, finalists, entries one by one, kernels.

`Tune.run` is a pure function of the seed, the recorder's results and the recorder's time, so that it can be
resumed (see `record.recorder`). `Tune.outcome` is a valid answer at any moment, so an interrupt can write it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..core.errors import DisturbedError, TuneError
from ..core.options import Options as Options  # noqa: TC001  (others import it from here)
from ..core.outcome import Failure, Outcome
from ..core.protocol import Configuration, TrialStatus
from ..decide.finalists import Chooser
from ..decide.unproven import best_trial, in_part, left_open
from ..kernels.stage import KernelStage
from ..measure.machine_monitor import Conditions
from ..search.crossover_stage import ThresholdStage
from ..search.parallel_screen import ParallelScreen
from ..search.proposers import SAMPLERS, proposer_of
from ..search.screen import Screen
from ..search.starting_points import leads, nearest
from .context import RunContext
from .noise import NoiseStage

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..core.crossing import Solved
    from ..decide.acceptance import Evidence
    from ..execution.device_pool import DevicePool
    from ..record.recorder import Recorder
    from ..search.observation import Trial
    from ..search.shared_study import Study
    from ..space.search_space import Point, Space


class Tune:
    """A tune: the sequence of the stages, and a valid outcome at any moment.

    Args:
        incumbents: Settings that race first: the most similar profile, the user's own command line.
        pool: Several devices of one kind that screen in parallel. The first one belongs to the recorder.
        shared: A joined study that other tunes also work on.

    Raises:
        TuneError: The sampler does not exist.
    """

    def __init__(
        self,
        recorder: Recorder,
        space: Space,
        options: Options,
        *,
        incumbents: Sequence[Mapping[str, Any]] = (),
        shared: Study | None = None,
        pool: DevicePool | None = None,
    ) -> None:
        if options.sampler not in SAMPLERS:
            raise TuneError(f"no sampler {options.sampler!r}; choose from {', '.join(SAMPLERS)}")
        self.context = RunContext(recorder, space, options)
        self.options = options
        self._incumbents = [p for p in (self._known(s) for s in incumbents) if p is not None]
        self._shared = shared
        self._pool = pool
        self._screen: Screen | None = None
        self._kernels: KernelStage | None = None
        self._left_open = False
        self._missed: tuple[Point, float] | None = None  # as in Chooser
        self._withdrawn: list[str] = []  # gained in rounds, but their answers could not be compared
        self._failed: list[str] = []  # looked faster, but failed twice in rounds
        self._failure = ""  # how
        self._solved: list[Solved] = []  # thresholds
        self.routing: dict[str, Any] = {}
        self.status = "complete"
        self.disturbance = ""  # the disturbance of the machine that ended the run

    @property
    def space(self) -> Space:
        """The search space, in which solved thresholds have fewer values."""
        return self.context.space

    def _known(self, settings: Mapping[str, Any]) -> Point | None:
        """An incumbent as a point; None if one of its values is not in the space."""
        try:
            return self.context.space.point(
                {k.name: settings.get(k.name, k.default) for k in self.context.space.knobs}
            )
        except ValueError:
            return None

    # ---- the run

    def run(self) -> Outcome:
        """Run the stages. Ctrl-C (KeyboardInterrupt), or a machine that does not become quiet, ends the run
        with the proven entries. `disturbance` then says who used the machine."""
        try:
            self._run()
        except (KeyboardInterrupt, DisturbedError) as error:
            self.status = "interrupted"
            self.disturbance = str(error)
        return self.outcome()

    def _run(self) -> None:
        context = self.context
        self.stage("noise")
        self._left_open = bool(context.space.knobs)  # until the finals have ended, even after Ctrl-C
        if not self._measure_noise():
            self.status, self._left_open = "budget", False
            return
        if self.options.routing:
            default = context.space.configuration(context.space.default)
            self.routing = context.recorder.routing("routing", default, process=context.processes.number)
        if context.space.knobs:
            self._glimpse()
            self._solve_thresholds()
            self.stage("screen")
            self._run_screen()
            self._keep_for_kernels()
            self.stage("finalists")
            chooser = Chooser(context.judge(), self._explore)
            try:
                chooser.run(self._candidates(), context.choice)
            finally:
                self._left_open, self._missed = chooser.unproven, chooser.missed
                self._failed, self._failure = chooser.failed, chooser.failure
            choice = context.choice
            proven = [e.name for e in choice.entries]
            if proven and not context.gate.still_right(choice.point):
                self._withdrawn = proven if context.gate.unanswered or context.gate.cut else []
                choice.clear(context.space.default)
        if self.options.kernels:
            self.stage("kernels")
            context.budget.reserve(0.0)
            context.budget.until("kernels")
            self._kernels = self._kernels or KernelStage(self.context)
            self._kernels.run(context.choice)
        untried = self._screen is not None and self._screen.ended == "budget" and len(self.trials) == 1
        cut = untried or self._short or (self._kernels is not None and self._kernels.cut)
        if context.budget.used_up or cut or self._looked_faster():
            self.status = "budget"
        elif self._withdrawn or self._unanswered:
            self.status = "unproven"  # more time would not help
        self.stage("done")

    def _glimpse(self) -> None:
        """If the shares would leave no time for kernels, a first look decides whether their proof gets time.
        There is no first look without time for that proof."""
        context = self.context
        if not self.options.kernels or not context.shortage.glimpses:
            return
        context.budget.until("kernels")
        kernels = KernelStage(context)
        if not kernels.time_to_keep():
            return
        self.stage("glimpse")
        self._kernels = kernels
        context.budget.reserve(self._kernels.glimpse(context.choice))

    def _keep_for_kernels(self) -> None:
        """Reserve time for the larger promise: if settings promise more, they get the time."""
        best = max((t.log_ratio for t in self.trials if t.log_ratio is not None), default=0.0)
        if self._kernels is not None and best > self._kernels.promise():
            self.context.budget.reserve(0.0)

    @property
    def unproven(self) -> bool:
        """Whether something that looked faster was neither proven nor refuted."""
        return self._short or bool(self._unanswered)

    @property
    def _unanswered(self) -> str:
        """The reason why settings that looked faster are not written, other than lack of time."""
        if self.context.choice.entries:
            return ""
        failed = f"they failed twice in rounds: {self._failure}" if self._failed else ""
        return self.context.gate.unanswered or failed

    @property
    def _short(self) -> bool:
        """Whether there was no time to prove something that looked faster."""
        return (self._left_open or self.context.gate.cut) and not self.context.choice.entries

    def stage(self, name: str) -> None:
        self.context.note("stage", name=name, t=round(self.context.recorder.now, 3))

    # ---- stages

    def _measure_noise(self) -> bool:
        """Measure A/A and the answers of the default. Returns False if the budget is too short."""
        context = self.context
        if not NoiseStage(context).run():
            return False
        if self.options.check:
            self.stage("answers")
            context.gate.check_default()
        context.budget.prepared()
        if context.space.knobs and (few := context.budget.few_measurements()):
            context.note("few_visits", **few)
            context.shortage.few = True
        return True

    def _solve_thresholds(self) -> None:
        """Solve the thresholds instead of searching them. A solved threshold keeps its default and the value
        that takes the faster path at all u-batches."""
        o = self.options
        if o.max_distinct is not None or not any(k.threshold_of and k.code for k in self.context.space.knobs):
            return
        self.stage("thresholds")
        self.context.budget.until("thresholds")
        whole = self.context.space
        stage = ThresholdStage(self.context)
        space = stage.run()
        self._solved = stage.solved
        incumbents = [whole.settings(p) for p in self._incumbents]
        self.context.change_space(space)
        # A value that solving has ruled out is removed from an incumbent, which still races without it.
        known = [self._known(s) or nearest(space, s) for s in [*incumbents, *stage.seeds]]
        self._incumbents = list(dict.fromkeys(known))

    def _leads(self) -> list[Point]:
        return leads(self.context.space, self._incumbents, few=self.context.shortage.few)

    def _run_screen(self) -> None:
        context, o = self.context, self.options
        context.budget.until("screen")
        proposer = proposer_of(o.sampler, context.space, whole=o.pareto)
        key = (o.seed, "screen")
        if self._pool is None:
            self._screen = Screen(context, proposer, key, self._shared)
        else:
            self._screen = ParallelScreen(context, proposer, key, self._pool, self._shared)
        self._screen.run([*self._incumbents, *self._leads()])
        context.note("screened", trials=len(self._screen.trials), ended=self._screen.ended)

    def _explore(self, points: Sequence[Point]) -> Sequence[Trial]:
        assert self._screen is not None
        self._screen.also(points)
        return self._candidates()

    @property
    def trials(self) -> Sequence[Trial]:
        """The trials of the screen so far."""
        return self._screen.trials if self._screen else []

    def _candidates(self) -> list[Trial]:
        """The candidates for the finals, including results of other machines."""
        others = self._shared.trials(self.context.space) if self._shared is not None else []
        return [*self.trials, *others]

    @property
    def winner(self) -> Point:
        return self.context.choice.point

    @property
    def evidence(self) -> Evidence | None:
        """The proof of the winner; None for the default."""
        return self.context.choice.evidence

    # ---- the answer, at any moment

    def _searched(self) -> list[str]:
        """Knobs with another tried value than the default. Nothing is known about the others, not even that
        their default is best."""
        points = [t.point for t in self._screen.trials] if self._screen else []
        return [
            k.name
            for n, k in enumerate(self.context.space.knobs)
            if k.name in {s.knob for s in self._solved} or any(p[n] != self.space.default[n] for p in points)
        ]

    def outcome(self) -> Outcome:
        """The outcome that is proven now."""
        context, space = self.context, self.context.space
        choice = context.choice
        defaults = space.settings(space.default)
        result = Outcome(
            settings=space.settings(choice.point),
            defaults=defaults,
            entries=list(choice.entries),
            searched=self._searched(),
            gain=dict(choice.gain),
            baseline=dict(choice.baseline),
            tuned=dict(choice.tuned),
            objective=self.options.objective,
            joules=dict(choice.joules),
            noise=dict(context.noise),
            margin=dict(context.bar(context.round_count()).margin),
            quality=context.gate.of(choice.point),
            default_quality=context.gate.of(space.default),
            unstable=context.unstable,
            drift=max((abs(n.drift) for n in context.noise.values()), default=0.0),
            seconds=context.recorder.now,
            routing=self.routing,
            crossings=list(self._solved),
            conditions=self._conditions().to_dict(),
            status=self.status,
            stage=choice.stage,
            unproven=self.unproven,
            unanswered=context.gate.unanswered or self._unanswered,
            missed=self._looked_faster(),
            too_short=dict(context.too_short),
            voided=choice.voided + (self._screen.voided if self._screen else 0),
        )
        trials: Sequence[Trial] = self._screen.trials if self._screen else []
        result.trials = len(trials)
        result.failures = [
            Failure(space.settings(t.point), t.status, t.message)
            for t in trials
            if t.status is not TrialStatus.OK
        ] + [Failure(space.settings(p), v.status, v.message) for p, v in choice.failed]
        if context.noise and not choice.entries:
            looked_faster = left_open(context.judge(), self.trials) if self.unproven else []
            result.left_open = list(dict.fromkeys([*self._withdrawn, *self._failed, *looked_faster]))
            short = self._short and self.status != "interrupted"
            result.promises += best_trial(context.judge(), self.trials, context.recorder.now, short)
        if self._kernels is not None:
            self._kernels.add_to(result)
            if result.kernels:
                whole = Configuration(result.settings, tuple(k.choice for k in result.kernels))
                result.quality = context.gate.of_kernels(whole)
        for metric in result.untouched:
            # The ratio is 1. Any other value of the rounds is their error.
            result.gain[metric] = result.gain[metric].widened(context.noise[metric].half_width(1))
        return result

    def _looked_faster(self) -> dict[str, Any]:
        return in_part(self.context.space, self._missed if self.context.choice.entries else None)

    def _conditions(self) -> Conditions:
        """The conditions of all devices."""
        recorders = (
            [member.recorder for member in self._pool.members]
            if self._pool is not None
            else [self.context.recorder]
        )
        return Conditions.of([recorder.conditions for recorder in recorders])
