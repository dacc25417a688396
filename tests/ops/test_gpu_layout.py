"""Layout gpu: the same bits as in the file, for any number of rows, and its refusals."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from dyno import _core
from dyno.errors import UnsupportedError

from ops.matmul_data import QUANTISED, block, weights
from ops.weight_blocks import GPU_FORMS

ops = _core.ops
# Types with a layout for the CPU's kernels and one for the GPU's.
ON_BOTH = [t for t in QUANTISED if ops.layout_supported(t, "x16") and ops.layout_supported(t, "gpu")]


@pytest.mark.parametrize("type_name", [*QUANTISED, *GPU_FORMS, "f16", "bf16"])
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (16, 3), (37, 11)])
def test_keeps_every_bit(type_name: str, rows: int, blocks: int) -> None:
    k = blocks * max(block(type_name), 32)
    plain, exact = weights(np.random.default_rng(rows), type_name, rows, k)
    packed = ops.repack(type_name, plain, rows, k, layout="gpu")
    assert packed.nbytes == ops.layout_bytes(type_name, "gpu", rows, k)
    got = ops.unpack(type_name, "gpu", packed, rows, k)
    np.testing.assert_array_equal(got, exact.astype(np.float32))


@pytest.mark.parametrize("type_name", ON_BOTH)
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (16, 3), (37, 11), (48, 2), (63, 5)])
def test_is_the_same_from_the_layout_of_the_cpu(type_name: str, rows: int, blocks: int) -> None:
    """The two ways to layout gpu give the same bytes: copies of streamed weights come in layout x16."""
    k = blocks * block(type_name)
    plain, _ = weights(np.random.default_rng(rows), type_name, rows, k)
    x16 = ops.repack(type_name, plain, rows, k, layout="x16")
    got = ops.repack(type_name, x16, rows, k, layout="gpu", source="x16")
    np.testing.assert_array_equal(got, ops.repack(type_name, plain, rows, k, layout="gpu"))


def test_every_bit_of_x16_counts() -> None:
    """A flipped bit of any byte but those of rows that do not exist changes the bytes of layout gpu."""
    for type_name in ON_BOTH:
        rows, k = 16, block(type_name)
        plain, _ = weights(np.random.default_rng(5), type_name, rows, k)
        x16 = ops.repack(type_name, plain, rows, k)
        want = ops.repack(type_name, x16, rows, k, layout="gpu", source="x16")
        for at in range(x16.size):
            changed = x16.copy()
            changed[at] ^= 1
            got = ops.repack(type_name, changed, rows, k, layout="gpu", source="x16")
            assert (got != want).sum() == 1, (type_name, at)


def test_refuses_other_ways_between_layouts() -> None:
    x16 = np.zeros(ops.layout_bytes("q4_0", "x16", 16, 64), np.uint8)
    with pytest.raises(UnsupportedError, match="layout x16 cannot be made from layout x16"):
        ops.repack("q4_0", x16, 16, 64, layout="x16", source="x16")
    with pytest.raises(UnsupportedError, match="f16 has no layout x16"):
        ops.repack("f16", np.zeros(16 * 64 * 2, np.uint8), 16, 64, layout="gpu", source="x16")


@pytest.mark.parametrize("type_name", [*QUANTISED, *GPU_FORMS])
def test_is_hardly_larger_than_the_file(type_name: str) -> None:
    plain = ops.layout_bytes(type_name, "plain", 4096, 4096)
    there = ops.layout_bytes(type_name, "gpu", 4096, 4096)
    assert there <= 1.04 * plain
    assert there >= plain or type_name == "q4_16"  # it has one table for four stripes of blocks


def test_refuses_what_it_cannot_hold() -> None:
    with pytest.raises(UnsupportedError, match="f32 has no layout gpu"):
        ops.layout_bytes("f32", "gpu", 16, 64)
    with pytest.raises(UnsupportedError, match="multiples of 256"):
        ops.layout_bytes("q4_k", "gpu", 16, 64)


H200 = {"kind": "cuda", "name": "NVIDIA H200", "compute_capability": 90, "sm_count": 132}


@pytest.mark.parametrize("m", [1, 8, 9, 33, 512, 4096])
@pytest.mark.parametrize("family", ["matmul", "up_gate", "matmul_id", "moe_up_gate"])
@pytest.mark.parametrize("capability", [75, 80, 90, 120])
def test_default_is_a_candidate(family: str, m: int, capability: int) -> None:
    device = H200 | {"compute_capability": capability}
    experts = {"experts": 128, "used": 8} if family in ("matmul_id", "moe_up_gate") else {}
    for layout, type_name in (("gpu", "q4_k"), ("gpu", "f16"), ("plain", "q4_k"), ("plain", "f32")):
        desc = {"type": type_name, "layout": layout, "act": "f32", "m": m, "n": 768, "k": 2048, **experts}
        found = ops.candidates(family, desc, device, "legal")
        default = ops.default_config(family, desc, device)
        assert default in found
        pairs = (
            family == "matmul" and type_name == "f32" and capability == 90
        )  # of what this build has code for
        if layout == "plain":
            assert {c["variant"] for c in found} == ({"exact", "tf32_pairs"} if pairs else {"exact"})
        if capability != 90:
            assert not any(c["variant"].startswith("wgmma") for c in found)
            ok, why = ops.supports(family, desc, {"variant": "wgmma", "tokens": 64, "warps": 4}, device)
            assert not ok
            assert "9.0" in why or "layout" in why


@pytest.mark.parametrize(
    ("family", "m", "n", "taken"),
    [
        ("up_gate", 4096, 14336, {"variant": "wgmma_wide", "tokens": 256, "group_size": 16}),
        ("up_gate", 512, 14336, {"variant": "wgmma_wide", "tokens": 256, "group_size": 16}),
        # 32 tiles for 66 pairs of multiprocessors: two pairs share k; of 16 tiles, four
        ("matmul", 512, 4096, {"variant": "wgmma_wide_split", "parts": 2}),
        ("matmul", 257, 4096, {"variant": "wgmma_wide_split", "parts": 2}),
        ("matmul", 512, 2048, {"variant": "wgmma_wide_split", "parts": 4}),
        ("matmul", 512, 6144, {"variant": "wgmma_wide", "tokens": 256, "group_size": 16}),
        ("matmul", 4096, 1024, {"variant": "wgmma_wide", "tokens": 256, "group_size": 16}),
        (
            "matmul",
            257,
            14336,
            {"variant": "wgmma", "tokens": 128, "warps": 8},
        ),  # almost half of wide tiles is empty, and they need two rounds
        (
            "matmul",
            128,
            1024,
            {"variant": "wgmma_split", "tokens": 64, "parts": 16},
        ),  # too few tiles of any wide kind: blocks share k
    ],
)
def test_wide_tiles_run_where_they_fill_the_chip(family: str, m: int, n: int, taken: dict[str, Any]) -> None:
    desc = {"type": "q4_k", "layout": "gpu", "act": "f32", "m": m, "n": n, "k": 4096}
    assert ops.default_config(family, desc, H200) == taken


@pytest.mark.parametrize("sm_count", [16, 78, 114, 132, 148])
def test_clusters_that_share_k_of_wide_tiles_run_at_once(sm_count: int) -> None:
    machine = {**H200, "shared_per_block_bytes": 227 << 10, "sm_count": sm_count}
    shared = 0
    for m, n, k in itertools.product((160, 256, 300, 512, 1024), (512, 2048, 4096, 5120), (256, 2048, 14336)):
        for kind in ("q4_k", "bf16"):
            desc = {"type": kind, "layout": "gpu", "act": "f32", "m": m, "n": n, "k": k, "path": "mmq"}
            config = ops.default_config("matmul", desc, machine)
            if config["variant"] != "wgmma_wide_split":
                continue
            shared += 1
            assert ops.supports("matmul", desc, config, machine) == (True, "")
            assert -(-m // 256) * -(-n // 256) * config["parts"] <= sm_count // 2
    assert shared > 0


def test_what_clusters_can_share() -> None:
    desc = {"type": "q4_k", "layout": "gpu", "act": "f32", "m": 512, "n": 4096, "k": 4096}
    config = {"variant": "wgmma_wide_split", "parts": 4}
    assert ops.supports("matmul", desc, config, H200) == (True, "")
    for other, word in (({"type": "f16", "k": 224}, "k=224"), ({"path": "dequantize"}, "path mmq")):
        ok, why = ops.supports("matmul", {**desc, **other}, config, H200)
        assert not ok
        assert word in why
    ok, why = ops.supports("matmul", desc, config, H200 | {"compute_capability": 80})
    assert not ok
    assert "8.0" in why


@pytest.mark.parametrize(
    ("family", "m", "n", "k", "taken"),
    [
        ("matmul", 32, 4096, 4096, (32, 8)),
        ("matmul", 32, 4096, 14336, (32, 8)),
        ("matmul", 64, 4096, 4096, (64, 8)),
        ("matmul", 128, 4096, 4096, (64, 4)),
        ("matmul", 256, 1024, 4096, (64, 8)),
        ("up_gate", 32, 14336, 4096, (32, 2)),
        ("up_gate", 64, 14336, 4096, None),  # its tiles fill the chip
        ("matmul", 256, 4096, 4096, None),  # two blocks of a tile gain nothing
        ("matmul", 512, 1024, 4096, None),
        ("matmul", 32, 4096, 256, None),  # k is too short to share
    ],
)
def test_blocks_share_k_where_tiles_are_few(
    family: str, m: int, n: int, k: int, taken: tuple[int, int] | None
) -> None:
    """`taken`: tokens and parts."""
    desc = {"type": "q4_k", "layout": "gpu", "act": "f32", "m": m, "n": n, "k": k}
    config = ops.default_config(family, desc, H200)
    split = (config["tokens"], config["parts"]) if config["variant"] == "wgmma_split" else None
    assert split == taken
    assert ops.default_config(family, desc, {**H200, "compute_capability": 80})["variant"] != "wgmma_split"


@pytest.mark.parametrize(
    ("m", "n", "parts"),
    [
        (7, 128, None),
        (8, 128, 16),
        (512, 32, 16),
        (1024, 128, 16),
        (1025, 128, 8),
        (4096, 128, 8),
        (4096, 4096, 1),
    ],
)
def test_routers_multiply_on_tensor_cores(m: int, n: int, parts: int | None) -> None:
    desc = {"type": "f32", "layout": "plain", "act": "f32", "m": m, "n": n, "k": 2048}
    config = ops.default_config("matmul", desc, H200)
    assert config.get("parts") == parts
    assert config["variant"] == ("exact" if parts is None else "tf32_pairs")
    assert ops.default_config("matmul", {**desc, "exact": True}, H200) == {"variant": "exact"}


@pytest.mark.parametrize(
    ("kind", "m", "variant"),
    [
        ("mxfp4", 576, "wgmma_sorted"),
        ("mxfp4", 504, "wgmma"),
        ("q4_k", 512, "wgmma_sorted"),  # 64 rows for each expert
        ("q4_0", 1024, "wgmma_sorted"),  # types that are unpacked quickly: 128 rows
        ("q4_0", 1016, "wgmma"),
        ("q8_0", 1016, "wgmma"),
        ("f16", 1024, "wgmma_sorted"),
        ("f16", 1016, "wgmma"),
    ],
)
@pytest.mark.parametrize("family", ["moe_up_gate", "matmul_id"])
def test_experts_with_many_rows_sort_them(family: str, kind: str, m: int, variant: str) -> None:
    desc = {"type": kind, "layout": "gpu", "act": "f32", "m": m, "n": 2880, "k": 2880, "experts": 32}
    desc |= {"used": 4}
    assert ops.default_config(family, desc, H200)["variant"] == variant
    assert ops.default_config(family, desc, H200 | {"compute_capability": 80})["variant"] == "mma"
    assert ops.default_config(family, {**desc, "k": 64}, H200)["variant"] == "wgmma"  # one tile of k


@pytest.mark.parametrize(("m", "variant"), [(512, "wgmma"), (568, "wgmma"), (576, "wgmma_sorted")])
def test_pairs_of_mxfp4_sort_rows_from_72_rows_on(m: int, variant: str) -> None:
    desc = {"type": "mxfp4", "layout": "gpu", "act": "f32", "m": m, "n": 2880, "k": 2880, "experts": 32}
    desc |= {"used": 4}
    assert ops.default_config("moe_up_gate", desc, H200)["variant"] == variant
    assert ops.default_config("matmul_id", desc, H200)["variant"] == "wgmma_sorted"


@pytest.mark.parametrize(("m", "variant"), [(8192, "wgmma_sorted"), (16384, "wgmma")])
def test_sorted_rows_take_at_most_a_gibibyte(m: int, variant: str) -> None:
    """A row of 7168 halves for each of a token's eight experts: 0.9 GiB for 8192 tokens."""
    desc = {"type": "q4_k", "layout": "gpu", "act": "f32", "m": m, "n": 2048, "k": 7168, "experts": 256}
    assert ops.default_config("moe_up_gate", desc | {"used": 8}, H200)["variant"] == variant


