"""Steps of many sequences on a GPU whose launches pass rows on as f16 tiles (csrc/ops/half_tiles.h)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from dyno import _core, quality
from dyno.testing import tiny_model

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

GPUS = [d for d in _core.devices() if d["kind"] == "cuda" and d["compute_capability"] == 90]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not GPUS, reason=f"no Hopper GPU: {_core.no_cuda_reason()}"),
]

TILES = "as f16 tiles"
SETTINGS = {"matvec_max_tokens": 3}  # as the engine chooses on Hopper
CACHE = {"kv_type_k": "f16", "kv_type_v": "f16"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    shape = {"n_layers": 4, "n_embd": 1024, "n_ff": 3072, "n_heads": 16, "n_kv_heads": 8, "head_dim": 128}
    return tiny_model(path, "llama", dtype="q4_k", n_ctx=1024, **shape)


def rows_only(session: _core.Session, count: int) -> list[tuple[str, str, dict[str, Any], str]]:
    """Entries that give the readers of tiles another variant, which has none."""
    device = {key: value for key, value in GPUS[0].items() if key != "ordinal"}
    entries = []
    for op in session.ops(count):
        if op["family"] != "matmul" or TILES not in op["reason"]:
            continue
        _, desc = _core.ops.parse_key(op["key"], tokens=count)
        configs = _core.ops.candidates("matmul", desc, device)
        ring = next(config for config in configs if config["variant"] == "wgmma_ring")
        entries.append((op["key"], op["tokens"], ring, "test"))
    return entries


def steps(model: Path, count: int, kernels: Sequence[Any] = (), **more: Any) -> np.ndarray:
    """Logits of three steps of so many sequences, behind prompts of different lengths, at least `depth`."""
    random = np.random.default_rng(count)
    depth = more.pop("depth", 3)
    load = {"device": "cuda:0", **more.pop("load", {})}
    context = {"ctx": depth + 93, "sequences": count, **CACHE, **more.pop("context", {})}
    settings = {**SETTINGS, **more.pop("session", {})}
    session = _core.Session(model, load=load, context=context, session=settings, kernels=list(kernels))
    assert [entry["status"] for entry in session.kernel_report()] == ["applied"] * len(kernels)
    prompts = [
        (slot, random.integers(0, 256, depth + 11 * slot % 70, dtype=np.int32)) for slot in range(count)
    ]
    session.decode(prompts, "none")
    out = []
    for _ in range(3):
        rows = [(slot, random.integers(0, 256, 1, dtype=np.int32)) for slot in range(count)]
        out.append(session.decode(rows, "last")[0].copy())
    return np.concatenate(out)


@pytest.mark.parametrize("count", [9, 16, 21, 32, 33, 64])
def test_steps_with_tiles_are_as_accurate_as_with_rows(model: Path, count: int) -> None:
    exact = steps(model, count, load={"numerics": "exact"}, context={"kv_type_k": "f32", "kv_type_v": "f32"})
    graphs = {False, _core.build_info()["switches"]["GGML_CUDA_USE_GRAPHS"] == "ON"}
    with_tiles = [steps(model, count, session={"cuda_graphs": captured}) for captured in sorted(graphs)]
    for other in with_tiles[1:]:
        assert np.array_equal(with_tiles[0], other), "a replayed graph gives other bits"
    probe = _core.Session(model, load={"device": "cuda:0"}, context=CACHE, session=SETTINGS)
    entries = rows_only(probe, count)
    assert len(entries) == 2, "o and down read tiles"
    with_rows = steps(model, count, kernels=entries, session={"cuda_graphs": False})
    tiles, rows = quality.nmse(exact, with_tiles[0]), quality.nmse(exact, with_rows)
    assert tiles < 1e-4
    assert tiles < 2 * rows


@pytest.mark.parametrize("count", [9, 24])
def test_steps_over_deep_contexts_divide_the_keys_and_pass_rows(tmp_path: Path, count: int) -> None:
    """A replayed graph computes the same as its launches."""
    depth = 2300
    shape = {"n_layers": 3, "n_embd": 1024, "n_ff": 2048, "n_heads": 16, "n_kv_heads": 2, "head_dim": 128}
    path = tiny_model(tmp_path / "m.gguf", "llama", dtype="q4_k", n_ctx=4096, **shape)
    desc = {"m": count, "heads": 16, "kv_heads": 2, "dk": 128, "dv": 128, "k_type": "f16", "v_type": "f16"}
    short, deep = (
        _core.ops.launch_config("attention", desc, sequences=count, depth=positions, device=GPUS[0])
        for positions in (96, depth)
    )
    assert short == {"variant": "direct", "rows": 8, "splits": 1}
    assert deep["splits"] > 1
    exact = steps(
        path,
        count,
        depth=depth,
        load={"numerics": "exact"},
        context={"kv_type_k": "f32", "kv_type_v": "f32"},
    )
    graphs = {False, _core.build_info()["switches"]["GGML_CUDA_USE_GRAPHS"] == "ON"}
    found = [
        steps(path, count, depth=depth, session={"cuda_graphs": captured}) for captured in sorted(graphs)
    ]
    for other in found[1:]:
        assert np.array_equal(found[0], other), "a replayed graph gives other bits"
    assert quality.nmse(exact, found[0]) < 1e-4


def test_a_generation_crosses_depths_with_a_graph_for_each(model: Path) -> None:
    """Its tokens are the ones of decoding launch by launch."""
    if _core.build_info()["switches"]["GGML_CUDA_USE_GRAPHS"] != "ON":
        pytest.skip("a build without CUDA graphs")
    prompt = np.random.default_rng(1).integers(0, 256, 490, dtype=np.int32)
    found = []
    for captured in (False, True):
        session = _core.Session(
            model,
            load={"device": "cuda:0"},
            context={"ctx": 600, **CACHE},
            session={**SETTINGS, "cuda_graphs": captured},
        )
        logits = session.decode([(0, prompt)], "last")[0]
        rows = []
        for _ in range(40):
            logits = session.decode([(0, np.array([int(logits[-1].argmax())], np.int32))], "last")[0]
            rows.append(logits.copy())
        found.append(np.concatenate(rows))
        depths = [work["depth"] for work in session.captures() if work["captured"]]
        assert depths == ([512, 600] if captured else [])
    assert np.array_equal(*found), "a replayed graph gives other bits"
