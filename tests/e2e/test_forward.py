"""Architectures in dimensions that no shipped file has, against a second implementation: `forward.py`. The
goldens of the public reference implementation check it first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from dyno import _core
from dyno.errors import PlanError
from forward import KNOWN, Forward
from random_models import SHAPES, Shape, random_model
from sparse_shapes import SPARSE_SHAPES, selected

TINY = Path(__file__).resolve().parent.parent / "data" / "tiny"
GOLDEN = sorted(
    path
    for path in TINY.glob("*-tiny.gguf")
    if _core.Gguf(path).get("general.architecture") in KNOWN and "nvfp4" not in path.name
)
TOKENS = 60
SMALL = [
    s for s in SHAPES if s.architecture in KNOWN and s.n_vocab < 2000 and s.heads < 31 and s.experts < 100
]


def nmse(observed: np.ndarray, reference: np.ndarray) -> float:
    o, r = observed.astype(np.float64), reference.astype(np.float64)
    return float(((o - r) ** 2).sum() / ((r - r.mean()) ** 2).sum())


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.name.removesuffix("-tiny.gguf"))
def test_the_second_implementation_against_the_public_one(path: Path) -> None:
    with np.load(path.with_name(path.name.replace(".gguf", ".golden.npz"))) as golden:
        tokens, want = golden["tokens_long"], golden["logits_long"]
    assert nmse(Forward(path).logits(tokens), want) < 1e-9


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("architecture", ["qwen35", "qwen35moe", "qwen3next"])
def test_drafts_in_other_dimensions(architecture: str, seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    mixture = {"experts": 6, "used": 2, "n_ff_expert": 48, "shared": 1} if architecture != "qwen35" else {}
    keys = int(rng.integers(1, 4))
    shape = Shape(
        architecture, ("f16", "bf16"), 32 * int(rng.integers(1, 4)), 2 * keys, keys, 24 + 8 * seed,
        96, 120 + seed, n_layers=2, rotary=8, tied=bool(seed % 2), taps=2 + seed % 3,
        linear_keys=keys, linear_values=keys * int(rng.integers(1, 4)), linear_dim=16, **mixture,
    )  # fmt: skip
    path = random_model(tmp_path / "m.gguf", shape, seed, head=True)
    tokens = rng.integers(0, shape.n_vocab, 30).astype(np.int32)
    want = Forward(path).drafts(tokens)
    s = _core.Session(
        path,
        load={"device": "cpu", "numerics": "exact"},
        context={"ctx": 64, "kv_type_k": "f32", "kv_type_v": "f32"},
    )
    s.load_draft_head()
    at = 0
    for size in (5, 1, 1, 9, 2, 7):
        s.decode([(0, tokens[at : at + size].copy())], "none")
        at += size
        assert nmse(s.draft([(0, int(tokens[at]))])[0], want[at - 1]) < 1e-9, f"after {at} tokens"


def test_the_second_implementation_covers_the_architectures() -> None:
    assert set(_core.architectures()) <= set(KNOWN)


def sparse_model(tmp_path: Path, shape: Shape, count: int) -> tuple[Path, np.ndarray, np.ndarray]:
    """A model, tokens and their logits. Rounding would exchange positions whose scores are nearly equal, so
    the first seed is used whose scores are not."""
    for seed in range(40):
        path = random_model(tmp_path / f"m{seed}.gguf", shape, seed)
        tokens = np.random.default_rng(seed).integers(0, shape.n_vocab, count).astype(np.int32)
        forward = Forward(path)
        want = forward.logits(tokens)
        if forward.margin > 1e-5:
            return path, tokens, want
    raise AssertionError(f"{shape.name}: all seeds have scores that are nearly equal")


@pytest.mark.parametrize("shape", SPARSE_SHAPES, ids=lambda shape: f"{shape.name}-{shape.n_vocab}")
def test_sparse_attention_in_other_dimensions(shape: Shape, tmp_path: Path, device: str) -> None:
    path, tokens, want = sparse_model(tmp_path, shape, 120)
    most, limit = selected(shape), 1e-9 if device == "cpu" else 1e-7
    context = {"ctx": 128, "kv_type_k": "f32", "kv_type_v": "f32", "sequences": 2}
    s = _core.Session(path, load={"device": device, "numerics": "exact"}, context={**context, "ctx": most})
    assert not any(node["key"].startswith("index_select") for node in s.nodes())
    s.set_context(context)
    own = [node["layer"] for node in s.nodes() if node["key"].startswith("index_select")]
    assert own == [layer for layer in range(shape.n_layers) if shape.has_indexer(layer)]
    for ubatch in (512, 7, 50):
        s.set({"ubatch": ubatch})
        s.reset()
        assert nmse(s.decode([(0, tokens)], "all")[0], want) < limit, f"ubatch {ubatch}"
    # Back, another text, back again: the keys of the indexer are those of the new text.
    other = np.roll(tokens, 1)[:90].copy()
    s.rewind(40)
    s.decode([(0, other[40:].copy())], "none")
    s.rewind(40)
    got = [s.decode([(0, tokens[at : at + 1].copy())], "all")[0] for at in range(40, 80)]
    assert nmse(np.vstack(got), want[40:80]) < limit, "token by token"
    s.copy_prefix(0, 1, 75)
    at = [80, 75]
    for _ in range(5):  # two sequences of other lengths, with other numbers of tokens each
        steps = [tokens[a : a + size].copy() for a, size in zip(at, (1, 3), strict=True)]
        rows = np.vstack([want[a : a + len(each)] for a, each in zip(at, steps, strict=True)])
        assert nmse(s.decode(list(enumerate(steps)), "all")[0], rows) < limit, f"two sequences at {at}"
        at = [a + len(each) for a, each in zip(at, steps, strict=True)]


def test_sparse_attention_with_a_rounded_cache_and_activations(tmp_path: Path, device: str) -> None:
    """Most positions that are read are the same, so the answers are near."""
    path, tokens, want = sparse_model(tmp_path, SPARSE_SHAPES[1], 120)
    for cache in ("f16", "bf16", "q8_0", "f32"):
        context = {"ctx": 128, "kv_type_k": cache, "kv_type_v": cache}
        s = _core.Session(path, load={"device": device}, context=context)
        assert nmse(s.decode([(0, tokens)], "all")[0], want) < 2e-2, cache
        s.rewind(60)
        rows = [s.decode([(0, tokens[at : at + 1].copy())], "all")[0] for at in range(60, 90)]
        assert nmse(np.vstack(rows), want[60:90]) < 2e-2, f"{cache}, token by token"


def test_a_context_of_exactly_the_selected_positions(tmp_path: Path) -> None:
    """The model's own limit ends the context, not the selection."""
    shape = SPARSE_SHAPES[0]
    short = replace(shape, metadata={**shape.metadata, "context_length": selected(shape)})
    path = random_model(tmp_path / "m.gguf", short)
    s = _core.Session(path, context={"ctx": 0})
    assert s.plan["settings"]["ctx"] == selected(shape)
    with pytest.raises(PlanError, match=r"ctx is 21, but the model was made for 20 positions"):
        s.set_context({"ctx": 21})


