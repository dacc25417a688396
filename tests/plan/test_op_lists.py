"""Which op list a u-batch runs through, planned for a GPU that need not be here."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from dyno import _core
from dyno.errors import ProfileError
from dyno.testing import tiny_model

TINY = Path(__file__).resolve().parent.parent / "data" / "tiny"
NAMES = sorted(p.name.removesuffix("-tiny.gguf") for p in TINY.glob("*-tiny.gguf"))
LATENT = [name for name in NAMES if name.startswith("deepseek2")]
HOPPER = {"kind": "cuda", "compute_capability": 90, "sm_count": 132, "shared_per_block_bytes": 232_448}


def plan_for(name: str, device: dict[str, Any] | None = HOPPER, **load: Any) -> _core.Session:
    path = TINY / f"{name}-tiny.gguf"
    return _core.Session(
        path, load=load, session={"cuda_graphs": False, "ubatch": 1024}, plan_only=True, device=device
    )


def lists(session: _core.Session, tokens: int) -> set[str]:
    """What runs through the model; drawing from its logits is a list of its own."""
    return {op["list"] for op in session.ops(tokens)} - {"draw"}


@pytest.mark.parametrize("name", NAMES)
def test_few_tokens_take_the_fused_list(name: str) -> None:
    session = plan_for(name)
    assert lists(session, 1) == lists(session, 8) == {"fused"}
    session.set({"mmq_max_tokens": 0})
    assert lists(session, 512) == ({"expanded"} if name in LATENT else {"general"})
    session.set({"mla_mode": "absorbed"})
    general = sum(op["count"] for op in session.ops(65))
    assert sum(op["count"] for op in session.ops(8)) <= general
    session.set({"fusion": False})
    assert lists(session, 1) == lists(session, 9) == lists(session, 512) == {"general"}
    assert sum(op["count"] for op in session.ops(1) if op["list"] != "draw") == general


@pytest.mark.parametrize("name", NAMES)
def test_prompts_store_keys_and_values_in_one_launch(name: str) -> None:
    session = plan_for(name)
    if name == "mistral3":  # a scale of positions that the launch does not know
        assert lists(session, 9) == {"general"}
        return
    if name in LATENT:
        session.set({"mla_mode": "absorbed", "ubatch": 1024})
    assert lists(session, 9) == lists(session, 512) == lists(session, 1024) == {"batched"}
    assert "ops per u-batch of at most 65536 tokens" in session.describe_plan()
    batched, general = Counter[str](), Counter[str]()
    for fusion, counts in ((True, batched), (False, general)):
        session.set({"fusion": fusion, "ubatch": 1024, "mla_mode": "absorbed"})
        for op in session.ops(1024):
            counts[op["family"]] += op["count"]
    stored = batched["qkv_rope_store"]
    assert stored > 0
    assert batched["attention"] == general["attention"] >= stored
    each = 1 if name in LATENT else 2  # keys and values, or latents
    assert batched["kv_store"] == general["kv_store"] - each * stored
    # A node that is not fused stays as it was.
    for family in {"up_gate", "moe_up_gate", "matmul_id"} & set(general):
        assert batched[family] == general[family]
    assert batched["matmul"] == general["matmul"] - (1 if name in LATENT else 2) * batched["qkv"]


# iq3_s is read as q4_16; where v has another type, no ring multiplies by all three.
@pytest.mark.parametrize(
    ("dtype", "v", "capability", "merged"),
    [
        ("q8_0", "q8_0", 90, True),
        ("q8_0", "q8_0", 80, False),
        ("iq3_s", "iq3_s", 90, True),
        ("q8_0", "q6_k", 90, False),
    ],
)
def test_prompts_multiply_by_q_k_and_v_in_one_launch(
    tmp_path: Path, dtype: str, v: str, capability: int, merged: bool
) -> None:
    path = tiny_model(
        tmp_path / "m.gguf", "llama", n_embd=512, n_ff=1024, n_heads=8, n_kv_heads=4, dtype=dtype,
        dtypes={"attn_v.weight": v},
    )  # fmt: skip
    device = {**HOPPER, "compute_capability": capability}
    session = _core.Session(
        path, session={"cuda_graphs": False, "ubatch": 1024}, plan_only=True, device=device
    )
    layers = session.model["n_layers"]
    for tokens in (9, 64, 65, 512, 513, 1024):
        counts = Counter[str]()
        for op in session.ops(tokens):
            counts[op["family"]] += op["count"]
        assert counts["qkv"] == (layers if merged else 0)
        assert counts["matmul"] == layers * (2 if merged else 5) + 1
        # The launch that makes half rows for q, k and v or for gate and up norms them.
        alone = (0 if merged else layers) + (0 if capability == 90 else layers)
        assert counts["norm"] == alone + 1


@pytest.mark.parametrize(("limit", "last"), [(0, 64), (64, 64), (200, 200), (512, 512), (1000, 1000)])
def test_mmq_max_tokens_limits_fused_prompts(limit: int, last: int) -> None:
    """Above it, products are computed by another path, which the fused launches do not have."""
    session = plan_for("llama")
    session.set({"mmq_max_tokens": limit})
    assert lists(session, last) == {"batched"}
    assert lists(session, last + 1) == {"general"}
    assert f"ops per u-batch of at most {last} tokens" in session.describe_plan()


def test_exact_and_the_cpu_have_one_list() -> None:
    for session in (plan_for(NAMES[0], numerics="exact"), plan_for(NAMES[0], device=None)):
        assert lists(session, 1) == {"general"}
        assert "at most" not in session.describe_plan()


def test_fused_ops_replace_single_ones() -> None:
    session = plan_for("qwen3moe")
    fused = {op["family"]: op["count"] for op in session.ops(1)}
    general = {op["family"]: op["count"] for op in session.ops(9)}
    layers = session.model["n_layers"]
    assert fused["qkv"] == fused["moe_down_sum"] == layers
    assert not {"qkv", "moe_down_sum"} & set(general)
    assert not {"moe_sum", "matmul_id"} & set(fused)
    keys = [op["key"] for op in session.ops(1)]
    assert any(key.startswith("qkv ") and " norm" in key for key in keys)


def test_attention_stores_what_it_reads_where_it_can() -> None:
    whole, parts = {"rope_attention"}, {"qkv_rope_store", "attention"}
    few = {op["family"] for op in plan_for("qwen3moe").ops(8)}
    assert few & (whole | parts) == whole
    assert {op["family"] for op in plan_for("qwen3moe").ops(9)} & (whole | parts) == parts
    assert {op["family"] for op in plan_for("qwen3moe").ops(1024)} & (whole | parts) == parts
    ampere = HOPPER | {"compute_capability": 86}
    assert {op["family"] for op in plan_for("qwen3moe", ampere).ops(1)} & (whole | parts) == whole


AMPERE = HOPPER | {"compute_capability": 86, "shared_per_block_bytes": 101_376}
LITE = {"heads": 16, "kv_heads": 1, "dk": 576, "dv": 512}


@pytest.mark.parametrize("cache", ["f32", "f16", "bf16"])
def test_clusters_take_latents_of_every_float_type(cache: str) -> None:
    """Alone and with norm, rotation and store; a chip without clusters goes the longer way."""
    fused, alone = {}, {}
    for device, machine in (("hopper", HOPPER), ("ampere", AMPERE)):
        session = latent_plan(LATENT[0], {"kv_type_k": cache}, "auto", device=machine)
        fused[device] = {op["family"]: op["config"]["variant"] for op in session.ops(1)}
        desc = LITE | {"m": 1, "k_type": cache, "v_type": cache, "v_in_k": True}
        alone[device] = _core.ops.default_config("attention", desc, machine)
    assert fused["hopper"]["rope_attention"] == "latent_cluster"
    assert not {"qkv_rope_store", "attention"} & set(fused["hopper"])
    assert {"qkv_rope_store", "attention"} <= set(fused["ampere"])
    assert alone["hopper"] == {"variant": "latent_cluster", "clusters": 14}
    assert alone["ampere"]["variant"] == "latent"


@pytest.mark.parametrize(("cache", "clusters"), [("f16", (14, 2, 1, 1, 1)), ("f32", (14, 8, 8, 4, 2))])
def test_clusters_of_several_tiles(cache: str, clusters: tuple[int, ...]) -> None:
    """Tokens of 16 heads are a tile each; an f32 cache of several takes waves of clusters. A single tile
    takes as many as run at once on 132 multiprocessors."""
    for tokens, want in zip((1, 4, 8, 16, 31), clusters, strict=True):
        desc = LITE | {"m": tokens, "k_type": cache, "v_type": cache, "v_in_k": True}
        config = _core.ops.default_config("attention", desc, HOPPER)
        assert config == {"variant": "latent_cluster", "clusters": want}, tokens


def test_clusters_of_f32_latents_need_their_shared_memory() -> None:
    """Two steps of 32 rows of 2.3 KB."""
    desc = LITE | {"m": 1, "k_type": "f32", "v_type": "f32", "v_in_k": True}
    config = {"variant": "latent_cluster", "clusters": 16}
    assert config in _core.ops.candidates("attention", desc, HOPPER, "legal")
    small = HOPPER | {"shared_per_block_bytes": 163_840}
    ok, why = _core.ops.supports("attention", desc, config, small)
    assert not ok
    assert "bytes of shared memory are more than the device's 163840" in why
    assert config in _core.ops.candidates("attention", desc | {"k_type": "f16"}, small, "legal")
    assert config not in _core.ops.candidates("attention", desc | {"exact": True}, HOPPER, "legal")


def test_what_no_fused_launch_covers_stays() -> None:
    """Routers are float32 in the file's order, which no streaming kernel reads: they keep their norm."""
    families = {op["family"] for op in plan_for("qwen3moe").ops(1)}
    assert "norm" in families or "norm_route" in families


