"""Sequences take the memory of the positions that they hold; prefixes are copied between them."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from dyno import _core
from dyno.errors import OutOfMemoryError, PlanError
from dyno.testing import tiny_model
from fresh_process import lacks_memory_figures, probed, spoilt_by_sanitizer
from random_models import SHAPES, random_model
from random_newer import RECURRENT

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

GPU = {
    "kind": "cuda",
    "name": "a GPU",
    "compute_capability": 90,
    "sm_count": 132,
    "memory_bytes": 80 << 30,
}
PIECE = 2 << 20
"""Bytes that a GPU's cache takes at a time."""
RESERVE = 512 << 20
"""Of a GPU, for its runtime."""
ROW = 4 * 64 * 2
"""Bytes of the keys of a token in the models below: heads, dimensions, bytes of f16."""
TOKENS = np.random.default_rng(5).integers(0, 80, 100).astype(np.int32)
STATEFUL = [shape for shape in SHAPES if shape.architecture in RECURRENT]

# argv: model, settings as JSON. Prints the bytes that are resident beyond those before opening:
# after loading, after 200 tokens in each sequence, after all but one were forgotten, and after trim().
PROBE = """
import json, sys
import numpy as np
from dyno import _core

def resident():
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmRSS:"))

context = json.loads(sys.argv[2])
before = resident()
s = _core.Session(sys.argv[1], context=context, session={"threads": 1, "ubatch": 64})
found = {"opened": resident() - before, "plan": dict(s.plan)}
tokens = np.arange(200, dtype=np.int32)
for slot in range(context["sequences"]):
    s.decode([(slot, tokens)], "none")
found["filled"], found["positions"] = resident() - before, s.cached_positions
for slot in range(1, context["sequences"]):
    s.reset(slot)
found["forgotten"] = resident() - before
for slot in range(context["sequences"]):
    s.trim(slot)
found["trimmed"], found["left"] = resident() - before, s.cached_positions
print(json.dumps(found, default=str))
"""


def long_model(path: Path) -> Path:
    return tiny_model(path, n_layers=4, n_embd=256, n_kv_heads=4, n_ctx=32768, vocabulary=False)


def session(path: Path, device: str = "cpu", **context: Any) -> _core.Session:
    kv = {"kv_type_k": "f32", "kv_type_v": "f32"}
    return _core.Session(
        path,
        load={"device": device, "numerics": "exact"},
        context={"ctx": 128, "sequences": 3, **kv, **context},
        session={"threads": 2, "ubatch": 16},
    )


