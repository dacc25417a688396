"""What the small families promise beyond the contract: in-place use, ties, NaNs and hostile arguments."""

from __future__ import annotations

import numpy as np
import pytest
from dyno import _core
from dyno.errors import PlanError

from ops import reference

F32 = np.float32
HOPPER = {"kind": "cuda", "compute_capability": 90, "sm_count": 132, "shared_per_block_bytes": 232_448}
run = _core.ops.run


def test_norm_and_moe_sum_work_in_place() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 40)).astype(F32)
    apart, inside = np.empty_like(x), x.copy()
    run("norm", {"m": 3, "n": 40}, None, {"x": x, "out": apart, "eps": 1e-6})
    run("norm", {"m": 3, "n": 40}, None, {"x": inside, "out": inside, "eps": 1e-6})
    np.testing.assert_array_equal(inside, apart)
    parts = rng.standard_normal((3, 2, 40)).astype(F32)
    weights = rng.random((3, 2)).astype(F32)
    args = {"x": parts, "weights": weights}
    run("moe_sum", {"m": 3, "n": 40, "used": 2}, None, {**args, "residual": x, "out": apart})
    run("moe_sum", {"m": 3, "n": 40, "used": 2}, None, {**args, "residual": x, "out": x})
    np.testing.assert_array_equal(x, apart)


def test_rope_is_accurate_at_any_position() -> None:
    inv_freq = (10000.0 ** (-np.arange(64) / 64)).astype(F32)
    positions = np.array([0, 1, 4095, 131_071, 1_000_003, 2**31 - 1], np.int32)
    x = np.zeros((len(positions), 128), F32)
    x[:, 0::2] = 1  # (1, 0) in every pair: the rotated pair is (cos, sin)
    desc = {"m": len(positions), "heads": 1, "head_dim": 128, "n_rot": 128}
    run("rope", desc, None, {"x": x, "positions": positions, "inv_freq": inv_freq})
    angle = positions[:, None].astype(np.float64) * inv_freq.astype(np.float64)
    assert np.abs(x[:, 0::2] - np.cos(angle)).max() < 1.5e-7
    assert np.abs(x[:, 1::2] - np.sin(angle)).max() < 1.5e-7


def test_rope_refuses_negative_positions_and_odd_shapes() -> None:
    args = {"x": np.zeros(4, F32), "positions": np.array([-1], np.int32), "inv_freq": np.ones(2, F32)}
    desc = {"m": 1, "heads": 1, "head_dim": 4, "n_rot": 4}
    with pytest.raises(PlanError, match="position -1"):
        run("rope", desc, None, args)
    config = _core.ops.default_config("rope", desc)
    for change, message in [
        ({"n_rot": 3}, "n_rot=3"),
        ({"offset": 2}, "do not fit"),
        ({"n_rot": 6}, "do not fit"),
    ]:
        ok, reason = _core.ops.supports("rope", {**desc, **change}, config)
        assert not ok
        assert message in reason


def test_embed_refuses_ids_outside_of_the_table() -> None:
    for bad in (-1, 3):
        args = {"table": np.zeros(3 * 8, np.uint8), "rows": 3, "out": np.zeros(4, F32)}
        with pytest.raises(PlanError, match=f"id {bad}; the table has 3 rows"):
            run("embed", {"type": "f16", "m": 1, "n": 4}, None, {**args, "ids": np.array([bad], np.int32)})


def test_kv_store_rounds_to_nearest_even_and_keeps_what_is_not_finite() -> None:
    x = np.array(
        [1 + 2**-11, 1 + 3 * 2**-11, 65519.0, 65520.0, -np.inf, np.nan, 2.0**-25, 2.0**-24, -0.0], F32
    )
    for dtype in ("f16", "bf16"):
        cache = np.zeros(2 * len(x), np.uint8)
        run("kv_store", {"type": dtype, "m": 1, "width": len(x)}, None, {"x": x, "cache": cache})
        bits = cache.view(np.uint16)
        if dtype == "f16":
            got = bits.view(np.float16)
            with np.errstate(over="ignore"):
                want = x.astype(np.float16)
        else:
            got = (bits.astype(np.uint32) << 16).view(F32)
            rounded = (
                (x.view(np.uint32).astype(np.uint64) + 0x7FFF + ((x.view(np.uint32) >> 16) & 1)) >> 16
            ) << 16
            want = np.where(np.isnan(x), x, rounded.astype(np.uint32).view(F32))
        np.testing.assert_array_equal(got, want)
        assert np.signbit(got[-1])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_q8_0_block_with_a_value_that_is_not_finite_is_nan(bad: float) -> None:
    x = np.ones(64, F32)
    x[40] = bad
    cache = np.zeros(68, np.uint8)
    run("kv_store", {"type": "q8_0", "m": 1, "width": 64}, None, {"x": x, "cache": cache})
    assert cache[:2].view(np.float16)[0] == np.float16(1 / 127)
    assert np.isnan(cache[34:36].view(np.float16)[0])


def test_routing_takes_the_lower_of_equal_experts_and_each_only_once() -> None:
    for logits in (np.zeros(6), np.full(6, np.nan), np.full(6, -np.inf)):
        ids, weights = np.full((1, 3), -1, np.int32), np.zeros((1, 3), F32)
        args = {"logits": logits.astype(F32).reshape(1, 6), "ids": ids, "weights": weights}
        run("moe_route", {"m": 1, "experts": 6, "used": 3}, None, args)
        assert ids.tolist() == [[0, 1, 2]]


