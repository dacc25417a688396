"""The ops that a tune may choose kernels for, of plans for a GPU that this machine need not have."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from dyno import _core
from dyno.errors import PlanError
from dyno.testing import tiny_model
from dyno_tuner.core.protocol import Workload
from dyno_tuner.targets.dyno import kernel_ops

if TYPE_CHECKING:
    from dyno_tuner.core.protocol import KernelOp

HOPPER = {"kind": "cuda", "compute_capability": 90, "sm_count": 132, "shared_per_block_bytes": 232_448}
N_VOCAB = 320
UP_GATE, DOWN = "up_gate q4_k n=2048 k=1024", "matmul q4_k n=1024 k=2048"


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> _core.Session:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    tiny_model(
        path, "llama", n_layers=2, n_embd=1024, n_ff=2048, n_heads=16, n_kv_heads=4, n_vocab=N_VOCAB,
        dtype="q4_k",
    )  # fmt: skip
    settings = {"cuda_graphs": False, "matvec_max_tokens": 3}
    return _core.Session(path, session=settings, plan_only=True, device=HOPPER)


@pytest.fixture(autouse=True)
def all_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a build for this GPU: every legal kernel is compiled in."""
    ops = {name: getattr(_core.ops, name) for name in ("parse_key", "supports", "cost")}
    core = SimpleNamespace(ops=SimpleNamespace(**ops, candidates=legal))
    monkeypatch.setattr(kernel_ops, "_core", core)


legal: Any = partial(_core.ops.candidates, set="legal")


def choices(session: _core.Session, tokens: int) -> dict[str, KernelOp]:
    """By the beginning of the key."""
    workload = Workload(pp=tokens, tg=0)
    found = kernel_ops.ops_with_choice(session, HOPPER, "cuda", {"n_vocab": N_VOCAB}, workload, 512)
    return {" ".join(op.key.split()[:4]): op for op in found}


def test_candidates_keep_tiles_of_halves(session: _core.Session) -> None:
    """Alone, an op reads and leaves rows: a kernel without tiles would not pay for the launch they spare."""
    tokens = 32
    ops = choices(session, tokens)
    for name, field in ((UP_GATE, "y_tiles"), (DOWN, "x_tiles")):
        op = ops[name]
        family, desc = _core.ops.parse_key(op.key, tokens)
        every = legal(family, desc, HOPPER)
        kept = [dict(c) for c in op.candidates]
        assert dict(op.default) in kept
        assert len(kept) > 1
        tiled = {**desc, field: tokens}
        assert kept == [c for c in every if _core.ops.supports(family, tiled, c, HOPPER)[0]]
        assert {c["variant"] for c in kept} == {"wgmma_codes"} != {c["variant"] for c in every}
        assert {c["tokens"] for c in kept} == {tokens}


@pytest.mark.parametrize("tokens", [1, 8, 32])
def test_attention_whose_launches_choose_is_left_out(session: _core.Session, tokens: int) -> None:
    """A profile also serves depths of the context that the workload lacks."""
    workload = Workload(pp=tokens, tg=16)
    found = kernel_ops.ops_with_choice(session, HOPPER, "cuda", {"n_vocab": N_VOCAB}, workload, 512)
    attention = {op["key"]: op["config"]["variant"] for op in session.ops(tokens) if "attention" in op["key"]}
    assert set(attention.values()) == {"adaptive"}
    assert found
    assert not {op.key for op in found} & set(attention)
    # The kernels of longer prompts do not depend on the depth.
    assert any(key.startswith("attention ") for key in choices(session, 512))


def test_without_tiles_all_candidates_stay(session: _core.Session) -> None:
    op = choices(session, 512)[UP_GATE]
    family, desc = _core.ops.parse_key(op.key, 512)
    assert len({c["variant"] for c in op.candidates}) > 1
    (path,) = {o["path"] for o in session.ops(512) if o["key"] == op.key}
    assert list(map(dict, op.candidates)) == legal(family, {**desc, "path": path}, HOPPER)


def test_a_prompt_passes_no_tiles_out_of_attention(session: _core.Session) -> None:
    """Attention leaves tiles only in a step of one token of each sequence. A prompt has one sequence, so the
    product behind it keeps every candidate."""
    tokens = 32
    keys = {"attention": "out_tiles", "matmul q4_k n=1024 k=1024": "x_tiles"}
    steps = {o["key"]: o["tiles"] for o in session.ops(tokens)}
    prompt = {o["key"]: o["tiles"] for o in session.ops(tokens, sequences=1)}
    for beginning, field in keys.items():
        (key,) = [key for key in steps if key.startswith(beginning)]
        assert steps[key].get(field) == tokens, "the case that this test is about"
        assert prompt[key] == {}
    found = {op.key: op for op in kernel_ops.ops_with_choice(
        session, HOPPER, "cuda", {"n_vocab": N_VOCAB}, Workload(pp=tokens, tg=0), 512
    )}  # fmt: skip
    (key,) = [key for key in found if key.startswith("matmul q4_k n=1024 k=1024")]
    family, desc = _core.ops.parse_key(key, found[key].m)
    path = next(o["path"] for o in session.ops(tokens) if o["key"] == key)
    assert list(map(dict, found[key].candidates)) == legal(family, {**desc, "path": path}, HOPPER)


@pytest.mark.parametrize("sequences", [0, 33, -1])
def test_a_count_of_sequences_that_the_tokens_cannot_have(session: _core.Session, sequences: int) -> None:
    with pytest.raises(PlanError, match=f"sequences is {sequences}; expected 1 to the 32 tokens"):
        session.ops(32, sequences=sequences)