F16 = {"kv_type_k": "f16"}


def latent_plan(name: str, context: dict[str, Any], mode: str, **more: Any) -> _core.Session:
    path = TINY / f"{name}-tiny.gguf"
    session = {"cuda_graphs": False, "mla_mode": mode, **more.pop("session", {})}
    device = more.pop("device", HOPPER)
    return _core.Session(path, context=context, session=session, plan_only=True, device=device, **more)


@pytest.mark.parametrize("cache", ["f32", "f16"])
@pytest.mark.parametrize("name", LATENT)
def test_prompts_expand_latent_attention(name: str, cache: str) -> None:
    session = latent_plan(name, {"kv_type_k": cache}, "auto")
    assert lists(session, 32) == lists(session, 512) == {"expanded"}
    assert lists(session, 31) == {"batched"}
    assert lists(session, 8) == {"fused"}
    families = {op["family"]: op for op in session.ops(512)}
    assert families["mla_expand"]["count"] == families["attention"]["count"] == session.model["n_layers"]
    assert f"k={cache} v={cache}" in families["attention"]["key"]
    variant = {"f32": "flash_wgmma_pairs", "f16": "flash_wgmma"}[cache]
    assert families["attention"]["config"]["variant"] == variant
    session.set({"mla_mode": "absorbed"})
    assert lists(session, 512) == {"batched"}
    session.set({"mla_mode": "expanded"})
    assert lists(session, 1) == {"expanded"}


