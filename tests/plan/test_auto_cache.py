"""Automatic placement weighs cached experts against whole layers on the GPU, by the recorded use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from dyno import _core
from hole_model import qwen3moe_hole
from test_cost_overlap import CPU, CPU_RATES, GPU, GPU_RATES

if TYPE_CHECKING:
    from pathlib import Path

LAYERS = 6
RESERVE = 512  # MiB for the runtime
LAYER = 324  # MiB of the experts of one
RATES = {"cpu": CPU_RATES, "cuda:0": GPU_RATES}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen3moe_hole(tmp_path_factory.mktemp("hole") / "model.gguf", LAYERS)


def planned(model: Path, memory: int, uses: Any = None, load: Any = None, **placement: Any) -> _core.Session:
    """A plan for a GPU of so many MiB."""
    given = {"beside_gpu": [CPU], "rates": RATES, **placement}
    if uses is not None:
        given["expert_uses"] = uses
    return _core.Session(
        model,
        load=load or {},
        context={"ctx": 640},
        session={"ubatch": 512, "threads": 2, "cuda_graphs": False},
        plan_only=True,
        device=GPU | {"memory_bytes": memory << 20},
        placement=given,
    )


def taken(session: _core.Session) -> float:
    """MiB on the GPU."""
    main = session.plan["devices"][0]
    parts = ("weights_bytes", "kv_bytes", "state_bytes", "arena_bytes", "stream_bytes")
    return sum(int(main[part]) for part in parts) / 2**20 + RESERVE


def seconds(session: _core.Session) -> float:
    """Of a prompt of 512 tokens and 128 tokens behind it."""
    prompt = session.cost(512, rates=RATES)["seconds"]
    return float(prompt + 128 * session.cost(1, 576, rates=RATES)["seconds"])


def skewed(strength: float) -> list[list[int]]:
    """The choices of expert i fall as (i + 1) to the power of -strength."""
    return [[int(10_000 * (i + 1) ** -strength) for i in range(128)] for _ in range(LAYERS)]


@pytest.fixture(scope="module")
def memory(model: Path) -> int:
    """MiB in which the experts of half of the layers have room, and few others."""
    return round(taken(planned(model, 1 << 20, load={"n_cpu_moe": LAYERS}))) + LAYERS * LAYER // 2 + 20


def test_recorded_use_lets_the_cache_win(model: Path, memory: int) -> None:
    uses = skewed(1.0)
    session = planned(model, memory, uses, automatic=True, choose_cache=True)
    chosen = session.plan["placement"]
    mib = session.plan["settings"]["expert_cache_mib"]
    assert mib > 20
    assert f"; expert_cache_mib={mib}: the most used experts are on both; " in chosen["note"]
    assert chosen["n_cpu_moe"] > LAYERS // 2
    assert any(tensor["name"].endswith("(cached)") for tensor in session.plan["tensors"])
    assert taken(session) <= memory
    whole = [planned(model, memory, load={"n_cpu_moe": n}) for n in range(1, LAYERS + 1)]
    fastest = min(seconds(one) for one in whole if taken(one) <= memory)
    assert seconds(session) < 0.85 * fastest
    # The note promises what the plan is expected to take.
    assert f"{seconds(session) * 1e3:.1f} ms" in chosen["note"]


@pytest.mark.parametrize("open_", [True, False])
def test_without_recorded_use_whole_layers_win(model: Path, memory: int, open_: bool) -> None:
    """Experts that are used evenly are the same bytes for the CPU, and a cache divides more layers."""
    session = planned(model, memory, automatic=True, choose_cache=open_)
    assert session.plan["settings"]["expert_cache_mib"] == 0
    count = session.plan["placement"]["n_cpu_moe"]
    assert 0 < count < LAYERS
    left = int(memory - taken(session))
    for n in range(count + 1, LAYERS + 1):
        load = {"n_cpu_moe": n, "expert_cache_mib": left + (n - count) * LAYER - 64}
        assert seconds(planned(model, memory, load=load)) > seconds(session)


def test_a_size_that_is_set_stays(model: Path, memory: int) -> None:
    uses = skewed(1.0)
    session = planned(model, memory, uses, automatic=True)
    assert session.plan["settings"]["expert_cache_mib"] == 0
    session = planned(model, memory, uses, load={"expert_cache_mib": 100}, automatic=True)
    assert session.plan["settings"]["expert_cache_mib"] == 100


def test_a_chain_is_searched_to_its_fastest_place(model: Path, memory: int) -> None:
    """With a GPU that is slower than the CPU, the place that is fastest is not the first that fits."""
    slow = {"memory_gbps": 20.0, "gflops_one": 100.0, "gflops_many": 1000.0, "link_gbps": 5.0}
    rates = {"cpu": CPU_RATES, "cuda:0": slow}

    def wanted(session: _core.Session) -> float:
        prompt = session.cost(512, rates=rates)["seconds"]
        return float(prompt + 128 * session.cost(1, 576, rates=rates)["seconds"])

    session = planned(model, memory, automatic=True, rates=rates)
    choices = [{"n_cpu_moe": n} for n in range(1, LAYERS + 1)] + [
        {"n_gpu_layers": n, **moe} for n in range(LAYERS + 1) for moe in ({}, {"n_cpu_moe": LAYERS})
    ]
    every = [planned(model, memory, load=choice) for choice in choices]
    fitting = [one for one in every if taken(one) <= memory]
    assert wanted(session) <= 1.003 * min(wanted(one) for one in fitting)
    placed = session.plan["placement"]
    assert placed["n_cpu_moe"] == LAYERS or placed["n_gpu_layers"] is not None
