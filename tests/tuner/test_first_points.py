"""The first points of a search: one change at a time, and none of what physics says is slower."""

from __future__ import annotations

from typing import Any

import pytest
from conftest_tuner import Simulated
from dyno_tuner.first import single_changes
from dyno_tuner.knobs import Facts, resolve
from dyno_tuner.samplers import GuidedProposer, Observation
from dyno_tuner.space import Point, Space
from dyno_tuner.target import Workload

DEFAULTS = {"ubatch": 512, "threads": 16, "threads_batch": 16, "cpu_repack": True}


def _space(cores: int, experts: int = 0, pp: int = 2048) -> Space:
    """Of dyno on a CPU."""
    facts = Facts(
        device={"kind": "cpu", "cores": cores}, model={"experts": experts}, workload=Workload(pp=pp, tg=64),
        defaults={**DEFAULTS, "threads": cores, "threads_batch": cores},
    )  # fmt: skip
    return Space(resolve(facts, approx=False))


def _proposed(space: Space, seed: int, count: int) -> list[dict[str, Any]]:
    """What a search proposes where nothing gains."""
    proposer = GuidedProposer(space)
    history = [Observation(space.default, 0.0)]
    for number in range(count):
        point = proposer.propose(history, (seed, "screen", number + 1))
        assert point is not None
        history.append(Observation(point, -0.1))
    return [_changes(space, o.point) for o in history[1:]]


def _changes(space: Space, point: Point) -> dict[str, Any]:
    settings, defaults = space.settings(point), space.settings(space.default)
    return {k: v for k, v in settings.items() if v != defaults[k]}


@pytest.mark.parametrize("cores", [2, 16])
@pytest.mark.parametrize("seed", range(4))
def test_the_first_five_points_are_changes_of_one_setting(cores: int, seed: int) -> None:
    assert all(len(changed) == 1 for changed in _proposed(_space(cores), seed, 5))


@pytest.mark.parametrize("seed", range(4))
def test_nothing_that_should_be_slower_comes_first(seed: int) -> None:
    first = _proposed(_space(16), seed, 5)
    assert first[0] == {"ubatch": 2048}
    for changed in first:
        assert changed.get("ubatch", 512) > 512 or "ubatch" not in changed
        assert changed.get("threads", 16) >= 8
        assert changed.get("threads_batch", 16) >= 8
        assert changed.get("cpu_repack", True)


def test_one_thread_tiny_ubatches_and_unpacked_weights_come_last() -> None:
    space = _space(16)
    order = [_changes(space, p) for p in single_changes(space)]
    late = [{"threads": 1}, {"threads_batch": 1}, {"cpu_repack": False}, {"ubatch": 32}]
    for changed in late:
        assert order.index(changed) > order.index({"ubatch": 1024})
        assert order.index(changed) > order.index({"threads": 12})
    assert order.index({"ubatch": 32}) > order.index({"ubatch": 256})


@pytest.mark.parametrize("seed", range(3))
def test_a_tune_tries_single_changes_first(seed: int) -> None:
    run = Simulated("saturating", seed, max_trials=6)
    defaults = run.space.settings(run.space.default)
    for trial in run.tune.trials[1:6]:
        settings = run.space.settings(trial.point)
        assert sum(settings[k] != defaults[k] for k in settings) == 1
