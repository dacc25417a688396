"""Layout gpu: the same bits as in the file, for any number of rows, and its refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dyno import _core
from dyno.errors import UnsupportedError

from ops.matmul_data import QUANTISED, block, weights

ops = _core.ops


@pytest.mark.parametrize("type_name", [*QUANTISED, "f16", "bf16"])
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (16, 3), (37, 11)])
def test_keeps_every_bit(type_name: str, rows: int, blocks: int) -> None:
    k = blocks * max(block(type_name), 32)
    plain, exact = weights(np.random.default_rng(rows), type_name, rows, k)
    packed = ops.repack(type_name, plain, rows, k, layout="gpu")
    assert packed.nbytes == ops.layout_bytes(type_name, "gpu", rows, k)
    got = ops.unpack(type_name, "gpu", packed, rows, k)
    np.testing.assert_array_equal(got, exact.astype(np.float32))


@pytest.mark.parametrize("type_name", QUANTISED)
def test_is_hardly_larger_than_the_file(type_name: str) -> None:
    plain = ops.layout_bytes(type_name, "plain", 4096, 4096)
    assert plain <= ops.layout_bytes(type_name, "gpu", 4096, 4096) <= 1.04 * plain


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
        assert layout == "gpu" or [c["variant"] for c in found] == ["exact"]
        if capability != 90:
            assert not any(c["variant"].startswith("wgmma") for c in found)
            ok, why = ops.supports(family, desc, {"variant": "wgmma", "tokens": 64, "warps": 4}, device)
            assert not ok
            assert "9.0" in why or "layout" in why


@pytest.mark.parametrize(
    ("family", "m", "n", "taken"),
    [
        ("up_gate", 4096, 14336, {"variant": "wgmma_wide", "tokens": 256, "group": 16}),
        ("up_gate", 512, 14336, {"variant": "wgmma_wide", "tokens": 256, "group": 16}),
        (
            "matmul",
            512,
            4096,
            {"variant": "wgmma", "tokens": 128, "warps": 4},
        ),  # 256 leaves half of the chip idle
        ("matmul", 4096, 1024, {"variant": "wgmma_wide", "tokens": 256, "group": 16}),
        (
            "matmul",
            257,
            14336,
            {"variant": "wgmma", "tokens": 128, "warps": 8},
        ),  # a third of wide tiles is empty
        (
            "matmul",
            128,
            1024,
            {"variant": "wgmma", "tokens": 32, "warps": 4},
        ),  # too few tiles of any wide kind
    ],
)
def test_wide_tiles_run_where_they_fill_the_chip(family: str, m: int, n: int, taken: dict[str, Any]) -> None:
    desc = {"type": "q4_k", "layout": "gpu", "act": "f32", "m": m, "n": n, "k": 4096}
    assert ops.default_config(family, desc, H200) == taken


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
