"""What a plan is expected to take, and the placement that follows from it."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dyno import _core
from dyno.errors import PlanError, ProfileError

TINY = Path(__file__).resolve().parents[1] / "data" / "tiny"
RATES = {"memory_gbps": 10.0, "gflops_one": 2.0, "gflops_many": 40.0, "launch_us": 3.0}
SLOW = {name: value if name == "launch_us" else value / 50 for name, value in RATES.items()}
ROUTED = 4 / 16
"""Experts of a token, as a part of all experts of the tiny model: so many of the rows meet one of them."""
LIMITS = {"link_gbps": 0.5, "latency_us": 20}


def planned(name: str = "qwen3moe", *, ubatch: int = 16, plan_only: bool = True, **placement: Any) -> Any:
    placement.setdefault("virtual_devices", [LIMITS])
    return _core.Session(
        TINY / f"{name}-tiny.gguf",
        load={"device": placement.pop("device", "cpu:1")},
        context={"ctx": 64},
        session={"ubatch": ubatch, "threads": 1},
        plan_only=plan_only,
        placement=placement,
    )


def total(cost: dict[str, Any]) -> float:
    return float(cost["seconds"])


def rate_of(rates: dict[str, float], rows: float) -> float:
    """Operations a second, between one row and 64 by their logarithm."""
    at = min(1.0, math.log(max(rows, 1)) / math.log(64))
    return 1e9 * rates["gflops_one"] ** (1 - at) * rates["gflops_many"] ** at


@pytest.mark.parametrize("tokens", [1, 5, 16])
def test_the_sum_over_ops(tokens: int) -> None:
    session = planned(cpu_moe=True)
    rates = {"cpu": SLOW, "cpu:1": RATES}
    want = 0.0
    crossings = 0.0
    for op in session.ops(tokens):
        if op["family"] == "transfer":
            one = op["bytes"] / 2  # read and written
            own = rates[op["device"]]
            copied = op["bytes"] / own["memory_gbps"] / 1e9 + 3e-6
            crossings += op["count"] * max(one / 0.5e9 + 20e-6, copied)
            continue
        own = rates[op["device"]]
        rows = tokens * ROUTED if op["family"] in ("moe_up_gate", "matmul_id") else tokens
        bound = max(op["bytes"] / own["memory_gbps"] / 1e9, op["flops"] / rate_of(own, rows))
        want += op["count"] * (bound + own["launch_us"] * 1e-6)
    logits = tokens * session.model["n_vocab"] * 4
    crossings += logits / 0.5e9 + 20e-6
    parts = session.cost(tokens, logit_rows=tokens, rates=rates)["parts"]
    assert math.fsum(p["seconds"] for p in parts) == pytest.approx(want, rel=1e-9)
    assert math.fsum(p["transfer_seconds"] for p in parts) == pytest.approx(crossings, rel=1e-9)
    assert sum(p["weights_bytes"] for p in parts) == session.plan["weights_bytes"]
    assert {(p["device"], p["layer"]) for p in parts} >= {("cpu", 0), ("cpu:1", 0), ("cpu:1", None)}


def test_a_measured_op_counts_instead() -> None:
    session = planned(cpu_moe=True)
    op = next(o for o in session.ops(8) if o["family"] == "moe_up_gate")
    plain = session.cost(8, logit_rows=8, rates={"cpu": RATES})
    measured = session.cost(
        8, logit_rows=8, rates={"cpu": RATES}, measured=[(op["device"], op["key"], op["rows"], 1.0)]
    )
    assert total(measured) - total(plain) == pytest.approx(op["count"], rel=0.05)
    other = session.cost(
        8, logit_rows=8, rates={"cpu": RATES}, measured=[("cpu:1", op["key"], op["rows"], 1.0)]
    )
    assert total(other) == pytest.approx(total(plain))


def test_depth_and_rows_of_logits() -> None:
    session = planned("llama", rules=["ffn_=CPU"])
    near, far = (total(session.cost(16, depth, rates={"cpu": RATES})) for depth in (0, 40))
    assert far > near
    none, one, every = (total(session.cost(16, 0, rows, rates={"cpu": RATES})) for rows in (0, 1, 16))
    assert none < one < every


def test_shared_experts_count_for_both_devices() -> None:
    """Products of the CPU's part move to it; the rest of the plan stays."""

    def flops(share: int) -> dict[str, float]:
        session = _core.Session(
            TINY / "qwen3moe-tiny.gguf",
            load={"device": "cpu:1"},
            context={"ctx": 64},
            session={"ubatch": 64, "threads": 1, "offload_min_tokens": 0, "cpu_share": share},
            plan_only=True,
            placement={"virtual_devices": [{**LIMITS, "streams": True}], "cpu_moe": True},
        )
        parts = session.cost(64, logit_rows=64, rates={"cpu": RATES})["parts"]
        return {d: math.fsum(p["flops"] for p in parts if p["device"] == d) for d in ("cpu", "cpu:1")}

    none, half, all_ = flops(0), flops(50), flops(100)
    assert none["cpu"] == 0
    sums = 0.02 * none["cpu:1"]  # each device adds rows
    assert 0 < half["cpu"] == pytest.approx(all_["cpu"] / 2, abs=sums)
    for one in (half, all_):
        assert sum(one.values()) == pytest.approx(sum(none.values()), abs=sums)


def test_rates_that_cannot_be() -> None:
    session = planned(cpu_moe=True)
    with pytest.raises(PlanError, match="a rate of a device is 0 or less"):
        session.cost(1, rates={"cpu": {"memory_gbps": 1}})
    with pytest.raises(ProfileError, match="unknown rate setting 'speed'"):
        session.cost(1, rates={"cpu": {"speed": 1}})
    with pytest.raises(PlanError, match="a cost of 0 tokens"):
        session.cost(0)
    assert total(session.cost(1)) > 0  # by assumed rates


