"""The first stage: A/A, the comparison of the default with itself, within a process and between processes."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from ..core.intervals import Noise, noise_of
from ..core.protocol import TrialStatus
from .budget import PROVING_MEASUREMENTS

if TYPE_CHECKING:
    from .context import RunContext

Rates = dict[str, dict[int, float]]  # rates of one measurement by metric and prompt


class NoiseStage:
    """The stage that measures the noise of the default, and thereby the cost of a measurement and the margin
    of a gain."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._processes: list[list[Rates]] = []
        # Seconds of measurements at the begin of a process, and of later ones.
        self._fresh: list[float] = []
        self._warm: list[float] = []
        self._speeds: dict[str, list[float]] = {}  # tokens per second by metric
        self._joules: dict[str, list[float]] = {}  # joules per token by metric, if energy was counted
        self._by_budget = 0  # samples per measurement for which the budget has room

    def run(self) -> bool:
        """Measure the noise, the rates and the energy of the default. Returns False if the budget is too
        short."""
        context = self._context
        if not self._plan():
            return False
        self._measure()
        context.noise = self._noise()
        if context.policy.prompts < self._by_budget and not context.quiet:
            # With much noise, the longer measurements that the budget allows are better than the old ones.
            self._forget()
            context.policy = dataclasses.replace(context.policy, prompts=self._by_budget)
            self._measure()
            context.noise = self._noise()
        else:
            self._fewer_samples()
        context.note(
            "noise",
            margin=context.bar(context.round_count()).margin,
            within={m: n.within for m, n in context.noise.items()},
            between={m: n.between for m, n in context.noise.items()},
            drift={m: n.drift for m, n in context.noise.items()},
        )
        context.choice.baseline = {m: sorted(r)[len(r) // 2] for m, r in self._speeds.items()}
        context.choice.tuned = dict(context.choice.baseline)
        medians = {m: sorted(j)[len(j) // 2] for m, j in self._joules.items() if j}
        context.choice.joules = {m: (joules, joules) for m, joules in medians.items()}
        context.resting = context.recorder.resting  # the costs then include rests
        return True

    def _plan(self) -> bool:
        """Plan the stage: a short measurement shows the cost, and so the number of prompts per measurement
        that the budget allows. The first load of a file is not used for anything else."""
        context, o = self._context, self._context.options
        budget = context.budget
        context.policy = dataclasses.replace(o.policy, prompts=1)
        begun = context.recorder.useful
        first = context.baseline("aa/first")
        spent = context.recorder.useful - begun  # a cold and a warm sample of each metric, and the load
        if o.budget is None:
            context.policy = o.policy
            return True
        if first.status is not TrialStatus.OK:
            said = f"a measurement of the default takes more than {o.budget:.0f} s; give a longer --budget"
            self._refuse(message=said)
            return False
        # A continued run keeps its original number of samples if the machine is quiet, because otherwise none
        # of its measurements would count.
        self._by_budget = context.shortage.prompts(spent / 2)
        prompts = context.recorder.begun.first_prompts or self._by_budget
        context.policy = dataclasses.replace(o.policy, prompts=prompts)
        # A file is loaded once per process, so only samples decide whether there is time for the noise.
        samples = sum(s.seconds for s in (*first.samples, *first.warmup))
        budget.plan(min(spent, samples or math.inf) / 2 * (prompts + 1))
        enough = budget.noise_fits(2 * o.aa_measurements)
        if not enough:
            cost = budget.measurement_cost
            needed = math.ceil(PROVING_MEASUREMENTS * cost)
            self._refuse(
                needed=needed,
                message=f"one measurement takes {cost:.1f} s, so a tune of {o.budget:.0f} s proves nothing; "
                f"give at least --budget {needed}s",
            )
        return enough

    def _refuse(self, **why: Any) -> None:
        self._context.too_short = why
        self._context.note("too_short", **why)

    def _measure(self) -> None:
        context, o = self._context, self._context.options
        recorder, budget = context.recorder, context.budget
        rested = recorder.resting
        for p in range(2 * o.aa_processes):
            # Two measurements in each of two processes are the minimum to separate noise within a process
            # from noise between processes.
            done = len(self._processes)
            if done == o.aa_processes or not (done < 2 or budget.fits(o.aa_measurements, 0.25)):
                break
            context.processes.next()
            measurements = []
            for v in range(o.aa_measurements if not done or budget.noise_fits(o.aa_measurements) else 1):
                begun = recorder.useful
                measurement = context.baseline(f"aa/p{p}/v{v}")
                measurements.append({m: measurement.rates(m) for m in context.weights})
                for m in context.weights:
                    self._speeds.setdefault(m, []).extend(measurement.speeds(m).values())
                    self._joules.setdefault(m, []).extend(measurement.joules(m).values())
                (self._warm if v else self._fresh).append(recorder.useful - begun)
                budget.learn_from(self._fresh, self._warm)
            if recorder.resting != rested:  # the GPU did not rest in the earlier ones
                rested = True
                self._forget()
                continue
            self._processes.append(measurements)

    def _forget(self) -> None:
        for kept in (self._processes, self._fresh, self._warm, self._speeds, self._joules):
            kept.clear()

    def _noise(self, prompts: int | None = None) -> dict[str, Noise]:
        """The noise by metric. With `prompts`: as if each measurement had kept only this many samples."""
        return {
            m: noise_of([[{p: r for p, r in v[m].items() if prompts is None or p < prompts} for v in process]
                         for process in self._processes])
            for m in self._context.weights
        }  # fmt: skip

    def _fewer_samples(self) -> None:
        context, kept = self._context, self._context.policy.prompts
        begun = context.recorder.begun.prompts
        if begun is not None and context.recorder.begun.first_prompts == kept and context.quiet:
            found = (begun, self._noise(begun)) if begun < kept else None
        else:
            found = context.shortage.fewer_samples(kept, context.noise, self._noise)
        if found is None:
            return
        prompts, context.noise = found
        context.policy = dataclasses.replace(context.policy, prompts=prompts)
        saved = (kept - prompts) / (kept + 1) * min(min(self._fresh), *self._warm)
        context.budget.learn_from([s - saved for s in self._fresh], [s - saved for s in self._warm])
        context.note("samples", prompts=prompts, instead_of=kept)
