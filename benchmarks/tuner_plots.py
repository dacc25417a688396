"""Plots of `tuner_statistics.py`, as SVG files that need no library to be read or written."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from svg import bar, line, polyline, svg, text

if TYPE_CHECKING:
    from pathlib import Path

COLOURS = {"guided": "#1668b8", "tpe_raw_means": "#d9822b", "random": "#8a8f98", "coordinate": "#7b53a6"}
LABELS = {
    "guided": "dyno's search", "tpe_raw_means": "Optuna TPE on raw means", "random": "random search",
    "coordinate": "coordinate sweeps",
}  # fmt: skip


def regret_curves(grouped: dict[str, list[dict[str, Any]]]) -> str:
    """For every surface the share of runs whose regret is at most x, by method."""
    found: dict[str, dict[str, list[float]]] = {}
    for key, rows in grouped.items():
        kind, *of = json.loads(key)
        if kind == "search":
            found.setdefault(of[0], {})[of[1]] = sorted(r["regret"] for r in rows)
    wide, high, span = 250, 190, 0.20
    parts = [text(20, 24, "Share of runs within a regret of the optimum", kind="t")]
    for i, (surface, methods) in enumerate(found.items()):
        left, top = 50 + (i % 3) * (wide + 60), 60 + (i // 3) * (high + 70)
        parts.append(text(left, top - 8, surface))
        for share in (0, 0.5, 0.9, 1.0):
            y = top + high * (1 - share)
            parts += [line(left, y, left + wide, y, "g"), text(left - 6, y + 4, f"{share:.0%}", "end")]
        for percent in (0, 5, 10, 15, 20):
            x = left + wide * percent / 100 / span
            parts.append(text(x, top + high + 16, f"{percent} %", "middle"))
        x = left + wide * 0.02 / span
        parts.append(line(x, top, x, top + high, "a"))
        for method, regrets in methods.items():
            points = [(0.0, 0.0)]
            for n, regret in enumerate(regrets, 1):
                if regret > span:
                    break
                points += [(max(0.0, regret), points[-1][1]), (max(0.0, regret), n / len(regrets))]
            points.append((span, points[-1][1]))
            places = [(left + wide * a / span, top + high * (1 - b)) for a, b in points]
            parts.append(polyline(places, COLOURS[method]))
    bottom = 60 + ((len(found) + 2) // 3) * (high + 70)
    for i, (method, label) in enumerate(LABELS.items()):
        x = 50 + i * 210
        parts.append(bar(x, bottom - 30, 14, 4, COLOURS[method]))
        parts.append(text(x + 20, bottom - 24, label))
    return svg(960, bottom, parts)


def bars(title: str, rows: list[tuple[str, float, str]], goal: float | None) -> str:
    """Horizontal bars of shares with the number behind each; a line where the goal is."""
    left, wide, step = 210, 560, 24
    parts = [text(20, 24, title, kind="t")]
    for i, (label, value, number) in enumerate(rows):
        y = 44 + i * step
        parts += [
            text(left - 8, y + 12, label, "end"),
            bar(left, y, wide * value, 16, "#1668b8"),
            text(left + wide * value + 6, y + 12, number),
        ]
    if goal is not None:
        x = left + wide * goal
        parts.append(line(x, 38, x, 44 + len(rows) * step, "a"))
    return svg(left + wide + 160, 60 + len(rows) * step, parts)


def write(report: dict[str, Any], grouped: dict[str, list[dict[str, Any]]], out: Path) -> None:
    """Writes OUT.regret.svg, OUT.repeatability.svg and OUT.thresholds.svg."""
    out.with_suffix(".regret.svg").write_text(regret_curves(grouped))
    agree = [
        (name, row["entries_agree"], f"{row['entries_agree']:.1%} of {row['tunes'] // 2} pairs, "
         f"{row['harmful']} harmful of {row['written']}")
        for name, row in report["tunes"].items()
    ]  # fmt: skip
    title = "Entries on which two fresh tunes agree (goal 95 %)"
    out.with_suffix(".repeatability.svg").write_text(bars(title, agree, 0.95))
    solved = []
    for name, row in report["thresholds"].items():
        solved.append((f"crossing, {name}", row["within_one_step"], f"{row['within_one_step']:.1%}"))
        solved.append((f"tie, {name}", row["ties_called"], f"{row['ties_called']:.1%}"))
    title = "Crossings located to one grid step and ties called ties, in at most 12 measurements"
    out.with_suffix(".thresholds.svg").write_text(bars(title, solved, None))