def test_what_rows_sorted_by_expert_take() -> None:
    sort = {"variant": "wgmma_sorted"}
    desc = {"type": "q4_0", "layout": "gpu", "act": "f32", "m": 8, "n": 64, "k": 128, "experts": 1024}
    desc |= {"used": 4}
    assert ops.supports("moe_up_gate", desc, sort, H200)[0]
    ok, why = ops.supports("moe_up_gate", {**desc, "experts": 1025}, sort, H200)
    assert not ok
    assert "experts=1025" in why
    ok, why = ops.supports("matmul_id", {**desc, "k": 64}, sort, H200)
    assert not ok
    assert "k=64" in why


def test_pairs_of_tf32_multiply_with_one_plain_matrix_unless_numerics_are_exact() -> None:
    desc = {"type": "f32", "layout": "plain", "act": "f32", "m": 512, "n": 128, "k": 2048}
    pairs = {"variant": "tf32_pairs", "parts": 1}
    assert ops.supports("matmul", desc, pairs, H200) == (True, "")
    for other, word in (
        ({"exact": True}, "exact"),
        ({"k": 2056}, "k=2056"),
        ({"batch": 2}, "one matrix"),
        ({"norm": True}, "norm"),
        ({"type": "f16"}, "f16"),
    ):
        ok, why = ops.supports("matmul", {**desc, **other}, pairs, H200)
        assert not ok
        assert word in why
    ok, why = ops.supports("matmul", desc, pairs, H200 | {"compute_capability": 80})
    assert not ok
    assert "8.0" in why