def test_routing_tells_apart_what_a_saturated_sigmoid_cannot() -> None:
    logits = np.array([[40.0, 60.0, 50.0, 30.0]], F32)
    ids, weights = np.zeros((1, 2), np.int32), np.zeros((1, 2), F32)
    desc = {"m": 1, "experts": 4, "used": 2, "gating": "sigmoid"}
    run("moe_route", desc, None, {"logits": logits, "ids": ids, "weights": weights})
    assert ids.tolist() == [[1, 2]]
    assert weights.tolist() == [[1.0, 1.0]]


def test_routing_clamps_a_vanishing_sum() -> None:
    logits = np.full((1, 4), -30.0, F32)
    ids, weights = np.zeros((1, 2), np.int32), np.zeros((1, 2), F32)
    desc = {"m": 1, "experts": 4, "used": 2, "gating": "sigmoid", "normalize": True}
    run("moe_route", desc, None, {"logits": logits, "ids": ids, "weights": weights})
    want = 1 / (1 + np.exp(30.0)) / 6.103515625e-5
    np.testing.assert_allclose(weights, want, rtol=1e-5)


def test_routing_refuses_experts_that_do_not_exist() -> None:
    args = {
        "logits": np.zeros((2, 4), F32),
        "ids": np.zeros((2, 1), np.int32),
        "weights": np.zeros((2, 1), F32),
    }
    with pytest.raises(PlanError, match="pinned expert 4 of token 1"):
        run("moe_route", {"m": 2, "experts": 4}, None, {**args, "pinned": np.array([[0], [4]], np.int32)})
    config = _core.ops.default_config("moe_route", {"experts": 8})
    for change, message in [
        ({"used": 9}, "used=9 is more than the 8"),
        ({"groups": 3}, "not divisible"),
        ({"groups": 4, "groups_used": 5}, "groups_used=5"),
        ({"groups": 4, "groups_used": 1, "used": 3}, "more than the 2"),
    ]:
        ok, reason = _core.ops.supports("moe_route", {"experts": 8, **change}, config)
        assert not ok
        assert message in reason


@pytest.mark.parametrize(("rows", "blocks"), [(1, 128), (2, 128), (8, 32), (32, 8), (512, 8)])
def test_all_blocks_that_sample_run_at_once(rows: int, blocks: int) -> None:
    config = _core.ops.default_config("sample", {"m": rows, "n_vocab": 128256}, HOPPER)
    assert config == {"variant": "blocks", "blocks": blocks}
    assert rows * blocks <= 2 * HOPPER["sm_count"] or blocks == 8


def test_sampling_follows_the_distribution() -> None:
    logits = np.log(np.array([0.1, 0.2, 0.3, 0.4])).astype(F32)
    uniform = ((np.arange(2000) + 0.5) / 2000).astype(F32)
    out = np.zeros(2000, np.int32)
    run(
        "sample",
        {"m": 2000, "n_vocab": 4},
        None,
        {"logits": np.tile(logits, (2000, 1)), "uniform": uniform, "out": out},
    )
    np.testing.assert_allclose(np.bincount(out) / 2000, [0.1, 0.2, 0.3, 0.4], atol=1e-3)
    assert (np.diff(out) >= 0).all()


def test_sampling_a_token_at_a_time() -> None:
    logits = np.array([1.0, 5.0, 5.0, np.nan, -np.inf], F32)

    def draw(
        u: float, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
    ) -> int:
        return int(_core.sample(logits, temperature, top_k, top_p, min_p, u))

    assert draw(0.9, temperature=0.0) == 1  # the lower id of equals
    assert draw(0.9, top_k=1) == 1
    assert draw(0.99, top_p=0.0) == 1
    assert {draw(u / 100, min_p=0.5) for u in range(100)} == {1, 2}
    assert {draw(u / 1000, temperature=3.0) for u in range(1000)} == {0, 1, 2}
    assert draw(0.999999, temperature=1e-30) in (1, 2)
    for bad, message in [
        ({"temperature": -1.0}, "temperature is -1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": -1}, "top_k -1"),
        ({"top_p": 1.5}, "top_p 1.5"),
        ({"min_p": -0.5}, "min_p -0.5"),
        ({"u": 1.0}, "uniform 1"),
    ]:
        with pytest.raises(PlanError, match=message):
            draw(**{"u": 0.5, **bad})  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="logits is empty"):
        _core.sample(np.zeros(0, F32), 1.0, 0, 1.0, 0.0, 0.5)


def test_sampling_keeps_what_the_filters_say_in_their_order() -> None:
    rng = np.random.default_rng(9)
    logits = (rng.standard_normal(50) * 2).astype(F32)
    settings = {"top_k": 20, "top_p": 0.8, "min_p": 0.02}
    drawn = {int(_core.sample(logits, 5.0, 20, 0.8, 0.02, u / 5000)) for u in range(5000)}
    kept = reference.kept_tokens(logits.astype(np.float64), **settings)  # type: ignore[arg-type]
    assert drawn == set(kept.tolist())
