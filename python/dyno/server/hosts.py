"""The names by which requests may address a server that needs no key.

A browser lets a page call the address that the page came from. The owner of that name can let it lead to
127.0.0.1 afterwards, and the page reads the answers of a server on the user's own machine. The header Host
still holds the foreign name then, so a server that knows its own names can refuse it.
"""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from dyno.errors import PlanError
from dyno.server.errors import ApiError
from dyno.server.wire import wire_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import ASGIApp, Receive, Scope, Send

__all__ = ["HostCheck", "host_name", "is_loopback"]

_NAME = re.compile(r"(?!-)[a-z0-9_.-]{1,253}")
_HEADER = re.compile(r"(?:\[(?P<address>[^\]]+)\]|(?P<name>[^:\[\]]*))(?::[0-9]*)?")


class HostCheck:
    """An application that answers only requests with a known name in their header Host.

    Args:
        app: Answers these.
        listens: The address or the name of loopback that the server listens on.
        names: Further names, as `host_name` returns them; `*` allows any.
    """

    def __init__(self, app: ASGIApp, listens: str, names: Sequence[str]) -> None:
        self._app, self._names = app, {_canonical(listens.lower()), *names}
        self._alone = is_loopback(listens)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            request = Request(scope)
            wrong = [host for host in request.headers.getlist("host") if not self._knows(host)]
            if wrong:
                await wire_of(request).response(_refused(wrong[0]))(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _knows(self, host: str) -> bool:
        """Whether the server has the name in a header. A request without one comes from no browser."""
        name = _without_port(host)
        if not name or "*" in self._names or name in self._names or is_loopback(name):
            return True
        # An address comes from no name that somebody lets lead here. Loopback alone has no other ones.
        return not self._alone and _address(name) is not None


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address. Other names than localhost may lead anywhere."""
    host = host.lower().removesuffix(".")
    address = _address(host)
    if address is not None:
        return bool(address.is_loopback)
    return host == "localhost" or host.endswith(".localhost")


def host_name(given: str) -> str:
    """A name or an address as `HostCheck` compares it.

    Raises:
        PlanError: No header Host holds such a name.
    """
    name = given.strip().lower().removesuffix(".")
    if name == "*":
        return name
    bare = name.removeprefix("[").removesuffix("]")
    if _address(bare) is not None:
        return _canonical(bare)
    if not _NAME.fullmatch(name):
        raise PlanError(
            f"[server] {given!r:.80} is not the name of a host; give a name without scheme, port and path, "
            "such as chat.example, or * for any. A name with letters beyond ASCII begins with xn--, as "
            "browsers send it"
        )
    return name


def _without_port(host: str) -> str:
    """The name or the address in a header Host; a header of another form stays whole."""
    found = _HEADER.fullmatch(host.strip().lower())
    return host if found is None else _canonical((found["address"] or found["name"]).removesuffix("."))


def _canonical(host: str) -> str:
    """The same text for all spellings of an address; a name stays as it is."""
    address = _address(host)
    return host if address is None else str(address)


def _address(host: str) -> Any:
    """An IP address without its zone, which is no part of a header Host; None for a name.

    An address of IPv4 in the form of IPv6 is one of IPv4.
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0] if ":" in host else host)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _refused(host: str) -> ApiError:
    name = _without_port(host)
    shown = name if _NAME.fullmatch(name) else "NAME"
    return ApiError(
        403,
        f"the header Host is {host!r:.80}, which is no known name of this server; a web page could let a "
        "name of its own lead here. If the name is yours, such as the one of a reverse proxy, start the "
        f"server with --allow-host {shown}, or with --api-key KEY",
        kind="permission_error",
        code="host_not_allowed",
    )
