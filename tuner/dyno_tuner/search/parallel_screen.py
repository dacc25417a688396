"""The screen on several devices, which measure separate blocks in parallel.

A step proposes the points of one block for each device. Earlier proposals count with the mean score (constant
liar). It then checks their answers, distributes them, and waits for all devices. A score is a ratio to the
default on the same device, so small differences between devices do not matter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.protocol import TrialStatus
from .observation import Observation, Trial
from .screen import Screen, ScreenBlock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..core.protocol import Measurement, Quality
    from ..execution.device_pool import DevicePool, PoolMember
    from ..measure.baseline_block import Baseline
    from ..space.search_space import Point
    from .context import SearchContext
    from .proposers import Proposer
    from .screen import Shared


class MemberDevice:
    """One of several devices. Its notes are kept, because only the main thread writes them."""

    def __init__(self, context: SearchContext, member: PoolMember) -> None:
        self._context = context
        self._member = member
        self._space = context.space
        self._default = context.space.configuration(context.space.default)
        self.noted: list[tuple[str, dict[str, Any]]] = []
        self.before: Baseline | None = None
        """The baseline that closed its last block."""

    @property
    def now(self) -> float:
        return self._member.recorder.now

    @property
    def resting(self) -> bool:
        return self._member.recorder.resting

    def measure(self, key: str, point: Point, metrics: Sequence[str]) -> Measurement:
        policy = self._context.policy_for(baseline=False)
        return self._member.measurement(key, self._space.configuration(point), metrics, policy)

    def baseline(self, key: str) -> Measurement:
        policy = self._context.policy_for(baseline=True)
        return self._member.default(key, self._default, tuple(self._context.weights), policy)

    def note(self, kind: str, /, **data: Any) -> None:
        self.noted.append((kind, data))


class ParallelScreen(Screen):
    """A screen whose blocks run on several devices in parallel."""

    def __init__(
        self, context: SearchContext, proposer: Proposer, key: Sequence[object], pool: DevicePool,
        shared: Shared | None = None,
    ) -> None:  # fmt: skip
        super().__init__(context, proposer, key, shared)
        self._pool = pool
        pool.members[0].process = context.processes.number
        self._devices = [MemberDevice(context, member) for member in pool.members]
        self._numbered = 1

    def run(self, seeds: Sequence[Point]) -> None:
        queue = list(seeds)
        number = 0
        while not self._enough(queue):
            self._idle = False
            begun = len(self.trials)
            dealt = self._deal(queue)
            if any(dealt):
                self._step(number, dealt)
            number += 1
            if len(self.trials) == begun:
                self.ended = "exhausted" if self._idle else "budget"

    def _deal(self, queue: list[Point]) -> list[list[tuple[int, Point]]]:
        """The points of a block for each device, with the numbers of their trials."""
        options = self._context.options
        chosen: list[tuple[int, Point]] = []
        room = options.max_trials - len(self.trials)
        while (wanted := min(options.block * len(self._pool), room) - len(chosen)) > 0:
            if not self._more(self._device, 3):
                break
            points = self._propose(queue, wanted, [p for _, p in chosen])
            if not points:
                self._idle = True
                break
            self._compare_answers(points)
            for point in points:
                refused = self._context.gate.admit(point)
                number, self._numbered = self._numbered, self._numbered + 1
                if refused is None:
                    chosen.append((number, point))
                else:
                    self._add(Trial.failed(number, point, *refused))
            room = options.max_trials - len(self.trials)
        members = len(self._pool)
        return [chosen[first::members] for first in range(members)]

    def _propose(self, queue: list[Point], wanted: int, pending: Sequence[Point]) -> list[Point]:
        """Up to `wanted` points. Points that are not measured yet count with the mean of the others."""
        found: list[Point] = []
        while len(found) < wanted:
            history = self.history
            lie = float(np.mean([o.score for o in history if o.score is not None]))
            history += [Observation(p, lie, self._sigma) for p in [*pending, *found]]
            point = self._proposed(queue, history, self._numbered + len(found))
            if point is None:
                break
            if self._claimed(point):
                found.append(point)
        return found

    def _step(self, number: int, dealt: Sequence[Sequence[tuple[int, Point]]]) -> None:
        """Measure one block on each device that has points."""
        blocks: list[ScreenBlock | None] = [None] * len(self._pool)

        def work(member: PoolMember) -> list[Trial]:
            own, points = self._devices[member.number], dealt[member.number]
            if not points:
                return []
            if own.before is None:
                if member.number:  # its first load does not count
                    own.baseline("screen/first")
                own.before = self._opening(own, number)
            block = ScreenBlock(own.before, own.resting, number=number)
            blocks[member.number] = block
            for trial_number, point in points:
                if not self._more(own, 2):
                    break
                self._measure(own, block, trial_number, point)
            failed = [t for t in block.trials if t.status is not TrialStatus.OK]
            if not block.taken:
                return failed
            own.before, finals = self._settle(own, block)
            return [*failed, *finals]

        try:
            results = self._pool.together(work)
        except BaseException:
            # The trials so far stay for the outcome, scored against one baseline.
            self.trials += sorted((t for b in blocks if b for t in b.trials), key=lambda t: t.number)
            raise
        finally:
            self.voided += sum(b.voided for b in blocks if b)
        self._joined()
        for own, member in zip(self._devices, self._pool.members, strict=True):
            for kind, data in own.noted:
                self._context.note(kind, device=member.number, **data)
            own.noted.clear()
        for trial in sorted((t for found in results for t in found), key=lambda t: t.number):
            self._add(trial)

    def _compare_answers(self, points: Sequence[Point]) -> None:
        """Compare the answers of these points on all devices in parallel, as far as the gate requires it."""
        gate, size = self._context.gate, len(self._pool)
        asked = gate.questions(points)
        if not asked:
            return

        def work(member: PoolMember) -> list[Quality]:
            return [member.quality(key, config) for _, key, config in asked[member.number :: size]]

        self._pool.members[0].process = self._context.processes.number
        found = self._pool.together(work)
        self._joined()
        for number, (point, _, _) in enumerate(asked):
            gate.learn(point, found[number % size][number // size])

    def _joined(self) -> None:
        """After joint work of the devices, let the first one continue alone from its state."""
        members = self._pool.members
        costs = [seconds for member in members for seconds in member.costs]
        self._context.joined(members[0].process, costs, sum(member.unstable for member in members))
        for member in members:
            member.costs.clear()
            member.unstable = 0
