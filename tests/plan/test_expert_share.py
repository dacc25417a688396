"""The CPU's part of the experts of a streamed prompt, as `cpu_share=-1` solves it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
from dyno import _core
from hole_model import qwen3moe_hole

if TYPE_CHECKING:
    from pathlib import Path

RATES = {"memory_gbps": 279.0, "gflops_one": 230.0, "gflops_many": 2470.0}
"""Of 16 cores of a Xeon beside an H100."""
LINK = {"link_gbps": 55.0, "latency_us": 10.0, "streams": True}


@pytest.mark.parametrize(("tokens", "least", "most"), [(512, 0.15, 0.45), (4096, 0.0, 0.01)])
def test_the_rows_that_cross_have_to_be_worth_it(
    tmp_path: Path, tokens: int, least: float, most: float
) -> None:
    """On an H100, prompts gained 22 % with u-batches of 512; with 4096 each share lost."""

    def of_the_cpu(share: int) -> float:
        session = _core.Session(
            qwen3moe_hole(tmp_path / "layer.gguf", layers=1),
            load={"device": "cpu:1"},
            context={"ctx": 4096},
            session={"ubatch": tokens, "threads": 16, "cpu_share": share},
            plan_only=True,
            placement={"virtual_devices": [LINK], "cpu_moe": True},
        )
        parts = session.cost(tokens, logit_rows=1, rates={"cpu": RATES})["parts"]
        return math.fsum(part["flops"] for part in parts if part["device"] == "cpu")

    assert least <= of_the_cpu(-1) / of_the_cpu(100) <= most
