"""The protocol of the context of a run, which its stages use; `run.context` implements it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from ..measure.paired_rounds import Time

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from ..core.intervals import Noise
    from ..core.options import MeasurementPolicy, Options
    from ..core.protocol import Configuration, Measurement, Quality, TrialStatus, Workload
    from ..measure.paired_rounds import Bar, Rounds
    from ..measure.round_spread import RoundSpread
    from ..space.search_space import Point, Space
    from .recorder import Recorder


class Processes:
    """The number of the running worker process. The process after a dead one has the next number."""

    def __init__(self) -> None:
        self.number = 0

    def next(self) -> int:
        """Begin a new process, and return its number."""
        self.number += 1
        return self.number

    def follow(self, status: TrialStatus, process: int | None = None) -> None:
        """Begin another process if an operation has killed its process, by default the running one."""
        if status.kills:
            self.number = max(self.number, self.number if process is None else process) + 1


class Budget(Time, Protocol):
    """The remaining time of a run."""

    @property
    def measurement_cost(self) -> float:
        """Seconds of a measurement of the default; 0 while unknown."""
        ...

    @property
    def left(self) -> float:
        """Seconds until the stage must end."""
        ...

    def until(self, stage: str) -> None:
        """Give a stage its share of the budget."""
        ...

    def more(self, measurements: int) -> bool:
        """Whether this many more measurements fit into the share of the stage."""
        ...


class Gate(Protocol):
    """The protocol of the quality gate."""

    def admit(self, point: Point) -> tuple[TrialStatus, str] | None: ...
    def admit_fully(self, point: Point) -> tuple[TrialStatus, str] | None: ...
    def why_not(self, configuration: Configuration) -> str: ...
    def undecided(self, configuration: Configuration) -> bool: ...
    def seconds(self, points: Collection[Point]) -> float: ...
    def questions(self, points: Sequence[Point]) -> list[tuple[Point, str, Configuration]]: ...
    def learn(self, point: Point, quality: Quality) -> None: ...
    def of(self, point: Point) -> Quality | None: ...
    @property
    def kernels_cut(self) -> bool: ...


class Context(Protocol):
    """The state that all stages of a run share."""

    @property
    def recorder(self) -> Recorder: ...
    @property
    def space(self) -> Space: ...
    @property
    def options(self) -> Options: ...
    @property
    def weights(self) -> Mapping[str, float]: ...
    @property
    def budget(self) -> Budget: ...
    @property
    def gate(self) -> Gate: ...
    @property
    def processes(self) -> Processes: ...
    @property
    def noise(self) -> Mapping[str, Noise]: ...
    @property
    def sigma(self) -> float:
        """Standard deviation of a measurement within a process, in log units."""
        ...

    @property
    def void_over(self) -> float:
        """The largest allowed change of a baseline within a block."""
        ...

    @property
    def spread(self) -> RoundSpread:
        """The noise that the rounds of this run have shown."""
        ...

    @property
    def short_of_time(self) -> bool:
        """Whether the budget has room for only a few measurements."""
        ...

    def note(self, kind: str, /, **data: Any) -> None: ...

    def measure(self, key: str, configuration: Configuration, metrics: Sequence[str]) -> Measurement:
        """Measure a configuration in the running process."""
        ...

    def glance(
        self, key: str, configuration: Configuration, workload: Workload, policy: MeasurementPolicy,
        baseline: bool,
    ) -> Measurement:  # fmt: skip
        """A short measurement in the running process, with another workload than the run."""
        ...

    def rounds(self) -> Rounds: ...

    def bar(self, rounds: int) -> Bar:
        """The margin after this many rounds."""
        ...

    def round_count(self) -> int:
        """The number of rounds that the noise requires, as far as it is known."""
        ...

    def loading(self, point: Point) -> float:
        """The cost of a measurement in units of a measurement of the default, if the engine loads between
        them."""
        ...

    def proving_rounds(self, least: int, metrics: Sequence[str]) -> int | None:
        """The least number of rounds that can prove a gain in these metrics; None if no number can."""
        ...