def seconds_of(session: Any, rates: dict[str, Any]) -> float:
    """Of the workload that placements are judged by, cut to the context of 64 tokens."""
    starts = range(0, 64, 16)
    prompt = sum(total(session.cost(16, depth=at, logit_rows=int(at == 48), rates=rates)) for at in starts)
    return prompt + 128 * total(session.cost(1, depth=63, rates=rates))


def held(session: Any) -> int:
    main = session.plan["devices"][0]
    return int(main["weights_bytes"] + main["kv_bytes"] + main["arena_bytes"])


@pytest.mark.parametrize("name", ["qwen3moe", "llama", "deepseek2-lite", "gpt-oss"])
@pytest.mark.parametrize("main", [RATES, SLOW], ids=["fast", "slow"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_auto_takes_the_fastest_that_fits(
    name: str,
    main: dict[str, float],
    share: float,
) -> None:
    rates = {"cpu": RATES if main is SLOW else SLOW, "cpu:1": main}
    whole = planned(name)
    limit = held(whole) * share
    layers = int(whole.model["n_layers"])
    choices: list[dict[str, int]] = [{"n_gpu_layers": n} for n in range(layers + 1)]
    if whole.model["moe_layers"]:
        choices += [{"n_cpu_moe": n} for n in range(1, layers + 1)]
        choices += [{"n_cpu_moe": layers, "n_gpu_layers": n} for n in range(1, layers + 1)]
    fitting = [s for s in (planned(name, **choice) for choice in choices) if held(s) <= limit]
    best = min(seconds_of(s, rates) for s in fitting)
    chosen = planned(
        name, automatic=True, rates=rates, virtual_devices=[{**LIMITS, "memory_mib": limit / 2**20}]
    )
    assert held(chosen) <= limit
    assert seconds_of(chosen, rates) <= best * 1.003
    note = chosen.plan["placement"]["note"]
    assert note.startswith("auto: the model takes ")
    assert note in chosen.describe_plan()


def test_auto_changes_nothing_where_all_fits() -> None:
    limits = [{**LIMITS, "memory_mib": 64}]
    chosen, plain = (planned(virtual_devices=limits, automatic=a) for a in (True, False))
    assert chosen.nodes() == plain.nodes()
    assert chosen.plan["placement"]["note"] == ""


def test_auto_computes_the_same() -> None:
    rates = {"cpu": SLOW, "cpu:1": RATES}
    one = planned(plan_only=False, device="cpu")
    limit = 0.6 * held(planned()) / 2**20
    several = planned(plan_only=False, automatic=True, rates=rates, virtual_devices=[{"memory_mib": limit}])
    assert {t["device"] for t in several.plan["tensors"]} == {"cpu", "cpu:1"}
    tokens = np.arange(40, dtype=np.int32)
    for _ in range(2):
        logits = [s.decode([(0, tokens)], rows="all")[0] for s in (one, several)]
        np.testing.assert_array_equal(*logits)
        for session in (one, several):
            session.set_context({"ctx": 48})


def test_a_near_miss_says_what_it_takes() -> None:
    rates = {"cpu": SLOW, "cpu:1": RATES}
    limit = held(planned(ubatch=16)) * 0.999 / 2**20
    note = planned(automatic=True, rates=rates, virtual_devices=[{**LIMITS, "memory_mib": limit}]).plan[
        "placement"
    ]["note"]
    found = re.search(r"; ([0-9.]+) MiB are missing for one more layer on cpu:1: (.+) frees that", note)
    assert found, note
    assert "kv_type_k=kv_type_v=q8_0" in found[2]


def test_a_placement_is_given_or_left_to_the_plan() -> None:
    with pytest.raises(PlanError, match="lets the engine choose the placement"):
        planned(automatic=True, n_cpu_moe=1)


def test_auto_beside_a_gpu() -> None:
    """A card of little memory takes a part of the model, and the CPU the rest."""
    cpu = dict(_core.cpu_info())
    gpu = {
        "kind": "cuda", "compute_capability": 90, "sm_count": 132, "shared_per_block_bytes": 232_448,
    }  # fmt: skip

    # Copies of two layers are more than the rest of so small a model.
    ops = ("matmul", "matmul_id", "up_gate", "moe_up_gate")
    whole_on_the_cpu = {f"op_offload.{op}": False for op in ops}

    def plan(memory: float, **placement: Any) -> Any:
        return _core.Session(
            TINY / "qwen3moe-tiny.gguf",
            context={"ctx": 64},
            session={"ubatch": 16, "cuda_graphs": False, **whole_on_the_cpu},
            plan_only=True,
            device={**gpu, "memory_bytes": int(memory)},
            placement={"beside_gpu": [cpu], **placement},
        )

    whole = plan(1 << 34, automatic=True)
    assert {t["device"] for t in whole.plan["tensors"]} == {"cuda:0"}
    free = whole.plan["scratch_bytes"] + (512 << 20) + 0.7 * held(whole)
    chosen = plan(free, automatic=True)
    assert {t["device"] for t in chosen.plan["tensors"]} == {"cuda:0", "cpu"}
    assert 0 < held(chosen) <= 0.7 * held(whole)
    assert chosen.plan["placement"]["note"].startswith("auto: the model takes 5")
    # Nothing was asked for, so nothing moves.
    assert {t["device"] for t in plan(free).plan["tensors"]} == {"cuda:0"}
