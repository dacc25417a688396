"""Default kernels of a token's experts on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
from dyno import _core

ops = _core.ops
HOPPER = {"kind": "cuda", "compute_capability": 90, "sm_count": 132, "shared_per_block_bytes": 227 << 10}


@pytest.mark.parametrize(
    ("desc", "config"),
    [
        # 720 pairs of stripes: more than four blocks for each multiprocessor.
        ({"type": "mxfp4", "n": 2880, "k": 2880, "used": 4}, {"variant": "walk", "warps": 8, "blocks": 2}),
        ({"n": 768, "k": 2048, "used": 8}, {"variant": "stream", "warps": 4, "stripes": 2}),
        ({"n": 768, "k": 2048, "used": 8, "shared": 768}, {"variant": "walk", "warps": 8, "blocks": 2}),
        ({"n": 4096, "k": 512, "used": 8}, {"variant": "walk", "warps": 4, "blocks": 4}),
        # Several tokens: blocks that stay for up to four tokens, if every warp has as many units of k.
        ({"n": 768, "k": 2048, "used": 8, "m": 2}, {"variant": "walk", "warps": 8, "blocks": 2}),
        ({"n": 768, "k": 2048, "used": 8, "m": 4}, {"variant": "walk", "warps": 8, "blocks": 2}),
        ({"n": 768, "k": 2304, "used": 8, "m": 4}, {"variant": "stream", "warps": 4, "stripes": 2}),
        (
            {"type": "mxfp4", "n": 768, "k": 2048, "used": 8, "m": 2},
            {"variant": "stream", "warps": 4, "stripes": 2},
        ),
        ({"n": 768, "k": 2048, "used": 8, "m": 5}, {"variant": "stream", "warps": 4, "stripes": 2}),
    ],
)
def test_blocks_stay_for_many_pairs_of_stripes(desc: dict[str, Any], config: dict[str, Any]) -> None:
    desc = {"type": "q4_0", "layout": "gpu", "m": 1, "experts": 64, "bytes": True, **desc}
    assert ops.default_config("moe_up_gate", desc, HOPPER) == config
    old = HOPPER | {"compute_capability": 75}
    assert ops.supports("moe_up_gate", desc, config, old)[0]
    del desc["bytes"]
    if config["variant"] == "walk":
        ok, why = ops.supports("moe_up_gate", desc, config, HOPPER)
        assert not ok
        assert "rows in bytes" in why
        assert ops.default_config("moe_up_gate", desc | {"shared": 0}, HOPPER)["variant"] != "walk"
    elif desc["m"] == 4:
        assert ops.default_config("moe_up_gate", desc, HOPPER)["variant"] == "ring"


@pytest.mark.parametrize(
    ("desc", "warps", "stripes"),
    [
        ({"type": "mxfp4", "n": 2880, "k": 2880, "used": 4}, 16, 2),  # 180 stripes
        ({"n": 2048, "k": 768, "used": 8}, 16, 1),
        ({"type": "f16", "n": 2880, "k": 2880, "used": 4}, 8, 1),
        # Several tokens: always two stripes, in eight warps or more.
        ({"type": "mxfp4", "n": 2880, "k": 2880, "used": 4, "m": 2}, 8, 2),
        ({"type": "mxfp4", "n": 2880, "k": 2880, "used": 4, "m": 4}, 8, 2),
        ({"n": 2048, "k": 768, "used": 8, "m": 2}, 16, 2),
        ({"n": 2048, "k": 768, "used": 8, "m": 4}, 8, 2),
        ({"n": 2048, "k": 256, "used": 2, "m": 32}, 4, 2),  # eight tiles: too few for eight warps
        ({"type": "f16", "n": 2880, "k": 2880, "used": 4, "m": 2}, 4, 1),
    ],
)
def test_two_stripes_of_a_sum_share_a_block(desc: dict[str, Any], warps: int, stripes: int) -> None:
    desc = {"type": "q4_0", "layout": "gpu", "m": 1, "experts": 64, **desc}
    config = {"variant": "stream", "warps": warps, "stripes": stripes}
    assert ops.default_config("moe_down_sum", desc, HOPPER) == config
