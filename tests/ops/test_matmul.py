"""Families matmul and copy, and the weight layouts, against float64 on exactly dequantised weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dyno import _core
from dyno.errors import DynoError, PlanError, UnsupportedError

from ops.harness import Case, expect_close, isas, launch, nmse
from ops.matmul_data import (
    CODED,
    FLOATS,
    QUANTISED,
    VALUES,
    FencedArray,
    activations,
    block,
    in_layout,
    layouts,
    prepare,
    quantise,
    split_q8,
    weights,
)

ops = _core.ops
ISAS = isas()
# Sums of at most 1100 float32 products in 16 or more partial sums.
ROUNDING = 2e-12


def device(isa: str) -> dict[str, Any]:
    return {"kind": "cpu", "isa": isa, "cores": 2, "l1d_bytes": 48 << 10, "l2_bytes": 2 << 20}


def shapes(type_name: str) -> list[tuple[int, int, int]]:
    """(m, n, k): odd rows and tokens, k in blocks; one k longer than a chunk of 1024."""
    step = block(type_name)
    if step == 1:
        ks = [33, 64, 7, 320, 1056]
    elif step == 32:
        ks = [32, 96, 544, 256, 1056]
    elif step < 256:
        ks = [step, 3 * step, 640, 256, 1152]
    else:
        ks = [256, 768, 256, 512, 1280]
    return list(zip([1, 3, 8, 23, 70], [45, 16, 1, 100, 17], ks, strict=True))


def run_matmul(
    desc: dict[str, Any], config: dict[str, Any] | None, isa: str, threads: int, **args: Any
) -> np.ndarray:
    y = args.pop("y", None)
    rows = (desc["m"], desc.get("batch", 1) * desc["n"])
    initial = np.full(rows, np.nan, np.float32) if y is None else y
    return launch(Case("matmul", desc, lambda _: ({}, {}, lambda __: None)), config, args, {"y": initial},
                  threads=threads, isa=isa)["y"]  # fmt: skip


@pytest.mark.parametrize("type_name", QUANTISED + FLOATS + CODED + VALUES)
def test_every_candidate_gives_the_same_right_answer(type_name: str) -> None:
    rng = np.random.default_rng(len(type_name))
    seen: set[str] = set()
    wanted: set[str] = set()
    for index, (m, n, k) in enumerate(shapes(type_name)):
        plain, exact = weights(rng, type_name, n, k)
        for act in activations(type_name):
            x, values, before = prepare(rng, act, m, k)
            want = values @ exact.T
            for layout in layouts(type_name):
                w = in_layout(type_name, plain, layout, n, k)
                desc = {"type": type_name, "layout": layout, "act": act, "m": m, "n": n, "k": k}
                for isa in ISAS:
                    configs = ops.candidates("matmul", desc, device(isa))
                    assert configs
                    assert ops.default_config("matmul", desc, device(isa)) in configs
                    first: np.ndarray | None = None
                    for number, config in enumerate(configs):
                        wanted.add(f"{isa} {config}")
                        # Small shapes take all of them, large ones every third.
                        if m > 8 and number % 3 != index % 3:
                            continue
                        seen.add(f"{isa} {config}")
                        got = run_matmul(desc, config, isa, 1 + number % 2, x=x, w=w)
                        if first is None:
                            expect_close(got, want, ROUNDING)
                            first = got
                        np.testing.assert_array_equal(got, first, err_msg=f"{desc} {config} {isa}")
            if act == "q8" and want.size > 16:
                assert nmse(want, before @ exact.T) < 2e-4, "8-bit activations lose little"
    assert seen == wanted, "every candidate was run"


@pytest.mark.parametrize("type_name", QUANTISED + CODED)
@pytest.mark.parametrize("rows", [1, 16, 37])
def test_layouts_keep_every_bit(type_name: str, rows: int) -> None:
    k = 3 * block(type_name) if block(type_name) > 32 else 352
    plain, exact = weights(np.random.default_rng(rows), type_name, rows, k)
    packed = ops.repack(type_name, plain, rows, k)
    assert packed.nbytes == ops.layout_bytes(type_name, "x16", rows, k)
    for isa in ISAS:
        for layout, w in (("plain", plain), ("x16", packed)):
            got = ops.unpack(type_name, layout, w, rows, k, isa)
            np.testing.assert_array_equal(got, exact.astype(np.float32))


@pytest.mark.parametrize("type_name", QUANTISED + FLOATS + CODED + VALUES)
def test_reads_nothing_past_the_weights(type_name: str) -> None:
    n, k = 19, 2 * (max(block(type_name), 160) if block(type_name) <= 32 else 256)
    k += 7 if type_name in FLOATS else 0
    rng = np.random.default_rng(1)
    plain, exact = weights(rng, type_name, n, k)
    for layout in layouts(type_name):
        w = FencedArray(in_layout(type_name, plain, layout, n, k))
        for act in activations(type_name):
            for m in (1, 9):
                x, values, _ = prepare(rng, act, m, k)
                fenced = FencedArray(x)
                desc = {"type": type_name, "layout": layout, "act": act, "m": m, "n": n, "k": k}
                for isa in ISAS:
                    for config in ops.candidates("matmul", desc, device(isa))[::4]:
                        y = FencedArray(np.zeros((m, n), np.float32))
                        args = {"x": fenced.array, "w": w.array, "y": y.array}
                        ops.run("matmul", desc, config, args, isa=isa)
                        expect_close(y.array, values @ exact.T, ROUNDING)


@pytest.mark.parametrize("act", ["q8", "f32"])
@pytest.mark.parametrize("m", [1, 21])
def test_bias_residual_and_scale(act: str, m: int) -> None:
    n, k = 50, 128
    rng = np.random.default_rng(m)
    plain, exact = weights(rng, "q4_1", n, k)
    x, values, _ = prepare(rng, act, m, k)
    bias = rng.standard_normal(n).astype(np.float32)
    residual = rng.standard_normal((m, n)).astype(np.float32)
    desc = {"type": "q4_1", "act": act, "m": m, "n": n, "k": k}
    product = values @ exact.T
    for isa in ISAS:
        got = run_matmul(desc, None, isa, 2, x=x, w=plain, bias=bias)
        expect_close(got, product + bias, ROUNDING)
        got = run_matmul(desc, None, isa, 2, x=x, w=plain, residual=residual, scale=0.25)
        expect_close(got, residual + 0.25 * product, ROUNDING)
        got = run_matmul(desc, None, isa, 2, x=x, w=plain, residual=residual, bias=bias, scale=-3.0)
        expect_close(got, residual - 3.0 * (product + bias), ROUNDING)
        in_place = residual.copy()
        ops.run("matmul", desc, None, {"x": x, "w": plain, "residual": in_place, "y": in_place}, isa=isa)
        expect_close(in_place, residual + product, ROUNDING)


@pytest.mark.parametrize("type_name", ["f16", "q8_0", "q6_k"])
def test_batches_of_matrices_with_strides(type_name: str) -> None:
    batch, m, n, k = 3, 5, 20, 256
    rng = np.random.default_rng(3)
    for act in activations(type_name):
        x, values, _ = prepare(rng, act, m * batch, k)
        pairs = [weights(rng, type_name, n, k) for _ in range(batch)]
        want = np.stack([values.reshape(m, batch, k)[:, b] @ pairs[b][1].T for b in range(batch)], axis=1)
        desc = {"type": type_name, "act": act, "m": m, "n": n, "k": k, "batch": batch}
        w = np.concatenate([raw for raw, _ in pairs])
        for isa in ISAS:
            for config in ops.candidates("matmul", desc, device(isa)):
                got = run_matmul(desc, config, isa, 2, x=x, w=w)
                expect_close(got.reshape(m, batch, n), want, ROUNDING)


@pytest.mark.parametrize("isa", ISAS)
def test_q8_rows_hold_what_they_say(isa: str) -> None:
    rng = np.random.default_rng(4)
    m, k = 6, 416
    x = (rng.standard_normal((m, k)) * 10.0 ** rng.integers(-6, 6, (m, k))).astype(np.float32)
    x[1, 32:64] = 0
    x[2, :32] = 1e-38
    x[3, 5] = 3e38
    out = np.zeros((m, ops.act_q8_row_bytes(k)), np.uint8)
    first: np.ndarray | None = None
    desc = {"act": "q8", "m": m, "k": k}
    for config in ops.candidates("copy", desc):
        for threads in (1, 2):
            ops.run("copy", desc, config, {"x": x, "out": out}, threads=threads, isa=isa)
            first = out.copy() if first is None else first
            np.testing.assert_array_equal(out, first)
    q, d, sums = split_q8(out, k)
    blocks = x.reshape(m, k // 32, 32).astype(np.float64)
    largest = np.abs(blocks).max(axis=2)
    np.testing.assert_allclose(d, np.where(largest < 1e-36, 0, largest / 127), rtol=1e-6)
    assert np.abs(q).max() == 127
    error = np.abs(q.reshape(blocks.shape) * d[:, :, None] - blocks)
    assert (error <= d[:, :, None] * 0.50001 + 1e-36).all()
    np.testing.assert_array_equal(sums, q.reshape(m, k // 16, 16).sum(axis=2))


def test_copy_moves_f32_rows_between_strides() -> None:
    x = np.arange(24, dtype=np.float32)
    out = np.zeros(3 * 40, np.uint8)
    args = {"x": x, "x_stride": 8, "out": out, "out_stride_bytes": 40}
    ops.run("copy", {"act": "f32", "m": 3, "k": 5}, None, args)
    np.testing.assert_array_equal(out.view(np.float32).reshape(3, 10)[:, :5], x.reshape(3, 8)[:, :5])
    assert (out.view(np.float32).reshape(3, 10)[:, 5:] == 0).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_stays_in_its_row(bad: float) -> None:
    rng = np.random.default_rng(5)
    n, k = 24, 64
    x = rng.standard_normal((3, k)).astype(np.float32)
    x[1, 40] = bad
    for type_name, act in (("q4_0", "q8"), ("q4_k", "q8"), ("f16", "f32"), ("q4_0", "f32")):
        width = 256 if type_name == "q4_k" else k
        rows = np.concatenate([x] * (width // k), axis=1)
        plain, _ = weights(rng, type_name, n, width)
        given = quantise(rows)[0] if act == "q8" else rows
        desc = {"type": type_name, "act": act, "m": 3, "n": n, "k": width}
        for isa in ISAS:
            got = run_matmul(desc, None, isa, 1, x=given, w=plain)
            assert np.isfinite(got[[0, 2]]).all()
            assert not np.isfinite(got[1]).any()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"act": "q8", "type": "f16"}, "f16 weights need f32 activations"),
        ({"k": 48}, "k=48 is not a multiple of 32"),
        ({"type": "q4_k", "k": 320}, "k=320 is not a multiple of 256"),
        ({"type": "f16", "act": "f32", "layout": "x16"}, "f16 has no layout x16"),
        ({"type": "q8_k"}, "no kernels multiply with q8_k"),
        ({"m": 0}, "m"),
        ({"act": "f32"}, "f32"),
    ],
)
def test_refusals_name_the_reason(change: dict[str, Any], reason: str) -> None:
    desc = {"type": "q4_0", "act": "q8", "m": 1, "n": 16, "k": 64, **change}
    config = ops.candidates("matmul", {"type": "q4_0", "act": "q8", "m": 1, "n": 16, "k": 64})[0]
    ok, why = ops.supports("matmul", desc, config)
    assert not ok
    assert reason in why


def test_wrong_configurations_and_sizes_are_refused() -> None:
    desc = {"type": "q4_0", "act": "q8", "m": 33, "n": 16, "k": 64}
    matvec = {"variant": "matvec", "rows": 64, "prefetch": 4096, "split": 1}
    assert ops.supports("matmul", {**desc, "m": 32}, matvec) == (True, "")
    assert ops.supports("matmul", desc, matvec) == (False, "m=33: matvec takes at most 32 tokens")
    narrow = device("avx2")
    wide = {"variant": "gemm", "rows": 64, "tokens": 3, "kc": 512, "block": 192, "split": 1}
    ok, why = ops.supports("matmul", desc, wide, narrow)
    assert not ok
    assert "avx2 kernels have at most 4 accumulators" in why
    with pytest.raises(DynoError):
        ops.run("matmul", desc, wide | {"kc": 13}, {})
    with pytest.raises(UnsupportedError, match="multiples of 256"):
        ops.layout_bytes("q6_k", "x16", 4, 100)
    with pytest.raises(UnsupportedError, match="no layout"):
        ops.layout_bytes("bf16", "x16", 16, 64)
    with pytest.raises(PlanError, match="are 36 bytes, not 35"):
        ops.repack("q4_0", np.zeros(35, np.uint8), 2, 32)


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512_vnni"])
@pytest.mark.parametrize("m", [1, 2, 8, 9, 64, 4096])
def test_defaults_are_candidates_on_any_machine(isa: str, m: int) -> None:
    for type_name in [*QUANTISED, *FLOATS]:
        for layout in layouts(type_name):
            for act in activations(type_name):
                desc = {"type": type_name, "layout": layout, "act": act, "m": m, "n": 64, "k": 256}
                machine = device(isa)
                found = ops.candidates("matmul", desc, machine)
                assert ops.default_config("matmul", desc, machine) in found
                assert len(found) >= 3, "the tuner has a choice"
                assert found == ops.candidates("matmul", desc, machine)


@pytest.mark.parametrize(
    ("isa", "layout", "type_name", "most"),
    [
        ("avx512_vnni", "x16", "q4_0", 24),
        ("avx512_vnni", "x16", "q8_0", 24),
        ("avx512_vnni", "x16", "q4_k", 16),
        ("avx512_vnni", "x16", "iq4_xs", 16),
        ("avx512_vnni", "x16", "q6_k", 8),
        ("avx512_vnni", "plain", "q4_0", 4),
        ("avx2", "x16", "q8_0", 24),
        ("avx2", "x16", "q4_k", 8),
        ("avx2", "x16", "q6_k", 4),
        ("portable", "x16", "q4_0", 2),
    ],
)
@pytest.mark.parametrize("family", ["matmul", "up_gate"])
def test_few_tokens_pass_over_the_weights_by_default(
    family: str, isa: str, layout: str, type_name: str, most: int
) -> None:
    desc = {"type": type_name, "layout": layout, "act": "q8", "n": 64, "k": 256}
    desc |= {"activation": "silu"} if family == "up_gate" else {}
    taken = [ops.default_config(family, {**desc, "m": m}, device(isa))["variant"] for m in range(1, 65)]
    assert taken[:most] == ["matvec"] * most
    assert "matvec" not in taken[most:]
