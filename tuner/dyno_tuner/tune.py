"""A whole tune, stage by stage: A/A, incumbents and screen, finalists, entries one by one, kernels.

`Tune.run` is a pure function of the seed, the ledger's results and the ledger's time; see `ledger` for what
that buys. At every moment `Tune.outcome` is a valid answer, which is what an interrupt takes.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .check import judge
from .choose import Choice, Chooser
from .confirm import Bar, Rounds
from .errors import TuneError
from .kernels import KernelStage, least_visits
from .knobs import Fidelity
from .measure import ANCHOR_DRIFT, VisitPolicy
from .outcome import Failure, Outcome
from .pareto import Variant, front, worthwhile
from .samplers import SAMPLERS
from .solving import ThresholdStage
from .stats import Noise, noise_of
from .study import Mirror, Screen, ScreenPlan, Trial
from .target import Configuration, Quality, TrialStatus, Visit, Workload, kind_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .ledger import Ledger
    from .space import Point, Space
    from .target import Value

# Share of the budget at which each stage has to end, with and without kernels behind it.
_ENDS = {
    "thresholds": (0.25, 0.2),
    "screen": (0.48, 0.36),
    "confirm": (0.68, 0.54),
    "walk": (0.80, 0.62),
    "leave_one_out": (0.97, 0.74),
    "kernels": (0.97, 0.97),
    "pareto": (0.98, 0.98),
}


@dataclass(frozen=True)
class Options:
    """How to tune. Everything here is part of the run's identity except the budget."""

    workload: Workload
    budget: float | None = None  # seconds; None: as long as it takes
    seed: int = 0
    sampler: str = "guided"
    approx_limit: float | None = None  # nats per token; None: `approx` knobs are not searched
    max_trials: int = 400
    max_distinct: int | None = None  # code that may be measured at all, in every stage
    rounds: int = 4  # of a paired comparison, at least
    max_rounds: int = 8  # where the noise asks for more
    aim: float = 0.015  # margin that rounds are added for
    aa_processes: int = 3
    aa_visits: int = 2
    block: int = 4
    patience: int = 24
    policy: VisitPolicy = field(default_factory=VisitPolicy)
    kernels: bool = False
    weights: Mapping[str, float] = field(default_factory=dict)  # of the metrics; default: all alike
    check: bool = True
    pareto: bool = False  # leave time to confirm what needs less memory
    routing: bool = False  # measure how the router spreads the workload

    def metric_weights(self) -> dict[str, float]:
        own = self.workload.weights
        return {m: float(self.weights.get(m, own[m])) for m in self.workload.metrics}


