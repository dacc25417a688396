"""The context of a run as its stages see it; `run.context` holds the real one."""

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
    """The number of the running worker process. A dead process is followed by one with the next number."""

    def __init__(self) -> None:
        self.number = 0

    def next(self) -> int:
        """Begins a process that has not run yet, and gives its number."""
        self.number += 1
        return self.number

    def follow(self, status: TrialStatus, process: int | None = None) -> None:
        """Begins another process if an operation has killed its own; by default that is the running one."""
        if status.kills:
            self.number = max(self.number, self.number if process is None else process) + 1


class Budget(Time, Protocol):
    """The time that is left."""

    @property
    def measurement_cost(self) -> float:
        """Seconds of a measurement of the default; 0 while unknown."""
        ...

    @property
    def left(self) -> float:
        """Seconds until the stage has to end."""
        ...

    def until(self, stage: str) -> None:
        """Gives a stage its share of the budget."""
        ...

    def more(self, measurements: int) -> bool:
        """Whether so many more measurements fit into the stage's share."""
        ...


class Gate(Protocol):
    """The quality gate: which answers may be measured and written."""

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
    """The state that every stage of a run shares."""

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
        """Standard deviation of a measurement within a process, log units."""
        ...

    @property
    def void_over(self) -> float:
        """By how much a baseline may move within a block."""
        ...

    @property
    def spread(self) -> RoundSpread:
        """The noise that the rounds of this run have shown."""
        ...

    @property
    def short_of_time(self) -> bool:
        """Whether the budget has room for few measurements."""
        ...

    def note(self, kind: str, /, **data: Any) -> None: ...

    def measure(self, key: str, configuration: Configuration, metrics: Sequence[str]) -> Measurement:
        """Measures a configuration in the running process."""
        ...

    def glance(
        self, key: str, configuration: Configuration, workload: Workload, policy: MeasurementPolicy,
        baseline: bool,
    ) -> Measurement:  # fmt: skip
        """A short measurement in the running process, of another workload than the run's."""
        ...

    def rounds(self) -> Rounds: ...

    def bar(self, rounds: int) -> Bar:
        """The margin after so many rounds."""
        ...

    def round_count(self) -> int:
        """Rounds that the noise asks for, as far as it is known."""
        ...

    def loading(self, point: Point) -> float:
        """Times a measurement, that one takes beside the default where the engine loads between them."""
        ...

    def proving_rounds(self, least: int, metrics: Sequence[str]) -> int | None:
        """The fewest rounds that can prove a gain on these metrics; None if none can."""
        ...
