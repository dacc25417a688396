"""The clock that a benchmark does not keep: how long its processes take for those who wait for them.

llama-bench tells the time of its samples by its own clock only. A process that claims more than its own time
is found out at once. One that claims less can't be by itself, for loading takes time, too, and some settings
(weights that are repacked) load longer. So its time beside the samples is compared with the default's, and
where a gain is missing there, a process with more repetitions has to take as much longer as it claims: both
load the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...core.workload import Workload

CLOCK_SKEW = 0.05  # by which the time of samples may exceed that of their process
_LEAST_SECONDS = 0.5  # that the samples have to be shorter by, for processes to show it
_LEAST_SHARE = 0.2  # and as a share of the default's
_MOST_SECONDS = 60.0  # that more repetitions may take at the default's pace


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim of a process, and how long the process took."""

    samples: dict[str, float]  # seconds of all repetitions, by metric
    wall: float

    @property
    def total(self) -> float:
        return sum(self.samples.values())

    @property
    def beside(self) -> float:
        """Seconds of loading, warming up and ending."""
        return self.wall - self.total

    @property
    def too_long(self) -> bool:
        return self.total > (1 + CLOCK_SKEW) * self.wall


@dataclass
class Walls:
    """The wall times of the default's processes, and of others that were checked."""

    _default: dict[tuple[Workload, str], float] = field(default_factory=dict)  # least seconds of samples
    _beside: dict[Workload, float] = field(default_factory=dict)  # least of the default
    _believed: dict[Workload, float] = field(default_factory=dict)  # most of those that were checked

    def learn(self, workload: Workload, claim: Claim) -> None:
        """Takes in a process of the default."""
        for metric, seconds in claim.samples.items():
            key = workload, metric
            self._default[key] = min(seconds, self._default.get(key, seconds))
        self._beside[workload] = min(claim.beside, self._beside.get(workload, claim.beside))

    def believe(self, workload: Workload, claim: Claim) -> None:
        """Takes in a process whose gain is real, though it takes longer beside its samples."""
        self._believed[workload] = max(claim.beside, self._believed.get(workload, claim.beside))

    def doubt(self, workload: Workload, claim: Claim, repetitions: int) -> int:
        """How many more repetitions would show whether a claim is true; 0 where there is no doubt, or no
        way to tell."""
        default = self._of_default(workload, claim)
        if default is None or workload not in self._beside:
            return 0
        shorter = default - claim.total
        if shorter < max(_LEAST_SECONDS, _LEAST_SHARE * default):
            return 0
        allowed = max(self._beside[workload], self._believed.get(workload, 0.0)) + shorter / 2
        if claim.beside <= allowed:
            return 0
        # Half of what is to be seen is well above the noise of loading.
        wanted = max(2 * _LEAST_SECONDS, self._beside[workload] / 2) / (shorter / default)
        return math.ceil(min(_MOST_SECONDS, wanted) * repetitions / default)

    def untrue(self, workload: Workload, claim: Claim, longer: Claim, times: float) -> str:
        """Why a claim is not believed; "" where it is.

        Args:
            longer: of a process of the same configuration with more repetitions.
            times: how many more, as a share of the repetitions of `claim`.
        """
        default = self._of_default(workload, claim)
        if default is None:
            return ""
        took, claimed = longer.wall - claim.wall, longer.total - claim.total
        if took <= (times * default + claimed) / 2:
            return ""
        return (
            f"llama-bench claims {claimed:.2f} s for more repetitions that took {took:.2f} s "
            f"(the default: {times * default:.2f} s)"
        )

    def _of_default(self, workload: Workload, claim: Claim) -> float | None:
        seconds = [self._default.get((workload, metric)) for metric in claim.samples]
        known = [s for s in seconds if s is not None]
        return sum(known) if known and len(known) == len(seconds) else None