@pytest.mark.parametrize("device", [pytest.param("cuda:0", marks=pytest.mark.gpu)], indirect=True)
def test_launches_of_sparse_attention_on_a_gpu(tmp_path: Path, device: str) -> None:
    """Replayed graphs give the bits of single launches. The fused list gives nearly the same logits."""
    path, tokens, _ = sparse_model(tmp_path, SPARSE_SHAPES[2], 120)
    s = _core.Session(path, load={"device": device}, context={"ctx": 128}, session={"cuda_graphs": False})

    def single() -> np.ndarray:
        s.reset()
        s.decode([(0, tokens[:30].copy())], "none")
        return np.vstack([s.decode([(0, tokens[at : at + 1].copy())], "all")[0] for at in range(30, 70)])

    launched = single()
    if _core.build_info()["switches"]["GGML_CUDA_USE_GRAPHS"] == "ON":
        s.set({"cuda_graphs": True})
        np.testing.assert_array_equal(single(), launched)
    s.set({"fusion": False})
    assert nmse(single(), launched) < 2e-2


@pytest.mark.parametrize("device", [pytest.param("cuda:0", marks=pytest.mark.gpu)], indirect=True)
@pytest.mark.parametrize(
    "placement",
    [
        {"n_gpu_layers": 3},  # a layer on the CPU selects for layers on the GPU
        {"rules": [r"blk\.[13]\.attn.*=CPU"]},  # attention of one device reads the selection of the other
        {"rules": ["indexer=CPU"]},
        {"rules": ["indexer.*norm=CPU", "attn_k_b=CPU", "exps=CPU"]},
    ],
    ids=str,
)
def test_sparse_attention_on_a_gpu_beside_the_cpu(
    placement: dict[str, object], tmp_path: Path, device: str
) -> None:
    path, tokens, want = sparse_model(tmp_path, SPARSE_SHAPES[2], 120)
    s = _core.Session(
        path, load={"device": device, "numerics": "exact"},
        context={"ctx": 128, "kv_type_k": "f32", "kv_type_v": "f32"}, placement=placement,
    )  # fmt: skip
    assert {"cpu", "cuda:0"} <= {node["device"] for node in s.nodes()}
    for ubatch in (512, 33):
        s.set({"ubatch": ubatch})
        s.reset()
        assert nmse(s.decode([(0, tokens[:80].copy())], "all")[0], want[:80]) < 1e-7, f"ubatch {ubatch}"
        rows = [s.decode([(0, tokens[at : at + 1].copy())], "all")[0] for at in range(80, 120)]
        assert nmse(np.vstack(rows), want[80:]) < 1e-7, f"ubatch {ubatch}, token by token"


