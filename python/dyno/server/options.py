"""The settings of a server."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dyno.errors import PlanError
from dyno.server.hosts import host_name

if TYPE_CHECKING:
    from dyno.chat import ChatTemplate
    from dyno.scheduler import Speculation

__all__ = ["KEEP_ALIVE_S", "Options"]

_ORIGIN = re.compile(
    r"[a-z][a-z0-9+.-]*://"
    r"(\[[0-9a-f:.]+\]|((?![/?#@:*\\\[\]%<>^|])[!-~])+)"  # an address of IPv6, or a name
    r"(:[1-9][0-9]{0,4})?"
)
_USUAL_PORTS = {"http": ":80", "https": ":443"}
"""Default ports by scheme, which browsers leave out."""

KEEP_ALIVE_S = 75
"""Seconds that an idle connection stays open. Clients close idle connections earlier. If the server were
first, it might close one that a client is about to reuse."""


@dataclass(frozen=True)
class Options:
    """The settings of a server.

    Raises:
        PlanError: The key is empty or blank, so that every request would carry it; or a browser sends no
            such origin or name of a host.
    """

    model: str = "model"
    """The name of the model in responses."""
    api_key: str | None = None
    """Requests have to carry it as a bearer token or in `x-api-key`; None: no key. /health and /ready need
    none. Blanks around it do not count."""
    max_waiting: int = 64
    """Maximum number of requests that wait for a sequence."""
    step_tokens: int | None = None
    """As of `Scheduler`."""
    speculation: Speculation | None = None
    """As of `Scheduler`."""
    max_body_bytes: int = 8 << 20
    body_timeout_s: float | None = 60.0
    """Seconds within which the whole body of a request must arrive; None: no limit."""
    strict_fields: bool = False
    """Whether to refuse requests with unknown fields, instead of ignoring the fields."""
    listens: str | None = None
    """The address on which the server listens, if requests without a key may address it only by this or a
    loopback name, or a name of `allowed_hosts`; None: by any name."""
    allowed_hosts: tuple[str, ...] = ()
    """Further names of the server; `*`: any."""
    cors_origins: tuple[str, ...] = ()
    """Pages of these origins may send requests from a browser; `*`: of any."""
    timeout_s: float | None = None
    """Seconds after which a request ends, even if it is incomplete; None: never. A request may set a shorter
    limit."""
    template: ChatTemplate | None = None
    """The chat template; None: the one of the model."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "allowed_hosts", tuple(map(host_name, self.allowed_hosts)))
        object.__setattr__(self, "cors_origins", tuple(map(_origin, self.cors_origins)))
        if self.api_key is None:
            return
        key = self.api_key.strip()
        if not key:
            raise PlanError(
                f"[server] api_key is {self.api_key!r}; give a key, or None for a server without one"
            )
        object.__setattr__(self, "api_key", key)


def _origin(given: str) -> str:
    """An origin in the form that browsers send."""
    origin = given.strip().removesuffix("/").lower()
    if origin not in ("*", "null") and not _ORIGIN.fullmatch(origin):
        raise PlanError(
            f"[server] {given!r:.80} is not an origin; give SCHEME://HOST or SCHEME://HOST:PORT without a "
            "path, such as https://chat.example, or * alone for any page. A name must not contain *. A "
            "name with letters beyond ASCII begins with xn--, as browsers show it in the header Origin"
        )
    return origin.removesuffix(_USUAL_PORTS.get(origin.partition("://")[0], ""))
