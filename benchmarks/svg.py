"""The SVG shapes of the benchmarks' plots. No library draws them, so a plot is the same on every machine."""

from __future__ import annotations

from xml.sax.saxutils import escape

STYLE = (
    "<style>text{font:12px system-ui,sans-serif;fill:#333}.t{font-size:15px;font-weight:600}"
    ".g{stroke:#ddd;stroke-width:1}.a{stroke:#555;stroke-width:1}@media(prefers-color-scheme:dark)"
    "{text{fill:#ddd}.g{stroke:#444}.a{stroke:#aaa}}</style>"
)


def svg(width: int, height: int, parts: list[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">'
    return head + STYLE + "".join(parts) + "</svg>\n"


def text(x: float, y: float, words: str, anchor: str = "start", kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def polyline(points: list[tuple[float, float]], colour: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'


def bar(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'
