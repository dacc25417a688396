"""Rows that one launch leaves as f16 tiles for the next: where a plan does that, and where not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from dyno import _core
from dyno.testing import tiny_model

if TYPE_CHECKING:
    from pathlib import Path

HOPPER = {"kind": "cuda", "compute_capability": 90, "sm_count": 132, "shared_per_block_bytes": 232_448}
AMPERE = HOPPER | {"compute_capability": 86, "shared_per_block_bytes": 101_376}
CPU = dict(_core.cpu_info())
LAYERS = 3
UP_GATE, DOWN = "up_gate q4_k n=2048 k=1024", "matmul q4_k n=1024 k=2048"
ATTENTION, OUTPUT = "attention heads=16", "matmul q4_k n=1024 k=1024"
FROM = "as f16 tiles from the op that writes them"
TO = "as f16 tiles to the op that reads them"
IF = "without a launch between them, if each token is of another sequence and the contexts are not deep"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return tiny_model(
        path, "llama", n_layers=LAYERS, n_embd=1024, n_ff=2048, n_heads=16, n_kv_heads=4, dtype="q4_k"
    )


def plan_of(model: Path, device: dict[str, Any] | None = HOPPER, **more: Any) -> _core.Session:
    kv_type = more.pop("kv_type", "f16")
    settings = {"cuda_graphs": False, "matvec_max_tokens": 3, **more.pop("session", {})}
    context = {"kv_type_k": kv_type, "kv_type_v": kv_type}
    return _core.Session(model, context=context, session=settings, plan_only=True, device=device, **more)


def reason(session: _core.Session, tokens: int, key: str) -> str:
    (text,) = [op["reason"] for op in session.ops(tokens) if op["key"].startswith(key)]
    return str(text)


def passes(session: _core.Session, tokens: int) -> dict[str, bool]:
    """Whether both ops of a pair say that tiles go from one to the other; they never differ."""
    out = {}
    for name, giver, reader in (("down", UP_GATE, DOWN), ("o", ATTENTION, OUTPUT)):
        gives, reads = TO in reason(session, tokens, giver), FROM in reason(session, tokens, reader)
        assert gives == reads
        out[name] = gives
    return out


@pytest.mark.parametrize("tokens", [9, 16, 17, 32, 33, 64])
def test_a_step_passes_tiles_on(model: Path, tokens: int) -> None:
    session = plan_of(model)
    assert passes(session, tokens) == {"down": True, "o": True}
    assert f"{LAYERS} of {LAYERS} {TO}" in reason(session, tokens, UP_GATE)
    # Behind the last attention rows whose logits nobody wants are left out, in float32.
    assert f"{LAYERS - 1} of {LAYERS} {TO}" in reason(session, tokens, ATTENTION)


@pytest.mark.parametrize(("tokens", "passed"), [(3, False), (4, False), (5, True), (8, True)])
def test_few_tokens_pass_on_rows_of_gate_and_up(model: Path, tokens: int, passed: bool) -> None:
    """From 5 tokens on: up to 4, so few weights are streamed. Attention needs several parts of the keys."""
    session = plan_of(model)
    assert (TO in reason(session, tokens, UP_GATE)) == (FROM in reason(session, tokens, DOWN)) == passed
    streamed = plan_of(model, session={"matvec_max_tokens": 16})
    assert FROM not in reason(streamed, tokens, DOWN)


@pytest.mark.parametrize("tokens", [1, 65, 512])
def test_others_do_not(model: Path, tokens: int) -> None:
    session = plan_of(model)
    texts = [op["reason"] for op in session.ops(tokens)]
    assert not any(TO in text or FROM in text for text in texts)


def test_only_hopper_does(model: Path) -> None:
    assert passes(plan_of(model, AMPERE), 32) == {"down": False, "o": False}


RING = {"variant": "wgmma_ring", "tokens": 32, "rows": 128, "parts": 4, "blocks": 1}
LOW = {"variant": "wgmma_codes", "tokens": 16, "rows": 128, "parts": 4, "blocks": 2}
WIDE = {"variant": "wgmma_codes", "tokens": 32, "rows": 512, "parts": 1, "blocks": 1}


@pytest.mark.parametrize(
    ("key", "config", "why"),
    [
        (
            DOWN,
            RING,
            " with wgmma_ring tokens=32 rows=128 parts=4 blocks=1: only wgmma_codes reads",
        ),
        (DOWN, LOW, " with wgmma_codes tokens=16 rows=128 parts=4 blocks=2"),
        (
            UP_GATE,
            WIDE,
            " with wgmma_codes tokens=32 rows=512 parts=1 blocks=1: f16 tiles are",
        ),
    ],
)
def test_a_profile_that_takes_another_kernel_gets_rows(
    model: Path, key: str, config: dict[str, Any], why: str
) -> None:
    """Either end decides: the entry is taken, and the other op gives or reads float32. The reasons of both
    ops and of the entry name the end that has no tiles, and its configuration."""
    (whole,) = {op["key"] for op in plan_of(model).ops(32) if op["key"].startswith(key)}
    session = plan_of(model, kernels=[(whole, "m17-32", config, "test")])
    assert passes(session, 32) == {"down": False, "o": True}
    assert passes(session, 16) == {"down": True, "o": True}
    (entry,) = session.kernel_report()
    assert entry["status"] == "applied"
    text = entry["reason"]
    assert text.startswith(f"test; with m17-32 rows from {UP_GATE}"), text
    for said in (text, reason(session, 32, UP_GATE), reason(session, 32, DOWN)):
        assert f"{whole}{why}" in said, said
    for said, way in (
        (reason(session, 32, UP_GATE), "to the op that reads"),
        (reason(session, 32, DOWN), "from the op that writes"),
    ):
        assert f"{LAYERS} of {LAYERS} as float32 rows {way} them" in said, said


def test_an_entry_that_keeps_tiles_says_nothing_of_rows(model: Path) -> None:
    for key in (UP_GATE, DOWN):
        (op,) = [op for op in plan_of(model).ops(32) if op["key"].startswith(key)]
        session = plan_of(model, kernels=[(op["key"], "m17-32", op["config"], "test")])
        assert [entry["reason"] for entry in session.kernel_report()] == ["test"]


def test_an_entry_of_attention_names_the_steps_that_lose_tiles(model: Path) -> None:
    session = plan_of(model)
    (op,) = [op for op in session.ops(32) if op["key"].startswith(ATTENTION)]
    session.set_kernels([(op["key"], "m17-32", {"variant": "rows", "splits": 1}, "test")])
    (entry,) = session.kernel_report()
    assert entry["status"] == "applied", entry
    assert f"{op['key']} with rows " in entry["reason"]
    assert entry["reason"].endswith(
        "f16 tiles, if each token is of another sequence and the contexts are not deep"
    )
    assert passes(session, 32) == {"down": True, "o": False}


def test_tiles_of_attention_have_a_condition(model: Path) -> None:
    """Rows of a prompt's chunk with as many tokens stay float32."""
    session = plan_of(model)
    for key, conditional in ((ATTENTION, True), (OUTPUT, True), (UP_GATE, False), (DOWN, False)):
        assert (IF in reason(session, 32, key)) == conditional


