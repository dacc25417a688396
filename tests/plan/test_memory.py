"""Sizes of a plan: a sum that no machine can address is an error, and so is more than the free memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dyno
import pytest
from dyno import OutOfMemoryError, PlanError, _core
from dyno.testing import tiny_model

if TYPE_CHECKING:
    from pathlib import Path

LONGEST = 1 << 31  # positions, the most that a file may claim


@pytest.fixture
def endless(tmp_path: Path) -> Path:
    """A tiny model whose file claims the longest context."""
    return tiny_model(tmp_path / "endless.gguf", n_ctx=LONGEST)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A million elements in a row of keys: 1024 sequences of 2^31 positions take 2^64 bytes."""
    return tiny_model(
        tmp_path_factory.mktemp("wide") / "wide.gguf",
        n_ctx=LONGEST, n_layers=1, n_embd=2, n_heads=1024, n_kv_heads=1024, head_dim=1024, n_ff=32,
        n_vocab=8, vocabulary=False,
    )  # fmt: skip


def planned(path: Path, *, load: dict[str, Any] | None = None, **context: Any) -> _core.Session:
    return _core.Session(path, load=load or {}, context=context, session={"ubatch": 32}, plan_only=True)


def test_a_cache_beyond_64_bits_is_an_error_with_its_terms(wide: Path) -> None:
    """The sum wrapped to 0 bytes, and the first token was written beyond them."""
    f32 = {"kv_type_k": "f32", "kv_type_v": "f32"}
    with pytest.raises(PlanError, match=r"the KV cache needs \d+ \+ \d+ bytes, more than can be addressed"):
        planned(wide, ctx=LONGEST, sequences=1024, **f32)
    assert planned(wide, ctx=LONGEST, sequences=512, **f32).plan["kv_bytes"] == 1 << 63


def test_a_large_cache_that_can_be_addressed_is_planned(endless: Path) -> None:
    ctx, sequences = 1 << 24, 1024
    plan = planned(endless, ctx=ctx, sequences=sequences).plan
    small = planned(endless, ctx=1 << 10, sequences=1).plan
    assert plan["kv_bytes"] == small["kv_bytes"] << 24


def test_the_cpu_refuses_a_plan_beyond_its_free_memory(endless: Path) -> None:
    """The cache was reserved without a check, and the process was killed once it had filled the memory."""
    with pytest.raises(
        OutOfMemoryError, match=r"device cpu is .* short: .* free, .*KV cache .*Use "
    ) as caught:
        _core.Session(endless, context={"ctx": 1 << 24, "sequences": 1024}, session={"ubatch": 32})
    assert "ctx=" in str(caught.value)
    with dyno.Engine(endless, profile=None, ctx=256) as engine:
        with pytest.raises(OutOfMemoryError, match="device cpu"):
            engine.set_context(ctx=1 << 24, sequences=1024)
        assert engine.settings["ctx"] == 256
        assert engine.logits([1, 2, 3]).shape[0] == 3  # it goes on as it was


@pytest.mark.parametrize("cpu_repack", [False, True])
def test_pages_of_the_file_are_no_copies(trained_model: Path, cpu_repack: bool) -> None:
    """The kernel gives mapped pages back, so only the cache, the arena and copies count on the CPU."""
    session = planned(trained_model, load={"cpu_repack": cpu_repack})
    plan = session.plan
    session.check_memory(plan["total_bytes"])
    # Norms are copied in both cases; they are small.
    needed = plan["kv_bytes"] + plan["arena_bytes"] + plan["scratch_bytes"] + (1 << 20)
    if not cpu_repack:
        session.check_memory(needed)
        return
    with pytest.raises(OutOfMemoryError, match=r"repacked weights [1-9]\d*\.\d MiB"):
        session.check_memory(needed)
