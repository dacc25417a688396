"""A baseline block: the baseline, candidates, and the baseline again.

Candidates are scored against both baselines, interpolated in time. If the baseline has changed meanwhile, or
the GPU has begun to rest, the block is void. Its candidates are then measured again, after the baseline that
closed it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from ..core.protocol import Measurement, TrialStatus
from .measurement import baseline_moved

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Baseline = tuple[float, Measurement]  # its time and its measurement

K = TypeVar("K")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Taken(Generic[K]):
    """A candidate, with the time of its measurement and the measurement."""

    candidate: K
    when: float
    measurement: Measurement


@dataclass
class BlockPlan(Generic[K]):
    """The parameters of a block.

    Args:
        baseline: Measures the baseline. Its argument is how often the block was void. It returns None if the
            baseline does not run.
        candidate: Measures a candidate again in a void block. Its argument is how often it was void before.
        more: Whether this many more measurements fit into the time.
        metrics: Metrics in which the baseline may have changed.
        void_over: Largest allowed change of the baseline.
        repeats: Most repetitions of a void block.
        resting: Whether the GPU now rests before prompts.
        on_void: Called with the number of the repetition and the change of the baseline.
        failure_ends: Whether a failing candidate ends the block, because it ends the process.
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
        """Measure candidates in turn, up to one whose failure ends the block."""
        taken: list[Taken[K]] = []
        for candidate in candidates:
            measurement = self.candidate(candidate, repeat)
            taken.append(Taken(candidate, self.now(), measurement))
            if self.failure_ends and measurement.status is not TrialStatus.OK:
                break
        return taken


@dataclass
class Block(Generic[K]):
    """A block: the candidates that were measured after a baseline.

    Args:
        before: The baseline that opens the block.
        resting: Whether the GPU rested when the block began.

    `after` is the closing baseline; None if it, or a candidate whose failure ends the block, did not run.
    `settled` says whether the scores are final: the block is not void, or no repetition is left.
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
        """Measure the baseline after the candidates. While the block is void, repeat it as often as the plan
        and the time allow."""
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
    """A result during which the GPU did not begin to rest. If it does, everything is measured once more.

    Args:
        measure: Measures. Its argument is whether this is the second time.
    """
    rested = resting()
    found = measure(False)
    return found if resting() == rested else measure(True)