def test_ops_tell_the_height_of_their_tiles(model: Path) -> None:
    session = plan_of(model)
    for tokens, height in ((16, 16), (32, 32), (64, 64)):
        tiles = {op["key"]: op["tiles"] for op in session.ops(tokens) if op["tiles"]}
        assert {next(iter(t)): next(iter(t.values())) for t in tiles.values()} == {
            "x_tiles": height, "y_tiles": height, "out_tiles": height
        }  # fmt: skip
    assert not any(op["tiles"] for op in session.ops(65))


def test_ops_of_a_cpu_are_not_asked_for_tiles(model: Path) -> None:
    """Neither of a CPU alone, nor of layers on the CPU beside a GPU. With exact numerics no copy stands
    between two ops there."""
    exact = {"load": {"numerics": "exact"}, "kv_type": "f32"}
    assert not any(node["tiles"] for node in plan_of(model, None, **exact).nodes())
    placement = {"rules": [r"blk\.0\.=cpu"], "beside_gpu": [CPU]}
    nodes = plan_of(model, placement=placement, **exact).nodes()
    assert {node["device"] for node in nodes if node["key"].startswith("up_gate")} == {"cpu", "cuda:0"}
    assert {node["device"] for node in nodes if node["tiles"]} == {"cuda:0"}


def test_a_cache_that_steps_do_not_read_gives_rows(model: Path) -> None:
    session = plan_of(model, kv_type="q8_0")
    assert passes(session, 32) == {"down": True, "o": False}
    for key in (ATTENTION, OUTPUT):
        assert "attention writes f16 tiles only over" in reason(session, 32, key)


@pytest.mark.parametrize(("ubatch", "fits"), [(17, False), (18, True)])
def test_tiles_fit_into_the_memory_of_the_rows(model: Path, ubatch: int, fits: bool) -> None:
    """A tile of 32 rows takes 548 bytes for 256 columns of each, whether they exist or not."""
    session = plan_of(model, session={"ubatch": ubatch})
    assert passes(session, 17) == {"down": fits, "o": fits}
    for key in (UP_GATE, DOWN, ATTENTION, OUTPUT):
        assert (f"a u-batch of {ubatch} tokens have" in reason(session, 17, key)) != fits
