"""Plans of a GPU beside the CPU, and of several GPUs, which need not be here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dyno import _core
from dyno.errors import OutOfMemoryError, PlanError

TINY = Path(__file__).resolve().parents[1] / "data" / "tiny"
QUANTISED = TINY.parents[2] / "models" / "pycode-moe-20m-Q4_K_M.gguf"
NAMES = sorted(p.name.removesuffix("-tiny.gguf") for p in TINY.glob("*-tiny.gguf"))
GPU = {"kind": "cuda", "compute_capability": 90, "sm_count": 132, "shared_per_block_bytes": 232_448}
CPU = dict(_core.cpu_info())
# Families that have kernels on a GPU alone.
ON_GPU = {"qkv", "qkv_rope_store", "rope_attention", "norm_route", "moe_down_sum", "mla_expand"}

Node = dict[str, Any]


def planned(name: str, *rules: str, gpus: int = 1, cached: int = 0, **placement: Any) -> _core.Session:
    """`cached`: MiB of the expert cache."""
    return _core.Session(
        TINY / f"{name}-tiny.gguf",
        load={"expert_cache_mib": cached},
        context={"ctx": 64, "sequences": 2},
        session={"ubatch": 16, "threads": 2, "cuda_graphs": False},
        plan_only=True,
        device=GPU,
        placement={"rules": list(rules), "beside_gpu": [CPU] + [GPU] * (gpus - 1), **placement},
    )


def has_experts(name: str) -> bool:
    return any("_exps" in tensor["name"] for tensor in planned(name).plan["tensors"])


WITH_EXPERTS = [name for name in NAMES if has_experts(name)]


def random_rules(name: str, seed: int) -> list[str]:
    """Each matrix goes to a device by chance; what a launch takes together stays together."""
    rng = np.random.default_rng(seed)
    rules = []
    for tensor in planned(name).plan["tensors"]:
        if tensor["name"].endswith(".weight") and "norm" not in tensor["name"] and rng.random() < 0.4:
            rules.append(rf"^{re.escape(tensor['name'])}$=CPU")
    return rules


def operands(node: Node) -> list[Node]:
    return [o for o in node["operands"].values() if isinstance(o, dict) and "access" in o]


def check(session: _core.Session) -> None:
    tensors = {tensor["name"]: tensor for tensor in session.plan["tensors"]}
    for tensor in tensors.values():
        assert tensor["layout"] != ("gpu" if tensor["device"] == "cpu" else "x16"), tensor
        assert not (tensor["mapped"] and tensor["device"] != "cpu"), tensor
    for node in session.nodes():
        name, device, family = node["name"], node["device"], node["key"].split()[0]
        read = [o for o in node["operands"].values() if isinstance(o, str) and o in tensors]
        # Prompts read copies of the CPU's weights on the GPU.
        copied = {"cpu"} if node["list"].startswith("streamed") and device == "cuda:0" else set()
        assert {tensors[weight]["device"] for weight in read} <= {device} | copied, name
        if family == "transfer":
            x, y = operands(node)
            gpu_ends = {end["device"] for end in (x, y)} - {"cpu"}
            assert x["device"] != y["device"], name
            # The CPU cannot reach a GPU's memory.
            assert device in (gpu_ends if "cpu" in (x["device"], y["device"]) else {y["device"]}), name
            continue
        for operand in operands(node):
            assert operand["device"] == device, (name, operand)
        if device == "cpu":
            assert family not in ON_GPU, name
            assert " layout=gpu" not in node["key"], name
        else:
            assert "act=q8" not in node["key"], name
            assert " layout=x16" not in node["key"], name


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layers", [0, 1, 2])
def test_the_last_layers_on_a_gpu(name: str, layers: int) -> None:
    session = planned(name, n_gpu_layers=layers)
    check(session)
    at = {tensor["name"]: tensor["device"] for tensor in session.plan["tensors"]}
    assert at["token_embd.weight"] == "cpu"
    assert at["output_norm.weight"] == ("cpu" if layers == 0 else "cuda:0")
    # The host draws: what it draws from comes to it.
    assert not any(node["list"] == "draw" for node in session.nodes())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(4))
def test_placements_by_chance(name: str, seed: int) -> None:
    session = planned(name, *random_rules(name, seed))
    check(session)
    assert {device["name"] for device in session.plan["devices"]} == {"cuda:0", "cpu"}
    assert "segments of one device" in session.describe_plan()


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_cached_experts_run_before_the_turn_of_the_cpu(name: str) -> None:
    session = planned(name, cpu_moe=True, cached=1)
    check(session)
    for which in ("general", "fused"):
        nodes = [node for node in session.nodes() if node["list"] == which]
        layers = {node["layer"] for node in nodes if node["key"].startswith("moe_split ")}
        assert layers
        for layer in layers:
            of_layer = [node for node in nodes if node["layer"] == layer]
            at = {node["name"].removeprefix(f"blk.{layer}."): i for i, node in enumerate(of_layer)}
            assert of_layer[at["moe_split"]]["device"] == "cuda:0"
            own = [i for name, i in at.items() if name.endswith(" (cached)")]
            others = [i for i, node in enumerate(of_layer) if node["device"] == "cpu"]
            assert len(own) >= 2
            # All that the CPU reads has left for it, then the GPU has work, then the CPU computes.
            leaving = [i for name, i in at.items() if name.endswith("to cpu")]
            assert max(leaving) < min(own) <= max(own) < min(others)
            crossing = {operands(of_layer[i])[0]["name"].removeprefix(f"blk.{layer}.") for i in leaving}
            assert crossing == {"ffn_norm", "expert_ids (not cached)"}, (which, layer)


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_only_rows_ids_and_weights_cross_to_experts_on_the_cpu(name: str) -> None:
    session = planned(name, cpu_moe=True)
    check(session)
    for which in ("general", "fused"):
        nodes = [node for node in session.nodes() if node["list"] == which]
        layers = {node["layer"] for node in nodes if node["key"].startswith("moe_sum ")}
        for layer in layers:
            crossing = {
                operands(node)[0]["name"].removeprefix(f"blk.{layer}.")
                for node in nodes
                if node["layer"] == layer and node["key"].startswith("transfer ")
            }
            assert crossing == {"ffn_norm", "expert_ids", "expert_weights", "moe_out"}, (which, layer)
        residuals = {o["device"] for node in nodes for o in operands(node) if o["name"] == "residual"}
        assert residuals == {"cuda:0"}
        widths = [
            int(match[1])
            for node in nodes
            if (match := re.match(r"transfer row=(\d+)", node["key"])) and "moe_out" in node["name"]
        ]
        assert widths == [4 * session.model["n_embd"]] * len(widths)


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_the_cpu_takes_one_turn_a_layer(name: str) -> None:
    """All that the experts read crosses before it, and so come the GPU's products that do not need it."""
    session = planned(name, cpu_moe=True)
    for which in ("general", "fused"):
        nodes = [node for node in session.nodes() if node["list"] == which]
        layers = {node["layer"] for node in nodes if node["key"].startswith("moe_sum ")}
        for layer in layers:
            here = [node for node in nodes if node["layer"] == layer]
            turns = [
                d for i, d in enumerate(n["device"] for n in here) if i == 0 or here[i - 1]["device"] != d
            ]
            assert turns.count("cpu") == 1, (which, layer)
            names = [node["name"] for node in here]
            leaving = [i for i, n in enumerate(names) if n.endswith(" to cpu")]
            assert leaving == list(range(leaving[0], leaving[0] + 3)), names
            shared = next((i for i, n in enumerate(names) if n.endswith("ffn_shared_up_gate")), None)
            if shared is not None:  # beside the CPU, and behind what the CPU waits for
                assert leaving[-1] < shared < names.index(f"blk.{layer}.moe_sum")


