"""Default kernels of a token's experts on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
from dyno import _core

ops = _core.ops
HOPPER = {"kind": "cuda", "compute_capability": 90, "sm_count": 132, "shared_per_block_bytes": 227 << 10}


@pytest.mark.parametrize(
    ("desc", "warps", "stripes"),
    [
        ({"type": "mxfp4", "n": 2880, "k": 2880, "used": 4}, 16, 2),  # 180 stripes
        ({"n": 2048, "k": 768, "used": 8}, 16, 1),
        ({"type": "f16", "n": 2880, "k": 2880, "used": 4}, 8, 1),
    ],
)
def test_two_stripes_of_a_sum_share_a_block_if_twice_as_many_warps_fit(
    desc: dict[str, Any], warps: int, stripes: int
) -> None:
    desc = {"type": "q4_0", "layout": "gpu", "m": 1, "experts": 64, **desc}
    config = {"variant": "stream", "warps": warps, "stripes": stripes}
    assert ops.default_config("moe_down_sum", desc, HOPPER) == config
