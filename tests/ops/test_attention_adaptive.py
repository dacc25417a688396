"""The kernel and the parts of the keys that variant `adaptive` chooses for each launch of attention."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from dyno import _core
from dyno.errors import PlanError

from ops.test_attention_defaults import AMPERE, BLACKWELL, HOPPER, TURING, desc_of, pytestmark

__all__ = ["pytestmark"]

ops = _core.ops
HALVES, EIGHTS = "f16 f16", "q8_0 q8_0"
DIRECT = {"variant": "direct", "rows": 8, "splits": 1}


def chosen(
    family: str,
    desc: dict[str, Any],
    depth: int,
    sequences: int = 1,
    machine: dict[str, Any] = HOPPER,
) -> dict[str, Any]:
    ok, why = ops.supports(family, desc, {"variant": "adaptive"}, machine)
    assert ok, why
    config: dict[str, Any] = ops.launch_config(family, desc, sequences=sequences, depth=depth, device=machine)
    return config


def rotated(heads: tuple[int, int], width: int, types: str, m: int) -> dict[str, Any]:
    return desc_of(heads, (width, width), types, m, n_rot=width, neox=True)


def rows_of(config: dict[str, Any]) -> int:
    return int(config.get("rows", 8))


def parts_of(config: dict[str, Any]) -> int:
    return int(config["splits"] if "splits" in config else 8 * config["clusters"])


def blocks(config: dict[str, Any], heads: tuple[int, int], m: int, sequences: int) -> int:
    """Blocks of a launch whose tokens are divided evenly among the sequences."""
    tokens = [m // sequences + (i < m % sequences) for i in range(sequences)]
    tiles = sum(math.ceil(n * (heads[0] // heads[1]) / rows_of(config)) for n in tokens)
    return tiles * heads[1] * parts_of(config)


def test_a_token_takes_clusters_first_and_more_parts_later() -> None:
    """One block reads few keys fastest. A cluster adds its parts faster than another launch, but its blocks
    start later."""
    variants = [
        chosen("rope_attention", rotated((32, 8), 128, HALVES, 1), depth)["variant"]
        for depth in (256, 512, 1024, 2048, 4096, 8192, 32_768, 131_072)
    ]
    assert variants == ["token"] + ["token_cluster"] * 3 + ["token"] * 4
    assert parts_of(chosen("rope_attention", rotated((32, 8), 128, HALVES, 1), 256)) == 1
    config = chosen("rope_attention", rotated((32, 8), 128, HALVES, 1), 32_768)
    assert 100 <= blocks(config, (32, 8), 1, 1) <= HOPPER["sm_count"]


@pytest.mark.parametrize("heads", [(32, 4), (28, 4), (40, 5)])
def test_few_kv_heads_take_parts_instead_of_second_steps(heads: tuple[int, int]) -> None:
    """A block of a cluster of eight would read its keys of 2,048 positions in two steps."""
    for depth in (512, 1024):
        assert chosen("rope_attention", rotated(heads, 128, HALVES, 1), depth)["variant"] == "token_cluster"
    for depth in (2048, 4096, 8192, 32_768):
        config = chosen("rope_attention", rotated(heads, 128, HALVES, 1), depth)
        assert config["variant"] == "token"
        assert config["splits"] >= 16
        assert blocks(config, heads, 1, 1) <= HOPPER["sm_count"]


@pytest.mark.parametrize("kv_heads", [16, 20, 32, 40])
def test_many_kv_heads_take_no_clusters(kv_heads: int) -> None:
    """Clusters of eight blocks would wait for others."""
    for depth in (256, 512, 1024, 4096, 32_768):
        config = chosen("rope_attention", rotated((kv_heads, kv_heads), 128, HALVES, 1), depth)
        assert config["variant"] == "token"
        assert blocks(config, (kv_heads, kv_heads), 1, 1) <= HOPPER["sm_count"]


@pytest.mark.parametrize("machine", [TURING, AMPERE, HOPPER, BLACKWELL], ids=lambda m: f"sm{m['sm_count']}")
@pytest.mark.parametrize("types", [HALVES, EIGHTS])
def test_deep_contexts_fill_the_chip(machine: dict[str, Any], types: str) -> None:
    """Every number of tokens, of sequences and of kv heads gets enough blocks."""
    for heads, (m, sequences) in itertools.product(
        ((32, 8), (32, 4), (8, 2), (14, 2)), ((1, 1), (2, 2), (4, 1), (8, 1), (8, 2), (8, 8))
    ):
        config = chosen("rope_attention", rotated(heads, 128, types, m), 60_000, sequences, machine)
        filled = blocks(config, heads, m, sequences) > 0.7 * machine["sm_count"]
        if m == 1 and heads[1] == 2 and config["variant"] == "token":
            # 88 blocks were faster than 132 (h200_added_parts.json: t44 and t66 behind 30,000 and 60,000).
            filled = blocks(config, heads, m, sequences) >= 88 / 132 * machine["sm_count"]
        assert filled or parts_of(config) == 32, (heads, m, sequences, config)  # the most of flash_wgmma
    for heads, (m, sequences) in itertools.product(
        ((32, 8), (32, 4), (8, 2)), ((12, 1), (12, 12), (16, 2), (32, 1), (64, 1))
    ):
        config = chosen("attention", desc_of(heads, (128, 128), types, m), 60_000, sequences, machine)
        filled = blocks(config, heads, m, sequences) > 0.7 * machine["sm_count"]
        assert filled or parts_of(config) == 32, (heads, m, sequences, config)  # the most of flash_wgmma


def test_short_contexts_are_left_whole() -> None:
    """A part has no fewer keys than a block reads in one step."""
    for family, m, sequences in (("rope_attention", 8, 1), ("attention", 16, 16), ("attention", 40, 1)):
        desc = rotated((32, 8), 128, HALVES, m) if m <= 8 else desc_of((32, 8), (128, 128), HALVES, m)
        assert parts_of(chosen(family, desc, 100, sequences)) == 1


def test_tokens_of_one_sequence_share_tiles() -> None:
    """With more query rows in a tile, the cache is read less often."""
    for m, variant in ((12, "flash_wgmma"), (64, "flash_wgmma")):
        assert chosen("attention", desc_of((32, 8), (128, 128), HALVES, m), 32_000)["variant"] == variant
        # Rows of q8_0 are converted for it, which takes longer than reading them again.
        assert chosen("attention", desc_of((32, 8), (128, 128), EIGHTS, m), 32_000)["variant"] == "direct"
    eight = rotated((32, 8), 128, EIGHTS, 8)
    assert chosen("rope_attention", eight, 32_000) == {"variant": "direct", "rows": 16, "splits": 8}
    assert rows_of(chosen("rope_attention", eight, 32_000, 8)) == 8


def test_deep_contexts_are_worth_a_launch_for_the_new_keys() -> None:
    """Tiles of 64 rows are not fused with norm, rotation and store."""
    for tokens, sequences in ((8, 1), (4, 1), (2, 2)):
        desc = rotated((32, 8), 128, HALVES, tokens)
        assert chosen("rope_attention", desc, 300, sequences)["variant"] == "direct"
        deep = chosen("rope_attention", desc, 32_000, sequences)
        assert (deep["variant"], deep["rows"]) == ("stored", 64)
        assert chosen("rope_attention", desc, 32_000, sequences, AMPERE)["variant"] in ("direct", "stored")


def test_chips_with_little_shared_memory_have_blocks_of_eight_rows() -> None:
    # 16 rows of 128 need more shared memory than a chip of 7.5 has.
    assert rows_of(chosen("attention", desc_of((8, 4), (128, 128), HALVES, 12), 9000, 1, TURING)) == 8
    assert rows_of(chosen("attention", desc_of((8, 4), (128, 128), HALVES, 12), 9000, 1, AMPERE)) == 16


def test_steps_of_many_sequences_stay_whole_until_they_leave_the_chip_idle() -> None:
    few, many = desc_of((32, 4), (128, 128), HALVES, 12), desc_of((32, 8), (128, 128), HALVES, 32)
    assert chosen("attention", few, 512, 12) == chosen("attention", many, 4096, 32) == DIRECT
    assert parts_of(chosen("attention", few, 16_000, 12)) > 1


def test_the_workspace_holds_every_choice() -> None:
    """It is 16896 rows (adaptive_scratch_bytes); one part needs none."""
    shapes = itertools.product(((32, 8), (32, 32), (4, 1), (64, 8)), (64, 128, 256), (HALVES, EIGHTS))
    for heads, width, types in shapes:
        for m, sequences, depth in itertools.product((1, 2, 7, 9, 33, 64), (1, 2, 64), (300, 5000, 200_000)):
            n = min(m, sequences)
            family = "attention" if m > 8 else "rope_attention"
            desc = rotated(heads, width, types, m) if m <= 8 else desc_of(heads, (width, width), types, m)
            config = chosen(family, desc, depth, n)
            if parts_of(config) > 1:
                rows = blocks(config, heads, m, n) * rows_of(config)
                assert rows <= 16_896, (heads, width, m, n, config)


def test_wrong_sequences_are_refused() -> None:
    desc = desc_of((32, 8), (128, 128), HALVES, 4)
    with pytest.raises(PlanError, match="sequences=5"):
        ops.launch_config("attention", desc, sequences=5, depth=100, device=HOPPER)
    with pytest.raises(PlanError, match="norm has no variant adaptive"):
        ops.launch_config("norm", {"m": 1, "n": 64}, sequences=1, depth=1, device=HOPPER)