def test_an_f32_cache_is_expanded_where_tensor_cores_attend_to_it() -> None:
    """Its tiles of queries and keys have to fit into shared memory; a setting expands all the same."""
    small = HOPPER | {"compute_capability": 75, "shared_per_block_bytes": 32_768}
    session = latent_plan(LATENT[0], {}, "auto", device=small)
    assert lists(session, 512) == {"batched"}
    assert "not used with an f32 cache on this GPU" in session.describe_plan()
    session.set({"mla_mode": "expanded"})
    assert lists(session, 512) == {"expanded"}
    turing = small | {"shared_per_block_bytes": 65_536}
    assert lists(latent_plan(LATENT[0], {}, "auto", device=turing), 512) == {"expanded"}


def expanded_ops(session: _core.Session) -> dict[str, dict[str, Any]]:
    return {op["family"]: op for op in session.ops(512) if op["family"] in ("mla_expand", "attention")}


def test_hopper_expands_an_f32_cache_to_pairs() -> None:
    """Other chips read float32, which their kernel splits."""
    for device, paired, variant in (
        (HOPPER, True, "flash_wgmma_pairs"),
        (HOPPER | {"compute_capability": 80}, False, "flash_pairs"),
        (HOPPER | {"shared_per_block_bytes": 131_072}, False, "flash_pairs"),
    ):
        ops = expanded_ops(latent_plan(LATENT[0], {}, "auto", device=device))
        assert ops["attention"]["config"]["variant"] == variant
        assert all(("paired" in op["key"]) == paired for op in ops.values())
    assert ops["mla_expand"]["config"]["variant"] == "pairs"


