"""The first points of a search: random ones, and none of what physics expects to be slow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from conftest_tuner import Simulated
from dyno_tuner.core.protocol import Workload
from dyno_tuner.search.observation import Observation
from dyno_tuner.search.proposers import GuidedProposer
from dyno_tuner.space.knobs import Facts, resolve
from dyno_tuner.space.search_space import Space

FIRST = 3  # points that cover before a model chooses


def _space(cores: int, pp: int = 2048) -> Space:
    """Of dyno on a CPU."""
    facts = Facts(
        device={"kind": "cpu", "cores": cores}, model={"experts": 0}, workload=Workload(pp=pp, tg=64),
        defaults={"ubatch": 512, "threads": cores, "threads_batch": cores, "cpu_repack": True},
    )  # fmt: skip
    return Space(resolve(facts, approx=False))


def _proposed(
    space: Space, seed: int, score: float | None = -0.1, *, whole: bool = False
) -> list[dict[str, Any]]:
    """The settings that the first points change."""
    proposer = GuidedProposer(space, whole=whole)
    history = [Observation(space.default, 0.0)]
    for number in range(FIRST):
        point = proposer.propose(history, (seed, "screen", number + 1))
        assert point is not None
        history.append(Observation(point, score))
    defaults = space.settings(space.default)
    return [{k: v for k, v in space.settings(o.point).items() if v != defaults[k]} for o in history[1:]]


@pytest.mark.parametrize("cores", [16, 64])
@pytest.mark.parametrize("seed", range(5))
def test_first_points_hold_nothing_that_should_be_slow(cores: int, seed: int) -> None:
    first = _proposed(_space(cores), seed)
    for changed in first:
        assert changed.get("ubatch", 512) >= 512
        assert 2 * changed.get("threads", cores) >= cores
        assert 2 * changed.get("threads_batch", cores) >= cores
        assert changed.get("cpu_repack", True)
    assert max(len(changed) for changed in first) > 1, "they stay random: pairs of settings gain together"


@pytest.mark.parametrize("seed", range(5))
def test_if_everything_should_be_slow_one_setting_changes_by_one_step(seed: int) -> None:
    """Two cores and a prompt of one u-batch. A search once began with `ubatch=32 threads=1 threads_batch=1
    cpu_repack=False`, 25 s until it was killed, and later with `cpu_repack=False` alone, a third as fast."""
    steps = ({"ubatch": 256}, {"threads": 1}, {"threads_batch": 1})
    first = _proposed(_space(2, pp=512), seed)
    assert all(changed in steps for changed in first), first
    assert len({str(changed) for changed in first}) == FIRST


def test_a_space_too_large_to_list_is_covered_as_well() -> None:
    space = _space(64)
    knobs = [replace(k, name=f"{k.name}{n}") if n else k for k in space.knobs for n in range(3)]
    large = Space(knobs)
    assert not large.enumerable()
    names = ("ubatch", "threads", "threads_batch", "cpu_repack")
    slow = [
        changed
        for seed in range(5)
        for changed in _proposed(large, seed)
        if changed.get("ubatch", 512) < 512
        or any(n in changed and changed[n] in (1, 2, False) for n in names)
    ]
    assert slow == []


@pytest.mark.parametrize("seed", range(3))
def test_if_a_point_failed_what_should_be_slow_counts_again(seed: int) -> None:
    """A wall, as of memory: away from it lie small u-batches."""
    first = _proposed(_space(16), seed, score=None)
    assert any(changed.get("ubatch", 512) < 512 or changed.get("threads", 16) < 8 for changed in first[1:])


@pytest.mark.parametrize("seed", range(3))
def test_a_search_for_less_memory_covers_small_ubatches(seed: int) -> None:
    first = _proposed(_space(16), seed, whole=True)
    assert any(changed.get("ubatch", 512) < 512 for changed in first)
    run = Simulated("saturating", seed, max_trials=4, pareto=True)
    plain = Simulated("saturating", seed, max_trials=4)
    least = [min(int(r.space.settings(t.point)["ubatch"]) for t in r.tune.trials) for r in (run, plain)]
    assert least[0] < 512 <= least[1]
