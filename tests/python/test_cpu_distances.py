"""The probe of the distance between CPUs: it always ends, and an answer that it cannot give is unknown."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from dyno import _core, info
from own_process import found_by
from waiting import LONG

BURN = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nprint(flush=True)\nwhile True: pass"


def probed(cpus: set[int] | None = None) -> dict[str, Any]:
    """The answer in a thread that may use these CPUs."""
    found: list[dict[str, Any]] = []

    def ask() -> None:
        if cpus is not None:
            os.sched_setaffinity(0, cpus)
        allowed = os.sched_getaffinity(0)
        found.append(_core.cpu_distances())
        assert os.sched_getaffinity(0) == allowed

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(LONG)
    assert found, "the probe does not end, or changes the affinity of its caller"
    return found[0]


def check(found: dict[str, Any], cpus: set[int]) -> None:
    """An answer is whole, or unknown with a reason."""
    if found["unknown"]:
        assert (found["pairs"], found["median_ns"], found["farthest_ns"]) == (0, 0.0, 0.0)
        return
    pairs = _core.ring_of_pairs(sorted(cpus), 16)
    assert found["pairs"] == len(pairs)
    assert found["farthest"] in pairs
    assert 0 < found["median_ns"] <= found["farthest_ns"]


def test_the_answer_names_the_farthest_pair_of_the_cpus_of_the_caller() -> None:
    cpus = os.sched_getaffinity(0)
    for _ in range(20):  # a busy machine gives few answers
        check(probed(), cpus)


def test_one_cpu_has_no_distance() -> None:
    for cpu in os.sched_getaffinity(0):
        found = probed({cpu})
        assert found["pairs"] == 0
        assert "fewer than two CPUs" in found["unknown"]


def test_it_ends_beside_busy_processes() -> None:
    cpus = os.sched_getaffinity(0)
    burning = [
        subprocess.Popen([sys.executable, "-c", BURN, str(cpu)], stdout=subprocess.PIPE) for cpu in cpus
    ]
    try:
        for process in burning:
            assert process.stdout is not None
            process.stdout.readline()
        for _ in range(5):
            check(probed(), cpus)
    finally:
        for process in burning:
            process.kill()
            process.communicate()


def test_a_system_that_refuses_to_bind_threads_makes_it_unknown() -> None:
    found, _ = found_by(Path(__file__).parent / "refused_pinning.py")
    if not found["filtered"]:
        pytest.skip("the system takes no filter of calls")
    if found["cpus"] < 2:
        pytest.skip("one CPU has no distance")
    assert found["distances"]["pairs"] == 0
    assert "does not let a thread run on cpu" in found["distances"]["unknown"]
    assert "Operation not permitted" in found["distances"]["unknown"]


@pytest.mark.parametrize(
    ("cpus", "pairs"),
    [
        ([], []),
        ([3], []),
        ([0, 1], [(0, 1)]),
        ([1, 4, 6], [(1, 4), (4, 6), (6, 1)]),
        (list(range(5)), [(0, 1), (1, 2), (3, 4)]),
        (list(range(8)), [(0, 1), (2, 3), (5, 6)]),
    ],
)
def test_pairs_are_neighbours_evenly_spread(cpus: list[int], pairs: list[tuple[int, int]]) -> None:
    assert _core.ring_of_pairs(cpus, 3) == pairs


@pytest.mark.parametrize("cpus", [16, 17, 64, 192, 1000])
def test_many_cpus_cost_as_much_as_sixteen(cpus: int) -> None:
    pairs = _core.ring_of_pairs(list(range(cpus)), 16)
    assert len(set(pairs)) == 16
    gaps = [b - a for (a, _), (b, _) in itertools.pairwise(pairs)]
    assert max(gaps) - min(gaps) <= 1
    assert _core.ring_of_pairs(list(range(cpus)), -1) == []


NEAR = {"pairs": 1, "median_ns": 110.4, "farthest_ns": 110.4, "farthest": (0, 1), "unknown": ""}


@pytest.mark.parametrize(
    ("found", "affinity", "line"),
    [
        (NEAR, 2, "    between CPUs: 110 ns for a cache line, there and back"),
        (
            {**NEAR, "pairs": 4, "farthest_ns": 540.0, "farthest": (3, 4)},
            5,
            "    between CPUs: 110 ns for a cache line, there and back, farthest 540 ns (cpu3, cpu4)",
        ),
        (
            {**NEAR, "pairs": 0, "unknown": "the threads got no time"},
            2,
            "    between CPUs: unknown (the threads got no time)",
        ),
        ({**NEAR, "pairs": 0, "unknown": "this process may use fewer than two CPUs"}, 1, None),
    ],
)
def test_info_shows_the_distance(found: dict[str, Any], affinity: int, line: str | None) -> None:
    facts = info.collect("cpu")
    assert set(facts["cpu_distances"]) == set(NEAR)
    facts |= {"cpu_distances": found, "limits": {**facts["limits"], "affinity": affinity}}
    lines = info.text(facts).splitlines()
    assert (line in lines) if line else "between CPUs" not in info.text(facts)
