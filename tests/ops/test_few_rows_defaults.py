"""Defaults of products of one row and of a few: `stream`, `ring`, and what a device says of itself."""

from __future__ import annotations

from typing import Any

import pytest
from dyno import _core

ops = _core.ops
H200 = {"kind": "cuda", "name": "NVIDIA H200", "compute_capability": 90, "sm_count": 132}
HOPPER = H200 | {"shared_per_block_bytes": 227 << 10}


@pytest.mark.parametrize(
    ("family", "desc", "variant"),
    [
        ("up_gate", {"type": "q4_k", "m": 1, "n": 14336, "k": 4096}, "ring"),
        ("up_gate", {"type": "q4_k", "m": 2, "n": 14336, "k": 4096}, "wgmma_codes"),
        ("up_gate", {"type": "q8_0", "m": 2, "n": 3072, "k": 1024}, "stream"),  # 6 MiB
        ("up_gate", {"type": "f16", "m": 1, "n": 14336, "k": 4096}, "stream"),  # rings hold codes
        ("matmul", {"type": "q6_k", "m": 1, "n": 128256, "k": 4096}, "ring"),
        ("matmul", {"type": "q8_0", "m": 1, "n": 201088, "k": 2880}, "stream"),  # the last chunk is not full
        ("matmul", {"type": "q4_k", "m": 1, "n": 4096, "k": 4096}, "stream"),  # 9 MiB
        ("matmul", {"type": "q4_k", "m": 1, "n": 4096, "k": 14336}, "stream"),  # one task a block
        ("matmul", {"type": "iq4_xs", "m": 1, "n": 4096, "k": 14336}, "stream"),
        ("matmul", {"type": "q8_0", "m": 1, "n": 6144, "k": 4096}, "stream"),  # three tasks a multiprocessor
        ("up_gate", {"type": "iq4_xs", "m": 1, "n": 14336, "k": 4096}, "ring"),
        ("moe_up_gate", {"type": "mxfp4", "m": 1, "n": 2880, "k": 2880, "experts": 32, "used": 4}, "stream"),
        ("moe_up_gate", {"type": "q4_0", "m": 1, "n": 768, "k": 2048, "experts": 128, "used": 8}, "stream"),
        ("moe_down_sum", {"type": "mxfp4", "m": 1, "n": 2880, "k": 2880, "experts": 32, "used": 4}, "stream"),
        ("moe_down_sum", {"type": "q4_0", "m": 1, "n": 2048, "k": 768, "experts": 128, "used": 8}, "stream"),
    ],
)
def test_a_token_takes_the_ring_where_a_launch_reads_much(
    family: str, desc: dict[str, Any], variant: str
) -> None:
    desc = {"layout": "gpu", **desc}
    assert ops.default_config(family, desc, HOPPER)["variant"] == variant
    assert ops.default_config(family, desc, HOPPER | {"compute_capability": 86})["variant"] == "stream"


def qkv(n: int, k: int, **more: Any) -> dict[str, Any]:
    return {
        "n": n,
        "n_k": 1024,
        "n_v": 1024,
        "k": k,
        "type_k": "q4_0",
        "type_v": "q4_0",
        "norm": True,
        **more,
    }


@pytest.mark.parametrize(
    ("family", "desc", "warps", "stripes"),
    [
        ("matmul", {"n": 2048, "k": 4096}, 16, 2),  # two units a warp: two stripes share their conversion
        ("matmul", {"n": 2048, "k": 6144}, 16, 1),  # three units a warp: the weights take longer
        ("matmul", {"n": 2048, "k": 2048}, 16, 2),  # 64 blocks leave room for the next launch
        ("matmul", {"n": 1024, "k": 2048}, 16, 1),
        ("matmul", {"n": 1536, "k": 1536}, 16, 2),  # four warps without a unit
        ("matmul", {"n": 2880, "k": 4096, "type": "q8_0"}, 16, 3),  # two blocks for three stripes, 120 in all
        ("matmul", {"n": 2880, "k": 4096}, 16, 2),
        ("matmul", {"n": 2560, "k": 4096, "type": "q8_0"}, 16, 2),  # 107 would be in all
        (
            "qkv",
            {**qkv(2048, 4096, type="q8_0", type_k="q8_0", type_v="q8_0"), "n_k": 448, "n_v": 448},
            16,
            2,
        ),
        ("matmul", {"n": 512, "k": 128, "batch": 16}, 4, 2),  # one unit
        ("matmul", {"n": 128, "k": 512, "batch": 16}, 4, 1),
        ("matmul", {"n": 2048, "k": 4096, "type": "f16"}, 16, 1),  # no units
        ("qkv", qkv(2048, 2048), 8, 2),  # 16 warps would occupy the whole chip, with one unit each
        ("qkv", {**qkv(3072, 2048), "n_k": 576, "n_v": 0}, 16, 2),
        ("qkv", qkv(2048, 1024), 8, 2),  # not 256 blocks of one stripe
        ("qkv", qkv(8192, 5120), 4, 2),  # 28 MiB, in blocks that fit at once
        ("up_gate", {"n": 3072, "k": 1024, "activation": "silu"}, 4, 2),
        ("up_gate", {"n": 8192, "k": 3072, "activation": "silu"}, 4, 2),
    ],
)
def test_warps_and_stripes_for_one_row(family: str, desc: dict[str, Any], warps: int, stripes: int) -> None:
    desc = {"type": "q4_0", "layout": "gpu", "m": 1, **desc}
    config = {"variant": "stream", "warps": warps, "stripes": stripes}
    assert ops.default_config(family, desc, HOPPER) == config


