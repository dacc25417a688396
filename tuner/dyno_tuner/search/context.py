"""The protocol of the context of a run for the search, with the time for trials and results of several
devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ..record.context import Context

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..core.options import MeasurementPolicy
    from ..core.protocol import Measurement
    from .observation import Trial


class SearchContext(Context, Protocol):
    """A context that also decides how long the search continues."""

    def baseline(self, key: str) -> Measurement:
        """A measurement of the default in the running process. Raises TuneError if it does not run."""
        ...

    def policy_for(self, *, baseline: bool) -> MeasurementPolicy:
        """The policy for measuring a baseline or a candidate."""
        ...

    def goes_on(self, now: float, measurements: int, trials: Sequence[Trial]) -> bool:
        """Whether the search has time for this many more measurements, by the clock of a device."""
        ...

    def joined(self, process: int, costs: Sequence[float], unstable: int) -> None:
        """Take over the results of joint work of several devices: the process with which the first one
        continues, the seconds of their baselines, and the number of unstable measurements."""
        ...