def test_blocks_share_no_more_of_k_than_there_is() -> None:
    desc = {"type": "q4_k", "layout": "gpu", "act": "f32", "m": 32, "n": 4096, "k": 512}

    def parts(desc: dict[str, Any], family: str = "matmul") -> list[int]:
        found = ops.candidates(family, desc, H200, "legal")
        return sorted({c["parts"] for c in found if c["variant"] == "wgmma_split"})

    assert parts(desc) == [2, 4, 8]
    assert parts({**desc, "k": 4096}) == [2, 4, 8, 16]
    assert parts({**desc, "k": 4096, "activation": "silu"}, "up_gate") == [2, 4, 8, 16]
    assert parts({**desc, "m": 512, "k": 4096}) == [2, 4, 8, 16]
    assert parts({**desc, "m": 513, "k": 4096}) == []
    assert parts({**desc, "k": 4096, "experts": 8, "used": 2}, "matmul_id") == []


@pytest.mark.parametrize(
    ("family", "kind", "m", "n", "k", "taken"),
    [
        ("matmul", "q5_k", 9, 4096, 4096, (16, 128, 4, 2)),  # two blocks share a multiprocessor
        ("matmul", "q5_k", 32, 4096, 4096, (32, 128, 2, 1)),  # half of the chip
        ("matmul", "q5_k", 64, 4096, 4096, (32, 128, 2, 1)),  # two tiles of 32 tokens
        ("matmul", "q5_k", 128, 4096, 4096, (64, 128, 2, 1)),
        ("matmul", "q5_k", 16, 1024, 4096, (16, 128, 8, 1)),
        (
            "matmul",
            "q5_k",
            32,
            1024,
            4096,
            (32, 128, 4, 1),
        ),  # more blocks gain less than their exchange costs
        ("matmul", "q6_k", 32, 4096, 14336, (32, 128, 4, 2)),  # k is long: smaller rings on all of the chip
        ("matmul", "q5_k", 32, 4096, 512, (32, 128, 2, 1)),
        ("up_gate", "q5_k", 32, 14336, 4096, (32, 128, 1, 2)),
        ("up_gate", "q5_k", 64, 14336, 4096, (64, 256, 1, 1)),
        ("up_gate", "q5_k", 128, 14336, 4096, None),  # tiles of 64 tokens fill the chip
        ("matmul", "q5_k", 256, 1024, 4096, (64, 128, 2, 1)),  # clusters of four would need a second round
        ("matmul", "q5_k", 256, 4096, 4096, (64, 128, 1, 1)),
        ("matmul", "q5_k", 256, 6144, 4096, None),  # wide tiles are faster
        ("matmul", "q5_k", 256, 5120, 2048, (64, 256, 1, 1)),  # k is short for an exchange of sums
        ("matmul", "q5_k", 257, 1024, 4096, None),
        ("matmul", "f16", 32, 4096, 4096, None),
    ],
)
def test_few_tokens_take_a_ring(
    family: str, kind: str, m: int, n: int, k: int, taken: tuple[int, ...] | None
) -> None:
    """`taken`: tokens, rows, parts and blocks."""
    machine = {**H200, "shared_per_block_bytes": 227 << 10}
    desc = {"type": kind, "layout": "gpu", "act": "f32", "m": m, "n": n, "k": k, "path": "mmq"}
    config = ops.default_config(family, desc, machine)
    names = ("tokens", "rows", "parts", "blocks")
    ring = tuple(config[name] for name in names) if config["variant"] == "wgmma_ring" else None
    assert ring == taken
    if taken:
        assert ops.supports(family, desc, config, machine) == (True, "")
        assert ops.default_config(family, desc, {**machine, "compute_capability": 80})["variant"] == "mma"