def test_plans_of_sparse_attention_for_a_gpu(tmp_path: Path) -> None:
    """A plan alone needs no GPU."""
    shape = SPARSE_SHAPES[2]
    path = random_model(tmp_path / "m.gguf", shape)
    hopper = {"kind": "cuda", "compute_capability": 90, "sm_count": 132, "shared_per_block_bytes": 232_448}

    def planned(ctx: int, **load: str) -> _core.Session:
        return _core.Session(
            path,
            load=load,
            context={"ctx": ctx},
            session={"cuda_graphs": False},
            plan_only=True,
            device=hopper,
        )

    def keys(s: _core.Session, tokens: int) -> list[str]:
        return [str(op["key"]) for op in s.ops(tokens)]

    whole, selecting = planned(37), planned(38)
    assert not any("indexer" in name for name in selecting.model["unused_tensors"])
    indexers = sum(shape.has_indexer(layer) for layer in range(shape.n_layers))
    assert selecting.plan["kv_bytes"] - planned(37).plan["kv_bytes"] >= indexers * 38 * shape.index_dim * 4
    default = _core.Session(path, load={"device": "cpu"}, plan_only=True).plan["settings"]["ctx"]
    assert planned(0).plan["settings"]["ctx"] == default > 37
    for tokens in (1, 16, 500):
        assert not any("select" in key for key in keys(whole, tokens))
        found = keys(selecting, tokens)
        assert any(key.startswith("index_select") for key in found)
        attention = [key for key in found if "attention" in key.split()[0]]
        assert attention
        assert all(key.startswith("attention") and "selected=37" in key for key in attention)
        # Latents are normalised, rotated and stored in one launch, as without a selection.
        fused = [key for key in found if key.startswith("qkv_rope_store")]
        assert fused
    assert {op["list"] for op in whole.ops(500)} == {"expanded"}
    assert {op["list"] for op in selecting.ops(500)} == {"batched"}
    assert any(key.startswith("index_select") for key in keys(planned(38, numerics="exact"), 16))


@pytest.mark.parametrize("shape", SMALL, ids=lambda shape: shape.name)
def test_other_dimensions(shape: Shape, tmp_path: Path) -> None:
    path = random_model(tmp_path / "m.gguf", shape)
    tokens = np.random.default_rng(5).integers(0, shape.n_vocab, TOKENS).astype(np.int32)
    want = Forward(path).logits(tokens)
    s = _core.Session(
        path,
        load={"device": "cpu", "numerics": "exact"},
        context={"ctx": 128, "kv_type_k": "f32", "kv_type_v": "f32", "sequences": 2},
    )
    for ubatch in (512, 7):
        s.set({"ubatch": ubatch})
        s.reset()
        assert nmse(s.decode([(0, tokens)], "all")[0], want) < 1e-9, f"ubatch {ubatch}"
    s.reset()
    s.decode([(1, tokens[:11].copy())], "none")
    got, at = [], [0, 11]
    for _ in range(6):  # two sequences of other lengths, with other numbers of tokens each
        steps = [tokens[a : a + size].copy() for a, size in zip(at, (3, 1), strict=True)]
        got.append(s.decode(list(enumerate(steps)), "all")[0])
        rows = np.vstack([want[a : a + len(each)] for a, each in zip(at, steps, strict=True)])
        assert nmse(got[-1], rows) < 1e-9, f"two sequences at {at}"
        at = [a + len(each) for a, each in zip(at, steps, strict=True)]
