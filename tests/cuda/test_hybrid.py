"""A GPU beside the CPU, and several GPUs: any placement answers as one device, within its ops' tolerance."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dyno
import numpy as np
import pytest
from dyno import _core
from dyno.errors import DeviceLostError
from numa_tree import Node, cores, write_nodes
from ops.matmul_data import QUANTISED, block, weights

if TYPE_CHECKING:
    from numpy.typing import NDArray

TINY = Path(__file__).resolve().parents[1] / "data" / "tiny"
NAMES = sorted(p.name.removesuffix("-tiny.gguf") for p in TINY.glob("*-tiny.gguf"))
GPUS = [d for d in _core.devices() if d["kind"] == "cuda"]
GRAPHS = _core.build_info()["switches"].get("GGML_CUDA_USE_GRAPHS") == "ON"
# Types with a layout for the CPU's kernels and one for the GPU's.
ON_BOTH = [
    t for t in QUANTISED if _core.ops.layout_supported(t, "x16") and _core.ops.layout_supported(t, "gpu")
]
EXACT = {"kv_type_k": "f32", "kv_type_v": "f32"}
CACHED = {"cpu_moe": True, "expert_cache_mib": 1}
ADAPTIVE = {**CACHED, "expert_cache": "adaptive"}

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPUS, reason=f"no GPU: {_core.no_cuda_reason()}")]

Arrays = list["NDArray[np.float32]"]


def nmse(observed: NDArray[np.float32], reference: NDArray[np.float32]) -> float:
    o, r = observed.astype(np.float64), reference.astype(np.float64)
    return float(((o - r) ** 2).sum() / ((r - r.mean()) ** 2).sum())


def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(TINY / f"{name}-tiny.golden.npz") as data:
        return {key: data[key] for key in data.files}


def opened(
    name: str, numerics: str = "exact", context: dict[str, Any] | None = None, *rules: str, **placement: Any
) -> _core.Session:
    session = placement.pop("session", {})
    cache = {name: placement.pop(name) for name in ("expert_cache_mib", "expert_cache") if name in placement}
    kv = EXACT if numerics == "exact" else {}
    return _core.Session(
        TINY / f"{name}-tiny.gguf",
        load={"device": "cuda:0", "numerics": numerics, **cache},
        context={"ctx": 256, **kv, **(context or {})},
        session={"ubatch": 23, "cuda_graphs": GRAPHS, **session},
        placement={"rules": list(rules), **placement},
    )


@functools.cache
def has_experts(name: str) -> bool:
    with dyno.Engine(TINY / f"{name}-tiny.gguf", device="cpu", profile=None, plan_only=True) as engine:
        return any("_exps" in tensor["name"] for tensor in engine.plan["tensors"])


def placements(name: str) -> dict[str, dict[str, Any]]:
    """By name: settings of `opened`. Matrices go to a device by chance as well."""
    found: dict[str, dict[str, Any]] = {f"ngl{n}": {"n_gpu_layers": n} for n in range(3)}
    with dyno.Engine(TINY / f"{name}-tiny.gguf", device="cpu", profile=None, plan_only=True) as engine:
        tensors = [tensor["name"] for tensor in engine.plan["tensors"]]
    layers_of_experts = [int(t.split(".")[1]) for t in tensors if "_exps" in t]
    if layers_of_experts:  # the first layers of some models are dense
        found |= {"cached": CACHED, "adaptive": ADAPTIVE}
        found |= {"cpu_moe": {"cpu_moe": True}, "n_cpu_moe": {"n_cpu_moe": min(layers_of_experts) + 1}}
    for seed in range(3):
        rng = np.random.default_rng(seed)
        chosen = [t for t in tensors if t.endswith(".weight") and "norm" not in t and rng.random() < 0.4]
        found[f"chance{seed}"] = {"rules": [rf"^{re.escape(t)}$=CPU" for t in chosen]}
    return found


def opened_at(name: str, where: dict[str, Any], numerics: str = "exact", **context: Any) -> _core.Session:
    given = dict(where)
    return opened(name, numerics, context, *given.pop("rules", []), **given)


def decode(s: _core.Session, tokens: NDArray[Any], rows: str = "all", **kw: Any) -> NDArray[np.float32]:
    return s.decode([(0, np.ascontiguousarray(tokens, np.int32))], rows, **kw)[0]


@pytest.mark.parametrize("name", NAMES)
def test_exact_prompts_and_single_tokens(name: str) -> None:
    """Launched, and replayed from the second use on."""
    g = golden(name)
    for which, where in placements(name).items():
        s = opened_at(name, where)
        assert "cpu" in {node["device"] for node in s.nodes()}, which
        for length in ("short", "long"):
            s.reset()
            assert nmse(decode(s, g[f"tokens_{length}"]), g[f"logits_{length}"]) < 1e-7, which
        for graphs in {False, GRAPHS}:
            s.set({"cuda_graphs": graphs})
            s.reset()
            rows = [decode(s, token.reshape(1))[0] for token in g["tokens_short"]]
            assert nmse(np.stack(rows), g["logits_short"]) < 1e-7, f"{which}, cuda_graphs={graphs}"
            if graphs:
                assert [row["reason"] for row in s.captures() if not row["captured"]] == [], which


@pytest.mark.parametrize("name", NAMES)
def test_exact_sequences_in_one_batch(name: str) -> None:
    g = golden(name)
    tokens = g["tokens_long"].astype(np.int32)
    sizes = {2: 3, 0: 41, 1: 17}
    for which, where in placements(name).items():
        s = opened_at(name, where, sequences=3)
        logits = s.decode([(slot, tokens[:n].copy()) for slot, n in sizes.items()], "all")[0]
        want = np.concatenate([g["logits_long"][:n] for n in sizes.values()])
        assert nmse(logits, want) < 1e-7, which
        for _ in range(4):
            step = [(slot, tokens[s.position(slot)].reshape(1)) for slot in sizes]
            want = np.stack([g["logits_long"][s.position(slot)] for slot in sizes])
            assert nmse(s.decode(step, "last")[0], want) < 1e-7, which


@pytest.mark.parametrize("name", NAMES)
def test_exact_tokens_after_a_streamed_prompt(name: str) -> None:
    """Both op lists work on the same cache and, in qwen35, on the same recurrent state."""
    g = golden(name)
    for which, where in placements(name).items():
        s = opened_at(name, {**where, "session": {"offload_min_tokens": 4, "ubatch": 64}})
        tokens = g["tokens_long"]
        parts = np.split(tokens, [40, 41, 42, 43, tokens.size - 10, tokens.size - 9])
        assert min(part.size for part in parts) > 0
        found = [decode(s, part) for part in parts]
        assert nmse(np.concatenate(found), g["logits_long"]) < 1e-7, which


@pytest.mark.parametrize("name", NAMES)
def test_default_numerics_with_pinned_routing(name: str) -> None:
    """Halves on the GPU, int8 rows on the CPU: few tokens through the fused list, and prompts."""
    g = golden(name)
    tokens = g["tokens_long"].astype(np.int32)
    exact = opened(name)
    routing = None
    if exact.model["moe_layers"]:
        routing = exact.decode([(0, tokens)], "none", capture_routing=True)[1]
    for which, where in placements(name).items():
        s = opened_at(name, where, "default")
        assert nmse(decode(s, tokens, pinned_routing=routing), g["logits_long"]) < 1e-3, which
        s.reset()
        rows = []
        for i, token in enumerate(tokens[:24]):
            pinned = None if routing is None else np.ascontiguousarray(routing[:, i : i + 1])
            rows.append(decode(s, token.reshape(1), pinned_routing=pinned)[0])
        assert nmse(np.stack(rows), g["logits_long"][:24]) < 1e-3, which


@pytest.mark.parametrize("name", [name for name in NAMES if has_experts(name)])
def test_replayed_tokens_equal_launched_ones(name: str) -> None:
    if not GRAPHS:
        pytest.skip("a build without CUDA graphs")
    tokens = golden(name)["tokens_long"].astype(np.int32)[:40]
    s = opened_at(name, {"cpu_moe": True, "session": {"cuda_graphs": False}}, "default")
    launched = [decode(s, token.reshape(1)) for token in tokens]
    s.set({"cuda_graphs": True})
    s.reset()
    for token, want in zip(tokens, launched, strict=True):
        np.testing.assert_array_equal(decode(s, token.reshape(1)), want)
    assert {row["captured"] for row in s.captures()} == {True}


@pytest.mark.parametrize("sequences", [1, 3])
def test_tokens_whose_parts_are_started_ahead_equal_launched_ones(sequences: int) -> None:
    """From the third use of a shape on the GPU's next part is started before the CPU's turn."""
    if not GRAPHS:
        pytest.skip("a build without CUDA graphs")
    tokens = golden("deepseek2-lite")["tokens_long"].astype(np.int32)
    for name in ("deepseek2-lite", "gpt-oss"):  # with a shared expert, and with biases
        results = []
        for graphs in (False, True):
            where = {"cpu_moe": True, "session": {"cuda_graphs": graphs}}
            s = opened_at(name, where, "default", sequences=sequences)
            rows = []
            for i in range(12):
                steps = [(slot, tokens[i + slot : i + slot + 1].copy()) for slot in range(sequences)]
                rows.append(s.decode(steps, "last")[0])
            results.append(np.stack(rows))
        np.testing.assert_array_equal(results[1], results[0])


def test_an_error_in_the_turn_of_the_cpu_leaves_no_gpu_waiting() -> None:
    tokens = golden("qwen3moe")["tokens_short"].astype(np.int32)
    want = decode(opened_at("qwen3moe", {"cpu_moe": True}, "default"), tokens[:1])
    s = opened_at("qwen3moe", {"cpu_moe": True}, "default")
    for token in tokens[:6]:
        decode(s, token.reshape(1))
    s.lose_device("cpu", 1)
    with pytest.raises(DeviceLostError, match="device cpu is lost"):
        decode(s, tokens[6:7])
    with pytest.raises(DeviceLostError, match="device cpu is lost"):
        decode(s, tokens[6:7])
    s.close()  # waits for the GPU
    np.testing.assert_array_equal(
        decode(opened_at("qwen3moe", {"cpu_moe": True}, "default"), tokens[:1]), want
    )


@pytest.mark.parametrize("name", [name for name in NAMES if has_experts(name)])
def test_routing_is_captured_wherever_it_is_chosen(name: str) -> None:
    tokens = golden(name)["tokens_short"].astype(np.int32)
    want = opened(name).decode([(0, tokens)], "last", capture_routing=True)
    for rules in (("ffn_gate_inp=CPU",), (r"blk\.1\.=CPU",), (r"blk\.1\.ffn_gate_inp=CPU", "_exps=CPU")):
        logits, routing = opened(name, "exact", None, *rules).decode(
            [(0, tokens)], "last", capture_routing=True
        )
        np.testing.assert_array_equal(routing, want[1], err_msg=str(rules))
        assert nmse(logits, want[0]) < 1e-7


def test_generated_text_is_that_of_one_device() -> None:
    path = TINY / "qwen3moe-tiny.gguf"
    texts = []
    for where in ({}, {"cpu_moe": True}, {"n_gpu_layers": 2}, {"placement": ["output=CPU"]}):
        with dyno.Engine(
            path, device="cuda:0", profile=None, numerics="exact", kv_type_k="f32", kv_type_v="f32", **where
        ) as engine:
            texts.append("".join(engine.generate([1, 2, 3, 4, 5, 6, 7], 24, temperature=1.0, seed=7)))
            engine.set(ubatch=5)
            engine.set_context(ctx=64)
            texts[-1] += "".join(engine.generate([1, 2, 3], 12, temperature=0))
    assert len(set(texts)) == 1
    assert texts[0]


def test_a_failed_capture_is_launched_and_told() -> None:
    if not GRAPHS:
        pytest.skip("a build without CUDA graphs")
    tokens = golden("qwen3moe")["tokens_short"].astype(np.int32)
    s = opened_at("qwen3moe", {"cpu_moe": True})
    want = [decode(s, token.reshape(1)) for token in tokens[:6]]
    s.set({"ubatch": 22})  # forgets the graphs
    s.reset()
    s.fail_next_captures(1)
    for token, one in zip(tokens[:6], want, strict=True):
        assert nmse(decode(s, token.reshape(1)), one) < 1e-9
    assert s.capture_failures == 1


def test_logits_stay_on_the_device_that_makes_them() -> None:
    path = TINY / "qwen3moe-tiny.gguf"
    for where, kind in (({"cpu_moe": True}, 2), ({"placement": ["^output=CPU"]}, 1)):
        with dyno.Engine(path, device="cuda:0", profile=None, **where) as engine:
            array = engine.logits([1, 2, 3], device_array=True)
            assert array.__dlpack_device__() == (kind, 0)  # kDLCUDA, kDLCPU


def test_times_of_ops_are_of_all_devices() -> None:
    s = opened_at("qwen3moe", {"cpu_moe": True})
    tokens = golden("qwen3moe")["tokens_short"].astype(np.int32)
    times = s.time_ops([(0, tokens)], "last")
    assert {row["family"] for row in times} >= {"transfer", "moe_up_gate", "attention", "matmul"}
    assert sum(row["seconds"] for row in times if row["family"] == "transfer") > 0


@pytest.mark.parametrize("name", NAMES)
def test_streamed_weights_answer_as_those_of_the_gpu(name: str) -> None:
    """Prompts multiply on the GPU what lies on the CPU; single tokens stay with the CPU."""
    g = golden(name)
    tokens = g["tokens_long"].astype(np.int32)
    placements: list[dict[str, Any]] = [{"n_gpu_layers": 1}]
    if has_experts(name):
        placements += [{"cpu_moe": True}, {"rules": [r"blk\.1\..*_exps=CPU"]}]
        placements += [CACHED, ADAPTIVE]
    for where in placements:
        given = {**where, "session": {"offload_min_tokens": 0}}
        s = opened_at(name, given)
        assert nmse(decode(s, tokens), g["logits_long"]) < 1e-7, where
        assert s.streamed["bytes"] + s.streamed["cached"] > 0, where
        for ubatch in (7, 64):
            s.set({"ubatch": ubatch})
            s.reset()
            assert nmse(decode(s, tokens), g["logits_long"]) < 1e-7, where
        s.set({"offload_min_tokens": 1 << 24})
        s.reset()
        assert nmse(decode(s, tokens), g["logits_long"]) < 1e-7, where


@pytest.mark.parametrize("name", NAMES)
def test_streamed_weights_with_default_numerics(name: str) -> None:
    """Repacked on their way, they give what the same weights in the GPU's memory give."""
    tokens = golden(name)["tokens_long"].astype(np.int32)
    exact = opened(name)
    routing = None
    if exact.model["moe_layers"]:
        routing = exact.decode([(0, tokens)], "none", capture_routing=True)[1]
    session = {"mla_mode": "absorbed", "fusion": False}
    want = decode(opened_at(name, {"session": session}, "default"), tokens, pinned_routing=routing)
    places: list[dict[str, Any]] = [{"rules": ["ffn_(up|gate|down)=CPU"]}]
    if has_experts(name):
        places = [{"cpu_moe": True}, CACHED, ADAPTIVE]
    for where in places:
        s = opened_at(name, {**where, "session": {**session, "offload_min_tokens": 0}}, "default")
        assert nmse(decode(s, tokens, pinned_routing=routing), want) < 1e-9, where
        assert s.streamed["bytes"] + s.streamed["cached"] > 0


