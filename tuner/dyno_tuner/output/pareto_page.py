"""The page of `--pareto`: a comparison of speed, energy and memory of the profiles."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from ..core.protocol import settings_text
from ..decide.pareto import plot
from ..space.memory_limits import gib

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..core.intervals import Estimate
    from ..core.workload import Workload
    from ..decide.pareto import Variant

_STYLE = (
    "body{font:14px system-ui,sans-serif;margin:2em;color-scheme:light dark}table{border-collapse:collapse}"
    "th,td{padding:.3em .8em;text-align:right;border-bottom:1px solid #8884}th:first-child,td:first-child,"
    "td.s{text-align:left}svg{max-width:640px;display:block}.p{fill:#1668b8}"
)


def pareto_page(variants: Sequence[Variant], title: str, workload: Workload) -> str:
    """A self-contained HTML page with a table of all variants, and plots over planned memory.

    Ratios are relative to the default, of the deciding value. Energy is shown if it was counted.

    Args:
        variants: The variants of one comparison; at least one.
        title: Device and model.
    """
    metrics = list(variants[0].tuned)
    head = ["profile", "memory"]
    for metric in metrics:
        name = workload.label(metric)
        head += [f"{name} ratio", f"{name} t/s", f"{name} J/token", f"{name} W"]
    rows = [_row(v, metrics) for v in variants]
    parts = [
        f"<h1>{escape(title)}</h1>",
        _table([*head, "settings"], rows),
        "<h2>Speed ratio to the default, by memory</h2>", plot(variants, title),
    ]  # fmt: skip
    counted = [v for v in variants if all(m in v.joules for m in metrics)]
    if counted:
        parts += [f"<h2>Energy of {escape(workload.label(m))}by memory</h2>" + _energy(counted, m)
                  for m in metrics]  # fmt: skip
    else:
        parts.append("<p>No energy counter could be read, so J/token and W are missing.</p>")
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Speed, energy and memory</title>'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\">"
        f"<style>{_STYLE}</style>\n" + "\n".join(parts) + "\n</html>\n"
    )


def _row(variant: Variant, metrics: Sequence[str]) -> list[str]:
    cells = [variant.name, gib(variant.size)]
    for metric in metrics:
        joules, rate = variant.joules.get(metric), variant.tuned.get(metric, 0.0)
        cells += [
            _ratio(variant.gain.get(metric)), f"{rate:,.1f}",
            "" if joules is None else f"{joules:.3g}",
            "" if joules is None else f"{joules * rate:.1f}",
        ]  # fmt: skip
    return [*cells, settings_text(variant.settings)]


def _ratio(gain: Estimate | None) -> str:
    return "" if gain is None else f"{gain.ratio:.3f} [{gain.low:.3f}, {gain.high:.3f}]"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    titles = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = [
        "<tr>"
        + "".join(f"<td>{escape(c)}</td>" for c in row[:-1])
        + f'<td class="s">{escape(row[-1])}</td></tr>'
        for row in rows
    ]
    return f"<table><tr>{titles}</tr>\n" + "\n".join(lines) + "</table>"


def _energy(variants: Sequence[Variant], metric: str) -> str:
    """Bars of joules per token for the variants, from the largest memory to the smallest."""
    most = max(v.joules[metric] for v in variants)
    wide, high = 360, 26
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 {high * len(variants)}" width="640">',
        "<style>text{font:12px system-ui,sans-serif}"
        "@media(prefers-color-scheme:dark){text{fill:#ddd}}</style>",
    ]
    for n, v in enumerate(variants):
        joules, y = v.joules[metric], high * n
        width = wide * joules / most
        parts.append(f'<rect class="p" x="0" y="{y + 4}" width="{width:.1f}" height="{high - 8}"/>')
        label = f"{v.name}: {joules:.3g} J/token, {gib(v.size)}"
        parts.append(f'<text x="{width + 8:.1f}" y="{y + 17}">{escape(label)}</text>')
    return "\n".join(parts) + "</svg>"