def test_without_flash_attention_expanded_keys_are_read_in_float32() -> None:
    """A setting of a session, so the plan's list is the same: only its launches leave out the pairs."""
    session = latent_plan(LATENT[0], {}, "auto", session={"flash_attention": False})
    assert expanded_ops(session)["attention"]["config"]["variant"] == "rows"


@pytest.mark.parametrize("cache", ["f32", "f16"])
def test_the_plan_holds_expanded_keys_and_values_of_one_context(cache: str) -> None:
    sizes = {}
    for ctx in (1024, 4096):
        for mode in ("auto", "absorbed"):
            plan = latent_plan(LATENT[0], {"kv_type_k": cache, "ctx": ctx, "sequences": 3}, mode)
            sizes[ctx, mode] = plan.plan["arena_bytes"]
            assert ("of the arena" in plan.describe_plan()) == (mode == "auto")
    attention = latent_plan(LATENT[0], {}, "auto").model["layers"][0]["attention"]
    assert sizes[1024, "absorbed"] == sizes[4096, "absorbed"]
    grown = sizes[4096, "auto"] - sizes[1024, "auto"]
    row = grown / 3072 / {"f32": 4, "f16": 2}[cache] / attention["heads"]  # numbers a head
    assert row == int(row)
    assert row > attention["rope"]["dims"]


def test_expanded_keys_and_values_are_kept_where_they_take_a_quarter_of_the_memory() -> None:
    """Each layer has memory of its own then, so the arena has them once for each layer."""

    def arena(mib: int, mode: str = "auto", **load: Any) -> tuple[int, bool]:
        device = HOPPER | {"memory_bytes": mib << 20}
        plan = latent_plan(LATENT[0], {"ctx": 2048}, mode, device=device, **load)
        return plan.plan["arena_bytes"], "each layer keeps them" in plan.describe_plan()

    one, kept = arena(0)  # of unknown size
    assert not kept
    absorbed, _ = arena(0, "absorbed")
    attention = latent_plan(LATENT[0], {}, "auto").model["layers"][0]["attention"]
    layer = 2048 * attention["heads"] * 4 * (attention["dk"] + attention["dv"])
    layers = latent_plan(LATENT[0], {}, "auto").model["n_layers"]
    quarter = (layers * layer) >> 18  # MiB of which all layers are a quarter
    assert arena(quarter - 1) == (one, False)
    most, kept = arena(quarter + 64)
    assert kept
    assert layers * layer <= most <= layers * layer + absorbed + one
    assert arena(quarter + 64, "absorbed") == (absorbed, False)


def test_exact_numerics_and_other_models_never_expand() -> None:
    exact = latent_plan(LATENT[0], F16, "expanded", load={"numerics": "exact"})
    assert lists(exact, 512) == {"general"}
    assert "mla_mode" not in plan_for("llama").describe_plan()


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ProfileError, match="mla_mode is 'fast'; expected auto, expanded or absorbed"):
        latent_plan(LATENT[0], F16, "fast")


