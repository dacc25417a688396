"""Shared experts whose products join launches of the routed ones: the plan, and answers on a GPU."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
from dyno import _core
from dyno.testing import TensorSpec, tiny_gguf, tiny_model
from dyno.testing.blocks import random_blocks

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    Entry = tuple[str, str, dict[str, Any], str]  # of a profile: key, tokens, config, origin

GPUS = [d for d in _core.devices() if d["kind"] == "cuda"]
HOPPER = {"kind": "cuda", "compute_capability": 90, "sm_count": 132, "shared_per_block_bytes": 232_448}
LAYERS, WIDTH, LONG, SHARED = 1, 2048, 6144, 1024
EMBD = 1024


def mixture(path: Path, dtype: str, width: int = WIDTH, **types: str) -> Path:
    """Random weights of hunyuan-moe, which has shared experts, beside the shapes of qwen3moe.

    Args:
        path: File to write.
        dtype: Type of all matrices.
        width: Rows of an expert. With LONG, the ring multiplies by gate and up of several tokens.
        types: Types of the shared expert's matrices, by names without `ffn_`.
    """
    plain = tiny_model(
        path.with_suffix(".plain"), "qwen3moe", n_layers=LAYERS, n_embd=EMBD, n_heads=4, n_kv_heads=2,
        n_vocab=320, n_experts=4, n_experts_used=3, n_ff_expert=width, dtype=dtype,
    )  # fmt: skip
    reader = gguf.GGUFReader(plain)
    metadata = {
        key.replace("qwen3moe.", "hunyuan-moe."): field.contents()
        for key, field in reader.fields.items()
        if not key.startswith("GGUF.")
    } | {"general.architecture": "hunyuan-moe"}
    tensors = [
        TensorSpec(t.name, tuple(map(int, reversed(t.shape))), t.tensor_type.name.lower(), t.data.tobytes())
        for t in reader.tensors
    ]
    rng = np.random.default_rng(3)
    for i in range(LAYERS):
        for name, shape in (("gate", (SHARED, EMBD)), ("up", (SHARED, EMBD)), ("down", (EMBD, SHARED))):
            kind = types.get(f"{name}_shexp", dtype)
            std = 0.02 if name == "down" else shape[1] ** -0.5
            data = random_blocks(kind, SHARED * EMBD, rng, std=std, row_elements=shape[1])
            tensors.append(TensorSpec(f"blk.{i}.ffn_{name}_shexp.weight", shape, kind, data))
    return tiny_gguf(path, metadata, tensors)


def with_head(path: Path) -> Path:
    """A layer of glm4moe whose shared expert's pair joins, and the same block again as a head that drafts."""
    source = gguf.GGUFReader(mixture(path.with_suffix(".mixture"), "q4_0", LONG))
    metadata = {
        key.replace("hunyuan-moe.", "glm4moe."): field.contents()
        for key, field in source.fields.items()
        if not key.startswith("GGUF.")
    }
    metadata |= {"general.architecture": "glm4moe", "glm4moe.block_count": LAYERS + 1}
    metadata |= {"glm4moe.nextn_predict_layers": 1, "glm4moe.expert_shared_count": 1}
    tensors = []
    for t in source.tensors:
        shape, kind = tuple(map(int, reversed(t.shape))), t.tensor_type.name.lower()
        name, data = t.name.replace("ffn_norm", "post_attention_norm"), t.data.tobytes()
        if "_shexp" in name:  # as wide as the others here
            shape = (EMBD, LONG) if "down" in name else (LONG, EMBD)
            data = random_blocks(kind, LONG * EMBD, np.random.default_rng(4), row_elements=shape[1])
        blocks = range(LAYERS + 1) if name.startswith("blk.0.") else (None,)
        for block in blocks:
            own = name if block is None else name.replace("blk.0.", f"blk.{block}.")
            tensors.append(TensorSpec(own, shape, kind, data))
    ones = np.ones(EMBD, np.float32).tobytes()
    for block in range(LAYERS + 1):
        bias = np.zeros(4, np.float32).tobytes()
        tensors.append(TensorSpec(f"blk.{block}.exp_probs_b.bias", (4,), "f32", bias))
    head = f"blk.{LAYERS}.nextn."
    for norm in ("enorm", "hnorm", "shared_head_norm"):
        tensors.append(TensorSpec(f"{head}{norm}.weight", (EMBD,), "f32", ones))
    merge = random_blocks("q4_0", 2 * EMBD * EMBD, np.random.default_rng(5), row_elements=2 * EMBD)
    tensors.append(TensorSpec(f"{head}eh_proj.weight", (EMBD, 2 * EMBD), "q4_0", merge))
    return tiny_gguf(path, metadata, tensors)


