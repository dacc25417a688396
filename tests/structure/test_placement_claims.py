"""The claims that benchmarks/placement_links.py prints follow from its rows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import placement_links

    yield placement_links
    for name in ("placement_links", "placement_tuned", "svg"):
        sys.modules.pop(name, None)


def row(predicted: float, seconds: float = 1.0, placement: str = "a") -> dict[str, Any]:
    return {
        "link_gbps": 8, "placement": placement, "metric": "prompt512", "seconds": seconds,
        "one_device_seconds": 1.0, "predicted": predicted,
    }  # fmt: skip


def test_claims_follow_from_the_rows(links: Any) -> None:
    near, far = [row(1.1)] * 9, [row(1.2)]
    assert links.judged({"summary": links.summary(near + far)}) == {
        "predicted_within_15_percent_of_9_in_10": True
    }
    assert not links.judged({"summary": links.summary(near + far * 2)})[
        "predicted_within_15_percent_of_9_in_10"
    ]
    steps = [{"steps_off": 1}, {"steps_off": 0}]
    assert links.judged({"thresholds": steps}) == {"thresholds_within_one_step": True}
    assert links.judged({"thresholds": [*steps, {"steps_off": 2}]}) == {"thresholds_within_one_step": False}
    assert links.judged({"tuned": [{"loss": 0.03}]}) == {"tuned_within_3_percent_of_the_best": True}
    assert links.judged({"tuned": [{"loss": 0.031}]}) == {"tuned_within_3_percent_of_the_best": False}
    assert links.judged({}) == {}


def test_the_placement_that_is_predicted_best_is_held_against_the_best(links: Any) -> None:
    rows = [row(1.0, 1.05, "a"), row(1.1, 1.0, "b")]
    assert links.summary(rows)["prompt512"]["chosen_over_best"] == {"8": 0.05}