@pytest.mark.parametrize("name", NAMES)
def test_what_is_planned_fits_a_small_chip(name: str) -> None:
    """Of 64 KiB of shared memory: no product of eight rows is planned with more warps than that holds."""
    turing = HOPPER | {"compute_capability": 75, "sm_count": 46, "shared_per_block_bytes": 65_536}
    session = plan_for(name, turing)
    for tokens in (1, 8):
        for op in session.ops(tokens):
            family, desc = _core.ops.parse_key(op["key"], op["rows"])
            assert _core.ops.supports(family, desc, op["config"], turing) == (True, "")


def test_more_warps_than_shared_memory_holds_are_refused() -> None:
    desc = {"type": "f16", "layout": "gpu", "m": 8, "n": 4096, "k": 4096}
    config = {"variant": "stream", "warps": 16, "stripes": 1}
    assert _core.ops.supports("matmul", desc, config, HOPPER) == (True, "")
    ok, why = _core.ops.supports("matmul", desc, config, HOPPER | {"shared_per_block_bytes": 65_536})
    assert not ok
    assert "shared memory" in why
    assert "65536" in why


def hybrid(name: str, mode: str = "auto", **load: Any) -> _core.Session:
    """A model whose weights lie partly on the CPU, beside a GPU; prompts from 4 tokens on stream them."""
    return _core.Session(
        TINY / f"{name}-tiny.gguf",
        load=load,
        context={"ctx": 256, "kv_type_k": "f16"},
        session={"cuda_graphs": False, "mla_mode": mode, "offload_min_tokens": 4},
        plan_only=True,
        device=HOPPER,
        placement={"beside_gpu": [dict(_core.cpu_info())]},
    )


@pytest.mark.parametrize("name", LATENT)
def test_prompts_that_stream_weights_expand_latent_attention(name: str) -> None:
    session = hybrid(name, cpu_moe=True)
    assert lists(session, 31) == {"streamed"}
    assert lists(session, 32) == lists(session, 512) == {"streamed_expanded"}
    families = {op["family"]: op for op in session.ops(512)}
    assert families["mla_expand"]["count"] == families["attention"]["count"] == session.model["n_layers"]
    assert "mla_expand" not in {op["family"] for op in session.ops(31)}
    session.set({"mla_mode": "absorbed"})
    assert lists(session, 512) == {"streamed"}
    session.set({"mla_mode": "expanded"})
    assert lists(session, 31) == {"streamed_expanded"}
    assert lists(session, 3) == {"expanded"}


@pytest.mark.parametrize("name", LATENT)
def test_both_streamed_lists_copy_the_same_weights(name: str) -> None:
    """Each list names the same copies of a layer, in the same order."""
    nodes = hybrid(name, cpu_moe=True).nodes()
    on_cpu = {t["name"] for t in hybrid(name, cpu_moe=True).plan["tensors"] if t["device"] == "cpu"}

    def copied(which: str) -> list[tuple[int, str]]:
        mine = [node for node in nodes if node["list"] == which and node["device"] == "cuda:0"]
        read = [(node["layer"], o) for node in mine for o in node["operands"].values()]
        return [(layer, o) for layer, o in read if isinstance(o, str) and o in on_cpu]

    assert copied("streamed") == copied("streamed_expanded") != []


def test_layers_whose_attention_is_on_the_cpu_are_not_expanded() -> None:
    session = hybrid("deepseek2-lite", n_gpu_layers=1 + 2)
    layers = session.model["n_layers"]
    assert layers > 2
    assert lists(session, 64) == {"streamed_expanded"}
    expanded = {
        node["layer"]
        for node in session.nodes()
        if node["list"] == "streamed_expanded" and node["key"].startswith("mla_expand")
    }
    assert expanded == {layers - 2, layers - 1}
    session = hybrid("deepseek2-lite", n_gpu_layers=0)
    assert lists(session, 64) == {"streamed"}


def test_the_arena_holds_the_keys_that_streamed_prompts_expand() -> None:
    arenas = {}
    for mode in ("auto", "absorbed"):
        session = hybrid("deepseek2-lite", mode, cpu_moe=True)
        session.set({"ubatch": 32})
        arenas[mode] = session.plan["devices"][0]["arena_bytes"]
    assert arenas["auto"] > arenas["absorbed"]