class Tune:
    """Args:
    incumbents: settings that race first: the nearest profile, the user's own command line.
    mirror: an Optuna study to keep in step, if one is wanted.
    """

    def __init__(
        self,
        ledger: Ledger,
        space: Space,
        options: Options,
        *,
        incumbents: Sequence[Mapping[str, Any]] = (),
        mirror: Mirror | None = None,
        on_stage: Callable[[str], None] | None = None,
    ) -> None:
        if options.sampler not in SAMPLERS:
            raise TuneError(f"no sampler {options.sampler!r}; there are {', '.join(SAMPLERS)}")
        self.ledger = ledger
        self.space = space = space.for_metrics(options.workload.metrics)
        self.options = options
        self.weights = options.metric_weights()
        self._incumbents = [p for p in (self._known(s) for s in incumbents) if p is not None]
        self._mirror = mirror
        self._mirrored = 1
        self._on_stage = on_stage or (lambda stage: None)
        self._process = 0
        self._stage_end = math.inf
        self._screen: Screen | None = None
        self._checked: dict[object, tuple[TrialStatus, str] | None] = {}
        self._qualities: dict[Point, Quality] = {}
        self._kernels: KernelStage | None = None
        self._kernel_qualities: dict[object, Quality] = {}
        self._choice = Choice(space.default)
        self._unstable = 0
        self._solved: list[str] = []  # thresholds
        self._policy = options.policy
        self._met: set[object] = {space.code_class(space.default)}
        self.noise: dict[str, Noise] = {}
        self.visit_cost = 0.0
        self.routing: dict[str, Any] = {}
        self.status = "complete"

    def _known(self, settings: Mapping[str, Any]) -> Point | None:
        """An incumbent as a point; None where one of its values is not in the space."""
        try:
            return self.space.point({k.name: settings.get(k.name, k.default) for k in self.space.knobs})
        except ValueError:
            return None

    # ---- the run

    def run(self) -> Outcome:
        """Goes through the stages. Ctrl-C (KeyboardInterrupt) ends the run with what is proven so far."""
        try:
            self._run()
        except KeyboardInterrupt:
            self.status = "interrupted"
            self._on_stage("interrupted")
        return self.outcome()

    def _run(self) -> None:
        self._stage("noise")
        if not self._measure_noise():
            self.status = "budget"
            return
        if self.options.routing:
            default = self.space.configuration(self.space.default)
            self.routing = self.ledger.routing("routing", default, process=self._process)
        if self.space.knobs:
            self._solve_thresholds()
            self._stage("screen")
            self._run_screen()
            self._stage("finalists")
            self._chooser().run(self._screen.trials if self._screen else [], self._choice)
            self._check_choice()
        if self.options.kernels:
            self._stage("kernels")
            self._until("kernels")
            self._kernels = KernelStage(
                self.ledger, self.space, self._rounds("kernels"), self.weights, self._bar,
                self._more_seconds, self._note, self._check_configuration, self._round_count,
                lambda: self._process,
            )  # fmt: skip
            self._kernels.run(self._choice)
        if self.options.budget is not None and self.ledger.now > 0.97 * self.options.budget:
            self.status = "budget"
        self._stage("done")

    def _stage(self, name: str) -> None:
        self.ledger.note("stage", name=name, t=round(self.ledger.now, 3))
        self._on_stage(name)

    def _note(self, kind: str, **data: Any) -> None:
        self.ledger.note(kind, **data)

    # ---- budget

    def _until(self, stage: str) -> None:
        budget = self.options.budget
        if budget is None:
            self._stage_end = math.inf
            return
        share = _ENDS[stage][1 if self.options.kernels else 0]
        if self.options.kernels and stage not in ("kernels", "pareto"):
            share *= self._before_kernels(budget) / _ENDS["leave_one_out"][1]
        if self.options.pareto and stage != "pareto":
            share *= 0.8
        self._stage_end = budget * share

    def _before_kernels(self, budget: float) -> float:
        """Share of the budget after which kernels begin: early enough for two rounds of the whole profile,
        however long a visit takes on a machine that is busy, and for timing ops. Half the budget stays with
        the settings."""
        kinds = len({kind_of(m) for m in self.weights})
        needed = 1.2 * least_visits(kinds) * self.visit_cost / budget + 0.08
        return max(0.47, min(_ENDS["leave_one_out"][1], _ENDS["kernels"][1] - needed))

    def _more(self, visits: int) -> bool:
        return self._more_seconds(visits * self.visit_cost)

    def _more_seconds(self, seconds: float) -> bool:
        return self.ledger.now + seconds <= self._stage_end

    # ---- visits

    def _next_process(self) -> int:
        self._process += 1
        return self._process

    def _visit(self, key: str, configuration: Configuration, process: int, anchor: bool) -> Visit:
        metrics = tuple(self.weights)
        return self._measured(key, configuration, metrics, process, anchor)

    def _measured(
        self, key: str, configuration: Configuration, metrics: Sequence[str], process: int, anchor: bool
    ) -> Visit:
        self._met.add(self.space.code_class(self.space.point(configuration.settings)))
        begun = self.ledger.now
        visit = self.ledger.visit(key, configuration, metrics, self._policy, process=process, anchor=anchor)
        if self.visit_cost and len(metrics) == len(self.weights) and visit.status is TrialStatus.OK:
            # A machine gets busier or quieter while a tune runs; the plan of the budget follows.
            self.visit_cost += 0.15 * (self.ledger.now - begun - self.visit_cost)
            self.ledger.expected_visit = self.visit_cost
        if visit.status.kills:
            self._process = max(self._process, process) + 1  # whatever comes next has a new worker
        self._unstable += not visit.stable
        return visit

    def _anchor(self, key: str) -> Visit:
        """A visit of the default in the running process. The default has to run; one failure is forgiven."""
        configuration = self.space.configuration(self.space.default)
        visit = self._measured(key, configuration, tuple(self.weights), self._process, True)
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
        begun = self.ledger.now
        self._anchor("aa/first")
        sample = (self.ledger.now - begun) / 2  # a cold and a warm one, with the load
        if o.budget is None:
            self._policy = o.policy
            return True
        for prompts in range(o.policy.prompts, 0, -1):
            self._policy = dataclasses.replace(o.policy, prompts=prompts)
            self.visit_cost = sample * (prompts + 1)
            if 30 * self.visit_cost <= o.budget:
                break
        enough = self._fits(2 * o.aa_visits, 0.45)
        if not enough:
            self._note(
                "too_short",
                needed=round(10 * self.visit_cost),
                message=f"one visit takes {self.visit_cost:.0f} s, so {o.budget:.0f} s prove nothing; "
                f"give at least --budget {math.ceil(10 * self.visit_cost / 60)}m",
            )
        return enough

    def _fits(self, visits: int, share: float) -> bool:
        """Whether so many more visits end within a share of the budget."""
        budget = self.options.budget
        return budget is None or self.ledger.now + visits * self.visit_cost <= share * budget

    def _measure_noise(self) -> bool:
        """A/A: the default against itself, inside one process and between processes. False: no time for
        it."""
        o = self.options
        enough = self._plan_visits()
        begun = self.ledger.now
        processes: list[list[dict[str, dict[int, float]]]] = []
        done = 0
        for p in range(o.aa_processes):
            # Two visits in each of two processes are the least that tells noise within from noise between.
            if not enough or (p > 1 and not self._fits(o.aa_visits, 0.25)):
                break
            self._next_process()
            visits = []
            for v in range(o.aa_visits):
                visit = self._anchor(f"aa/p{p}/v{v}")
                visits.append({m: visit.rates(m) for m in self.weights})
                done += 1
                self.visit_cost = (self.ledger.now - begun) / done
                self.ledger.expected_visit = self.visit_cost
            processes.append(visits)
        if not enough:
            return False
        for metric in self.weights:
            self.noise[metric] = noise_of([[v[metric] for v in process] for process in processes])
        self._note(
            "noise",
            margin=self._bar(self._round_count).margin,
            within={m: n.within for m, n in self.noise.items()},
            between={m: n.between for m, n in self.noise.items()},
            drift={m: n.drift for m, n in self.noise.items()},
        )
        rates = {m: sorted(r for p in processes for v in p for r in v[m].values()) for m in self.weights}
        self._choice.baseline = {m: r[len(r) // 2] for m, r in rates.items()}
        self._choice.tuned = dict(self._choice.baseline)
        if o.check:
            self._default_quality = self._quality(self.space.default)
            if self._default_quality.status is not TrialStatus.OK:
                raise TuneError(f"the default's answers cannot be checked: {self._default_quality.message}")
        return True

    def _bar(self, rounds: int) -> Bar:
        return Bar({m: n.margin(max(1, rounds)) for m, n in self.noise.items()})

    @property
    def _round_count(self) -> int:
        """As many rounds as bring the margin down to what is aimed at, within limits."""
        o = self.options
        for count in range(o.rounds, o.max_rounds):
            if max(self._bar(count).margin.values(), default=0.0) <= o.aim:
                return count
        return max(o.rounds, o.max_rounds)

    @property
    def _void_over(self) -> float:
        """3 %, or more where the noise of a visit alone makes an anchor move by that."""
        return max(ANCHOR_DRIFT, *(3 * math.sqrt(2) * n.within for n in self.noise.values()))

    def _solve_thresholds(self) -> None:
        """Solved, not searched: what is left of a threshold is its default and the value that takes the
        faster path at every u-batch."""
        o = self.options
        if o.max_distinct is not None or not any(k.threshold_of and k.code for k in self.space.knobs):
            return
        self._stage("thresholds")
        self._until("thresholds")
        whole = self.space
        stage = ThresholdStage(
            whole,
            lambda key, settings, metrics: self._measured(
                key, Configuration(dict(settings)), metrics, self._process, False
            ),
            lambda settings: self._admit(whole.point(settings)),
            self._more, self._note, self.weights, self._visit_sigma,
        )  # fmt: skip
        space = stage.run()
        self._solved = stage.solved
        incumbents = [whole.settings(p) for p in self._incumbents]
        qualities = [(whole.settings(p), q) for p, q in self._qualities.items()]
        self.space = space
        self._choice.point = space.default
        # A value that solving has ruled out is none any more; an incumbent without it still races.
        known = [self._known(s) or self._nearest(s) for s in [*incumbents, *stage.seeds]]
        self._incumbents = list(dict.fromkeys(known))
        self._qualities = {p: q for s, q in qualities if (p := self._known(s)) is not None}

    def _nearest(self, settings: Mapping[str, Any]) -> Point:
        """`settings` with the solution in place of a threshold that solving has ruled out."""
        point = []
        for knob in self.space.knobs:
            value = settings[knob.name]
            if value not in knob.values:
                value = next((v for v in knob.values if v != knob.default), knob.default)
            point.append(knob.values.index(value))
        return tuple(point)

    @property
    def _visit_sigma(self) -> float:
        return max(0.002, max(1.25 * n.within for n in self.noise.values()))

    def _run_screen(self) -> None:
        o = self.options
        self._until("screen")
        plan = ScreenPlan(
            visit=lambda key, point, metrics: self._measured(
                key, self.space.configuration(point), metrics, self._process, False
            ),
            anchor=self._anchor,
            admit=self._admit,
            now=lambda: self.ledger.now,
            more=self._more,
            note=self._note_trial,
            weights=self.weights,
            sigma=self._visit_sigma,
            void_over=self._void_over,
            block=o.block,
            max_trials=o.max_trials,
            patience=o.patience,
        )
        proposer = SAMPLERS[o.sampler](self.space)
        self._screen = Screen(self.space, proposer, plan, (o.seed, "screen"))
        self._screen.run(self._incumbents)
        self._note("screened", trials=len(self._screen.trials), ended=self._screen.ended)

    def _note_trial(self, kind: str, **data: Any) -> None:
        self.ledger.note(kind, **data)
        if self._mirror is not None and self._screen is not None and kind == "trial":
            self._mirror.add(self._screen.trials[data["number"]], 0.0)

    def _rounds(self, stage: str) -> Rounds:
        return Rounds(
            self._visit, self._next_process, self._more, tuple(self.weights), self._void_over,
            lambda: self.ledger.now, self._more_seconds,
        )  # fmt: skip

    def _chooser(self) -> Chooser:
        return Chooser(
            self.space, self._rounds("confirm"), self.weights, self._bar, self._until, self._admit_fully,
            self._note, count=self._round_count,
        )  # fmt: skip

    # ---- answers

    def _check_choice(self) -> None:
        """What is written is checked as it is written: dropping entries can have made a point of its own."""
        choice = self._choice
        if not choice.entries or not self.options.check:
            return
        verdict = judge(
            self._quality(choice.point), self._default_quality, self.space.fidelity(choice.point),
            self.options.approx_limit,
        )  # fmt: skip
        if not verdict.ok:
            self._note("incorrect", settings=self.space.settings(choice.point), reason=verdict.reason)
            self._choice = Choice(self.space.default, baseline=choice.baseline, tuned=dict(choice.baseline))

    def _quality(self, point: Point) -> Quality:
        if point not in self._qualities:
            key = "quality/" + "/".join(map(str, point))
            quality = self.ledger.quality(key, self.space.configuration(point), process=self._process)
            if quality.status.kills:
                self._process += 1
            self._qualities[point] = quality
        return self._qualities[point]

    def _admit(self, point: Point) -> tuple[TrialStatus, str] | None:
        """Before its speed is measured: the answers with those of its values that may change them. Knobs
        that must not change a bit are checked with the rest when a point reaches the finals."""
        reduced = tuple(
            d if k.fidelity is Fidelity.EXACT else i
            for k, i, d in zip(self.space.knobs, point, self.space.default, strict=True)
        )
        return self._admit_fully(reduced if self.space.legal(reduced) else point)

    def _admit_fully(self, point: Point) -> tuple[TrialStatus, str] | None:
        kind = self.space.code_class(point)
        limit = self.options.max_distinct
        if limit is not None and kind not in self._met and len(self._met) >= limit:
            return TrialStatus.INVALID, f"{limit} configurations have been measured, and no more are allowed"
        if limit is not None:
            self._met.add(kind)  # admitted is as good as measured: several can be admitted at once
        if not self.options.check or kind == self.space.code_class(self.space.default):
            return None
        if kind not in self._checked:
            quality = self._quality(point)
            verdict = judge(
                quality, self._default_quality, self.space.fidelity(point), self.options.approx_limit
            )
            status = quality.status if quality.status is not TrialStatus.OK else TrialStatus.INCORRECT
            self._checked[kind] = None if verdict.ok else (status, verdict.reason)
            if not verdict.ok:
                self._note("incorrect", settings=self.space.settings(point), reason=verdict.reason)
        return self._checked[kind]

    def _check_configuration(self, configuration: Configuration) -> str:
        """For configurations with kernels: the reason why not, or nothing."""
        if not self.options.check:
            return ""
        identity = self.space.identity(configuration)
        if identity not in self._kernel_qualities:
            key = f"quality/kernels/{len(self._kernel_qualities)}"
            quality = self.ledger.quality(key, configuration, process=self._process)
            if quality.status.kills:
                self._process += 1
            self._kernel_qualities[identity] = quality
        quality = self._kernel_qualities[identity]
        # Kernels may change rounding; settings among them may be allowed to change more.
        order = list(Fidelity)
        settings = self.space.fidelity(self.space.point(configuration.settings))
        fidelity = max(settings, Fidelity.ROUNDING, key=order.index)
        return judge(quality, self._default_quality, fidelity, self.options.approx_limit).reason

    # ---- speed against memory

    def trade_memory(self, needs: Callable[[Mapping[str, Value]], int | None]) -> list[Variant]:
        """The fastest settings and what needs less memory, confirmed together, from large to small; empty
        where there is no time for it. Call it after `run`.

        Args:
            needs: bytes of settings by the engine's plan; None where it refuses them.
        """
        space, winner = self.space, self._choice.point
        sizes = {winner: needs(space.settings(winner)), space.default: needs(space.settings(space.default))}
        found = []
        for trial in self._screen.trials if self._screen else []:
            size = needs(space.settings(trial.point))
            if size is not None and trial.log_ratio is not None and self._admit_fully(trial.point) is None:
                sizes[trial.point] = size
                found.append((trial.point, trial.log_ratio, size))
        whole = sizes[winner]
        if whole is None or self.status == "interrupted" or not self.noise:
            return []
        self._stage("pareto")
        self._until("pareto")
        names = {"fastest": winner} if winner != space.default else {}
        names |= {f"memory{i}": p for i, p in enumerate(front(found, whole), 1) if p != space.default}
        if not names:
            return []
        points = {"default": space.default, **names}
        result = self._rounds("pareto").compare(
            "pareto", {n: space.configuration(p) for n, p in points.items()}, self._round_count
        )
        if result.rounds < 2:
            return []
        metrics = list(self.weights)
        variants = [
            Variant(
                name, point, space.settings(point), int(sizes[point] or 0),
                result.ratio(name, metrics, self.weights),
                {m: result.ratio(name, [m], self.weights) for m in metrics},
                {m: result.median_rate(name, m) for m in metrics},
            )
            for name, point in points.items()
            if name == "default" or name in result.logs
        ]  # fmt: skip
        kept = worthwhile(variants, self._bar(result.rounds).of(metrics))
        for v in kept:
            self._note("pareto", name=v.name, settings=dict(v.settings), size=v.size, **v.overall.to_dict())
        return kept

    def variant_outcome(self, variant: Variant) -> Outcome:
        """What a profile of this variant says: its entries were proven together."""
        outcome = self.outcome()
        numbers = self.space.entries(variant.point)
        chooser = self._chooser()
        group = "g1" if len(numbers) > 1 else None
        outcome.settings = dict(variant.settings)
        outcome.entries = [chooser._entry(variant.point, n, variant.overall, group) for n in numbers]
        outcome.kernels, outcome.kernel_defaults = [], []
        outcome.gain, outcome.tuned = dict(variant.gain), dict(variant.tuned)
        outcome.quality = self._qualities.get(variant.point)
        return outcome

    # ---- the answer, at any moment

    def _searched(self) -> list[str]:
        """Knobs of which another value than the default was tried: of the others nothing can be said, not
        even that their default is best."""
        points = [t.point for t in self._screen.trials] if self._screen else []
        return [
            k.name
            for n, k in enumerate(self.space.knobs)
            if k.name in self._solved or any(p[n] != self.space.default[n] for p in points)
        ]

    def outcome(self) -> Outcome:
        """What is proven now."""
        if self.status == "interrupted" and not self._choice.entries and self._screen is not None:
            self._choose_from_screen(self._screen.trials)
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
            margin=dict(self._bar(self._round_count).margin),
            quality=self._qualities.get(choice.point),
            default_quality=self._qualities.get(self.space.default),
            unstable=self._unstable,
            drift=max((abs(n.drift) for n in self.noise.values()), default=0.0),
            seconds=self.ledger.now,
            routing=self.routing,
            conditions=self.ledger.conditions.to_dict(),
            status=self.status,
            voided=choice.voided + (self._screen.voided if self._screen else 0),
        )
        trials: Sequence[Trial] = self._screen.trials if self._screen else []
        result.trials = len(trials)
        result.failures = [
            Failure(self.space.settings(t.point), t.status, t.message)
            for t in trials
            if t.status is not TrialStatus.OK
        ] + [Failure(self.space.settings(p), v.status, v.message) for p, v in choice.failed]
        if self._kernels is not None:
            self._kernels.add_to(result)
            if result.kernels:
                whole = Configuration(result.settings, tuple(k.choice for k in result.kernels))
                result.quality = self._kernel_qualities.get(self.space.identity(whole))
        return result

    def _choose_from_screen(self, trials: Sequence[Trial]) -> None:
        """After an interrupt in the screen: the best point, if its paired samples clear the margin by
        themselves even at the lower end of their interval. All its entries are one group, because none was
        left out alone."""
        from .stats import estimate

        bar = self._bar(1)
        best = max(
            (t for t in trials if t.score is not None and t.log_ratio is not None), default=None,
            key=lambda t: t.log_ratio or 0.0,
        )  # fmt: skip
        if best is None or best.score is None:
            return
        for metric in self.weights:
            pairs = best.score.pairs.get(metric)
            if not pairs:
                continue
            gain = estimate([pairs], "interrupted", metric)
            others = [best.score.log_ratio(m) > math.log1p(-bar.margin[m]) for m in self.weights]
            if gain.low >= 1 + bar.margin[metric] and all(others) and self._checked.get(
                self.space.code_class(best.point)
            ) is None:  # fmt: skip
                chooser = self._chooser()
                numbers = self.space.entries(best.point)
                group = "g1" if len(numbers) > 1 else None
                self._choice.point = best.point
                self._choice.entries = [chooser._entry(best.point, n, gain, group) for n in numbers]
                self._choice.gain = {metric: gain}
                return