@pytest.mark.parametrize(
    ("family", "desc", "share"),
    [
        ("up_gate", {"n": 9728, "k": 2560}, 2),  # 608 blocks of stream would not fit at once
        ("up_gate", {"n": 18944, "k": 3584}, 1),
        ("up_gate", {"n": 18944, "k": 3584, "type": "q8_0"}, 4),
        ("qkv", qkv(8192, 5120, type="q8_0", type_k="q8_0", type_v="q8_0"), 2),  # 53 MiB
    ],
)
def test_the_ring_reads_what_does_not_fit_at_once(family: str, desc: dict[str, Any], share: int) -> None:
    desc = {"type": "q4_0", "layout": "gpu", "m": 1, **desc}
    if family == "up_gate":
        desc["activation"] = "silu"
    assert ops.default_config(family, desc, HOPPER) == {"variant": "ring", "share": share, "blocks": 2}


def test_blocks_use_the_whole_chip_where_launches_do_not_start_early() -> None:
    desc = {"type": "q4_0", "layout": "gpu", "m": 1, "n": 2048, "k": 2048}
    config = ops.default_config("matmul", desc, HOPPER | {"compute_capability": 86})
    assert config == {"variant": "stream", "warps": 16, "stripes": 1}


def test_three_stripes_take_one_row_of_one_matrix() -> None:
    config = {"variant": "stream", "warps": 8, "stripes": 3}
    one = {"type": "q4_0", "layout": "gpu", "m": 1, "n": 96, "k": 512}
    assert config in ops.candidates("matmul", one, HOPPER, "legal")
    for family, desc in (
        ("matmul", one | {"m": 2}),
        ("matmul", one | {"type": "f16"}),
        ("up_gate", one | {"activation": "silu"}),
        ("qkv", one | {"n_k": 16, "n_v": 16, "type_k": "q4_0", "type_v": "q4_0"}),
        ("matmul_id", one | {"experts": 4, "used": 2}),
        ("moe_down_sum", one | {"experts": 4, "used": 2}),
    ):
        assert config not in ops.candidates(family, desc, HOPPER, "legal"), family
        assert {**config, "stripes": 2} in ops.candidates(family, desc, HOPPER, "legal"), family


@pytest.mark.parametrize("capability", [75, 86, 90, 120])
@pytest.mark.parametrize("shared", [{}, {"shared_per_block_bytes": 227 << 10}])
def test_defaults_of_a_device_that_does_not_say_its_size(capability: int, shared: dict[str, int]) -> None:
    device = {"kind": "cuda", "compute_capability": capability, **shared}
    for family in ("matmul", "up_gate"):
        desc = {"type": "q4_k", "layout": "gpu", "m": 1, "n": 14336, "k": 4096}
        assert ops.default_config(family, desc, device) in ops.candidates(family, desc, device, "legal")


def test_long_prompts_are_rotated_and_stored_by_whole_tokens() -> None:
    rope = {"heads": 32, "head_dim": 128, "n_rot": 128}
    assert ops.default_config("rope", rope | {"m": 63}, H200)["variant"] == "pairs"
    assert ops.default_config("rope", rope | {"m": 64}, H200)["variant"] == "tokens"
    for dtype, width, variant in (
        ("f16", 1024, "chunks"),
        ("f16", 1028, "columns"),
        ("q8_0", 1024, "columns"),
    ):
        desc = {"m": 512, "width": width, "type": dtype}
        assert ops.default_config("kv_store", desc, H200)["variant"] == variant


@pytest.mark.parametrize("family", ["matmul", "matmul_id", "up_gate", "moe_up_gate", "moe_down_sum", "qkv"])
@pytest.mark.parametrize("capability", [75, 90])
@pytest.mark.parametrize("m", [1, 2, 8])
def test_a_type_without_the_layout_is_refused(family: str, capability: int, m: int) -> None:
    """The CPU alone multiplies iq3_s as it is; a GPU holds its values in another form."""
    desc = {"type": "iq3_s", "layout": "gpu", "m": m, "n": 4096, "k": 4096}
    if family == "qkv":
        desc |= {"type_k": "iq3_s", "type_v": "iq3_s", "n_k": 256, "n_v": 256, "norm": True}
    elif family not in ("matmul", "up_gate"):
        desc |= {"experts": 8, "used": 2}
    device = HOPPER | {"compute_capability": capability}
    ok, why = ops.supports(family, desc, ops.default_config(family, desc, device), device)
    assert not ok
    assert "iq3_s" in why
