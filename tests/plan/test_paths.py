"""Which of the three ways matrix products go, and how settings and profiles move them; planned, not run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dyno import _core
from dyno.errors import DynoError
from dyno.settings import SETTINGS

TINY = Path(__file__).resolve().parent.parent / "data" / "tiny"
HOPPER = {"kind": "cuda", "compute_capability": 90, "sm_count": 132, "shared_per_block_bytes": 232_448}
AMPERE = {"kind": "cuda", "compute_capability": 80, "sm_count": 108, "shared_per_block_bytes": 166_912}
NAMES = ("matvec_max_tokens", "matvec_id_max_tokens", "mmq_max_tokens", "mmq_id_max_tokens")
DENSE, EXPERTS = ("matmul", "up_gate"), ("matmul_id", "moe_up_gate")
KERNELS = {
    "matvec": {"ring", "stream", "walk"},
    "mmq": {"mma", "wgmma", "wgmma_split", "wgmma_wide", "wgmma_wide_split", "wgmma_sorted"},
    "dequantize": {"cublas", "half_mma", "half_staged", "float32"},
}


def plan_for(device: dict[str, Any] = HOPPER, kernels: Any = (), **session: Any) -> _core.Session:
    settings = {"cuda_graphs": False, "fusion": False, "ubatch": 4096, **session}
    return _core.Session(
        TINY / "qwen3moe-tiny.gguf",
        context={"ctx": 64},
        session=settings,
        kernels=list(kernels),
        plan_only=True,
        device=device,
    )


def products(session: _core.Session, tokens: int, families: tuple[str, ...]) -> list[dict[str, Any]]:
    rows = [op for op in session.ops(tokens) if op["family"] in families and "layout=gpu" in op["key"]]
    assert rows
    return rows


def paths(session: _core.Session, tokens: int, families: tuple[str, ...]) -> set[str]:
    rows = products(session, tokens, families)
    for op in rows:
        assert op["config"]["variant"] in KERNELS[op["path"]]
        assert f"path {op['path']}: " in op["reason"]
    return {op["path"] for op in rows}


@pytest.mark.parametrize("device", [HOPPER, AMPERE], ids=["90", "80"])
def test_thresholds_decide_by_tokens_of_the_ubatch(device: dict[str, Any]) -> None:
    session = plan_for(
        device, matvec_max_tokens=3, mmq_max_tokens=100, matvec_id_max_tokens=5, mmq_id_max_tokens=300
    )
    for tokens, dense, experts in (
        (1, "matvec", "matvec"),
        (3, "matvec", "matvec"),
        (4, "mmq", "matvec"),
        (6, "mmq", "mmq"),
        (100, "mmq", "mmq"),
        (101, "dequantize", "mmq"),
        (300, "dequantize", "mmq"),
        (301, "dequantize", "dequantize"),
        (4096, "dequantize", "dequantize"),
    ):
        assert paths(session, tokens, DENSE) == {dense}, tokens
        assert paths(session, tokens, EXPERTS) == {experts}, tokens


def test_a_path_is_explained_by_its_threshold() -> None:
    """The plan holds the explanation: it is the same for all u-batches that take the path."""
    session = plan_for(matvec_max_tokens=3, mmq_max_tokens=100)
    for tokens, expected in (
        (1, "path matvec: tokens <= matvec_max_tokens 3"),
        (3, "path matvec: tokens <= matvec_max_tokens 3"),
        (4, "path mmq: tokens <= mmq_max_tokens 100"),
        (100, "path mmq: tokens <= mmq_max_tokens 100"),
        (101, "path dequantize: tokens > mmq_max_tokens 100"),
        (4096, "path dequantize: tokens > mmq_max_tokens 100"),
    ):
        for op in products(session, tokens, DENSE):
            assert op["reason"].endswith(expected), (tokens, op["reason"])


def test_zero_means_never_and_settings_change_between_calls() -> None:
    session = plan_for(matvec_max_tokens=0, mmq_max_tokens=0, matvec_id_max_tokens=0, mmq_id_max_tokens=0)
    assert paths(session, 1, DENSE + EXPERTS) == {"dequantize"}
    before = session.plan["scratch_bytes"]
    session.set({"mmq_max_tokens": 4096, "mmq_id_max_tokens": 4096})
    assert paths(session, 1, DENSE + EXPERTS) == {"mmq"}
    assert session.plan["scratch_bytes"] < before
    assert session.plan["settings"]["mmq_max_tokens"] == 4096


@pytest.mark.parametrize("compute", ["f16", "bf16", "f32"])
def test_compute_type(compute: str) -> None:
    session = plan_for(mmq_max_tokens=0, mmq_id_max_tokens=0, compute_type=compute)
    assert session.plan["settings"]["compute_type"] == compute
    for op in products(session, 512, EXPERTS):
        assert (op["config"]["variant"] == "float32") == (compute == "f32")


def test_the_table_of_settings_has_the_engines_defaults() -> None:
    settings = plan_for().plan["settings"]
    for name in (*NAMES, "compute_type"):
        assert SETTINGS[name].default_value() == settings[name]
    for name in NAMES:
        maximum = SETTINGS[name].maximum
        assert plan_for(**{name: maximum}).plan["settings"][name] == maximum


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("mmq_max_tokens", -1, "mmq_max_tokens is -1"),
        ("matvec_id_max_tokens", 5000, "matvec_id_max_tokens is 5000"),
        ("compute_type", "f8", "compute_type is 'f8'"),
    ],
)
def test_impossible_settings(name: str, value: Any, message: str) -> None:
    with pytest.raises(DynoError, match=message):
        plan_for(**{name: value})


def test_a_kernel_entry_never_chooses_the_path() -> None:
    key = products(plan_for(), 512, ("matmul",))[0]["key"]
    entry = (key, "m257-512", {"variant": "wgmma", "tokens": 64, "warps": 8}, "test")
    session = plan_for(kernels=[entry], mmq_max_tokens=512)
    assert session.kernel_report()[0]["status"] == "applied"
    chosen = next(op for op in products(session, 512, ("matmul",)) if op["key"] == key)
    assert chosen["config"] == entry[2]
    assert chosen["reason"].startswith("profile: test")
    session.set({"mmq_max_tokens": 128})
    report = session.kernel_report()[0]
    assert report["status"] == "rejected"
    assert "path dequantize" in report["reason"]
    chosen = next(op for op in products(session, 512, ("matmul",)) if op["key"] == key)
    assert chosen["path"] == "dequantize"
    assert chosen["reason"].startswith("fallback: ")
    # A border inside the bucket: the entry holds on its own side of it.
    session.set({"mmq_max_tokens": 300})
    assert session.kernel_report()[0]["status"] == "applied"
    by_tokens = {
        tokens: next(op for op in products(session, tokens, ("matmul",)) if op["key"] == key)
        for tokens in (300, 301)
    }
    assert by_tokens[300]["config"] == entry[2]
    assert by_tokens[301]["config"]["variant"] in KERNELS["dequantize"]


def test_exact_numerics_have_no_paths() -> None:
    session = _core.Session(
        TINY / "qwen3moe-tiny.gguf",
        load={"numerics": "exact"},
        session={"cuda_graphs": False},
        plan_only=True,
        device=HOPPER,
    )
    assert {op["path"] for op in session.ops(64)} == {"any"}


def test_fused_products_keep_to_the_thresholds() -> None:
    """They are matvec's: where the settings leave fewer tokens to that path, fewer take the fused list."""
    session = plan_for(fusion=True)
    assert {op["list"] for op in session.ops(8)} == {"fused"}
    session.set({"matvec_max_tokens": 5})
    assert {op["list"] for op in session.ops(5)} == {"fused"}
    assert {op["list"] for op in session.ops(6)} == {"batched"}
    assert paths(session, 6, DENSE) == {"mmq"}
    session.set({"matvec_id_max_tokens": 0})
    assert {op["list"] for op in session.ops(1)} == {"batched", "draw"}


