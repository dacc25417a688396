"""The elements of the page: sections, tables and figures. All texts are escaped here."""

from __future__ import annotations

import html
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...core.intervals import Estimate
    from .figures import Figure


@dataclass
class Page:
    """A page under construction: its parts."""

    title: str = "tune report"
    parts: list[str] = field(default_factory=list)
    figures: dict[str, Figure] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)  # facts that this journal lacks

    def plot(self, name: str, figure: Figure) -> str:
        self.figures[name] = figure
        return f'<div class="plot" id="{name}" style="min-height:{figure["layout"]["height"]}px"></div>\n'

    def section(self, title: str, *body: str, kind: str = "") -> None:
        self.parts.append(section(title, *body, kind=kind))


def text(value: object, limit: int = 600) -> str:
    shown = str(value)
    return html.escape(shown if len(shown) <= limit else shown[: limit - 1] + "…")


def section(title: str, *body: str, kind: str = "") -> str:
    mark = f' class="{kind}"' if kind else ""
    return f"<section{mark}>\n<h2>{text(title)}</h2>\n{''.join(body)}</section>\n"


def soft(line: str) -> str:
    return f'<p class="soft">{text(line, 2000)}</p>\n'


TALL = 30  # rows; longer tables scroll


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table. A column whose name begins with `#` has numbers, and one with `~` has long texts."""
    kinds = {"#": ' class="n"', "~": ' class="words"'}
    marks = [kinds.get(c[:1], "") for c in columns]
    head = "".join(f"<th{m}>{text(c.lstrip('#~'))}</th>" for c, m in zip(columns, marks, strict=True))
    lines = [
        "<tr>" + "".join(f"<td{m}>{text(v)}</td>" for v, m in zip(row, marks, strict=True)) + "</tr>\n"
        for row in rows
    ]
    # A short table is shown as a whole, because a scroll bar would hide the last row.
    kind = "scroll tall" if len(rows) > TALL else "scroll"
    return (
        f'<div class="{kind}"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{''.join(lines)}</tbody></table></div>\n"
    )


def ratio_cells(e: Estimate | None) -> list[str]:
    return ["", ""] if e is None else [f"{e.ratio:.4f}", f"{e.low:.4f} … {e.high:.4f}"]
