"""Mixtures of experts whose routers tie: files with equal router rows, random prompts, and tokens one by one.
Of equal experts the lower ids have to be taken, first to last, by every way through the engine."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
from dyno import _core

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GPUS = [d for d in _core.devices() if d["kind"] == "cuda" and not _core.device_problem(d)]
GRAPHS = _core.build_info()["switches"].get("GGML_CUDA_USE_GRAPHS") == "ON"
needs_gpu = pytest.mark.skipif(not GPUS, reason=f"no GPU: {_core.no_cuda_reason()}")

MODELS = ["bailingmoe2", "deepseek2-lite", "deepseek2-v3", "glm4moe", "gpt-oss", "granitemoe", "qwen3moe"]
COPIES = [1, 2, 4, 64]  # experts with the same row; 1: the file as it is, 64: all of them
LOOKED_AT, DRAWN = 8, 32  # tokens
# 420 tokens round more than the 150 of the golden files, and 27 narrow layers amplify it most.
LIMITS = {"deepseek2-lite": 1e-4, "gpt-oss": 2e-5}
F32 = {"ctx": 512, "kv_type_k": "f32", "kv_type_v": "f32"}
by_model = pytest.mark.parametrize("name", MODELS)
by_copies = pytest.mark.parametrize("copies", COPIES)
# The ops that are fused with the router's launch, and how they get to the GPU.
WAYS: list[dict[str, Any]] = [
    {},
    {"fusion": False},
    {"flash_attention": False},
    {"cuda_graphs": False},
    {"cuda_graphs": False, "fusion": False},
    {"fusion": False, "graph_concurrency": True},
]


def nmse(observed: np.ndarray, reference: np.ndarray) -> float:
    o, r = observed.astype(np.float64), reference.astype(np.float64)
    return float(((o - r) ** 2).sum() / ((r - r.mean()) ** 2).sum())


def tied(source: Path, target: Path, copies: int) -> Path:
    """A copy of a model in which `copies` neighbouring experts have the same router row and biases."""
    shutil.copyfile(source, target)
    target.chmod(0o600)
    reader = gguf.GGUFReader(target, "r+")
    changed = 0
    for tensor in reader.tensors:
        if tensor.name.endswith(("ffn_gate_inp.weight", "ffn_gate_inp.bias", "exp_probs_b.bias")):
            rows = np.arange(len(tensor.data))
            tensor.data[:] = tensor.data[rows - rows % copies].copy()
            changed += tensor.name.endswith(".weight")
    reader.data.flush()
    assert changed
    return target


def check_ties(routing: np.ndarray, copies: int) -> None:
    """Of experts that are equal the lowest ids, in ascending order.

    Args:
        routing: int32 [layers, tokens, used].
        copies: Experts with the same row.
    """
    ids = routing.reshape(-1, routing.shape[-1]).astype(np.int64)
    assert all(len(set(row)) == len(row) for row in ids.tolist()), "an expert is used twice"
    group = ids // copies
    same = group[:, :, None] == group[:, None, :]
    # How many of its equals stand before an expert: that is its own place among them.
    before = np.tril(same, -1).sum(-1)
    wrong = np.nonzero((before != ids % copies).any(-1))[0]
    assert not len(wrong), f"experts {ids[wrong[0]].tolist()} of equal ones, and {len(wrong)} more rows"


def prompts(session: _core.Session, seed: int, *sizes: int) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(seed)
    for size in sizes:
        yield rng.integers(0, session.model["n_vocab"], size).astype(np.int32)


@pytest.mark.parametrize("ids", [[1, 0, 4], [0, 3, 2], [1, 4, 5], [2, 2, 3]])
def test_the_check_sees_wrong_choices(ids: list[int]) -> None:
    right = np.array([[[4, 0, 1], [2, 3, 0]]], np.int32)
    check_ties(right, 2)
    with pytest.raises(AssertionError):
        check_ties(np.concatenate([right, np.array([[ids, ids]], np.int32)]), 2)


@by_copies
@by_model
def test_on_the_cpu(tiny_dir: Path, tmp_path: Path, name: str, copies: int) -> None:
    path = tied(tiny_dir / f"{name}-tiny.gguf", tmp_path / "m.gguf", copies)
    for numerics in ("exact", "default"):
        s = _core.Session(path, load={"numerics": numerics}, context=F32)
        for tokens in prompts(s, 1, 200, 1, 1, 1, 3):
            check_ties(s.decode([(0, tokens)], "all", capture_routing=True)[1], copies)


@pytest.mark.gpu
@needs_gpu
@by_copies
@by_model
def test_on_a_gpu(tiny_dir: Path, tmp_path: Path, name: str, copies: int) -> None:
    path = tied(tiny_dir / f"{name}-tiny.gguf", tmp_path / "m.gguf", copies)
    exact = _core.Session(path, load={"device": "cuda:0", "numerics": "exact"}, context=F32)
    prompt, rest = prompts(exact, copies, 400, 20)
    both = np.concatenate([prompt, rest])
    want, routing = exact.decode([(0, both)], "all", capture_routing=True)
    check_ties(routing, copies)
    cpu = _core.Session(path, load={"numerics": "exact"}, context=F32)
    assert nmse(want, cpu.decode([(0, both)], "all", pinned_routing=routing)[0]) < 1e-7

    s = _core.Session(path, load={"device": "cuda:0"}, context={"ctx": 512})
    limit = LIMITS.get(name, 1e-5)
    known = _core.known_settings()["session"]
    base = {setting: known[setting] for way in WAYS for setting in way}
    for way in WAYS:
        if way.get("graph_concurrency") and not GRAPHS:
            continue
        s.set({**base, **way})
        runs = [_free_run(s, prompt, rest, copies) for _ in range(2)]
        for first, second in zip(*runs, strict=True):
            np.testing.assert_array_equal(first, second, err_msg=str(way))
        s.reset()
        got = s.decode([(0, prompt)], "all", pinned_routing=routing[:, : len(prompt)].copy())[0]
        rows = []
        for at in range(len(prompt), len(both)):
            pinned = routing[:, at : at + 1].copy()
            rows.append(s.decode([(0, both[at : at + 1].copy())], "last", pinned_routing=pinned)[0])
        assert nmse(got, want[: len(prompt)]) < limit, way
        assert nmse(np.concatenate(rows), want[len(prompt) :]) < limit, way


def _free_run(s: _core.Session, prompt: np.ndarray, rest: np.ndarray, copies: int) -> list[np.ndarray]:
    """Everything that two runs have to agree on bit for bit, with the router's own choices."""
    s.reset()
    logits, routing = s.decode([(0, prompt)], "all", capture_routing=True)
    check_ties(routing, copies)
    found = [logits, routing]
    for token in rest[:LOOKED_AT]:  # whose routing is looked at: launched one by one
        logits, routing = s.decode([(0, token.reshape(1))], "last", capture_routing=True)
        check_ties(routing, copies)
        found += [logits, routing]
    s.rewind(len(prompt))
    plain = [s.decode([(0, token.reshape(1))], "last")[0] for token in rest]  # replayed, where graphs are on
    found += plain
    for size in (2, 5, 7):  # few tokens at once
        logits, routing = s.decode([(0, rest[:size].copy())], "all", capture_routing=True)
        check_ties(routing, copies)
        found += [logits, routing]
    drawn = s.generation(int(prompt[0]), temperature=1.0)
    drawn.queue(np.random.default_rng(4).random(DRAWN).astype(np.float32))
    found.append(np.array([drawn.next() for _ in range(DRAWN)]))
    # A replay repeats the launches, so it has chosen the same experts.
    for step, logits in enumerate(plain[:LOOKED_AT]):
        assert nmse(logits, found[2 + 2 * step]) < 1e-6
    return found