@pytest.mark.parametrize(("cache", "mode"), [("f16", "auto"), ("f32", "expanded")])
@pytest.mark.parametrize("name", ["deepseek2-lite", "deepseek2-v3"])
def test_streamed_prompts_expand_latent_attention(name: str, cache: str, mode: str) -> None:
    """As without streamed weights, also if sequences share a u-batch and the lists of a sequence change."""
    tokens = golden(name)["tokens_long"].astype(np.int32)
    routing = opened(name).decode([(0, tokens)], "none", capture_routing=True)[1]
    session = {"mla_mode": mode, "fusion": False, "offload_min_tokens": 0, "ubatch": 128}
    context = {"kv_type_k": cache, "sequences": 3}
    batches = ({0: 40}, {2: 3, 0: 61, 1: 17}, {0: 1, 2: 1}, {1: 60, 2: 50}, {0: 40})
    for where in ({"cpu_moe": True}, CACHED, {"n_gpu_layers": 2}):
        whole = opened_at(name, {"session": session}, "default", **context)
        s = opened_at(name, {**where, "session": session}, "default", **context)
        assert {op["list"] for op in s.ops(128)} == {"streamed_expanded"}
        for number, sizes in enumerate(batches):
            if number == len(batches) - 1:
                for each in (whole, s):
                    each.set({"mla_mode": "absorbed"})
            done = {slot: s.position(slot) for slot in sizes}
            parts = [slice(done[slot], done[slot] + n) for slot, n in sizes.items()]
            pinned = np.ascontiguousarray(np.concatenate([routing[:, part] for part in parts], axis=1))
            batch = [(slot, tokens[part].copy()) for slot, part in zip(sizes, parts, strict=True)]
            want, got = (each.decode(batch, "all", pinned_routing=pinned)[0] for each in (whole, s))
            # Layers whose attention is on the CPU stay absorbed, and round differently.
            assert nmse(got, want) < (1e-3 if "n_gpu_layers" in where else 1e-9), (where, sizes)
        assert s.streamed["bytes"] + s.streamed["cached"] > 0, where