@pytest.mark.parametrize(
    ("dtype", "n", "tokens", "device", "variant"),
    [
        ("q8_0", 201_088, 2, HOPPER, "wgmma_ring"),
        ("q8_0", 201_088, 4, HOPPER, "wgmma_ring"),
        ("q8_0", 8192, 2, HOPPER, "stream"),  # 17 MiB
        ("q8_0", 8192, 3, HOPPER, "wgmma_ring"),
        ("q6_k", 151_936, 8, HOPPER, "wgmma_codes"),
        ("q8_0", 201_088, 8, AMPERE, "stream"),
        ("f16", 201_088, 8, HOPPER, "stream"),
        ("q8_0", 2048, 8, HOPPER, "stream"),
        ("q8_0", 201_088, 32, HOPPER, "stream"),
    ],
)
def test_large_weights_take_the_ring_from_2_tokens_on(
    dtype: str, n: int, tokens: int, device: dict[str, Any], variant: str
) -> None:
    """On path matvec: `stream` would multiply for longer than memory delivers so many weights."""
    family, desc = _core.ops.parse_key(f"matmul {dtype} n={n} k=2048 layout=gpu", tokens)
    desc["path"] = "matvec"
    config = _core.ops.default_config(family, desc, device)
    assert config["variant"] == variant
    assert _core.ops.supports(family, desc, config, device)[0]
    rings = {c["variant"] for c in _core.ops.candidates(family, desc, device, "legal")} - {"stream", "ring"}
    assert bool(rings) == (dtype != "f16" and tokens > 1 and device is HOPPER)
    assert rings <= {"wgmma_ring", "wgmma_codes"}


@pytest.mark.parametrize("tokens", [2, 3, 4])
def test_two_to_four_tokens_have_defaults_of_their_own(tokens: int) -> None:
    products = [op for op in plan_for(fusion=True).ops(tokens) if "path" in op["reason"]]
    assert products
    for op in products:
        family, desc = _core.ops.parse_key(op["key"], tokens)
        assert op["config"] == _core.ops.default_config(family, desc | {"path": op["path"]}, HOPPER)


def test_an_entry_for_2_to_4_tokens_covers_all_of_them() -> None:
    session = plan_for(fusion=True)
    product = next(op for op in session.ops(2) if op["family"] == "moe_down_sum")
    entry = {"variant": "stream", "warps": 16, "stripes": 1}
    session.set_kernels([(product["key"], "m2-4", entry, "test")])
    for tokens in (2, 3, 4):
        assert [op["config"] for op in session.ops(tokens) if op["key"] == product["key"]] == [entry]
    assert all(op["config"] != entry for op in session.ops(5) if op["key"] == product["key"])
