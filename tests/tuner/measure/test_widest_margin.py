"""A margin over 10 % proves nothing: no entry is written with it, and `verify` keeps none."""

from __future__ import annotations

import math

import pytest
from dyno_tuner.measure.comparison import Comparison
from dyno_tuner.measure.paired_rounds import WIDEST_MARGIN, Bar

WEIGHTS = {"pp": 1.0, "tg": 1.0}


def fifteen_times() -> Comparison:
    """Rounds that all show a gain of about 15 in both metrics."""
    logs = [[math.log(15.0)], [math.log(15.1)], [math.log(14.9)]]
    found = Comparison(["default", "tuned"], rounds=3)
    found.logs = {"tuned": {"pp": logs, "tg": logs}}
    return found


@pytest.mark.parametrize(
    ("margin", "moves", "beats"),
    [
        ({"pp": 0.02, "tg": 0.02}, ["pp"], True),
        ({"pp": WIDEST_MARGIN, "tg": 2.31}, ["pp"], True),  # the entry does not move tg
        ({"pp": 0.11, "tg": 0.02}, ["pp"], False),
        ({"pp": 2.31, "tg": 2.31}, ["pp", "tg"], False),
    ],
)
def test_no_gain_beats_a_margin_over_ten_percent(
    margin: dict[str, float], moves: list[str], beats: bool
) -> None:
    found, gain = Bar(margin).beats(fifteen_times(), "tuned", moves, WEIGHTS)
    assert gain.ratio == pytest.approx(15, rel=0.01)
    assert found is beats
