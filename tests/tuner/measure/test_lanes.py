"""Lanes of the benchmarks: two cores each, and no core in two of them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def lanes() -> Any:
    spec = importlib.util.spec_from_file_location("lanes", ROOT / "benchmarks" / "lanes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["lanes"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("text", "cpus"), [("0\n", [0]), ("0-2,8\n", [0, 1, 2, 8]), ("3,19", [3, 19])])
def test_a_list_of_cpus(lanes: Any, text: str, cpus: list[int]) -> None:
    assert lanes.parse_list(text) == cpus


@pytest.mark.parametrize(
    ("told", "stride", "found"),
    [
        ({0: [0, 1], 1: [0, 1], 2: [2, 3], 3: [2, 3], 4: [4, 5], 5: [4, 5], 6: [6, 7], 7: [6, 7]}, None,
         [[0, 2], [4, 6]]),
        ({n: sorted((n, (n + 4) % 8)) for n in range(8)}, None, [[0, 1], [2, 3]]),
        ({}, 1, [[0, 2], [4, 6]]),  # a virtual machine that tells nothing
        ({}, 4, [[0, 1], [2, 3]]),
        ({}, None, [[0, 1], [2, 3], [4, 5], [6, 7]]),
    ],
)  # fmt: skip
def test_no_core_is_in_two_lanes(
    lanes: Any, told: dict[int, list[int]], stride: int | None, found: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(lanes, "told_siblings", lambda cpu: told.get(cpu, [cpu]))
    monkeypatch.setattr(lanes, "measured_stride", lambda cpus: stride)
    assert lanes.of_two(lanes.cores(range(8)), 8) == found


def test_a_quota_limits_the_lanes(lanes: Any) -> None:
    assert lanes.of_two([[n] for n in range(8)], 5) == [[0, 1], [2, 3]]
    assert lanes.of_two([[0]], 1) == []


@pytest.mark.parametrize(("sibling", "stride"), [(1, 1), (4, 4), (2, None), (None, None)])
def test_a_busy_sibling_is_noticed(
    lanes: Any, sibling: int | None, stride: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another CPU that slows the first one down by chance is not taken for its sibling."""
    burning: list[int] = []

    class Busy:
        def __init__(self, program: str, cpus: list[int]) -> None:
            self._cpus = cpus

        def __enter__(self) -> None:
            burning.extend(self._cpus)

        def __exit__(self, *error: object) -> None:
            burning.clear()

    monkeypatch.setattr(lanes, "busy", Busy)
    monkeypatch.setattr(lanes, "START_SECONDS", 0)
    monkeypatch.setattr(lanes, "_rate", lambda cpu: 60 if sibling in burning else 100)
    assert lanes.measured_stride(range(8)) == stride
