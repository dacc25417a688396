"""The settings of a server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dyno.chat import ChatTemplate
    from dyno.scheduler import Speculation

__all__ = ["KEEP_ALIVE_S", "Options"]

KEEP_ALIVE_S = 75
"""Seconds that an idle connection stays open. Clients close theirs after fewer: a server that did so first
might close one that a client has just taken again."""


@dataclass(frozen=True)
class Options:
    """The settings of a server."""

    model: str = "model"
    """The name of the model in responses."""
    api_key: str | None = None
    """Requests have to carry it as a bearer token or in `x-api-key`; None: no key. /health and /ready need
    none."""
    max_waiting: int = 64
    """Requests that may wait for a sequence."""
    step_tokens: int | None = None
    """As of `Scheduler`."""
    speculation: Speculation | None = None
    """As of `Scheduler`."""
    max_body_bytes: int = 8 << 20
    timeout_s: float | None = None
    """Seconds after which a request ends, done or not; None: never. A request may ask for less."""
    template: ChatTemplate | None = None
    """The chat template; None takes the model's."""
