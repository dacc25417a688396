"""Waits for what another thread or process does, however slow the machine is."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

LONG = 120
"""Seconds after which a wait is one for ever."""


def until(condition: Callable[[], object]) -> None:
    """Returns when `condition` holds."""
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end, "waited for ever"
        time.sleep(0.002)
