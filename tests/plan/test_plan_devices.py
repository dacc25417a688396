"""A plan of several devices: what lies and runs where, and how values cross."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dyno import _core
from dyno.errors import PlanError

TINY = Path(__file__).resolve().parents[1] / "data" / "tiny"
GPU = {"kind": "cuda", "compute_capability": 90, "sm_count": 132, "shared_per_block_bytes": 232_448}

Node = dict[str, Any]


def planned(
    name: str,
    *rules: str,
    device: str = "cpu",
    virtual: int = 2,
    limits: dict[str, float] | None = None,
    plan_only: bool = True,
    **placement: Any,
) -> _core.Session:
    """`limits`: of every virtual device."""
    return _core.Session(
        TINY / f"{name}-tiny.gguf",
        load={"device": device},
        context={"ctx": 64, "sequences": 2},
        session={"ubatch": 16, "threads": 2},
        plan_only=plan_only,
        placement={"virtual_devices": [limits or {}] * virtual, "rules": list(rules), **placement},
    )


def where(session: _core.Session) -> dict[str, str]:
    return {tensor["name"]: tensor["device"] for tensor in session.plan["tensors"]}


def operands(node: Node) -> list[Node]:
    return [o for o in node["operands"].values() if isinstance(o, dict) and "access" in o]


@pytest.mark.parametrize("name", ["llama", "gpt-oss", "deepseek2-v3", "gemma3"])
@pytest.mark.parametrize(
    "rules",
    [("ffn_=cpu:1",), ("attn_(q|k|kv)=cpu:1", "norm=cpu:2"), (r"blk\.1\.=cpu:2", "ffn_(up|down)=cpu:1")],
    ids=["ffn", "attention", "layer"],
)
def test_a_node_touches_only_what_lies_on_its_device(name: str, rules: tuple[str, ...]) -> None:
    session = planned(name, *rules)
    at = where(session)
    for node in session.nodes():
        named = [weight for weight in node["operands"].values() if isinstance(weight, str)]
        assert {at[weight] for weight in named if weight in at} <= {node["device"]}, node["name"]
        if node["key"].startswith("transfer "):
            (x, y) = operands(node)
            assert (x["device"] != node["device"], y["device"]) == (True, node["device"])
            continue
        for operand in operands(node):
            # The logits lie in the memory of the caller.
            assert operand["device"] == node["device"] or operand["name"] == "logits", (node["name"], operand)


def test_a_value_crosses_once_between_two_writes() -> None:
    nodes = planned("llama", "attn_(k|v)=cpu:1", "attn_q=cpu:2").nodes()
    good: dict[int, int] = {}  # node that brought a copy, by the value on its device
    written: dict[str, int] = {}
    crossings = 0
    for i, node in enumerate(nodes):
        if node["key"].startswith("transfer "):
            x, y = operands(node)
            assert written[x["name"]] > good.get(y["value"], -1), f"{node['name']} brings what is there"
            good[y["value"]] = i
            crossings += 1
            continue
        for operand in operands(node):
            if operand["access"] != "read":
                written[operand["name"]] = i
    assert crossings > 0
    # Normed rows go to k and v once, though two products read them.
    assert [node["name"] for node in nodes].count("blk.0.attn_norm to cpu:1") == 1


@pytest.mark.parametrize("name", ["llama", "deepseek2-v3"])
def test_values_of_one_device_do_not_overlap_in_its_arena(name: str) -> None:
    session = planned(name, "ffn_=cpu:1", "attn_output=cpu:2")
    placed = {o["value"]: o for node in session.nodes() for o in operands(node) if o["bytes"] is not None}
    ends: dict[str, int] = {}
    for one in placed.values():
        end = one["arena_offset"] + one["bytes"]
        ends[one["device"]] = max(ends.get(one["device"], 0), end)
        for other in placed.values():
            together = one["first_use"] <= other["last_use"] and other["first_use"] <= one["last_use"]
            if one["value"] < other["value"] and together and one["device"] == other["device"]:
                assert (
                    end <= other["arena_offset"]
                    or other["arena_offset"] + other["bytes"] <= one["arena_offset"]
                )
    devices = {d["name"]: d for d in session.plan["devices"]}
    for device, end in ends.items():
        assert end <= devices[device]["arena_bytes"] < end + 64
    assert session.plan["arena_bytes"] == sum(d["arena_bytes"] for d in devices.values())


def test_bytes_are_counted_by_device() -> None:
    session = planned("qwen3moe", r"blk\.1\.=cpu:1")
    plan = session.plan
    for total in ("weights_bytes", "kv_bytes", "arena_bytes"):
        assert plan[total] == sum(device[total] for device in plan["devices"])
    one, other = plan["devices"][:2]
    assert (one["name"], other["name"]) == ("cpu", "cpu:1")
    assert 0 < other["kv_bytes"] < one["kv_bytes"]  # the cache lies with the layer's attention
    assert not any(t["mapped"] for t in plan["tensors"] if t["device"] == "cpu:1")
    assert "cpu:1: weights" in session.describe_plan()


def test_without_rules_nothing_crosses() -> None:
    one, several = planned("qwen3moe", virtual=0), planned("qwen3moe", virtual=2)
    assert one.nodes() == several.nodes()
    assert {node["device"] for node in one.nodes()} == {"cpu"}


def test_layers_and_experts_go_where_the_settings_say() -> None:
    layers = where(planned("qwen3moe", device="cpu:1", n_gpu_layers=2))
    assert {name.split(".")[1]: device for name, device in layers.items() if name.startswith("blk.")} == {
        "0": "cpu",
        "1": "cpu",
        "2": "cpu:1",
    }
    assert (layers["token_embd.weight"], layers["output_norm.weight"]) == ("cpu", "cpu:1")
    assert set(where(planned("qwen3moe", device="cpu:1", n_gpu_layers=99)).values()) == {"cpu:1"}
    assert set(where(planned("qwen3moe", device="cpu:1", n_gpu_layers=0)).values()) == {"cpu"}

    for placement, count in (({"cpu_moe": True}, 3), ({"n_cpu_moe": 2}, 2)):
        moved = {k for k, v in where(planned("qwen3moe", device="cpu:1", **placement)).items() if v == "cpu"}
        assert moved == {f"blk.{i}.ffn_{w}_exps.weight" for i in range(count) for w in ("gate", "up", "down")}
    # A rule comes before them.
    kept = where(planned("qwen3moe", r"blk\.0\.ffn_up_exps=cpu:1", device="cpu:1", cpu_moe=True))
    assert (kept["blk.0.ffn_up_exps.weight"], kept["blk.0.ffn_gate_exps.weight"]) == ("cpu:1", "cpu")


def test_the_first_rule_that_matches_decides() -> None:
    at = where(planned("llama", "attn_q=cpu:1", "attn_=CPU", r"blk\.0=cpu:2"))
    assert at["blk.0.attn_q.weight"] == "cpu:1"
    assert at["blk.0.attn_k.weight"] == "cpu"
    assert at["blk.0.ffn_up.weight"] == "cpu:2"


def test_a_bias_goes_with_its_product() -> None:
    at = where(planned("qwen2", r"attn_q\.weight=cpu:1", r"attn_k\.bias=cpu:2"))
    assert (at["blk.0.attn_q.bias"], at["blk.0.attn_k.bias"]) == ("cpu:1", "cpu")


@pytest.mark.parametrize(
    ("rules", "placement", "message"),
    [
        (["no_such=cpu:1"], {}, "'no_such=cpu:1' matches no tensor"),
        (["attn_q=cpu:3"], {}, "names device 'cpu:3'; this plan has cpu, cpu:1, cpu:2"),
        (["attn_q=cuda:0"], {}, "names device 'cuda:0'"),
        (["attn_(q=cpu:1"], {}, r"'attn_\(q' is not a regular expression"),
        (["attn_q"], {}, "'attn_q' is not REGEX=DEVICE"),
        (["=cpu:1"], {}, "is not REGEX=DEVICE"),
        (["a" * 2000 + "=cpu:1"], {}, "2006 characters"),
        ([], {"cpu_moe": True}, "cpu_moe: this model has no experts"),
        ([], {"n_cpu_moe": -1}, "n_cpu_moe is -1"),
        ([], {"n_gpu_layers": -2}, "n_gpu_layers is -2"),
        ([], {"n_gpu_layers": 1}, "n_gpu_layers=1 needs a device beside the CPU"),
        ([], {"virtual": 17}, "virtual_devices is 17; expected 0 to 16"),
        ([], {"device": "cpu:2", "virtual": 1}, "device cpu:2 does not exist; it needs virtual_devices=2"),
        ([], {"limits": {"link_gbps": 1e-4}}, "link_gbps of cpu:1 is 0.0001; expected 0.001 to"),
        ([], {"limits": {"link_gbps": float("nan")}}, "link_gbps of cpu:1 is nan"),
        ([], {"limits": {"latency_us": -1}}, "latency_us of cpu:1 is -1"),
        ([], {"limits": {"memory_mib": 1 << 31}}, "memory_mib is 2.14748e"),
    ],
)
def test_what_cannot_be_is_an_error(rules: list[str], placement: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        planned("llama", *rules, **placement)


def test_a_gpu_takes_rules_that_leave_all_with_it() -> None:
    file = TINY / "qwen3moe-tiny.gguf"
    whole = {"rules": ["output=CUDA0", "attn=cuda:0"], "n_gpu_layers": 99}
    session = _core.Session(file, plan_only=True, device=GPU, session={"cuda_graphs": False}, placement=whole)
    plain = _core.Session(file, plan_only=True, device=GPU, session={"cuda_graphs": False})
    assert session.nodes() == plain.nodes()
    with pytest.raises(PlanError, match="virtual devices need the CPU as the main device"):
        _core.Session(file, plan_only=True, device=GPU, placement={"virtual_devices": [{}]})


def test_a_session_keeps_its_devices_when_settings_change() -> None:
    rng = np.random.default_rng(0)
    one = planned("llama", virtual=0, plan_only=False)
    several = planned("llama", "ffn_=cpu:1", "attn_(k|v)=cpu:2", plan_only=False)
    tokens = rng.integers(0, one.model["n_vocab"], 30).astype(np.int32)
    for change in ({}, {"ubatch": 7}, {"ubatch": 32, "threads": 1}):
        logits = []
        for session in (one, several):
            session.set(change)
            session.set_context({"ctx": 40, "sequences": 1})
            logits.append(session.decode([(0, tokens)], rows="all")[0])
        np.testing.assert_array_equal(*logits)
    assert {node["device"] for node in several.nodes()} == {"cpu", "cpu:1", "cpu:2"}


def test_a_plan_says_what_limits_its_devices() -> None:
    session = planned("llama", "ffn_=cpu:1", limits={"link_gbps": 8, "latency_us": 10, "memory_mib": 64})
    main, other = session.plan["devices"][:2]
    assert (other["link_gbps"], other["latency_us"], other["memory_limit"]) == (8, 10, 64 << 20)
    assert (main["link_gbps"], main["latency_us"], main["memory_limit"]) == (0, 0, 0)
    assert "; limit 64.0 MiB; link 8 GB/s; latency 10 us\n" in session.describe_plan()
