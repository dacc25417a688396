"""Timing of single ops: it runs every family and refuses nonsense. What it measures is no matter of tests."""

from __future__ import annotations

from typing import Any

import pytest
from dyno import _core
from dyno.errors import DynoError

from ops.cases import all_cases

HERE = [case for case in all_cases() if _core.ops.candidates(case.family, case.desc)]
GPUS = [d for d in _core.devices() if d["kind"] == "cuda"]
DEVICE = {key: value for key, value in GPUS[0].items() if key != "ordinal"} if GPUS else {}
FAMILIES = list({case.family: case.desc for case in HERE}.items())


@pytest.mark.parametrize(("family", "desc"), FAMILIES, ids=[family for family, _ in FAMILIES])
def test_every_family_can_be_timed(family: str, desc: dict[str, Any]) -> None:
    for config in (None, _core.ops.candidates(family, desc)[-1]):
        seconds = _core.ops.time(
            family, desc, config, threads=2, min_seconds=0.0, rotate_bytes=1 << 20, depth=9
        )
        assert len(seconds) >= 5
        assert all(value >= 0 for value in seconds)


@pytest.mark.gpu
@pytest.mark.skipif(not GPUS, reason=f"no GPU: {_core.no_cuda_reason()}")
@pytest.mark.parametrize("family", ["matmul", "up_gate", "matmul_id", "attention"])
def test_every_variant_can_be_timed_on_the_gpu(family: str) -> None:
    desc = next(
        c.desc for c in reversed(all_cases()) if c.family == family and c.desc.get("layout", "gpu") == "gpu"
    )
    configs = {c["variant"]: c for c in _core.ops.candidates(family, desc, DEVICE)}
    assert configs
    for config in configs.values():
        assert len(_core.ops.time(family, desc, config, min_seconds=0.0, device="cuda:0")) >= 5


@pytest.mark.parametrize("family", ["matmul_id", "moe_up_gate"])
@pytest.mark.parametrize("absent", [0.5, 1.0])
def test_products_without_some_experts_can_be_timed(family: str, absent: float) -> None:
    desc = next(case.desc for case in HERE if case.family == family)
    for config in _core.ops.candidates(family, desc):
        assert len(_core.ops.time(family, desc, config, min_seconds=0.0, absent=absent)) >= 5


@pytest.mark.parametrize(
    "family", ["attention", "rope_attention", "linear_attention", "short_conv", "kv_store"]
)
@pytest.mark.parametrize("sequences", [2, 3, 4096])
def test_tokens_of_several_sequences_can_be_timed(family: str, sequences: int) -> None:
    """If there are more sequences than tokens, each token has one."""
    desc = {**next(case.desc for case in HERE if case.family == family), "m": 5}
    for config in _core.ops.candidates(family, desc):
        seconds = _core.ops.time(family, desc, config, min_seconds=0.0, depth=33, sequences=sequences)
        assert len(seconds) >= 5


def test_several_configurations_share_their_data() -> None:
    desc = {"m": 1, "n": 8}
    good = _core.ops.candidates("norm", desc)[-1]
    times = _core.ops.time_configs("norm", desc, [good, {**good, "grain": 3}, good], min_seconds=0.0)
    assert [len(t) >= 5 for t in times] == [True, False, True]
    assert times[1] == []  # cannot be launched, and costs the others nothing


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threads": 0}, "threads is 0; expected 1 to 1024"),
        ({"min_seconds": -1.0}, "min_seconds=-1"),
        ({"min_seconds": float("nan")}, "min_seconds=nan"),
        ({"rotate_bytes": 1 << 60}, "more than half of the memory"),
        ({"depth": -1}, "depth=-1"),
        ({"sequences": 0}, "sequences=0"),
        ({"absent": 1.5}, r"absent=1\.5"),
        ({"absent": 0.5}, "matmul_id and moe_up_gate, not for norm"),
        ({"isa": "avx1024"}, "avx1024"),
        ({"config": {"variant": "rows", "grain": 3}}, "grain=3"),
    ],
)
def test_bad_options_are_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DynoError, match=message):
        _core.ops.time("norm", {"m": 1, "n": 8}, **options)
