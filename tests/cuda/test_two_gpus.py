"""Layers over two GPUs: each way to use the engine answers as one GPU, bit for bit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dyno
import numpy as np
import pytest
from dyno import _core
from own_process import found_by

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

TINY = Path(__file__).resolve().parents[1] / "data" / "tiny"
NAMES = sorted(p.name.removesuffix("-tiny.gguf") for p in TINY.glob("*-tiny.gguf"))
GPUS = [d for d in _core.devices() if d["kind"] == "cuda" and not _core.device_problem(d)]
HERE = Path(__file__).resolve().parent
GRAPHS = _core.build_info()["switches"].get("GGML_CUDA_USE_GRAPHS") == "ON"
ONE: dict[str, Any] = {}
# By memory, with most layers on the first GPU, and with most of them on the second.
SPLITS: list[dict[str, Any]] = [
    {"split": "layer"},
    {"split": "layer", "tensor_split": (3, 1)},
    {"split": "layer", "tensor_split": (1, 4)},
]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(len(GPUS) < 2, reason="needs two GPUs"),
    # Two cards of different kinds may have different kernels.
    pytest.mark.skipif(
        len({d["name"] for d in GPUS[:2]}) > 1, reason="the first two GPUs differ, so their kernels may"
    ),
]

Arrays = list["NDArray[np.float32]"]


def tokens_of(name: str) -> list[int]:
    with np.load(TINY / f"{name}-tiny.golden.npz") as data:
        return [int(token) for token in data["tokens_long"]]


def opened(name: str, where: dict[str, Any], **settings: Any) -> dyno.Engine:
    given = {"ctx": 256, "ubatch": 23, "cuda_graphs": GRAPHS, **settings}
    return dyno.Engine(TINY / f"{name}-tiny.gguf", device="cuda:0", profile=None, **where, **given)


def holds_same(name: str, ask: Callable[[dyno.Engine], Arrays], **settings: Any) -> None:
    """What `ask` reads of one GPU and of each split."""
    with opened(name, ONE, **settings) as engine:
        want = ask(engine)
    for where in SPLITS:
        with opened(name, where, **settings) as engine:
            assert {"cuda:0", "cuda:1"} <= {tensor["device"] for tensor in engine.plan["tensors"]}, where
            for got, expected in zip(ask(engine), want, strict=True):
                np.testing.assert_array_equal(got, expected, err_msg=str(where))


@pytest.mark.parametrize("numerics", ["exact", "default"])
@pytest.mark.parametrize("name", NAMES)
def test_prompts_and_single_tokens(name: str, numerics: str) -> None:
    tokens = tokens_of(name)
    holds_same(
        name,
        lambda engine: [
            engine.logits(tokens, rows="all"),
            *(engine.logits([token], rows="last", reset=i == 0) for i, token in enumerate(tokens[:12])),
        ],
        numerics=numerics,
    )


@pytest.mark.skipif(not GRAPHS, reason="a build without CUDA graphs")
@pytest.mark.parametrize("name", NAMES)
def test_replayed_tokens_equal_launched_ones(name: str) -> None:
    tokens = tokens_of(name)[:10]
    results = []
    for graphs in (False, True):
        with opened(name, SPLITS[0], cuda_graphs=graphs) as engine:
            rows = [engine.logits([token], rows="last", reset=i == 0) for i, token in enumerate(tokens)]
            results.append(np.stack(rows))
            if graphs:
                captures = engine.diagnostics.captures()
                assert captures
                assert [row["reason"] for row in captures if not row["captured"]] == []
    np.testing.assert_array_equal(results[1], results[0])


@pytest.mark.parametrize("name", NAMES)
def test_sequences_in_one_batch(name: str) -> None:
    tokens = tokens_of(name)

    def ask(engine: dyno.Engine) -> Arrays:
        first = engine.logits_batch({2: tokens[:3], 0: tokens[:41], 1: tokens[:17]}, reset=True)
        found = list(first.values())
        for step in range(4):
            found += engine.logits_batch(
                {slot: [tokens[50 + slot + step]] for slot in range(3)}, reset=False
            ).values()
        engine.copy_sequence(0, 2)
        found.append(engine.logits([tokens[7]], rows="last", reset=False, slot=2))
        return found

    holds_same(name, ask, sequences=3)


def test_generated_text_and_a_smaller_context() -> None:
    texts = []
    for where in (ONE, *SPLITS):
        with opened("qwen3moe", where) as engine:
            text = "".join(engine.generate([1, 2, 3, 4, 5, 6, 7], 24, temperature=1.0, seed=7))
            engine.set(ubatch=5)
            engine.set_context(ctx=64)
            texts.append(text + "".join(engine.generate([1, 2, 3], 12, temperature=0)))
    assert len(set(texts)) == 1
    assert texts[0]


@pytest.mark.parametrize("lost", ["0", "1"])
def test_a_lost_gpu_is_named_and_the_cpu_works_on(trained_model: Path, lost: str) -> None:
    """Values cross from the first GPU to the second, so the loss of either ends a step. Known drivers
    end the contexts of both, and then the first error names both."""
    found, stderr = found_by(HERE / "lost_peer.py", str(trained_model), lost)
    for moment in ("first", "again", "another engine"):
        kind, message = found[moment]
        assert kind == "DeviceLostError", (moment, found)
        assert f"cuda:{lost}" in message, (moment, found)
    assert f"cuda:{lost} is lost" in found["another engine"][1]
    assert found["cpu"]
    if found["kept answers"]:
        assert (found["other gpu"], found["same"]) == ([], True)
        return
    for moment in ("first", "again", "another engine", "other gpu"):
        assert "this process can use none of its GPUs: cuda:" in found[moment][1], (moment, found)
        assert {"cuda:0", "cuda:1"} <= set(re.findall(r"cuda:\d", found[moment][1]))
    assert f"cuda:{1 - int(lost)} is lost" in found["other gpu"][1]
    assert "[cuda]" not in stderr  # closing is silent: both losses have been told
