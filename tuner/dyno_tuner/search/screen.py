"""The screen: blocks of trials between baselines, proposed by a sampler, until time, trials or ideas run out.

The history of the screen is in the journal. Data shared with other tunes in an Optuna storage comes through a
`Shared`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ..core.protocol import Measurement, TrialStatus
from ..measure.baseline_block import Baseline, Block, BlockPlan, Taken
from ..measure.measurement import score
from .observation import Observation, Trial

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from ..space.search_space import Point, Space
    from .context import SearchContext
    from .proposers import Proposer


MAX_REPEATS = 2  # most repetitions of a void block


class Device(Protocol):
    """The protocol of a device on which blocks are measured: the device of the run, or one of several."""

    @property
    def now(self) -> float:
        """Seconds of the run, by the clock of the device."""
        ...

    @property
    def resting(self) -> bool:
        """Whether the GPU now rests before prompts."""
        ...

    def measure(self, key: str, point: Point, metrics: Sequence[str]) -> Measurement: ...

    def baseline(self, key: str) -> Measurement:
        """A measurement of the default, which must run."""
        ...

    def note(self, kind: str, /, **data: Any) -> None: ...


class RunDevice:
    """The device of a run, measured through its context."""

    def __init__(self, context: SearchContext) -> None:
        self._context = context
        self._space = context.space
        self.baseline = context.baseline
        self.note = context.note

    @property
    def now(self) -> float:
        return self._context.recorder.now

    @property
    def resting(self) -> bool:
        return self._context.recorder.resting

    def measure(self, key: str, point: Point, metrics: Sequence[str]) -> Measurement:
        return self._context.measure(key, self._space.configuration(point), metrics)


@dataclass
class ScreenBlock(Block[Trial]):
    """The trials of one device between two baselines."""

    number: int = 0
    trials: list[Trial] = field(default_factory=list)  # scored only against `before` until settled


class Shared(Protocol):
    """The protocol of a study that several tunes work on; see `shared_study`."""

    def observations(self, space: Space, own: Sequence[Observation]) -> list[Observation]:
        """The points that other tunes have tried or are trying."""
        ...

    def claim(self, settings: Mapping[str, Any]) -> bool:
        """Claim settings. Returns whether this tune, and no other one, should try them."""
        ...

    def publish(self, settings: Mapping[str, Any], trial: Trial) -> None: ...


class Screen:
    """The screen: a search by blocks, with all its trials. `trials` is valid at any moment.

    Args:
        proposer: Proposes the next point.
        key: Key of its random draws.
    """

    def __init__(
        self, context: SearchContext, proposer: Proposer, key: Sequence[object], shared: Shared | None = None
    ) -> None:
        space = context.space
        self._context = context
        self._device: Device = RunDevice(context)
        self._space = space
        self._weights = dict(context.weights)
        self._sigma = context.sigma
        self._void_over = context.void_over
        self._proposer = proposer
        self._key = tuple(key)
        self._shared = shared
        self.trials: list[Trial] = [Trial(0, space.default, TrialStatus.OK, 0.0)]
        self.voided = 0
        self.ended = ""
        self._empty = 0  # blocks of `also` without a trial

    @property
    def history(self) -> list[Observation]:
        own = [Observation(t.point, t.log_ratio, self._sigma) for t in self.trials]
        return own if self._shared is None else [*own, *self._shared.observations(self._space, own)]

    def run(self, seeds: Sequence[Point]) -> None:
        """Run blocks until the screen has ended.

        Args: `seeds` are tried first, in order: the incumbents."""
        queue = list(seeds)
        number = 0
        before: Baseline | None = None
        while not self._enough(queue):
            if before is None:
                before = self._opening(self._device, number)
            begun = len(self.trials)
            before = self._block(number, queue, before)
            number += 1
            if len(self.trials) == begun:
                self.ended = "exhausted" if self._idle else "budget"

    def also(self, points: Sequence[Point]) -> None:
        """Try these points, too, as far as there is time."""
        device, left = self._device, list(points)
        before: Baseline | None = None
        while left and self._more(device, 3):
            # Unique block numbers, whatever the number of blocks and trials: each block has made a trial,
            # except blocks of `also` of which other tunes have claimed all points.
            number, first = len(self.trials) + 1 + self._empty, max(t.number for t in self.trials) + 1
            known = len(self.trials)
            if before is None:
                before = self._opening(device, number)
            block = ScreenBlock(before, device.resting, number=number)
            while left and len(block.taken) < self._context.options.block and self._more(device, 3):
                point = left.pop(0)
                if not self._claimed(point):
                    continue
                refused = self._context.gate.admit(point)
                if refused is not None:
                    self._add(Trial.failed(first, point, *refused))
                else:
                    trial = self._measure(device, block, first, point)
                    if trial.status is not TrialStatus.OK:
                        self._add(trial)
                first += 1
            if block.taken:
                before, finals = self._close(block)
                for trial in finals:
                    self._add(trial)
            self._empty += len(self.trials) == known

    def _enough(self, queue: Sequence[Point]) -> bool:
        """Whether the screen has ended, and `ended` says why."""
        options = self._context.options
        best = max((t.log_ratio for t in self.trials if t.log_ratio is not None), default=0.0)
        stale = sum(1 for t in reversed(self.trials) if t.number > self._last_gain(best))
        if not self.ended:
            if len(self.trials) >= options.max_trials:
                self.ended = "trials"
            elif stale >= options.patience and not queue:
                self.ended = "no gain"
            elif not self._more(self._device, 3):
                self.ended = "budget"
        return self.ended != ""

    def _last_gain(self, best: float) -> int:
        return next(
            (t.number for t in self.trials if t.log_ratio is not None and t.log_ratio >= best - 0.002), 0
        )

    def _block(self, number: int, queue: list[Point], before: Baseline) -> Baseline:
        """Measure one block. Returns its closing baseline, which opens the next one."""
        device, options = self._device, self._context.options
        block = ScreenBlock(before, device.resting, number=number)
        self._idle = False
        while len(block.taken) < options.block and len(self.trials) < options.max_trials:
            if not self._more(device, 3):
                break
            point = self._next(queue)
            if point is None:
                self._idle = True
                break
            trial_number = len(self.trials)
            refused = self._context.gate.admit(point)
            if refused is not None:
                self._add(Trial.failed(trial_number, point, *refused))
                continue
            trial = self._measure(device, block, trial_number, point)
            if trial.status is TrialStatus.OK:
                self.trials.append(trial)
            else:
                self._add(trial)
        if not block.taken:
            return before
        after, finals = self._close(block)
        for final in finals:
            self.trials[final.number] = final
            self._report(final)
        return after

    def _more(self, device: Device, measurements: int) -> bool:
        """Whether this many more measurements fit, by the clock of a device."""
        return self._context.goes_on(device.now, measurements, self.trials)

    def _opening(self, device: Device, number: int) -> Baseline:
        """The baseline that opens a block."""
        first = device.baseline(f"screen/b{number}/before")
        return device.now, first

    def _measure(self, device: Device, block: ScreenBlock, number: int, point: Point) -> Trial:
        """A trial of the block, scored against the baseline before it."""
        measurement = device.measure(f"screen/t{number}", point, self._metrics(point))
        trial = self._trial(number, point, measurement, [block.before], device.now)
        if trial.status is TrialStatus.OK:
            block.taken.append(Taken(trial, device.now, measurement))
        block.trials.append(trial)
        return trial

    def _settle(self, device: Device, block: ScreenBlock) -> tuple[Baseline, list[Trial]]:
        """Measure the baseline after the block, and score its trials against both baselines."""
        key = f"screen/b{block.number}"

        def baseline(voided: int) -> Baseline:
            begun = device.now
            return begun, device.baseline(f"{key}/again{voided - 1}" if voided else f"{key}/after")

        def again(trial: Trial, repeat: int) -> Measurement:
            name = f"screen/t{trial.number}/again{repeat}"
            return device.measure(name, trial.point, self._metrics(trial.point))

        how = BlockPlan(
            baseline, again, lambda: device.now, lambda measurements: self._more(device, measurements),
            list(self._weights), self._void_over, MAX_REPEATS, lambda: device.resting,
            lambda repeat, moved: device.note("void", block=block.number, repeat=repeat, moved=moved),
        )  # fmt: skip
        block.close(how)
        assert block.after is not None
        return block.after, [
            self._trial(t.candidate.number, t.candidate.point, t.measurement, block.baselines(), t.when)
            for t in block.taken
        ]

    def _close(self, block: ScreenBlock) -> tuple[Baseline, list[Trial]]:
        """As `_settle`, for a block on the device of the run."""
        try:
            return self._settle(self._device, block)
        finally:
            self.voided += block.voided

    def _metrics(self, point: Point) -> list[str]:
        """The metrics that the point can affect. Others are not worth the time here. The confirming rounds
        measure all."""
        moved = self._space.moved(point, self._space.default)
        return [m for m in self._weights if m in moved] or list(self._weights)

    def _trial(
        self, number: int, point: Point, measurement: Measurement, baselines: list[Baseline], when: float
    ) -> Trial:
        if measurement.status is not TrialStatus.OK:
            return Trial.failed(number, point, measurement.status, measurement.message)
        scored = score(measurement, baselines, when, list(self._weights))
        return Trial(number, point, TrialStatus.OK, scored.combined(self._weights), scored)

    def _next(self, queue: list[Point]) -> Point | None:
        while True:
            point = self._proposed(queue, self.history, len(self.trials))
            if point is None or self._claimed(point):
                return point

    def _claimed(self, point: Point) -> bool:
        return self._shared is None or self._shared.claim(self._space.settings(point))

    def _proposed(self, queue: list[Point], history: Sequence[Observation], number: int) -> Point | None:
        tried: set[Hashable] = {self._space.code_class(o.point) for o in history}
        while queue:
            point = queue.pop(0)
            if self._space.legal(point) and self._space.code_class(point) not in tried:
                return point
        return self._proposer.propose(history, (*self._key, number))

    def _add(self, trial: Trial) -> None:
        self.trials.append(trial)
        self._report(trial)

    def _report(self, trial: Trial) -> None:
        """Report a trial. Its interval comes from the noise of measurements in one ratio. Later rounds are
        more precise."""
        measured: dict[str, list[float]] = {}
        if trial.log_ratio is not None:
            half = 1.96 * self._sigma
            measured = {"ci95": [math.exp(trial.log_ratio - half), math.exp(trial.log_ratio + half)]}
        self._context.note(
            "trial",
            number=trial.number,
            settings=self._space.settings(trial.point),
            status=str(trial.status),
            ratio=None if trial.log_ratio is None else math.exp(trial.log_ratio),
            message=trial.message,
            **measured,
        )
        if self._shared is not None:
            self._shared.publish(self._space.settings(trial.point), trial)