@pytest.mark.parametrize("share", [0, 30, 100, -1])
@pytest.mark.parametrize("name", [name for name in NAMES if has_experts(name)])
def test_experts_shared_with_the_cpu(name: str, share: int) -> None:
    """Percent of the experts of a streamed prompt; the second prompt finds experts that crossed ahead.
    Routing is pinned, since the last bit may decide it."""
    g = golden(name)
    tokens = g["tokens_long"].astype(np.int32)
    routing = opened(name).decode([(0, tokens)], "none", capture_routing=True)[1]
    for where in ({"cpu_moe": True}, CACHED, ADAPTIVE):
        for numerics, limit in (("exact", 1e-7), ("default", 1e-3)):
            session = {"offload_min_tokens": 0, "cpu_share": share}
            s = opened_at(name, {**where, "session": session}, numerics)
            for ubatch in (23, 23, 7, 64):
                s.set({"ubatch": ubatch})
                s.reset()
                got = decode(s, tokens, pinned_routing=routing)
                assert nmse(got, g["logits_long"]) < limit, (where, numerics, ubatch)
            counts = s.streamed
            if share == 0:
                assert counts["shared"] == 0
            if share == 100:
                assert counts["shared"] + counts["cached"] > 0
                assert counts["matrices"] == 0
            # Single tokens of several runs, whose pieces are captured.
            s.reset()
            for i, token in enumerate(tokens[:4]):
                pinned = np.ascontiguousarray(routing[:, i : i + 1])
                got = decode(s, token.reshape(1), pinned_routing=pinned)
                assert nmse(got[0], g["logits_long"][i]) < limit, (where, numerics, i)