def decode(s: _core.Session, slot: int, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    logits = s.decode([(slot, tokens)], "all")[0]
    assert logits is not None
    return logits


def same(a: NDArray[np.float32], b: NDArray[np.float32]) -> bool:
    x, y = a.astype(np.float64), b.astype(np.float64)
    return bool(((x - y) ** 2).sum() < 1e-10 * ((y - y.mean()) ** 2).sum())


@pytest.mark.skipif(
    bool(lacks_memory_figures() or spoilt_by_sanitizer()),
    reason=lacks_memory_figures() or spoilt_by_sanitizer(),
)
def test_64_sequences_of_32768_tokens_take_what_they_hold(tmp_path: Path) -> None:
    path = long_model(tmp_path / "m.gguf")
    context = {"ctx": 32768, "sequences": 64, "cache_tokens": 65536}
    found = probed(PROBE, path, json.dumps(context))
    position = 4 * 2 * 4 * 64 * 2  # layers, keys and values, heads, dimensions, bytes of f16
    plan = found["plan"]
    assert plan["kv_address_bytes"] == 64 * 32768 * position
    assert (
        plan["kv_bytes"] == 65536 * position + 64 * 4 * 2 * 2 * 4096
    )  # and pages that begin or end a sequence
    cache = 64 * 200 * position
    assert found["positions"] == 64 * 200
    assert found["opened"] < plan["total_bytes"] - plan["kv_bytes"] + (8 << 20), found
    assert cache <= found["filled"] - found["opened"] <= 1.3 * cache + (8 << 20), found
    assert found["forgotten"] >= found["filled"] - (4 << 20)
    assert found["filled"] - found["trimmed"] >= 0.9 * cache, found
    assert found["left"] == 200


def test_the_limit_holds_and_forgotten_positions_make_room(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "m.gguf")
    whole = decode(session(path), 0, TOKENS)
    s = session(path, cache_tokens=150)
    assert same(decode(s, 0, TOKENS), whole)
    decode(s, 1, TOKENS[:40])
    with pytest.raises(PlanError, match="would hold 160 positions, but cache_tokens is 150"):
        decode(s, 2, TOKENS[:20])
    assert (s.position(2), s.cached_positions) == (0, 140)
    with pytest.raises(PlanError, match="would hold 180 positions"):
        s.copy_prefix(1, 2, 40)
    s.rewind(20, 0)
    assert s.cached_positions == 140  # the memory is there for the next positions
    assert same(decode(s, 2, TOKENS[:80]), whole[:80])  # but goes where it is needed
    assert s.cached_positions == 20 + 40 + 80
    assert same(decode(s, 0, TOKENS[20:30]), whole[20:30])
    with pytest.raises(PlanError, match="would hold 151 positions"):
        decode(s, 1, TOKENS[:1])


def test_impossible_limits(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "m.gguf")
    with pytest.raises(PlanError, match=r"cache_tokens is 100; expected 0 .* or at least ctx=128"):
        session(path, cache_tokens=100)
    assert session(path, cache_tokens=10000).plan["kv_bytes"] == session(path).plan["kv_bytes"]
    plan = session(path, sequences=64)
    with pytest.raises(OutOfMemoryError, match=r"cache_tokens=\d+ for all sequences together"):
        plan.check_memory(plan.plan["total_bytes"] - plan.plan["kv_bytes"] // 2)
    context = {"ctx": 128, "sequences": 1000, "cache_tokens": 4096}
    found = _core.Session(path, context=context, plan_only=True, device=GPU).plan
    # Of each layer's keys and values: no more than the addresses, which are few here.
    assert found["kv_bytes"] == found["kv_address_bytes"]


def test_the_plan_counts_pieces_of_a_gpu(tmp_path: Path) -> None:
    path = long_model(tmp_path / "m.gguf")
    context = {"ctx": 32768, "sequences": 8, "cache_tokens": 32768}
    found = _core.Session(path, context=context, plan_only=True, device=GPU).plan
    assert found["kv_address_bytes"] == 8 * 8 * 32768 * ROW
    # In each of the 8: the rows, and of each sequence two pieces and the rows behind its end.
    assert found["kv_bytes"] == 8 * (32768 * ROW + 8 * (256 * ROW + 2 * PIECE))


@pytest.mark.parametrize("device", [None, GPU])
@pytest.mark.parametrize("tokens", [0, 131072])
@pytest.mark.parametrize(
    ("missing", "setting"), [(50, "sequences"), (40, "cache_tokens"), (150, "cache_tokens")]
)
def test_advice_frees_what_it_promises(
    tmp_path: Path, device: dict[str, Any] | None, tokens: int, missing: int, setting: str
) -> None:
    """Each sequence has pages of its own, so the memory is not in proportion to the tokens."""
    path = long_model(tmp_path / "m.gguf")
    context = {"ctx": 32768, "sequences": 8, "cache_tokens": tokens}

    def planned(**changed: int) -> _core.Session:
        return _core.Session(
            path, context={**context, **changed}, plan_only=True, **({"device": device} if device else {})
        )

    plan = planned()
    with pytest.raises(OutOfMemoryError) as found:
        plan.check_memory(plan.plan["total_bytes"] + (RESERVE if device else 0) - (missing << 20))
    advice = re.search(setting + r"=(\d+)[^(]*\(frees ([0-9.]+) ([MG]iB)\)", str(found.value))
    assert advice is not None, found.value
    promised = float(advice[2]) * (1 << (30 if advice[3] == "GiB" else 20))
    freed = plan.plan["total_bytes"] - planned(**{setting: int(advice[1])}).plan["total_bytes"]
    assert freed == pytest.approx(promised, rel=0.02, abs=1 << 19)


@pytest.mark.gpu
def test_a_gpu_s_cache_takes_memory_by_need(tmp_path: Path) -> None:
    if not any(d["kind"] == "cuda" and not _core.device_problem(d) for d in _core.devices()):
        pytest.skip(f"no GPU: {_core.no_cuda_reason()}")
    path = long_model(tmp_path / "m.gguf")

    def opened(**context: int) -> _core.Session:
        made = {"ctx": 32768, "kv_type_k": "f16", "kv_type_v": "f16", **context}
        return _core.Session(path, load={"device": "cuda:0"}, context=made, session={"ubatch": 512})

    whole, s = opened(), opened(sequences=64, cache_tokens=65536)
    assert whole.gpu_cache_bytes == whole.plan["kv_address_bytes"] == 8 * 32768 * ROW
    assert s.plan["kv_address_bytes"] == 64 * 8 * 32768 * ROW
    assert s.gpu_cache_bytes == 0
    tokens = np.random.default_rng(1).integers(0, 80, 9000).astype(np.int32)
    want = whole.decode([(0, tokens)], "last")[0]
    taken = 0
    for slot in (0, 63):
        got = s.decode([(slot, tokens)], "last")[0]
        assert got is not None
        assert want is not None
        assert np.abs(got - want).max() < 0.02 * np.abs(want).max()
        pieces = -(-(9000 + 256) * ROW // PIECE)  # a sequence begins at a whole piece
        taken += 8 * pieces * PIECE
        assert s.gpu_cache_bytes == taken <= s.plan["kv_bytes"]
    # Single tokens, most of them in a captured graph, over the place where the next piece begins.
    for session, slot in ((whole, 0), (s, 5)):
        session.reset(slot)
        session.decode([(slot, tokens[: PIECE // ROW - 256 - 10])], "none")
    taken += 8 * PIECE
    assert s.gpu_cache_bytes == taken
    for token in tokens[:20]:
        a, b = (x.decode([(slot, token.reshape(1))], "last")[0] for x, slot in ((whole, 0), (s, 5)))
        assert np.abs(a - b).max() < 0.02 * np.abs(a).max()
    taken += 8 * PIECE
    assert s.gpu_cache_bytes == taken
    # A text that is drawn there, ahead of the host.
    drawn = []
    for session, slot in ((whole, 0), (s, 5)):
        generation = session.generation(tokens[:300], slot=slot)
        generation.queue(np.zeros(500, np.float32))
        drawn.append([generation.next() for _ in range(500)])
    assert drawn[0][:20] == drawn[1][:20]
    s.copy_prefix(63, 9, 9000)
    assert s.gpu_cache_bytes > taken
    a, b = (s.decode([(slot, tokens[:3])], "last")[0] for slot in (63, 9))
    assert np.abs(a - b).max() < 0.02 * np.abs(a).max()
    before = s.gpu_cache_bytes
    s.reset(0)
    s.trim(0)
    assert s.gpu_cache_bytes == before - 8 * (pieces - 1) * PIECE  # the first rows may be read
    s.decode([(20, tokens)], "none")
    with pytest.raises(PlanError, match="but cache_tokens is 65536"):
        s.decode([(slot, tokens) for slot in range(21, 28)], "none")
    s.set_context({"ctx": 1024, "sequences": 2, "kv_type_k": "f16", "kv_type_v": "f16"})
    assert s.gpu_cache_bytes == s.plan["kv_address_bytes"] == 2 * 8 * 1024 * ROW
    assert s.decode([(1, tokens[:100])], "last")[0] is not None


@pytest.mark.parametrize("seed", range(4))
def test_prefixes_of_any_sequence_go_on_in_any_other(tmp_path: Path, seed: int, device: str) -> None:
    path = tiny_model(tmp_path / "m.gguf")
    alone, s = session(path, device), session(path, device)
    rng = np.random.default_rng(seed)
    held: list[list[int]] = [[], [], []]
    for _ in range(60):
        source, target = (int(each) for each in rng.integers(0, 3, 2))
        count = int(rng.integers(0, len(held[source]) + 1))
        s.copy_prefix(source, target, count)
        held[target] = held[source][:count]
        s.trim(int(rng.integers(0, 3)))
        more = rng.integers(0, 80, int(rng.integers(1, 20))).astype(np.int32)
        if len(held[target]) + len(more) > 128:
            continue
        logits = decode(s, target, more)
        held[target] += more.tolist()
        alone.reset()
        assert same(logits, decode(alone, 0, np.array(held[target], np.int32))[-len(more) :])
        assert [s.position(slot) for slot in range(3)] == [len(each) for each in held]


@pytest.mark.parametrize("shape", STATEFUL, ids=lambda shape: shape.name)
def test_prefixes_with_recurrent_state(tmp_path: Path, shape: Any, device: str) -> None:
    s = session(random_model(tmp_path / "m.gguf", shape), device)
    whole = decode(s, 0, TOKENS)
    s.reset()
    decode(s, 0, TOKENS[:40])
    there = s.checkpoint(0)
    decode(s, 0, TOKENS[40:60])
    with pytest.raises(PlanError, match=r"cannot copy 50 positions .* the nearest earlier position is 40"):
        s.copy_prefix(0, 1, 50)
    with pytest.raises(PlanError, match="cannot copy 61 positions of sequence 0; it holds 60"):
        s.copy_prefix(0, 1, 61)
    s.copy_prefix(0, 1, 40)
    s.copy_prefix(0, 2, 60)
    assert [s.position(slot) for slot in range(3)] == [60, 40, 60]
    assert same(decode(s, 1, TOKENS[40:]), whole[40:])
    assert same(decode(s, 2, TOKENS[60:]), whole[60:])
    assert same(decode(s, 0, TOKENS[60:]), whole[60:])
    s.copy_prefix(0, 0, 40)
    assert s.position(0) == there.position
    assert same(decode(s, 0, TOKENS[40:]), whole[40:])
