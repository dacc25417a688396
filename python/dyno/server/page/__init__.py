"""The page at `/`: a conversation with the model, with the speed of its answers."""

from __future__ import annotations

from importlib import resources

from starlette.responses import Response
from starlette.routing import Route

__all__ = ["routes"]

_FILES = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
_HEADERS = {
    # The page loads nothing from other hosts, runs no other scripts, and cannot be shown in a frame.
    "Content-Security-Policy": "default-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def routes() -> list[Route]:
    """The files of the page. They need no key, because the page itself asks for it."""

    def route(path: str, name: str, media_type: str) -> Route:
        content = resources.files(__name__).joinpath(name).read_bytes()

        async def file(_: object) -> Response:
            return Response(content, media_type=media_type, headers=_HEADERS)

        return Route(path, file, methods=["GET"])

    return [route(path, name, kind) for path, (name, kind) in _FILES.items()]