def test_prompts_repeat_if_the_cpu_shares_their_experts() -> None:
    """From the second prompt on, each finds the same experts ahead and gives the same bits."""
    tokens = golden("qwen3moe")["tokens_long"].astype(np.int32)
    where = {"cpu_moe": True, "session": {"offload_min_tokens": 0, "cpu_share": 30}}
    s = opened_at("qwen3moe", where, "default")
    found = []
    for _ in range(4):
        s.reset()
        found.append(decode(s, tokens))
    np.testing.assert_array_equal(found[2], found[1])
    np.testing.assert_array_equal(found[3], found[1])
    s.set({"cpu_share": 0})
    s.reset()
    plain = opened_at("qwen3moe", {"cpu_moe": True, "session": {"offload_min_tokens": 0}}, "default")
    np.testing.assert_array_equal(decode(s, tokens), decode(plain, tokens))


@pytest.mark.parametrize("type_name", ON_BOTH)
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (16, 3), (37, 11), (768, 9)])
def test_copies_in_the_layout_of_the_cpu_become_that_of_the_gpu(
    type_name: str, rows: int, blocks: int
) -> None:
    """The kernel behind the copies gives the bytes of the host's packer, each matrix in its place."""
    ops, k = _core.ops, blocks * block(type_name)
    place = [2, 0, 5]
    plain = [weights(np.random.default_rng(seed), type_name, rows, k)[0] for seed in place]
    x16 = np.concatenate([ops.repack(type_name, one, rows, k) for one in plain])
    got = ops.repack_on_gpu(type_name, x16, rows, k, place).reshape(6, -1)
    for one, at in zip(plain, place, strict=True):
        np.testing.assert_array_equal(got[at], ops.repack(type_name, one, rows, k, layout="gpu"))
    assert not got[[1, 3, 4]].any()