def counts(session: _core.Session, tokens: int = 1) -> Counter[str]:
    """Launches by family; of those with a shared expert `family shared`, too."""
    found = Counter[str]()
    for op in session.ops(tokens):
        found[op["family"]] += op["count"]
        if " shared=" in op["key"]:
            found[op["family"] + " shared"] += op["count"]
    return found


def planned(path: Path, *, kernels: Sequence[Entry] = (), **device: int) -> _core.Session:
    return _core.Session(
        path, session={"cuda_graphs": False}, plan_only=True, device=HOPPER | device, kernels=list(kernels)
    )


def test_the_down_product_of_a_shared_expert_joins_the_sum_over_experts(tmp_path: Path) -> None:
    path = mixture(tmp_path / "m.gguf", "q4_0")
    session = planned(path)
    found, general = counts(session), counts(session, 65)
    assert found["moe_down_sum shared"] == found["moe_down_sum"] == LAYERS
    assert counts(session, 8)["moe_down_sum shared"] == LAYERS
    assert found["matmul"] == LAYERS + 1  # attention's output, and the head
    assert counts(session, 2)["up_gate"] == general["up_gate"] == LAYERS
    assert not general["moe_down_sum"]
    old = counts(planned(path, compute_capability=86, shared_per_block_bytes=101_376))
    assert old["moe_down_sum shared"] == LAYERS


def test_a_down_product_of_another_type_stays_a_launch(tmp_path: Path) -> None:
    found = counts(planned(mixture(tmp_path / "m.gguf", "q8_0", down_shexp="q4_0")))
    assert (found["moe_down_sum"], found["moe_down_sum shared"]) == (LAYERS, 0)


def test_gate_and_up_of_a_shared_expert_join_the_experts_of_one_token(tmp_path: Path) -> None:
    path = mixture(tmp_path / "m.gguf", "q4_0")
    session = planned(path)
    assert counts(planned(path, compute_capability=75))["moe_up_gate shared"] == LAYERS
    one, two = counts(session), counts(session, 2)
    assert {op["list"] for op in session.ops(1)} == {"single", "draw"}
    assert {op["list"] for op in session.ops(2)} == {"fused"}
    assert "ops per u-batch of one token" in session.describe_plan()
    assert (one["moe_up_gate"], one["moe_up_gate shared"], one["up_gate"]) == (LAYERS, LAYERS, 0)
    assert (two["moe_up_gate"], two["moe_up_gate shared"], two["up_gate"]) == (LAYERS, 0, LAYERS)
    assert one["moe_down_sum shared"] == two["moe_down_sum shared"] == LAYERS
    assert sum(one.values()) - one["moe_up_gate shared"] == sum(two.values()) - LAYERS + 1  # 1: the draw
    (joined,) = (
        node
        for node in session.nodes()
        if node["list"] == "single" and " shared=" in node["key"] and node["key"].startswith("moe_up_gate")
    )
    (sum_of_all,) = (
        node for node in session.nodes() if node["list"] == "single" and "moe_down_sum" in node["key"]
    )
    assert joined["operands"]["shared_gate"] == "blk.0.ffn_gate_shexp.weight"
    assert joined["operands"]["shared_up"] == "blk.0.ffn_up_shexp.weight"
    assert joined["operands"]["shared_y"]["value"] == sum_of_all["operands"]["shared_x"]["value"]
    session.set({"fusion": False})
    assert counts(session)["up_gate"] == LAYERS


def test_entries_of_ops_that_one_token_does_not_run_name_the_op_that_it_runs(tmp_path: Path) -> None:
    path = mixture(tmp_path / "m.gguf", "q4_0", LONG)
    session = planned(path)
    (joined,) = (op["key"] for op in session.ops(1) if op["family"] == "moe_up_gate")
    ops = {op["family"]: op for op in session.ops(2) if op["family"] in ("moe_up_gate", "up_gate")}
    assert len(ops) == 2
    for op in ops.values():
        reports = {}
        for tokens in ("m1", "m1-4", "m2-4"):
            session.set_kernels([(op["key"], tokens, op["config"], "test")])
            (row,) = session.kernel_report()
            reports[tokens] = row["status"], row["reason"]
        assert reports == {
            "m1": ("unused", f"test: one token runs {joined} instead"),
            "m1-4": ("applied", f"test; one token runs {joined} instead"),
            "m2-4": ("applied", "test"),
        }
    # Without fused launches, the pair of the shared expert is a launch, and rows of experts are floats.
    session.set_kernels([(op["key"], "m1", op["config"], "test") for op in ops.values()])
    assert {row["status"] for row in session.kernel_report()} == {"unused"}
    session.set({"fusion": False})
    own = ops["up_gate"]["key"]
    assert {row["key"]: row["status"] for row in session.kernel_report()}[own] == "applied"
    (reason,) = (op["reason"] for op in session.ops(1) if op["key"] == own)
    assert "profile: test" in reason