@pytest.mark.parametrize(
    ("family", "m", "n", "k", "taken"),
    [
        # As many blocks as a chip takes at once: with 64 rows 512 of 660, 384 or 448 of 528, 192 of 264; with
        # 128 rows 224 of 264
        ("matmul", 4, 4096, 4096, (16, 64, 8, 4)),
        ("matmul", 16, 4096, 14336, (16, 64, 8, 4)),
        ("matmul", 16, 2048, 4096, (16, 256, 8, 2)),
        ("matmul", 32, 4096, 4096, (32, 64, 6, 4)),
        ("matmul", 64, 4096, 4096, (64, 64, 3, 2)),
        ("matmul", 32, 4096, 14336, (32, 64, 7, 4)),
        ("matmul", 32, 8192, 8192, (32, 64, 3, 4)),
        ("matmul", 32, 5120, 17408, (32, 64, 5, 4)),
        ("matmul", 33, 4096, 14336, (64, 128, 7, 2)),
        ("matmul", 64, 8192, 8192, (64, 128, 3, 2)),
        ("matmul", 32, 1024, 4096, (32, 128, 8, 2)),
        ("matmul", 32, 4096, 512, (32, 128, 2, 2)),
        ("up_gate", 16, 14336, 4096, (16, 256, 2, 2)),
        ("up_gate", 64, 14336, 4096, (64, 128, 1, 2)),
        ("matmul", 65, 4096, 4096, None),
    ],
)
def test_q4_k_takes_whole_numbers(family: str, m: int, n: int, k: int, taken: tuple[int, ...] | None) -> None:
    """`taken`: tokens, rows, parts and blocks."""
    machine = {**H200, "shared_per_block_bytes": 227 << 10}
    desc = {"type": "q4_k", "layout": "gpu", "act": "f32", "m": m, "n": n, "k": k, "path": "mmq"}
    config = ops.default_config(family, desc, machine)
    names = ("tokens", "rows", "parts", "blocks")
    assert (tuple(config[name] for name in names) if config["variant"] == "wgmma_codes" else None) == taken
    assert ops.supports(family, desc, config, machine) == (True, "")


