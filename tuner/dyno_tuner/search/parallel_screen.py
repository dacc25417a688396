"""The screen on several devices: every device measures blocks of its own, all at the same time.

A step proposes the points of one block for every device, each proposal knowing of those before it by a
constant liar, checks their answers, deals them out and waits for all. A score is the ratio to the default of
the same device, so that devices that differ by a few percent do not disturb it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.protocol import TrialStatus
from .observation import Observation
from .screen import Screen, ScreenBlock, Trial

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..execution.device_pool import DevicePool, PoolMember
    from ..measure.baseline_block import Baseline
    from ..space.search_space import Point, Space
    from .proposers import Proposer
    from .screen import ScreenPlan, Shared


@dataclass
class MemberPlan:
    """How one device measures, with what it noted meanwhile: notes are the main thread's to write."""

    plan: ScreenPlan
    noted: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    before: Baseline | None = None  # the baseline that closed its last block


class ParallelScreen(Screen):
    """A screen whose blocks run on several devices at once.

    Args:
    plan_for: the plan of a device, with its own `measurement`, `baseline`, `now` and `more`.
    prepare: has the answers of points checked, on all devices; `plan.admit` of each asks nothing after it.
    joined: takes over what the devices have learnt in a step.
    """

    def __init__(
        self, space: Space, proposer: Proposer, plan: ScreenPlan, key: Sequence[object], pool: DevicePool,
        plan_for: Callable[[PoolMember, Callable[..., None]], ScreenPlan],
        prepare: Callable[[Sequence[Point]], None], joined: Callable[[], None], shared: Shared | None = None,
    ) -> None:  # fmt: skip
        super().__init__(space, proposer, plan, key, shared)
        self._pool = pool
        self._prepare = prepare
        self._joined = joined
        self._plans: list[MemberPlan] = []
        for member in pool.members:
            noted: list[tuple[str, dict[str, Any]]] = []

            def note(kind: str, /, _to: list[tuple[str, dict[str, Any]]] = noted, **data: Any) -> None:
                _to.append((kind, data))

            self._plans.append(MemberPlan(plan_for(member, note), noted))
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
        """Points of a block for every device, with the numbers of their trials."""
        plan = self._plan
        chosen: list[tuple[int, Point]] = []
        room = plan.max_trials - len(self.trials)
        while (wanted := min(plan.block * len(self._pool), room) - len(chosen)) > 0 and plan.more(3):
            points = self._propose(queue, wanted, [p for _, p in chosen])
            if not points:
                self._idle = True
                break
            self._prepare(points)
            for point in points:
                refused = plan.admit(point)
                number, self._numbered = self._numbered, self._numbered + 1
                if refused is None:
                    chosen.append((number, point))
                else:
                    self._add(Trial(number, point, refused[0], None, None, refused[1]))
            room = plan.max_trials - len(self.trials)
        members = len(self._pool)
        return [chosen[first::members] for first in range(members)]

    def _propose(self, queue: list[Point], wanted: int, pending: Sequence[Point]) -> list[Point]:
        """Up to `wanted` points. What is not measured yet is taken to be as good as the mean of what is."""
        found: list[Point] = []
        while len(found) < wanted:
            history = self.history
            lie = float(np.mean([o.score for o in history if o.score is not None]))
            history += [Observation(p, lie, self._plan.sigma) for p in [*pending, *found]]
            point = self._proposed(queue, history, self._numbered + len(found))
            if point is None:
                break
            if self._claimed(point):
                found.append(point)
        return found

    def _step(self, number: int, dealt: Sequence[Sequence[tuple[int, Point]]]) -> None:
        """One block on every device that has got points."""
        blocks: list[ScreenBlock | None] = [None] * len(self._pool)

        def work(member: PoolMember) -> list[Trial]:
            own, points = self._plans[member.number], dealt[member.number]
            if not points:
                return []
            if own.before is None:
                if member.number:  # its first load decides nothing
                    own.plan.baseline("screen/first")
                first = own.plan.baseline(f"screen/b{number}/before")
                own.before = (own.plan.now(), first)
            block = ScreenBlock(own.before, own.plan.resting(), number=number)
            blocks[member.number] = block
            for trial_number, point in points:
                if not own.plan.more(2):
                    break
                self._measure(own.plan, block, trial_number, point)
            failed = [t for t in block.trials if t.status is not TrialStatus.OK]
            if not block.taken:
                return failed
            own.before, finals = self._settle(own.plan, block)
            return [*failed, *finals]

        try:
            results = self._pool.together(work)
        except BaseException:
            # What was measured is there for an answer, scored against one baseline.
            self.trials += sorted((t for b in blocks if b for t in b.trials), key=lambda t: t.number)
            raise
        finally:
            self.voided += sum(b.voided for b in blocks if b)
        self._joined()
        for own, member in zip(self._plans, self._pool.members, strict=True):
            for kind, data in own.noted:
                self._plan.note(kind, device=member.number, **data)
            own.noted.clear()
        for trial in sorted((t for found in results for t in found), key=lambda t: t.number):
            self._add(trial)
