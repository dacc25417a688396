"""Attention beyond the contract: what a row's answer must not depend on, hostile arguments, long contexts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dyno import _core
from dyno.errors import PlanError

from ops import reference
from ops.harness import expect_close

F32 = np.float32
HEADS, KV_HEADS, DIM = 6, 2, 32
CTX = 300
CONFIGS = _core.ops.candidates("attention", {"heads": HEADS, "kv_heads": KV_HEADS, "dk": DIM, "dv": DIM})


class Cache:
    """Random f16 keys and values of 3 sequences and queries for CTX positions of each."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        shape = (3, CTX, KV_HEADS, DIM)
        self.keys = rng.standard_normal(shape).astype(np.float16)
        self.values = rng.standard_normal(shape).astype(np.float16)
        self.queries = rng.standard_normal((3, CTX, HEADS * DIM)).astype(F32)

    def run(
        self, runs: list[tuple[int, int, int]], config: dict[str, Any] | None, **options: Any
    ) -> np.ndarray[Any, Any]:
        """Attention of runs (slot, position, n_tokens), one after the other in one batch."""
        batch: list[reference.Run] = []
        first = 0
        for slot, position, count in runs:
            batch.append((first, count, position, slot))
            first += count
        q = np.concatenate([self.queries[slot, position : position + n] for slot, position, n in runs])
        out = np.zeros((first, HEADS * DIM), F32)
        desc = {"m": first, "heads": HEADS, "kv_heads": KV_HEADS, "dk": DIM, "dv": DIM}
        desc["windowed"] = "window" in options
        threads = options.pop("threads", 1)
        args = {
            "q": q,
            "k_cache": self.keys.view(np.uint8).reshape(-1),
            "v_cache": self.values.view(np.uint8).reshape(-1),
            "slot_positions": CTX,
            "runs": batch,
            "scale": DIM**-0.5,
            "out": out,
            **options,
        }
        _core.ops.run("attention", desc, config, args, threads=threads)
        return out


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: "-".join(str(v) for v in c.values()))
def test_sequences_of_a_batch_get_what_they_get_alone(config: dict[str, Any]) -> None:
    cache = Cache(1)
    runs = [(0, 0, 21), (2, 130, 1), (1, 70, 40)]
    together = cache.run(runs, config)
    alone = np.concatenate([cache.run([run], config) for run in runs])
    np.testing.assert_array_equal(together, alone)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: "-".join(str(v) for v in c.values()))
def test_sequences_with_few_rows_get_the_bits_of_decode(config: dict[str, Any]) -> None:
    """Steps between and behind prompts: the rows of their tokens would not fill the tiles of a prompt."""
    cache = Cache(7)
    prompt, steps = (0, 0, 21), [(1, 70, 1), (2, 130, 2)]
    runs = [steps[0], prompt, steps[1]]
    together = cache.run(runs, config)
    decode = {"variant": "decode", "splits": config.get("splits", 1)}
    np.testing.assert_array_equal(together[[0, 22, 23]], cache.run(steps, decode))
    np.testing.assert_array_equal(together[1:22], cache.run([prompt], config))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: "-".join(str(v) for v in c.values()))
@pytest.mark.parametrize("window", [None, 50])
def test_pieces_of_a_prompt_give_what_the_whole_gives(config: dict[str, Any], window: int | None) -> None:
    cache = Cache(2)
    options = {} if window is None else {"window": window}
    whole = cache.run([(0, 0, 64)], config, **options)
    for size in (1, 7, 33):
        pieces = [cache.run([(0, at, min(size, 64 - at))], config, **options) for at in range(0, 64, size)]
        expect_close(np.concatenate(pieces), whole.astype(np.float64), 1e-12)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: "-".join(str(v) for v in c.values()))
def test_bits_do_not_depend_on_threads(config: dict[str, Any]) -> None:
    cache = Cache(3)
    runs = [(0, 200, 5), (1, 0, 50)]
    expected = cache.run(runs, config)
    for threads in (2, 3, 7, 32):
        np.testing.assert_array_equal(cache.run(runs, config, threads=threads), expected)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: "-".join(str(v) for v in c.values()))
def test_keys_out_of_sight_are_never_read(config: dict[str, Any]) -> None:
    cache = Cache(4)
    expected = cache.run([(1, 150, 8)], config, window=40)
    # NaN everywhere but in the keys that some query of the run sees.
    for array in (cache.keys, cache.values):
        seen = array[1, 111:158].copy()
        array[...] = np.nan
        array[1, 111:158] = seen
    np.testing.assert_array_equal(cache.run([(1, 150, 8)], config, window=40), expected)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: "-".join(str(v) for v in c.values()))
