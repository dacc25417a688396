"""The first points of a search: random ones, and none of what physics expects to be slow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from conftest_tuner import Simulated
from dyno_tuner.core.protocol import Workload
from dyno_tuner.search.observation import Observation
from dyno_tuner.search.proposers import GuidedProposer
from dyno_tuner.search.starting_points import leads
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


def _latent_space(cache: str = "f32", *, latent: bool = True, approx: bool = True) -> Space:
    """Of dyno with a mixture of experts on a GPU."""
    facts = Facts(
        device={"kind": "cuda", "cores": 16}, model={"experts": 64, "latent_cache": latent},
        workload=Workload(pp=4096, tg=64),
        defaults={
            "numerics": "default", "ubatch": 1024, "kv_type_k": cache, "kv_type_v": cache,
            "flash_attention": True, "mmq_id_max_tokens": 8192, "mmq_max_tokens": 8192,
            "compute_type": "f16", "mla_mode": "auto",
        },
    )  # fmt: skip
    return Space(resolve(facts, approx=approx))


def _changed(space: Space, points: list[Any]) -> list[dict[str, Any]]:
    defaults = space.settings(space.default)
    return [{k: v for k, v in space.settings(p).items() if v != defaults[k]} for p in points]


def test_half_caches_of_latents_are_tried_first() -> None:
    """A tune of deepseek2-lite with five trials once changed the cache with slow settings only. Alone, f16
    makes its prompts 1.5 times as fast."""
    space = _latent_space()
    assert "kv_type_v" not in {k.name for k in space.knobs}, "a latent row is key and value"
    (cache,) = (k for k in space.knobs if k.name == "kv_type_k")
    assert cache.moves == {"pp", "tg"}, "prompts read the cache, too"
    assert _changed(space, leads(space, [], few=False)) == [{"kv_type_k": "f16"}]
    assert _changed(space, leads(space, [], few=True)) == [{"kv_type_k": "f16"}, {"ubatch": 4096}]
    assert leads(space, leads(space, [], few=True), few=False) == []


def test_other_caches_are_not() -> None:
    for space in (_latent_space("f16"), _latent_space("f16", latent=False), _latent_space(approx=False)):
        assert leads(space, [], few=False) == []
        assert _changed(space, leads(space, [], few=True)) == [{"ubatch": 4096}]
    values = _latent_space("f32", latent=False)  # numerics: exact
    assert _changed(values, leads(values, [], few=False)) == [{"kv_type_k": "f16", "kv_type_v": "f16"}]


@pytest.mark.parametrize("seed", range(5))
def test_first_points_leave_out_the_reference_and_explicit_modes(seed: int) -> None:
    for changed in _proposed(_latent_space(), seed):
        assert changed.get("compute_type", "f16") != "f32"
        assert "mla_mode" not in changed
