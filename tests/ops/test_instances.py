"""Instances that a build can leave out: none is a default, so that every build runs every model as fast."""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from dyno import _core

ops = _core.ops

CSRC = Path(__file__).resolve().parents[2] / "csrc"
FAMILIES = CSRC / "ops"
sys.path.insert(0, str(CSRC / "cmake"))
import cuda_instances  # noqa: E402

MACHINES = [
    {"kind": "cuda", "compute_capability": capability, "sm_count": count, "shared_per_block_bytes": shared}
    for capability, count, shared in (
        (75, 46, 65_536),
        (86, 84, 101_376),
        (90, 132, 232_448),
        (120, 170, 101_376),
    )
]


def optional(family: str) -> list[dict[str, Any]]:
    text = (FAMILIES / family / "variants.def").read_text()
    params = {variant["name"]: variant["params"] for variant in ops.variants(family)}
    return [
        {"variant": m[1], **dict(zip(params[m[1]], map(int, m[2].split(",")), strict=True))}
        for m in re.finditer(r"^DYNO_OPTIONAL\((\w+), ([\d, ]+)\)", text, re.MULTILINE)
    ]


def test_some_are_optional() -> None:
    assert all(optional(family) for family in ("matmul", "matmul_id", "up_gate", "moe_up_gate"))


@pytest.mark.skipif(
    _core.build_info()["switches"]["GGML_CUDA"] == "ON", reason="a CUDA build replaces what it does not hold"
)
@pytest.mark.parametrize("family", ["matmul", "matmul_id", "up_gate", "moe_up_gate"])
def test_no_default_is_optional(family: str) -> None:
    left_out = optional(family)
    experts = {"experts": 64, "used": 6} if family in ("matmul_id", "moe_up_gate") else {}
    taken = set()
    for machine in MACHINES:
        for m in (1, 3, 8, 16, 17, 40, 100, 256, 700, 4096):
            for n, k in ((64, 512), (768, 2048), (4096, 4096), (14336, 4096), (151936, 1024)):
                for kind in ("q4_0", "q6_k", "mxfp4", "f16"):
                    desc = {"type": kind, "layout": "gpu", "act": "f32", "m": m, "n": n, "k": k, **experts}
                    config = ops.default_config(family, desc, machine)
                    assert config not in left_out, (desc, machine)
                    taken.add(tuple(config.items()))
    assert len(taken) > 5


@pytest.mark.skipif(
    _core.build_info()["switches"]["GGML_CUDA"] == "ON", reason="a CUDA build replaces what it does not hold"
)
@pytest.mark.parametrize("family", ["matmul", "matmul_id", "up_gate", "moe_up_gate"])
def test_no_default_of_hopper_is_of_older_chips(family: str) -> None:
    """GGML_CUDA_PROFILE leaves these variants out of a build for 90a alone."""
    older = {variant for variant, families in cuda_instances.BEFORE_HOPPER.items() if family in families}
    assert "mma" in older
    experts = {"experts": 64, "used": 6} if family in ("matmul_id", "moe_up_gate") else {}
    assert older <= {variant["name"] for variant in ops.variants(family)}
    for machine, path, compute in itertools.product(
        (machine for machine in MACHINES if machine["compute_capability"] == 90),
        ("any", "matvec", "mmq", "dequantize"),
        ("f16", "bf16", "f32"),
    ):
        for m, (n, k), kind in itertools.product(
            (1, 3, 8, 16, 17, 40, 100, 256, 700, 4096),
            ((64, 512), (72, 96), (768, 2048), (4096, 4096), (151936, 1024)),
            ("q4_0", "q4_k", "q6_k", "q8_0", "mxfp4", "f16", "bf16"),
        ):
            desc = {"type": kind, "layout": "gpu", "act": "f32", "m": m, "n": n, "k": k, **experts}
            desc |= {"path": path, "compute": compute}
            config = ops.default_config(family, desc, machine)
            assert config["variant"] not in older, desc