def test_streamed_weights_keep_the_layout_of_the_cpus_kernels() -> None:
    """A GPU repacks the copies, whatever the layout; `explain` says which way each goes."""

    def planned_with(**load: Any) -> _core.Session:
        return _core.Session(
            QUANTISED,
            load=load,
            context={"ctx": 64},
            session={"ubatch": 16, "threads": 2, "cuda_graphs": False},
            plan_only=True,
            device=GPU,
            placement={"cpu_moe": True, "beside_gpu": [CPU]},
        )

    def layouts(session: _core.Session) -> set[str]:
        return {t["layout"] for t in session.plan["tensors"] if t["device"] == "cpu" and "_exps" in t["name"]}

    default = planned_with()
    assert layouts(default) == {"x16"}
    assert re.search(r"copies of q4_\w+ x16 to gpu\n", default.describe_plan())
    in_order = planned_with(cpu_repack=False)
    assert layouts(in_order) == {"plain"}
    assert "plain to gpu, the file's order: cpu_repack is off" in in_order.describe_plan()
    exact = planned_with(numerics="exact")
    assert layouts(exact) == {"plain"}
    assert " to gpu" not in exact.describe_plan()


def test_few_tokens_are_fused_where_all_of_a_launch_is_on_the_gpu() -> None:
    whole = {node["key"].split()[0] for node in planned("qwen3moe").nodes()}
    experts = {node["key"].split()[0] for node in planned("qwen3moe", cpu_moe=True).nodes()}
    assert {"qkv", "rope_attention", "moe_down_sum"} <= whole
    assert whole - experts == {"moe_down_sum", "sample"}


@pytest.mark.parametrize("name", NAMES)
def test_layers_over_three_gpus(name: str) -> None:
    session = planned(name, r"blk\.1\.=cuda:1", r"^output=cuda:2", gpus=3)
    check(session)
    devices = {device["name"]: device for device in session.plan["devices"]}
    assert set(devices) == {"cuda:0", "cuda:1", "cuda:2"}
    assert devices["cuda:1"]["kv_bytes"] + devices["cuda:1"]["state_bytes"] > 0
    assert devices["cuda:2"]["kv_bytes"] == 0
    crossing = [node for node in session.nodes() if node["key"].startswith("transfer ")]
    # Where the output matrix is the embedding table, it stays with that, apart from its norm.
    assert {operands(node)[0]["name"] for node in crossing} <= {"residual", "output_norm"}


def test_devices_without_weights_are_left_out() -> None:
    session = planned("qwen3moe", gpus=3)
    assert [device["name"] for device in session.plan["devices"]] == ["cuda:0"]
    with pytest.raises(PlanError, match=r"names device 'cuda:3'; this plan has cuda:0, cpu, cuda:1, cuda:2"):
        planned("qwen3moe", "attn_q=cuda:3", gpus=3)


def test_each_memory_is_asked_for_its_own_part() -> None:
    whole, experts = planned("qwen3moe"), planned("qwen3moe", cpu_moe=True)
    gpu, cpu = experts.plan["devices"]
    assert gpu["weights_bytes"] + cpu["weights_bytes"] == experts.plan["weights_bytes"]
    assert (cpu["kv_bytes"], gpu["kv_bytes"]) == (0, experts.plan["kv_bytes"])
    needed = sum(gpu[key] for key in ("weights_bytes", "kv_bytes", "arena_bytes")) + (512 << 20)
    with pytest.raises(OutOfMemoryError, match=r"device cuda:0 is .* short"):
        experts.check_memory(needed - 1)
    with pytest.raises(OutOfMemoryError, match="n_cpu_moe="):
        whole.check_memory(needed)