def test_entries_of_ops_that_one_token_runs_are_applied(tmp_path: Path) -> None:
    path = mixture(tmp_path / "m.gguf", "q4_0", LONG)
    session = planned(path)
    entries = [
        (op["key"], "m1", op["config"], "test")
        for op in session.ops(1)
        if op["family"] in ("moe_up_gate", "matmul", "moe_down_sum")
    ]
    assert len(entries) > 3
    assert {row["status"] for row in planned(path, kernels=entries).kernel_report()} == {"applied"}
    # Without a list of its own, one token runs the ops of two.
    session = planned(mixture(tmp_path / "other.gguf", "q4_0", up_shexp="q8_0"))
    entries = [(op["key"], "m1", op["config"], "test") for op in session.ops(2) if "up_gate" in op["key"]]
    session.set_kernels(entries)
    assert {row["status"] for row in session.kernel_report()} == {"applied"}


def test_a_list_for_one_token_keeps_the_rows_that_a_head_needs(tmp_path: Path) -> None:
    """The plan refuses a list without these rows; the model and its head both have the list."""
    session = planned(with_head(tmp_path / "m.gguf"))
    session.load_draft_head()
    for nodes in (session.nodes(), session.draft_head_nodes()):
        assert "single" in {node["list"] for node in nodes}


@pytest.mark.parametrize(
    ("width", "types", "device"),
    [
        (LONG, {"gate_shexp": "q8_0", "up_shexp": "q8_0"}, {}),
        (WIDTH, {"up_shexp": "q8_0"}, {}),
        (WIDTH, {"up_shexp": "q8_0"}, {"compute_capability": 86, "shared_per_block_bytes": 101_376}),
    ],
)
def test_other_gates_and_ups_stay_a_launch(
    tmp_path: Path, width: int, types: dict[str, str], device: dict[str, int]
) -> None:
    session = planned(mixture(tmp_path / "m.gguf", "q4_0", width, **types), **device)
    assert counts(session)["moe_up_gate shared"] == 0
    assert {op["list"] for op in session.ops(1)} == {"fused", "draw"}


@pytest.mark.gpu
@pytest.mark.skipif(not GPUS, reason=f"no GPU: {_core.no_cuda_reason()}")
@pytest.mark.parametrize(
    ("dtype", "width"),
    [*((t, w) for t in ("q4_0", "q4_k", "q8_0") for w in (WIDTH, LONG)), ("iq4_nl", LONG)],
)
def test_tokens_with_a_shared_expert_are_those_of_single_launches(
    tmp_path: Path, dtype: str, width: int
) -> None:
    """One token, replayed, and several sequences at once, against exact numerics on the CPU."""
    path = mixture(tmp_path / "m.gguf", dtype, width)
    tokens = np.random.default_rng(5).integers(1, 300, 24).astype(np.int32)
    exact = _core.Session(path, load={"device": "cpu", "numerics": "exact"}, context={"ctx": 64})
    want, routing = exact.decode([(0, tokens)], "all", capture_routing=True)
    errors: dict[tuple[bool, int], float] = {}
    for fusion in (True, False):
        for sequences in (1, 3, 7):
            session = _core.Session(
                path, load={"device": "cuda:0"}, context={"ctx": 64, "sequences": sequences},
                session={"fusion": fusion},
            )  # fmt: skip
            assert bool(counts(session)["moe_down_sum shared"]) == fusion
            assert bool(counts(session)["moe_up_gate shared"]) == fusion
            rows = []
            for i, token in enumerate(tokens):
                pinned = np.ascontiguousarray(np.repeat(routing[:, i : i + 1], sequences, axis=1))
                batch = [(slot, token.reshape(1)) for slot in range(sequences)]
                got = session.decode(batch, "last", pinned_routing=pinned)[0]
                assert max(nmse(row, got[0]) for row in got) < 1e-5
                rows.append(got[0])
            errors[fusion, sequences] = nmse(np.stack(rows), want)
    for (fusion, sequences), error in errors.items():
        assert error < 1e-4, (fusion, sequences, errors)


def nmse(got: np.ndarray[Any, Any], want: np.ndarray[Any, Any]) -> float:
    difference = got.astype(np.float64) - want
    return float((difference**2).sum() / (want.astype(np.float64) ** 2).sum())
