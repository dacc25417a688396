"""How to tune: what the user asked for and what the method fixes."""

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
    """The length of one measurement."""

    prompts: int = 3  # kept samples of a metric, one for each prompt
    tolerance: float = 0.02  # a rise across the kept window that counts as "still warming up"
    cap: int = 8  # samples of a metric at most; a measurement that reaches it unsettled is marked
    longest: float | None = None  # seconds of a metric's samples after which no more are taken
    rest: float | None = None  # seconds without work before short prompts are read
    energy: str | None = None  # BESIDE: joules are counted where they can be; DECIDES: they are what counts

    def to_dict(self) -> dict[str, Any]:
        return {k: v for k, v in dataclasses.asdict(self).items() if v is not None}


@dataclass(frozen=True)
class Options:
    """The options of a tune. Everything here is part of the run's identity except the budget."""

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
    aa_measurements: int = 2
    block: int = 4
    patience: int = 24
    policy: MeasurementPolicy = field(default_factory=MeasurementPolicy)
    kernels: bool = False
    weights: Mapping[str, float] = field(default_factory=dict)  # of the metrics; default: all alike
    check: bool = True
    pareto: bool = False  # leave time to confirm what needs less memory
    objective: str = SPEED
    """SPEED: tokens per second; ENERGY: tokens per joule; MEMORY: the least bytes that cost no speed."""
    apart: bool = True  # the engine switches settings between two calls: see `measure.paired_rounds`
    routing: bool = False  # measure how the router spreads the workload

    def __post_init__(self) -> None:
        if self.objective == MEMORY:  # the least memory is one end of that front
            object.__setattr__(self, "pareto", True)
        energy = DECIDES if self.objective == ENERGY else BESIDE if self.pareto else None
        if self.policy.energy != energy:
            object.__setattr__(self, "policy", dataclasses.replace(self.policy, energy=energy))

    def metric_weights(self) -> dict[str, float]:
        own = self.workload.weights
        return {m: float(self.weights.get(m, own[m])) for m in self.workload.metrics}
