"""The plots of the report."""

from __future__ import annotations

from report_text import COLOURS, UBATCHES, Json, load, rate
from svg import bar, line, polyline, svg, text


def prompts_plot(chosen: Json) -> str:
    """Prompts of 4096 tokens by u-batch: one panel a model, one line an engine."""
    data, peers = chosen["data"], chosen["peers"]
    wide, high = 230, 170
    parts = [text(20, 24, "Prompts of 4096 tokens by u-batch, tokens/s", kind="t")]
    for i, model in enumerate(data["models"]):
        left, top = 70 + (i % 3) * (wide + 80), 64 + (i // 3) * (high + 70)
        series = {"dyno": [model["cells"][f"pp4096 ub{u}"]["median"] for u in UBATCHES]}
        for engine in ("llama.cpp", "ik_llama.cpp"):
            of = peers["models"][model["model"]].get(engine, {})
            if all(f"pp4096 ub{u}" in of for u in UBATCHES):
                series[engine] = [of[f"pp4096 ub{u}"] for u in UBATCHES]
        most = max(max(values) for values in series.values())
        parts.append(text(left, top - 8, model["model"]))
        for step in range(5):
            value = most * step / 4
            y = top + high * (1 - step / 4)
            parts += [line(left, y, left + wide, y, "g"), text(left - 6, y + 4, rate(value), "end")]
        for n, ubatch in enumerate(UBATCHES):
            parts.append(text(left + wide * n / (len(UBATCHES) - 1), top + high + 16, str(ubatch), "middle"))
        for engine, values in series.items():
            places = [
                (left + wide * n / (len(UBATCHES) - 1), top + high * (1 - value / most))
                for n, value in enumerate(values)
            ]
            parts.append(polyline(places, COLOURS[engine]))
    bottom = 64 + ((len(data["models"]) + 2) // 3) * (high + 70)
    for i, (engine, colour) in enumerate(COLOURS.items()):
        parts += [bar(70 + i * 160, bottom - 30, 14, 4, colour), text(90 + i * 160, bottom - 24, engine)]
    return svg(1000, bottom, parts)


def tunes_plot() -> str:
    """The gain of the newest tune of each model, as fresh processes found it."""
    newest = {m["model"]: m for m in load("tune_h200.json")["models"]}
    left, step, wide = 210, 44, 480
    most = max(m["bench"][c]["ratio"] for m in newest.values() for c in ("pp4096", "tg64"))
    parts = [
        text(20, 24, "Speed with the tuned profile over the defaults, found by fresh processes", kind="t")
    ]
    for i, (name, model) in enumerate(sorted(newest.items())):
        y = 44 + i * step
        parts.append(text(left - 8, y + 20, name, "end"))
        for n, (cell, colour) in enumerate((("pp4096", COLOURS["dyno"]), ("tg64", COLOURS["llama.cpp"]))):
            ratio = model["bench"][cell]["ratio"]
            parts += [
                bar(left, y + 16 * n, wide * ratio / most, 13, colour),
                text(left + wide * ratio / most + 6, y + 16 * n + 11, f"{cell} {ratio:.3f} ×"),
            ]
    x = left + wide / most
    parts.append(line(x, 38, x, 44 + len(newest) * step, "a"))
    return svg(left + wide + 130, 60 + len(newest) * step, parts)
