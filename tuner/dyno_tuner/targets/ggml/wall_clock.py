"""A second clock for a benchmark: the wall time of its processes.

llama-bench reports the time of its samples by its own clock only. Samples that take longer than their process
are clearly wrong. Samples that are too short are harder to find: loading takes time, too, and some settings
(repacked weights) load longer. So the time beside the samples is compared with the default's. If it has grown
by the claimed gain, the process runs again with more repetitions. Both runs load the same, so the second must
take longer by the claimed time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...core.workload import Workload

CLOCK_SKEW = 0.05  # share by which samples may exceed the time of their process
_LEAST_SECONDS = 0.5  # smallest gain in seconds that process times can show
_LEAST_SHARE = 0.2  # the same as a share of the default's time
_MOST_SECONDS = 60.0  # limit for additional repetitions at the default's rate


@dataclass(frozen=True, slots=True)
class Claim:
    """The times that a process reports, and its wall time."""

    samples: dict[str, float]  # seconds of all repetitions, by metric
    wall: float

    @property
    def total(self) -> float:
        return sum(self.samples.values())

    @property
    def beside(self) -> float:
        """Seconds of loading, warm-up and exit."""
        return self.wall - self.total

    @property
    def too_long(self) -> bool:
        return self.total > (1 + CLOCK_SKEW) * self.wall


@dataclass
class Walls:
    """The wall times of the default's processes and of other checked ones."""

    _default: dict[tuple[Workload, str], float] = field(default_factory=dict)  # minimum seconds of samples
    _beside: dict[Workload, float] = field(default_factory=dict)  # minimum of the default
    _believed: dict[Workload, float] = field(default_factory=dict)  # maximum of the checked processes

    def learn(self, workload: Workload, claim: Claim) -> None:
        """Add a process of the default."""
        for metric, seconds in claim.samples.items():
            key = workload, metric
            self._default[key] = min(seconds, self._default.get(key, seconds))
        self._beside[workload] = min(claim.beside, self._beside.get(workload, claim.beside))

    def believe(self, workload: Workload, claim: Claim) -> None:
        """Add a process whose gain is real although it takes longer beside its samples."""
        self._believed[workload] = max(claim.beside, self._believed.get(workload, claim.beside))

    def doubt(self, workload: Workload, claim: Claim, repetitions: int) -> int:
        """The number of additional repetitions that would verify a claim; 0 without doubt or without a way to
        tell."""
        default = self._of_default(workload, claim)
        if default is None or workload not in self._beside:
            return 0
        shorter = default - claim.total
        if shorter < max(_LEAST_SECONDS, _LEAST_SHARE * default):
            return 0
        allowed = max(self._beside[workload], self._believed.get(workload, 0.0)) + shorter / 2
        if claim.beside <= allowed:
            return 0
        # Half of the expected difference is well above the noise of loading.
        wanted = max(2 * _LEAST_SECONDS, self._beside[workload] / 2) / (shorter / default)
        return math.ceil(min(_MOST_SECONDS, wanted) * repetitions / default)

    def untrue(self, workload: Workload, claim: Claim, longer: Claim, times: float) -> str:
        """The reason why a claim is rejected; "" if it is accepted.

        Args:
            longer: claim of a process of the same configuration with more repetitions.
            times: the additional repetitions, relative to the repetitions of `claim`.
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