@pytest.mark.parametrize("type_name", ["q4_0", "q8_0", "q6_k"])
def test_more_matrices_than_a_launch_takes(type_name: str) -> None:
    ops, k = _core.ops, block(type_name)
    plain, _ = weights(np.random.default_rng(1), type_name, 300 * 16, k)
    x16 = ops.repack(type_name, plain, 300 * 16, k)  # 300 matrices of one tile
    got = ops.repack_on_gpu(type_name, x16, 16, k, list(range(300)))
    np.testing.assert_array_equal(got, ops.repack(type_name, plain, 300 * 16, k, layout="gpu"))


@pytest.mark.skipif(len(GPUS) < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", NAMES)
def test_layers_over_two_gpus(name: str) -> None:
    g = golden(name)
    for rules in (
        (r"blk\.1\.=cuda:1",),
        (r"blk\.[12]\.=cuda:1", "^output=cuda:1"),
        (r"blk\.1\.=cuda:1", "_exps=CPU"),
    ):
        if "_exps=CPU" in rules and not has_experts(name):
            continue
        s = opened(name, "exact", None, *rules)
        assert nmse(decode(s, g["tokens_long"]), g["logits_long"]) < 1e-7
        s.reset()
        rows = [decode(s, token.reshape(1))[0] for token in g["tokens_short"]]
        assert nmse(np.stack(rows), g["logits_short"]) < 1e-7


@pytest.mark.parametrize("mode", ["interleave", "pin", "mirror"])
@pytest.mark.parametrize("name", ["llama", "qwen3moe"])
def test_weights_over_numa_nodes_beside_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, mode: str
) -> None:
    """Two made-up nodes: tokens that the CPU multiplies, and prompts that are streamed from it."""
    nodes = write_nodes(tmp_path, [Node(cores()), Node(cores())])
    monkeypatch.setenv("DYNO_NUMA_ROOT", str(nodes))
    tokens = [int(token) for token in golden(name)["tokens_long"]][:60]
    given: dict[str, Any] = {"ctx": 256, "ubatch": 32, "threads": 4, "offload_min_tokens": 8, "profile": None}

    def ask(numa: str) -> Arrays:
        where = TINY / f"{name}-tiny.gguf"
        with dyno.Engine(where, device="cuda:0", n_gpu_layers=1, numa=numa, **given) as engine:
            assert engine.plan["numa_nodes"] == (1 if numa == "off" else 2)
            return [engine.logits(tokens), *(engine.logits([t], reset=False) for t in tokens[:4])]

    for got, want in zip(ask(mode), ask("off"), strict=True):
        np.testing.assert_array_equal(got, want)
