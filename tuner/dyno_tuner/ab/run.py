"""The result of one process of a side, and the protocol of a side."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ..core.protocol import Workload
    from ..measure.machine_monitor import Careful


@dataclass(frozen=True)
class Energy:
    """Energy of one source during the measurement of one metric, including idle power."""

    joules_per_token: float
    watts: float

    @classmethod
    def by_source(
        cls, counted: Mapping[str, Mapping[str, tuple[int, float, float]]]
    ) -> dict[str, dict[str, Energy]]:
        """Energy by metric and source, from tokens, seconds and joules. Sources without a count are left
        out."""
        return {
            metric: {s: cls(joules / tokens, joules / seconds)
                     for s, (tokens, seconds, joules) in by.items() if tokens > 0 and seconds > 0}
            for metric, by in counted.items() if by
        }  # fmt: skip


@dataclass(frozen=True)
class Run:
    """The result of one process: tokens/s by metric, in the order of the prompts, without the cold first
    sample."""

    rates: Mapping[str, tuple[float, ...]]
    host_mib: float | None = None  # largest resident set
    gpu_mib: float | None = None  # peak use of GPU memory above the use before
    energy: Mapping[str, Mapping[str, Energy]] = field(default_factory=dict)  # by metric and source


@dataclass(frozen=True)
class Answers:
    """The distance of a side from the most exact answers of the first side (KLD in nats per token)."""

    mean_kld: float
    max_kld: float
    top1: float  # share of tokens with the same most likely next token
    tokens: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Side(Protocol):
    """The protocol of a side of a comparison. Each call of `run` starts a new process. Methods raise
    TuneError."""

    kind: str  # the engine: dyno, llama.cpp or ik_llama.cpp
    facts: dict[str, Any] = field()  # version and settings, for people and the JSON

    def run(self, workload: Workload) -> Run: ...

    def answers(self, reference: Path, *, first: bool) -> Answers | None:
        """The answers of this side, or their distance from a reference.

        Args:
        reference: Folder in which the first side stores its most exact answers, for the comparison of both.
        first: Whether this is the first side.
        """
        ...

    def close(self) -> None: ...


def watched(key: str, side: Side, workload: Workload, careful: Careful) -> Run:
    """Run one process on a monitored machine. If the GPU was throttled or other programs used the CPUs, it is
    run again.

    Args:
        key: Name of the measurement, for notes.

    Raises:
        DisturbedError: The machine did not become quiet.
    """
    run, seen = careful.measure(key, lambda: side.run(workload), lambda run: True)
    if "gpu" in seen:
        careful.learn(seen["gpu"])
    if "cpu" in seen:
        careful.conditions.add_load(seen["cpu"])
    return run
