"""The plots as plain Plotly figures. A colour is the name of a CSS variable of the page (`--tuned`), so that
the script can draw them light and dark. All texts are escaped, because Plotly interprets markup."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

from ...core.protocol import changed_text
from .analyse import curves, median_rate, voids
from .read import SECOND

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ...core.intervals import Estimate
    from .analyse import Depths, Effect, Paired, Tried
    from .read import Run

Figure = dict[str, Any]


def plain(text: object, limit: int = 160) -> str:
    """A text for Plotly, without markup and control characters, and not too long."""
    kept = "".join(c if c.isprintable() else " " for c in str(text))
    return html.escape(kept if len(kept) <= limit else kept[: limit - 1] + "…")


def _figure(
    data: list[Figure], x: Mapping[str, Any], y: Mapping[str, Any], height: int, **layout: Any
) -> Figure:
    return {
        "data": data,
        "layout": {
            "xaxis": {"automargin": True, **x},
            "yaxis": {"automargin": True, **y},
            "height": height,
            "margin": {"l": 8, "r": 12, "t": 8, "b": 8},
            "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
            **layout,
        },
    }


def forest(rows: Sequence[tuple[str, Estimate]], margin: float | None) -> Figure:
    """Ratios to the default with their 95 % intervals, the first row on top."""
    estimates = [e for _, e in rows]
    trace = {
        "type": "scatter",
        "mode": "markers",
        "x": [e.ratio for e in estimates],
        "y": [plain(name, 34) for name, _ in rows],
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [e.high - e.ratio for e in estimates],
            "arrayminus": [e.ratio - e.low for e in estimates],
            "color": "--tuned",
            "thickness": 2,
        },
        "marker": {"color": "--tuned", "size": 10},
        "hovertemplate": "%{y}: %{x:.4f} ×<extra></extra>",
        "showlegend": False,
    }
    line = {"type": "line", "x0": 1, "x1": 1, "y0": 0, "y1": 1, "yref": "paper",
            "line": {"color": "--muted", "width": 1, "dash": "dot"}}  # fmt: skip
    shapes: list[Figure] = [line]
    if margin is not None:
        shapes.append(
            {"type": "rect", "x0": 1 - margin, "x1": 1 + margin, "y0": 0, "y1": 1, "yref": "paper",
             "fillcolor": "--band", "line": {"width": 0}, "layer": "below"}
        )  # fmt: skip
    return _figure(
        [trace],
        {"title": {"text": "ratio to the default"}},
        {"range": [len(rows) - 0.5, -0.5], "type": "category"},
        90 + 34 * len(rows),
        shapes=shapes,
    )


def _hover(run: Run) -> str:
    """The hover text of a value that decides."""
    return f"%{{y:{',.1f' if run.unit == SECOND else '.4~g'}}} {run.unit}"


def samples(run: Run, pair: Paired, metric: str) -> Figure:
    """All samples of the paired rounds, default and tuned."""
    data = [
        {
            "type": "box",
            "y": values[metric],
            "name": name,
            "boxpoints": "all",
            "jitter": 0.5,
            "pointpos": 0,
            "marker": {"color": colour, "size": 4},
            "line": {"color": colour, "width": 1},
            "fillcolor": "rgba(0,0,0,0)",
            "hovertemplate": f"{_hover(run)}<extra></extra>",
            "showlegend": False,
        }
        for name, values, colour in (("default", pair.base, "--default"), ("tuned", pair.rates, "--tuned"))
    ]
    return _figure(data, {}, {"title": {"text": f"{plain(run.named(metric))}, {run.unit}"}}, 280)


def by_ubatch(run: Run, metric: str, chosen: Mapping[str, Any]) -> Figure | None:
    """All measured configurations over the u-batch, the best ones, and the crossing of two paths."""
    found, crossing = curves(run, metric)
    if not any(len(c.points) > 1 for c in found):
        return None
    x: list[float] = []
    y: list[float] = []
    text: list[str] = []
    marks: dict[str, list[tuple[float, float]]] = {"default": [], "chosen": []}
    for seen in run.measurements:
        rate, size = median_rate(seen, metric), seen.settings().get("ubatch")
        if rate is None or isinstance(size, bool | str) or size is None or size <= 0:
            continue
        x.append(size)
        y.append(rate)
        text.append(plain(changed_text(seen.settings(), run.defaults)))
        if seen.settings() == run.defaults:
            marks["default"].append((size, rate))
        elif seen.settings() == dict(chosen):
            marks["chosen"].append((size, rate))
    data: list[Figure] = [
        {"type": "scatter", "mode": "markers", "x": x, "y": y, "text": text, "name": "one measurement",
         "marker": {"color": "--muted", "size": 5, "opacity": 0.55},
         "hovertemplate": f"u-batch %{{x}}: {_hover(run)}<br>%{{text}}<extra></extra>"}
    ]  # fmt: skip
    for curve, colour in zip(found, ("--accent", "--second"), strict=False):
        data.append(
            {"type": "scatter", "mode": "lines", "x": list(curve.points),
             "y": [rate for rate, _ in curve.points.values()], "name": plain(curve.name),
             "text": [plain(s) for _, s in curve.points.values()], "line": {"color": colour, "width": 2},
             "hovertemplate": f"u-batch %{{x}}: {_hover(run)}<br>%{{text}}<extra></extra>"}
        )  # fmt: skip
    for name, colour, symbol in (("default", "--default", "diamond"), ("chosen", "--tuned", "star")):
        if marks[name]:
            rates = sorted(rate for _, rate in marks[name])
            data.append(
                {"type": "scatter", "mode": "markers", "x": [marks[name][0][0]],
                 "y": [rates[len(rates) // 2]], "name": name,
                 "marker": {"color": colour, "size": 13, "symbol": symbol},
                 "hovertemplate": f"{name}, median of its measurements: {_hover(run)}<extra></extra>"}
            )  # fmt: skip
    layout: Figure = {}
    if crossing is not None:
        layout["shapes"] = [_upright(crossing)]
    sizes = sorted(set(x))
    return _figure(
        data,
        {"title": {"text": "u-batch, tokens"}, "type": "log", "tickvals": sizes,
         "ticktext": [f"{s:g}" for s in sizes]},
        {"title": {"text": f"{plain(run.named(metric))}, {run.unit}"}, "rangemode": "tozero"},
        380,
        **layout,
    )  # fmt: skip


def by_depth(run: Run, found: Depths) -> Figure:
    """Default and tuned rates of one length over the depth, and their crossings."""
    data = [
        {"type": "scatter", "mode": "lines+markers", "x": list(rates), "y": list(rates.values()),
         "name": name, "line": {"color": colour, "width": 2},
         "marker": {"color": colour, "size": 9, "symbol": symbol},
         "hovertemplate": f"{name} behind %{{x}}: {_hover(run)}<extra></extra>"}
        for name, rates, colour, symbol in (
            ("default", found.default, "--default", "diamond"), ("tuned", found.tuned, "--tuned", "star"),
        )
        if rates
    ]  # fmt: skip
    return _figure(
        data,
        {"title": {"text": "context before it, tokens"}, "tickvals": list(found.default),
         "ticktext": [str(d) for d in found.default]},
        {"title": {"text": f"{plain(found.name)}, {run.unit}"}, "rangemode": "tozero"},
        320,
        shapes=[_upright(depth) for depth in found.crossings],
    )  # fmt: skip


def _upright(x: float) -> Figure:
    """A vertical line where two curves cross."""
    line = {"color": "--warn", "width": 2, "dash": "dash"}
    return {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "line": line}


def history(run: Run, tried: Sequence[Tried]) -> Figure | None:
    """The trials of the screen over time: good ones, failed ones, measurements of void blocks, and the
    baselines."""
    good = [t for t in tried if t.ratio is not None and t.t is not None]
    failed = [t for t in tried if t.ratio is None]
    if not good and not failed:
        return None
    blocks = voids(run)
    data: list[Figure] = [_baseline_line(run)]
    best: list[float] = []
    for t in sorted(good, key=lambda t: t.t or 0.0):
        best.append(max([*best[-1:], t.ratio or 0.0, 1.0]))
    times = sorted(t.t for t in good if t.t is not None)
    data.append({"type": "scatter", "mode": "lines", "x": times, "y": best, "name": "best so far",
                 "line": {"color": "--tuned", "width": 1, "shape": "hv"}, "hoverinfo": "skip"})  # fmt: skip
    data.append(
        {"type": "scatter", "mode": "markers", "x": [t.t for t in good], "y": [t.ratio for t in good],
         "text": [f"{t.number}: {plain(changed_text(t.settings, run.defaults))}" for t in good],
         "name": "trial",
         "marker": {"color": "--accent", "size": 8},
         "hovertemplate": "%{text}<br>%{y:.3f} ×<extra></extra>"}
    )  # fmt: skip
    if failed:
        low = min([t.ratio or 1.0 for t in good] + [1.0])
        late = {t.number: t.t for t in tried if t.t is not None}
        # A trial that was refused before its measurement has no time, and gets the time of the previous one.
        when = [t.t or max((s for n, s in late.items() if n < t.number), default=0.0) for t in failed]
        data.append(
            {"type": "scatter", "mode": "markers", "x": when, "y": [low * 0.96] * len(failed),
             "text": [f"{t.number} {plain(t.status)}: {plain(changed_text(t.settings, run.defaults))}"
                      for t in failed],
             "name": "failed", "marker": {"color": "--warn", "size": 9, "symbol": "x"},
             "hovertemplate": "%{text}<extra></extra>"}
        )  # fmt: skip
    shapes = [
        {"type": "rect", "x0": b.begin, "x1": b.end, "y0": 0, "y1": 1, "yref": "paper",
         "fillcolor": "--void", "line": {"width": 0}, "layer": "below"}
        for b in blocks
    ]  # fmt: skip
    return _figure(
        data,
        {"title": {"text": "seconds of the run"}},
        {"title": {"text": "ratio to the default"}},
        380,
        shapes=shapes,
    )


def _baseline_line(run: Run) -> Figure:
    """The default over time, relative to its first block, which shows the drift of the machine."""
    metric = run.metrics[0] if run.metrics else ""
    seen = [s for s in run.measurements if s.key.startswith(("aa/p", "screen/b")) and median_rate(s, metric)]
    first = median_rate(seen[0], metric) if seen else None
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "x": [s.t for s in seen],
        "y": [(median_rate(s, metric) or 0.0) / first for s in seen] if first else [],
        "name": f"default, {plain(metric)}",
        "line": {"color": "--default", "width": 1, "dash": "dot"},
        "marker": {"color": "--default", "size": 5},
        "hovertemplate": "default at %{x:.0f} s: %{y:.3f} × its first measurement<extra></extra>",
    }


def importance(found: Sequence[Effect]) -> Figure:
    """The range of the main effect of each knob, the largest on top."""
    trace = {
        "type": "bar",
        "orientation": "h",
        "x": [100 * e.spread for e in found],
        "y": [plain(e.knob, 34) for e in found],
        "text": [f"{100 * e.spread:.1f} %" for e in found],
        "textposition": "auto",
        "marker": {"color": "--accent"},
        "hovertemplate": "%{y}: %{x:.2f} %<extra></extra>",
    }
    return _figure(
        [trace],
        {"title": {"text": "best over worst value, %"}, "rangemode": "tozero"},
        {"autorange": "reversed", "type": "category"},
        90 + 32 * len(found),
    )
