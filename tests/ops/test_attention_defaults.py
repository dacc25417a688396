"""The variant of attention that a GPU runs by default, over shapes, cache types and chips."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from dyno import _core

ops = _core.ops

TURING, AMPERE, HOPPER, BLACKWELL = (
    {"kind": "cuda", "compute_capability": capability, "sm_count": count, "shared_per_block_bytes": shared}
    for capability, count, shared in (
        (75, 46, 65_536),
        (80, 108, 166_912),
        (90, 132, 232_448),
        (120, 170, 101_376),
    )
)
pytestmark = pytest.mark.skipif(
    _core.build_info()["switches"]["GGML_CUDA"] == "ON",
    reason="a CUDA build has its own chips' code alone",
)

GROUPS = ((1, 1), (8, 8), (32, 8), (28, 4), (16, 1), (64, 8))
MIXED = ("f16 q8_0", "q8_0 f16")


def desc_of(heads: tuple[int, int], dims: tuple[int, int], types: str, m: int, **more: Any) -> dict[str, Any]:
    k_type, v_type = types.split()
    shape = {"heads": heads[0], "kv_heads": heads[1], "dk": dims[0], "dv": dims[1], "m": m}
    return {**shape, "k_type": k_type, "v_type": v_type, **more}


def default(desc: dict[str, Any], machine: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = ops.default_config("attention", desc, machine)
    ok, why = ops.supports("attention", desc, config, machine)
    assert ok, (desc, config, why)
    return config


@pytest.mark.parametrize(
    "machine", [TURING, AMPERE, HOPPER, BLACKWELL], ids=lambda machine: str(machine["compute_capability"])
)
def test_every_shape_has_a_default_that_runs(machine: dict[str, Any]) -> None:
    dims = ((1, 1), (64, 64), (80, 80), (100, 100), (128, 128), (192, 128), (75, 41), (256, 256), (512, 512))
    types = ("f32 f32", "f16 f16", "bf16 bf16", "f16 bf16", "f32 f16")
    found = set()
    for heads, width, kinds, m in itertools.product(GROUPS, dims, types, (1, 2, 9, 17, 64, 65, 512)):
        found.add(default(desc_of(heads, width, kinds, m), machine)["variant"])
    for heads, width, m in itertools.product(GROUPS, ((64, 64), (128, 128), (256, 256)), (1, 9, 64, 512)):
        for kinds in (*MIXED, "q8_0 q8_0"):
            found.add(default(desc_of(heads, width, kinds, m), machine)["variant"])
    prompts = "flash_wgmma" if machine is HOPPER else "flash"
    assert {"direct", "flash_pairs", "rows", prompts} <= found


@pytest.mark.parametrize("machine", [AMPERE, HOPPER], ids=("ampere", "hopper"))
def test_few_tokens_split_the_keys_whatever_the_cache_is_of(machine: dict[str, Any]) -> None:
    """A token over a long cache needs more blocks than it has heads."""
    dims = ((64, 64), (100, 100), (128, 128), (256, 256))
    for heads, width in itertools.product(((32, 8), (28, 4), (8, 4)), dims):
        for types in ("f16 f16", "bf16 bf16") if width == (100, 100) else ("f16 f16", "q8_0 q8_0", *MIXED):
            for m in (1, 2, 8) if types in MIXED else (1, 2, 8, 16):
                desc = desc_of(heads, width, types, m)
                config = default(desc, machine)
                if types not in MIXED:
                    assert config == {"variant": "adaptive"}
                    config = ops.launch_config("attention", desc, sequences=1, depth=16_000, device=machine)
                assert config["splits"] > 1, (heads, width, types, m, config)


@pytest.mark.parametrize("types", MIXED)
def test_caches_of_two_types_get_four_blocks_a_multiprocessor(types: str) -> None:
    """These are the fastest of the configurations in h200_mixed_caches.json, or nearly."""
    for m, splits in ((1, 66), (4, 16), (8, 8), (16, 4), (24, 4), (64, 1)):
        config = default(desc_of((32, 8), (128, 128), types, m), HOPPER)
        assert config == {"variant": "direct", "rows": 8, "splits": splits}, m
    assert default(desc_of((32, 8), (128, 128), types, 65), HOPPER)["variant"] == "flash_wgmma"


def test_wide_heads_of_two_types_have_blocks_of_eight_rows_or_sixty_four() -> None:
    wide = (256, 256)
    assert default(desc_of((8, 4), wide, "f16 q8_0", 12), HOPPER)["rows"] == 8
    # With more tokens, tiles of 64 rows read the cache less often, if the chip can split their keys.
    assert default(desc_of((8, 4), wide, "f16 q8_0", 40), HOPPER)["variant"] == "flash_wgmma"
    assert default(desc_of((8, 4), wide, "f16 q8_0", 40), AMPERE)["variant"] == "direct"
    # So they do if there are too many tiles of 8 rows to split their keys.
    assert default(desc_of((64, 16), wide, "f16 q8_0", 12), HOPPER)["variant"] == "flash_wgmma"


@pytest.mark.parametrize(
    ("desc", "rows", "words"),
    [
        (desc_of((8, 2), (128, 128), "f16 q8_0", 4), 16, "rows=16 are for keys and values of one type"),
        (desc_of((8, 2), (512, 512), "f16 q8_0", 4), 8, "multiples of 4 up to 256"),
        (
            desc_of((8, 2), (102, 100), "f16 f16", 4),
            8,
            "dk=102 dv=100: direct attention takes",
        ),
        (
            desc_of((8, 2), (128, 128), "f16 bf16", 4),
            8,
            "f16 or q8_0 keys and values, or bf16 for both",
        ),
        (desc_of((8, 2), (128, 128), "f32 f16", 4), 8, "k_type=f32 with v_type=f16"),
    ],
)
def test_direct_names_what_it_does_not_read(desc: dict[str, Any], rows: int, words: str) -> None:
    ok, why = ops.supports("attention", desc, {"variant": "direct", "rows": rows, "splits": 8}, HOPPER)
    assert not ok
    assert words in why


@pytest.mark.parametrize(
    ("types", "width", "words"),
    [
        (
            "f16 q8_0",
            128,
            "v_type=q8_0: variants other than latent_cluster store keys and values of one type",
        ),
        ("q8_0 f16", 64, "k_type=q8_0 with v_type=f16"),
        ("f16 f16", 100, "heads of dk=100 dv=100: variant direct rotates and stores multiples of 8"),
    ],
)
def test_one_launch_with_rotation_takes_one_type_and_eights(types: str, width: int, words: str) -> None:
    desc = desc_of((8, 2), (width, width), types, 1, n_rot=32)
    for config in ({"variant": "direct", "rows": 8, "splits": 4}, {"variant": "token", "splits": 4}):
        ok, why = ops.supports("rope_attention", desc, config, HOPPER)
        assert not ok
        assert words in why or (config["variant"] == "token" and width == 100), why
