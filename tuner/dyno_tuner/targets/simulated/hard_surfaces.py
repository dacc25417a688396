"""Hard surfaces that mislead a search. The method was not developed on them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ...space.knobs import Fidelity, Knob
from .surfaces import Surface

if TYPE_CHECKING:
    from ...core.protocol import Settings, Value

_PP = frozenset({"pp"})
_TG = frozenset({"tg"})
_SWITCH: tuple[Value, ...] = (False, True)


def crumbs() -> Surface:
    """Six switches that gain 1.2 % each: one alone is below the margin, all together gain 7 %."""
    knobs = tuple(
        Knob(f"switch{i}", _SWITCH, False, ordinal=False, fidelity=Fidelity.ROUNDING) for i in range(6)
    )

    def rates(s: Settings) -> dict[str, float]:
        gain = math.exp(0.012 * sum(bool(s[k.name]) for k in knobs))
        return {"pp": 400.0 * gain, "tg": 30.0 * gain}

    return Surface("crumbs", knobs, rates)


def trade() -> Surface:
    """A gain of 25 % in prefill costs 4 % in generation; a smaller gain costs nothing."""
    knobs = (
        Knob(
            "layout", ("plain", "wide", "packed", "tiled"), "plain", ordinal=False, fidelity=Fidelity.ROUNDING
        ),
        Knob("ubatch", (128, 256, 512, 1024, 2048), 512, moves=_PP, fidelity=Fidelity.ROUNDING),
    )

    def rates(s: Settings) -> dict[str, float]:
        pp = {"plain": 1.0, "wide": 1.25, "packed": 1.1, "tiled": 0.9}[str(s["layout"])]
        tg = {"plain": 1.0, "wide": 0.96, "packed": 1.0, "tiled": 1.03}[str(s["layout"])]
        ubatch = int(s["ubatch"])
        return {"pp": 500 * pp * ubatch / (ubatch + 200), "tg": 30 * tg}

    return Surface("trade", knobs, rates)


def either() -> Surface:
    """Two settings that gain 12 % alone and lose 10 % together."""
    knobs = (
        Knob("prefetch", (0, 1, 2, 4, 8), 0, fidelity=Fidelity.ROUNDING),
        Knob("streams", (1, 2, 3, 4), 1, fidelity=Fidelity.ROUNDING),
        Knob("threads", (2, 4, 6, 8), 8, moves=_TG),
    )

    def rates(s: Settings) -> dict[str, float]:
        a, b = math.log2(1 + int(s["prefetch"])) / math.log2(9), (int(s["streams"]) - 1) / 3
        gain = math.exp(0.115 * (a + b) - 0.35 * a * b)
        return {"pp": 400 * gain, "tg": 30 * gain * (1.0 if int(s["threads"]) >= 6 else 0.9)}

    return Surface("either", knobs, rates)


def needle() -> Surface:
    """432 points: 1 in 48 is 15 % better, and its neighbours do not show it."""
    knobs = (
        Knob("variant", tuple("abcdefgh"), "a", ordinal=False, moves=_PP, fidelity=Fidelity.ROUNDING),
        Knob("stages", (1, 2, 3, 4, 5, 6), 2, moves=_PP, fidelity=Fidelity.ROUNDING),
        Knob("ubatch", tuple(1 << p for p in range(4, 13)), 512, moves=_PP, fidelity=Fidelity.ROUNDING),
    )

    def rates(s: Settings) -> dict[str, float]:
        ubatch = int(s["ubatch"])
        hit = 1.15 if s["variant"] == "f" and s["stages"] == 5 else 1.0
        return {"pp": 500 * hit * ubatch / (ubatch + 150), "tg": 30.0}

    return Surface("needle", knobs, rates, weights={"pp": 1.0})


def harmful() -> Surface:
    """120 points: the default is the best, and all others are 0.5 to 20 % slower."""
    knobs = (
        Knob("ubatch", tuple(1 << p for p in range(6, 12)), 512, moves=_PP, fidelity=Fidelity.ROUNDING),
        Knob("threads", (1, 2, 4, 6, 8), 8, moves=_TG),
        Knob("layout", ("plain", "wide", "packed", "tiled"), "plain", ordinal=False),
    )

    def rates(s: Settings) -> dict[str, float]:
        far = abs(math.log2(int(s["ubatch"]) / 512))
        layout = {"plain": 1.0, "wide": 0.995, "packed": 0.98, "tiled": 0.9}[str(s["layout"])]
        tg = 1 - 0.006 * (8 - int(s["threads"]))
        return {"pp": 500 * layout * (1 - 0.01 * far), "tg": 30 * tg * layout}

    return Surface("harmful", knobs, rates)


HARD = {f.__name__: f for f in (crumbs, trade, either, needle, harmful)}
