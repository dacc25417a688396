"""Architectures in dimensions that no shipped file has, against a second implementation: `forward.py`. The
goldens of the public reference implementation check it first."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from dyno import _core
from forward import KNOWN, Forward
from random_models import SHAPES, Shape, random_model

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
    assert set(_core.architectures()) - set(KNOWN) == {"deepseek32", "glm-dsa"}  # deepseek2 with an indexer


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
