"""A block: the baseline, candidates, the baseline again.

Candidates are scored against both baselines, interpolated in time. If the baseline has moved meanwhile, or
the GPU has begun to rest, the block is void: its candidates are measured again, after the baseline that
closed it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from ..core.protocol import Measurement, TrialStatus
from .measurement import baseline_moved

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Baseline = tuple[float, Measurement]  # the time at which it stands, and its measurement

K = TypeVar("K")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Taken(Generic[K]):
    """A candidate, the time of its measurement, and the measurement."""

    candidate: K
    when: float
    measurement: Measurement


@dataclass
class BlockPlan(Generic[K]):
    """The way in which a block measures.

    Args:
        baseline: measures the baseline; its argument is how often the block was void. None: it does not run.
        candidate: measures a candidate again in a void block; its argument is how often it was void before.
        more: whether so many more measurements fit.
        metrics: of the baseline, by which it may have moved.
        void_over: by how much the baseline may move.
        repeats: of a void block, at most.
        resting: whether the GPU rests before prompts by now.
        on_void: is called with the number of the repetition and with how far the baseline has moved.
        failure_ends: whether a candidate that fails ends the block, because it ends the process.
    """

    baseline: Callable[[int], Baseline | None]
    candidate: Callable[[K, int], Measurement]
    now: Callable[[], float]
    more: Callable[[int], bool]
    metrics: Sequence[str]
    void_over: float
    repeats: int
    resting: Callable[[], bool] = lambda: False
    on_void: Callable[[int, float], None] = lambda repeat, moved: None
    failure_ends: bool = False

    def measure_all(self, candidates: Sequence[K], repeat: int) -> list[Taken[K]]:
        """Measures candidates in turn, up to one whose failure ends the block."""
        taken: list[Taken[K]] = []
        for candidate in candidates:
            measurement = self.candidate(candidate, repeat)
            taken.append(Taken(candidate, self.now(), measurement))
            if self.failure_ends and measurement.status is not TrialStatus.OK:
                break
        return taken


@dataclass
class Block(Generic[K]):
    """The candidates that were measured since a baseline.

    Args:
        before: the baseline that opens the block.
        resting: whether the GPU rested as the block began.

    `after` closes it; None if the baseline, or a candidate whose failure ends the block, did not run.
    `settled` says whether its scores stand: it is not void, or no repetition is left.
    """

    before: Baseline
    resting: bool = False
    taken: list[Taken[K]] = field(default_factory=list)
    after: Baseline | None = None
    settled: bool = False
    voided: int = 0

    def baselines(self) -> list[Baseline]:
        return [self.before] if self.after is None else [self.before, self.after]

    def close(self, plan: BlockPlan[K]) -> None:
        """Measures the baseline after the candidates, and the whole block again while it is void, as often as
        the plan and the time allow."""
        while not self._broken(plan):
            self.after = plan.baseline(self.voided)
            if self.after is None:
                return
            moved = baseline_moved(self.before[1], self.after[1], list(plan.metrics))
            alike = moved <= plan.void_over and self.resting == plan.resting()
            self.resting = plan.resting()
            self.settled = alike or self.voided == plan.repeats
            if self.settled or not plan.more(len(self.taken) + 1):
                return
            repeat, self.voided = self.voided, self.voided + 1
            plan.on_void(repeat, moved)
            self.before, self.after = self.after, None
            self.taken = plan.measure_all([t.candidate for t in self.taken], repeat)

    def _broken(self, plan: BlockPlan[K]) -> bool:
        return plan.failure_ends and any(t.measurement.status is not TrialStatus.OK for t in self.taken)


def rested_alike(measure: Callable[[bool], T], resting: Callable[[], bool]) -> T:
    """A result within which the GPU did not begin to rest: if it does, all of it is measured once more.

    Args:
        measure: its argument is whether this is the second time.
    """
    rested = resting()
    found = measure(False)
    return found if resting() == rested else measure(True)
