"""The context of a run as the search sees it: with the time for trials and the results of several devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ..record.context import Context

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..core.options import MeasurementPolicy
    from ..core.protocol import Measurement
    from .observation import Trial


class SearchContext(Context, Protocol):
    """A context that knows how long the search goes on."""

    def baseline(self, key: str) -> Measurement:
        """A measurement of the default in the running process. Raises TuneError if it does not run."""
        ...

    def policy_for(self, *, baseline: bool) -> MeasurementPolicy:
        """How a baseline or a candidate is measured."""
        ...

    def goes_on(self, now: float, measurements: int, trials: Sequence[Trial]) -> bool:
        """Whether the search has time for so many more measurements, by the clock of a device."""
        ...

    def joined(self, process: int, costs: Sequence[float], unstable: int) -> None:
        """Takes over what several devices have learnt together: the process with which the first one goes on,
        the seconds of their baselines, and how many measurements were unstable."""
        ...
