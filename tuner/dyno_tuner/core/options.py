"""The options of a tune: the user's choices, and constants of the method."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .protocol import Workload


SPEED, ENERGY, MEMORY = "speed", "energy", "memory"
OBJECTIVES = (SPEED, ENERGY, MEMORY)
BESIDE, DECIDES = "beside", "decides"


@dataclass(frozen=True, slots=True)
class MeasurementPolicy:
    """The policy for the length of a measurement."""

    prompts: int = 3  # kept samples per metric, one for each prompt
    tolerance: float = 0.02  # a rise over the kept samples that counts as "still warming up"
    cap: int = 8  # most samples per metric; a measurement that is not stable by then is marked
    longest: float | None = None  # seconds of samples of a metric after which no more are taken
    rest: float | None = None  # seconds of rest before short prompts
    energy: str | None = None  # BESIDE: joules are counted if possible; DECIDES: joules decide

    def to_dict(self) -> dict[str, Any]:
        return {k: v for k, v in dataclasses.asdict(self).items() if v is not None}


@dataclass(frozen=True)
class Options:
    """The options of a tune. All of them except the budget are part of the identity of a run."""

    workload: Workload
    budget: float | None = None  # seconds; None: no limit
    seed: int = 0
    sampler: str = "guided"
    approx_limit: float | None = None  # nats per token; None: `approx` knobs are not searched
    max_trials: int = 400
    max_distinct: int | None = None  # most distinct configurations to measure, over all stages
    rounds: int = 4  # least rounds of a paired comparison
    max_rounds: int = 8  # most rounds, if the noise needs them
    aim: float = 0.015  # target margin, for which rounds are added
    aa_processes: int = 3
    aa_measurements: int = 2
    block: int = 4
    patience: int = 24
    policy: MeasurementPolicy = field(default_factory=MeasurementPolicy)
    kernels: bool = False
    weights: Mapping[str, float] = field(default_factory=dict)  # weights of the metrics; default: all equal
    check: bool = True
    pareto: bool = False  # leave time to confirm profiles of less memory
    objective: str = SPEED
    """SPEED: tokens per second; ENERGY: tokens per joule; MEMORY: the least memory that does not cost
    speed."""
    apart: bool = True  # whether the engine switches settings between two calls; see `measure.paired_rounds`
    routing: bool = False  # whether to measure the use of experts

    def __post_init__(self) -> None:
        if self.objective == MEMORY:  # the least memory is one end of the Pareto front
            object.__setattr__(self, "pareto", True)
        energy = DECIDES if self.objective == ENERGY else BESIDE if self.pareto else None
        if self.policy.energy != energy:
            object.__setattr__(self, "policy", dataclasses.replace(self.policy, energy=energy))

    def metric_weights(self) -> dict[str, float]:
        own = self.workload.weights
        return {m: float(self.weights.get(m, own[m])) for m in self.workload.metrics}
