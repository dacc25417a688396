"""Expected times where devices run beside each other: a GPU beside the CPU, and copies behind computation."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
from dyno import _core
from hole_model import qwen3moe_hole

if TYPE_CHECKING:
    from pathlib import Path

GPU = {"kind": "cuda", "compute_capability": 90, "sm_count": 132, "shared_per_block_bytes": 232_448}
CPU = dict(_core.cpu_info())
LAYERS = 6
EXPERTS = 128 * 3 * 768 * 2048 * 18 / 32  # bytes of a layer's
CPU_RATES = {
    "memory_gbps": 280.0,
    "weights_gbps": 155.0,
    "gflops_one": 2000.0,
    "gflops_many": 2470.0,
    "spread_us": 9.0,
}
GPU_RATES = {
    "memory_gbps": 2950.0,
    "gflops_one": 40_000.0,
    "gflops_many": 400_000.0,
    "launch_us": 3.0,
    "link_gbps": 55.0,
    "latency_us": 10.0,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen3moe_hole(tmp_path_factory.mktemp("hole") / "model.gguf", LAYERS)


def cost(
    model: Path, tokens: int, n_cpu_moe: int, cached: int = 0, core_gbps: float = 0, **rates: float
) -> dict[str, Any]:
    """`rates`: of the GPU, others than usual."""
    session = _core.Session(
        model,
        load={"n_cpu_moe": n_cpu_moe, "expert_cache_mib": cached},
        context={"ctx": 4096},
        session={"ubatch": 4096, "threads": 2, "cuda_graphs": False},
        plan_only=True,
        device=GPU,
        placement={"beside_gpu": [CPU]},
    )
    every = {"cpu": CPU_RATES | {"core_gbps": core_gbps}, "cuda:0": GPU_RATES | rates}
    return session.cost(tokens, logit_rows=1, rates=every)


def seconds(found: dict[str, Any], device: str = "", field: str = "seconds") -> float:
    return math.fsum(p[field] for p in found["parts"] if device in p["device"])


def test_copies_run_behind_the_computation(model: Path) -> None:
    """With 32 of 48 layers streamed over 55 GB/s, a prompt of 512 tokens took the copies' time."""
    found = cost(model, 512, LAYERS)
    copies = LAYERS * EXPERTS / 55e9
    assert seconds(found, field="transfer_seconds") == pytest.approx(copies, rel=0.02)
    computing = seconds(found)
    assert computing < copies
    # Nothing hides the first layer's copies, nor the computation behind the last ones.
    assert copies < found["seconds"] < copies + 2.5 * computing / LAYERS


def test_layers_without_copies_hide_none(model: Path) -> None:
    """Copies run one layer ahead alone."""
    half = LAYERS // 2
    found = cost(model, 512, half)
    copies = half * EXPERTS / 55e9
    behind = seconds(found) * (LAYERS - half) / LAYERS
    assert found["seconds"] == pytest.approx(copies + behind, rel=0.06)


def test_a_fast_link_hides_behind_the_computation(model: Path) -> None:
    found = cost(model, 4096, LAYERS, link_gbps=2000.0)
    computing = seconds(found)
    assert computing > seconds(found, field="transfer_seconds")
    assert computing < found["seconds"] < 1.2 * computing


def test_cached_experts_do_not_cross(model: Path) -> None:
    plain, cached = (cost(model, 512, LAYERS, mib) for mib in (0, round(0.5 * LAYERS * EXPERTS / 2**20)))
    ratio = seconds(cached, field="transfer_seconds") / seconds(plain, field="transfer_seconds")
    assert ratio == pytest.approx(0.5, abs=0.02)


def test_a_token_crosses_once_each_way(model: Path) -> None:
    """The row, the ids and the weights cross together."""
    found = cost(model, 1, LAYERS)
    assert seconds(found, "cpu", "transfer_seconds") == pytest.approx(LAYERS * 10e-6, rel=0.1)
    assert seconds(found, "cuda", "transfer_seconds") == pytest.approx(LAYERS * 10e-6, rel=0.1)
    # The GPU waits for the CPU: nothing runs beside.
    both = seconds(found) + seconds(found, field="transfer_seconds")
    assert found["seconds"] == pytest.approx(both, rel=0.01)


def test_the_cpu_multiplies_at_the_rate_of_weights(model: Path) -> None:
    """16 threads took 155 us for a layer's experts, and the memory's own rate promised 80."""
    token = cost(model, 1, LAYERS)
    layer = 8 / 128 * EXPERTS / 155e9 + 2 * 9e-6
    assert seconds(token, "cpu") / LAYERS == pytest.approx(layer, rel=0.05)


def test_a_slow_gpu_computes_beside_the_cpu(model: Path) -> None:
    """Its share of the experts is in the CPU's shade, or the other way round."""
    found = cost(model, 1, LAYERS, cached=round(0.5 * LAYERS * EXPERTS / 2**20), memory_gbps=100.0)
    assert found["seconds"] < 0.9 * (seconds(found) + seconds(found, field="transfer_seconds"))
    assert found["seconds"] > seconds(found, "cuda")


def test_few_rows_are_the_work_of_one_thread(model: Path) -> None:
    """Quantised inputs of both products, and the sum over the experts; a prompt's are the work of all."""
    quantised, added = (2048 + 8 * 768) * 5.25, 2048 * 10 * 4
    token, alone = (seconds(cost(model, 1, LAYERS, core_gbps=gbps), "cpu") for gbps in (0, 20.0))
    # The sum's 80 KiB are more than the least of a thread.
    slow = quantised / 20e9 + 2**16 / 20e9
    fast = (quantised + added) / 280e9
    assert alone - token == pytest.approx(LAYERS * (slow - fast), rel=1e-3)
    prompt, shared = (cost(model, 512, LAYERS, core_gbps=gbps)["seconds"] for gbps in (0, 20.0))
    assert shared == pytest.approx(prompt, rel=1e-6)


def test_products_of_experts_wait_for_their_numbers(model: Path) -> None:
    """On the GPU two of them a layer, on the CPU none."""
    for n_cpu_moe, layers in ((0, LAYERS), (2, LAYERS - 2), (LAYERS, 0)):
        plain, late = (seconds(cost(model, 1, n_cpu_moe, experts_us=us), "cuda") for us in (0.0, 3.0))
        assert late - plain == pytest.approx(layers * 2 * 3e-6, abs=1e-9)


def test_a_gpu_takes_rows_of_the_host_by_passes(model: Path) -> None:
    """With cached experts a row for each slot crosses, 64 KiB: 7 more trips over the bus than one row."""
    cached = cost(model, 1, LAYERS, cached=round(0.5 * LAYERS * EXPERTS / 2**20))
    each = 10e-6 + 2**16 / 55e9 + 7 * 1.2e-6
    assert seconds(cached, "cuda", "transfer_seconds") == pytest.approx(LAYERS * each, rel=0.01)
    # The CPU gets them by posted writes.
    assert seconds(cached, "cpu", "transfer_seconds") == pytest.approx(LAYERS * 10e-6, rel=0.1)