def test_a_head_of_q6_k_is_multiplied_as_whole_numbers() -> None:
    machine = {**H200, "shared_per_block_bytes": 227 << 10}
    desc = {"type": "q6_k", "layout": "gpu", "act": "f32", "k": 4096, "path": "mmq"}
    for m, n, variant in [
        (8, 128256, "wgmma_codes"),
        (32, 151936, "wgmma_codes"),
        (33, 128256, "wgmma"),
        (32, 32000, "wgmma_ring"),
    ]:
        config = ops.default_config("matmul", {**desc, "m": m, "n": n}, machine)
        assert config["variant"] == variant
        assert config.get("parts", 1) == 1 or variant == "wgmma_ring"


@pytest.mark.parametrize("sm_count", [7, 78, 114, 132, 148])
def test_blocks_that_share_k_need_no_second_round(sm_count: int) -> None:
    machine = {**H200, "shared_per_block_bytes": 227 << 10, "sm_count": sm_count}
    for m, n, k in itertools.product((4, 32, 64), (1024, 2048, 4096, 5120, 8192), (2048, 4096, 14336)):
        desc = {"type": "q4_k", "layout": "gpu", "act": "f32", "m": m, "n": n, "k": k, "path": "mmq"}
        config = ops.default_config("matmul", desc, machine)
        if config["variant"] != "wgmma_codes" or config["parts"] == 1:
            continue
        assert ops.supports("matmul", desc, config, machine) == (True, "")
        blocks = -(-n // config["rows"]) * config["parts"]
        # A multiprocessor takes five blocks of 64 rows by 16 tokens, although their memory is that of four.
        each = 5 if (config["tokens"], config["rows"]) == (16, 64) else config["blocks"]
        assert blocks <= sm_count * each


def test_blocks_of_64_rows_are_for_single_products_of_q4_k() -> None:
    machine = {**H200, "shared_per_block_bytes": 227 << 10}
    desc = {"type": "q4_k", "layout": "gpu", "act": "f32", "m": 32, "n": 4096, "k": 14336}
    config = {"variant": "wgmma_codes", "tokens": 32, "rows": 64, "parts": 8, "blocks": 4}
    assert ops.supports("matmul", desc, config, machine) == (True, "")
    assert ops.supports("matmul", {**desc, "x_tiles": 32}, config, machine) == (True, "")
    assert "q4_k, not q6_k" in ops.supports("matmul", {**desc, "type": "q6_k"}, config, machine)[1]
    assert "fewer than parts=8" in ops.supports("matmul", {**desc, "k": 1792}, config, machine)[1]


def test_a_ring_holds_two_stages_for_each_block_of_a_multiprocessor() -> None:
    desc = {"type": "q6_k", "layout": "gpu", "act": "f32", "m": 32, "n": 4096, "k": 4096}
    config = {"variant": "wgmma_ring", "tokens": 32, "rows": 256, "parts": 8, "blocks": 2}

    def refused(family: str = "matmul", **changes: Any) -> str:
        ok, why = ops.supports(
            family,
            {**desc, **{name: value for name, value in changes.items() if name not in config}},
            {**config, **{name: value for name, value in changes.items() if name in config}},
            {**H200, "shared_per_block_bytes": 227 << 10},
        )
        assert ok == (why == "")
        return why

    assert "two stages" in refused()  # 256 rows of six bits by 256 k are 52 KiB, tiles of x 16
    assert refused(blocks=1) == ""
    assert refused(rows=128) == ""
    assert refused(parts=16) == ""  # a single stage holds all of the block's k
    assert refused(type="q4_k") == ""
    assert "fewer than parts=8" in refused(type="q4_k", k=1792)
    assert refused(type="q8_0", k=1792) == ""  # its chunks are half as long
    assert "257 rows" in refused(type="q4_k", m=257)
    assert "quantised" in refused(type="f16")
    assert refused("up_gate", type="q4_k", activation="silu") == ""


def test_whole_numbers_are_made_of_super_blocks_of_four_bits_and_more() -> None:
    machine = {**H200, "shared_per_block_bytes": 227 << 10}
    desc = {"type": "q4_k", "layout": "gpu", "act": "f32", "m": 32, "n": 4096, "k": 4096}
    config = {"variant": "wgmma_codes", "tokens": 32, "rows": 256, "parts": 4, "blocks": 2}
    for kind in ("q4_k", "q5_k", "q6_k", "q3_k", "q8_0", "iq4_xs"):
        ok, why = ops.supports("matmul", {**desc, "type": kind}, config, machine)
        assert ok == (kind == "q4_k"), why
        assert ok or ("two stages" if kind in {"q5_k", "q6_k"} else "q4_k, q5_k and q6_k") in why
    for change in ({"blocks": 1}, {"rows": 128}):
        assert ops.supports("matmul", {**desc, "type": "q6_k"}, {**config, **change}, machine) == (True, "")
    # A stage of 512 rows leaves room for two; sums of 512 rows by 32 tokens need 64 KiB.
    wide = {**config, "rows": 512, "blocks": 1}
    assert ops.supports("matmul", desc, wide, machine) == (True, "")
    assert "two stages" in ops.supports("matmul", {**desc, "type": "q6_k"}, wide, machine)[1]
    assert ops.supports("up_gate", {**desc, "activation": "silu"}, config, machine) == (True, "")
    assert not ops.supports("matmul", desc, config, {**machine, "compute_capability": 80})[0]
    ring = {**config, "variant": "wgmma_ring"}
    for variant in (config, ring):
        assert ops.supports("up_gate", {**desc, "activation": "silu", "norm": True}, variant, machine)[0]


def test_products_of_one_type_can_share_a_ring() -> None:
    machine = {**H200, "shared_per_block_bytes": 227 << 10}
    kinds = {"type": "q4_k", "type_k": "q4_k", "type_v": "q4_k"}
    desc = {**kinds, "layout": "gpu", "m": 32, "n": 4096, "n_k": 1024, "n_v": 1024, "k": 4096}
    config = {"variant": "wgmma_ring", "tokens": 32, "rows": 128, "parts": 2, "blocks": 1}
    assert ops.supports("qkv", desc, config, machine) == (True, "")
    assert ops.supports("qkv", {**desc, "norm": True}, config, machine) == (True, "")
    for change, word in (
        ({"type_v": "q6_k"}, "one type"),
        ({"m": 257}, "257 rows"),
    ):
        ok, why = ops.supports("qkv", {**desc, **change}, config, machine)
        assert not ok
        assert word in why
    for m, variant in (
        (3, "stream"),
        (4, "wgmma_codes"),
        (64, "wgmma_codes"),
        (65, "wgmma_ring"),
        (128, "wgmma_ring"),
        (256, "wgmma_wide_split"),
        (512, "wgmma_wide"),
    ):
        assert ops.default_config("qkv", {**desc, "m": m}, machine)["variant"] == variant
        # With a norm, so few weights are streamed for up to 3 rows.
        normed = "stream" if m <= 3 else variant
        assert ops.default_config("qkv", {**desc, "m": m, "norm": True}, machine)["variant"] == normed
    assert ops.default_config("qkv", {**desc, "type_v": "q6_k"}, machine)["variant"] == "stream"
    tiles = {"variant": "wgmma", "tokens": 128, "warps": 4}
    assert ops.supports("qkv", {**desc, "m": 512}, tiles, machine) == (True, "")
    ok, why = ops.supports("qkv", {**desc, "m": 512, "type_v": "q6_k"}, tiles, machine)
    assert not ok
    assert "one type" in why


def test_experts_have_no_wide_tiles() -> None:
    desc = {
        "type": "q4_0",
        "layout": "gpu",
        "act": "f32",
        "m": 512,
        "n": 768,
        "k": 2048,
        "experts": 8,
        "used": 2,
    }
    assert not any(c["variant"] == "wgmma_wide" for c in ops.candidates("moe_up_gate", desc, H200, "legal"))


def test_chunks_are_of_float_types() -> None:
    config = {"variant": "chunks", "threads": 128}
    ok, why = ops.supports("kv_store", {"m": 512, "width": 1024, "type": "q8_0"}, config, H200)
    assert not ok
    assert "float type" in why
    assert ops.supports("kv_store", {"m": 512, "width": 1024, "type": "f16"}, config, H200)[0]
    assert not ops.supports("kv_store", {"m": 512, "width": 100, "type": "f16"}, config, H200)[0]


def test_cpu_kernels_refuse_the_layout() -> None:
    cpu = _core.cpu_info()
    desc = {"type": "q4_0", "layout": "gpu", "act": "q8", "m": 1, "n": 16, "k": 64}
    assert ops.candidates("matmul", desc, cpu, "legal") == []
