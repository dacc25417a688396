"""The check of latency limits of a served load."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.errors import TargetFailure
from ..core.protocol import TrialStatus

if TYPE_CHECKING:
    from ..core.serve_load import ServedLoad
    from .served_load import Figures

__all__ = ["check_limits"]


def check_limits(load: ServedLoad, found: Figures) -> None:
    """Check the latencies against the limits.

    Raises:
        TargetFailure: A latency exceeds its limit (`invalid`). Such settings are not acceptable, whatever
            their throughput.
    """
    for name, seconds, limit in (
        ("time to first token", found.ttft_p95, load.ttft),
        ("time between tokens", found.itl_p95, load.itl),
    ):
        if limit is not None and seconds > limit:
            raise TargetFailure(
                TrialStatus.INVALID,
                f"{name}: {seconds:.3g} s at the 95th percentile, the limit is {limit:g} s",
            )
