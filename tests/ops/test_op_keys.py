"""Op keys, token ranges and configurations by name: what profiles are made of."""

from __future__ import annotations

import pytest
from dyno import _core
from dyno.errors import DynoError, ProfileError
from hypothesis import given
from hypothesis import strategies as st

ops = _core.ops


def test_keys_read_as_profiles_write_them() -> None:
    matmul = {"type": "q4_0", "m": 7, "n": 4096, "k": 2048}
    assert ops.op_key("matmul", matmul) == "matmul q4_0 n=4096 k=2048"
    packed = {**matmul, "layout": "x16", "act": "q8"}
    assert ops.op_key("matmul", packed) == "matmul q4_0 n=4096 k=2048 layout=x16 act=q8"
    attention = {"heads": 32, "kv_heads": 4, "dk": 128, "dv": 128, "windowed": True}
    assert (
        ops.op_key("attention", attention)
        == "attention heads=32 kv_heads=4 dk=128 dv=128 k=f16 v=f16 windowed"
    )


def test_key_words_may_come_in_any_order() -> None:
    family, desc = ops.parse_key("matmul q4_0 act=q8  k=64 n=32 batch=2", tokens=9)
    assert (family, desc["type"], desc["n"], desc["k"]) == ("matmul", "q4_0", 32, 64)
    assert (desc["act"], desc["batch"], desc["m"], desc["layout"]) == ("q8", 2, 9, "plain")


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("", "empty"),
        ("matmull q4_0 n=1 k=1", "did you mean 'matmul'"),
        ("matmul n=1 k=1", "type is missing"),
        ("matmul q4_0 n=1", "k= is missing"),
        ("matmul q9_9 n=1 k=1", "'q9_9' is not a tensor type"),
        ("matmul q4_0 n=0 k=1", "n='0'"),
        ("matmul q4_0 n=-4 k=1", "n='-4'"),
        ("matmul q4_0 n=1x k=1", "n='1x'"),
        ("matmul q4_0 n=99999999999999999999 k=1", "n='99999999999999999999'"),
        ("matmul q4_0 n=1 k=1 n=2", "'n' is given twice"),
        ("matmul q4_0 n=1 k=1 layuot=x16", "did you mean 'layout'"),
        ("matmul q4_0 n=1 k=1 layout=x17", "unknown layout 'x17'; did you mean 'x16'"),
        ("matmul q4_0 q4_0 n=1 k=1", "given twice"),
        ("norm n=4 ad", "did you mean 'add'"),
        ("attention heads=1 kv_heads=1 dk=1 dv=1 k=f16 v=f16 windowed windowed", "'windowed' is given twice"),
    ],
)
def test_bad_keys_name_the_offending_part(key: str, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        ops.parse_key(key)


@given(st.text(max_size=60))
def test_no_text_is_more_than_an_error(text: str) -> None:
    try:
        family, desc = ops.parse_key(text)
    except ProfileError:
        return
    assert ops.parse_key(ops.op_key(family, desc)) == (family, desc)


def test_unknown_desc_fields_and_values_are_errors() -> None:
    with pytest.raises(ProfileError, match="did you mean 'kv_heads'"):
        ops.op_key("attention", {"kv_head": 1})
    with pytest.raises(ProfileError, match="heads is a str"):
        ops.op_key("attention", {"heads": "4"})
    with pytest.raises(ProfileError, match="unknown gating 'softmx'; did you mean 'softmax'"):
        ops.op_key("moe_route", {"gating": "softmx"})
    with pytest.raises(ProfileError, match="add is a int"):
        ops.op_key("norm", {"add": 1})


def test_configurations_name_what_is_wrong() -> None:
    desc = {"m": 1, "heads": 1, "kv_heads": 1, "dk": 16, "dv": 16}
    for config, message in [
        ({}, "needs the key 'variant'"),
        ({"variant": "blokced"}, "did you mean 'blocked'"),
        ({"variant": "decode"}, "needs the parameter 'splits'"),
        ({"variant": "decode", "splits": 1, "k_block": 64}, "no parameter 'k_block'"),
        ({"variant": "decode", "splits": "two"}, "splits='two' is not a whole number"),
        ({"variant": "decode", "splits": True}, "splits is a bool"),
        ({"variant": "decode", "splits": -1}, "splits=-1"),
        ({"variant": "decode", "splits": 1 << 40}, "splits=1099511627776"),
    ]:
        with pytest.raises(ProfileError, match=message):
            ops.supports("attention", desc, config)
    ok, reason = ops.supports("attention", desc, {"variant": "decode", "splits": 3})
    assert not ok
    assert "splits=3" in reason
    assert "1, 2, 4, 8, 16" in reason


def test_unknown_families_name_the_nearest() -> None:
    with pytest.raises(ProfileError, match="did you mean 'attention'"):
        ops.variants("atention")


def test_buckets_double() -> None:
    names = {m: ops.bucket_name(m) for m in (1, 2, 4, 5, 8, 9, 16, 17, 512, 513)}
    assert names == {
        1: "m1",
        2: "m2-4",
        4: "m2-4",
        5: "m5-8",
        8: "m5-8",
        9: "m9-16",
        16: "m9-16",
        17: "m17-32",
        512: "m257-512",
        513: "m513-1024",
    }
    with pytest.raises(DynoError, match="0 tokens"):
        ops.bucket_name(0)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("m1", (1, 1)),
        ("m2-4", (2, 4)),
        ("m1-8", (1, 8)),
        ("m5-512", (5, 512)),
        ("m513+", (513, 1 << 31)),
        ("m1+", (1, 1 << 31)),
    ],
)
def test_token_ranges(text: str, tokens: tuple[int, int]) -> None:
    assert ops.parse_tokens(text) == tokens


@pytest.mark.parametrize(
    "text",
    ["", "m", "1", "m0", "m3", "m2", "m1-7", "m8-1", "m1-", "m01", "m1-8x", "m1 -8", "m-8", "m2+4", "m3+"],
)
def test_token_ranges_end_at_bucket_borders(text: str) -> None:
    assert ops.parse_tokens(text) is None


@given(st.integers(1, 1 << 31))
def test_every_count_lies_in_its_bucket(m: int) -> None:
    tokens = ops.parse_tokens(ops.bucket_name(m))
    assert tokens is not None
    assert tokens[0] <= m <= tokens[1]