def test_a_nan_key_shows_in_every_row_that_sees_it(config: dict[str, Any]) -> None:
    cache = Cache(5)
    cache.keys[0, 20] = np.nan
    out = cache.run([(0, 0, 40)], config)
    assert np.isfinite(out[:20]).all()
    assert np.isnan(out[20:]).all()


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: "-".join(str(v) for v in c.values()))
def test_scores_far_apart_do_not_overflow(config: dict[str, Any]) -> None:
    cache = Cache(6)
    cache.queries *= 3e4
    out = cache.run([(0, 0, 60)], config)
    want = reference.attention(
        cache.queries[0, :60].reshape(60, HEADS, DIM).astype(np.float64),
        cache.keys.astype(np.float64),
        cache.values.astype(np.float64),
        [(0, 60, 0, 0)],
        scale=DIM**-0.5,
    )
    # Scores of 1e5 carry rounding errors of 1e-2, which tell only where two keys nearly tie.
    assert np.isfinite(out).all()
    expect_close(out, want.reshape(60, -1), 1e-3)


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([(0, CTX - 3, 5)], "positions 297"),
        ([(-1, 0, 1)], "slot -1"),
        ([(0, -1, 1)], "positions -1"),
    ],
)
def test_runs_outside_of_the_cache_are_errors(runs: list[tuple[int, int, int]], message: str) -> None:
    q = np.zeros((5, HEADS * DIM), F32)
    desc = {"m": 5, "heads": HEADS, "kv_heads": KV_HEADS, "dk": DIM, "dv": DIM}
    batch = [(0, count, position, slot) for slot, position, count in runs]
    large = np.zeros(4 * CTX * KV_HEADS * DIM * 2, np.uint8)
    args = {"q": q, "k_cache": large, "v_cache": large, "slot_positions": CTX, "runs": batch, "out": q.copy()}
    with pytest.raises(PlanError, match=message):
        _core.ops.run("attention", desc, None, args)
    with pytest.raises(PlanError, match="tokens 3\\+4 in a batch of 5"):
        _core.ops.run("attention", desc, None, {**args, "runs": [(3, 4, 0, 0)]})


def test_a_window_or_cap_of_nothing_is_an_error() -> None:
    cache = Cache(7)
    with pytest.raises(PlanError, match="window is 0; expected 1 or more"):
        cache.run([(0, 0, 3)], None, window=0)


def test_shapes_that_make_no_sense_are_refused() -> None:
    config = {"variant": "decode", "splits": 1}
    good = {"m": 1, "heads": 4, "kv_heads": 2, "dk": 64, "dv": 64}
    for change, message in [
        ({"kv_heads": 3}, "heads=4 is not a multiple of kv_heads=3"),
        ({"k_type": "q4_0"}, "k_type=q4_0"),
        ({"k_type": "q8_0", "dk": 40}, "40 elements, not a multiple of the 32"),
        ({"v_type": "q8_0", "dv": 8}, "8 elements, not a multiple of the 32"),
        ({"v_in_k": True, "dv": 65}, "dv=65 values do not lie within keys of dk=64"),
        ({"m": 65}, "up to 64 tokens, not m=65"),
    ]:
        ok, reason = _core.ops.supports("attention", {**good, **change}, config)
        assert not ok
        assert message in reason


def test_a_long_context_keeps_its_precision() -> None:
    rng = np.random.default_rng(8)
    depth, dim = 20_000, 64
    keys = rng.standard_normal((1, depth + 1, 1, dim)).astype(F32)
    values = rng.standard_normal((1, depth + 1, 1, dim)).astype(F32)
    q = rng.standard_normal((1, 2, dim)).astype(F32)
    want = reference.attention(
        *(a.astype(np.float64) for a in (q, keys, values)), [(0, 1, depth, 0)], scale=0.125
    )
    desc = {"m": 1, "heads": 2, "kv_heads": 1, "dk": dim, "dv": dim, "k_type": "f32", "v_type": "f32"}
    for config in _core.ops.candidates("attention", desc):
        out = np.zeros((1, 2 * dim), F32)
        args = {
            "q": q.reshape(1, -1),
            "k_cache": keys.view(np.uint8).reshape(-1),
            "v_cache": values.view(np.uint8).reshape(-1),
            "slot_positions": depth + 1,
            "runs": [(0, 1, depth, 0)],
            "scale": 0.125,
            "out": out,
        }
        _core.ops.run("attention", desc, config, args)
        expect_close(out, want.reshape(1, -1), 1e-11)
