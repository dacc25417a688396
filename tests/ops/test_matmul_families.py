"""Families up_gate, matmul_id and moe_up_gate against float64 on exactly dequantised weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dyno import _core
from dyno.errors import PlanError

from ops.harness import Case, expect_close, isas, launch
from ops.matmul_data import (
    CODED,
    FLOATS,
    QUANTISED,
    VALUES,
    activations,
    block,
    gated,
    in_layout,
    layouts,
    prepare,
    sigmoid,
    weights,
)

ops = _core.ops
ISAS = isas()
ROUNDING = 2e-11
ACTIVATIONS = ["silu", "gelu_tanh", "swiglu_oai", "relu"]
EXPERTS = 5


def device(isa: str) -> dict[str, Any]:
    return {"kind": "cpu", "isa": isa, "cores": 2, "l1d_bytes": 48 << 10, "l2_bytes": 2 << 20}


def sweep(
    family: str, desc: dict[str, Any], args: dict[str, Any], outputs: dict[str, Any], want: Any
) -> None:
    """Every candidate on every instruction set: right, and the same on one thread and on two."""
    case = Case(family, desc, lambda _: ({}, {}, lambda __: None))
    for isa in ISAS:
        configs = ops.candidates(family, desc, device(isa))
        assert ops.default_config(family, desc, device(isa)) in configs
        first: np.ndarray | None = None
        for number, config in enumerate(configs):
            got = launch(case, config, args, outputs, threads=1 + number % 2, isa=isa)["y"]
            if first is None:
                expect_close(got, want, ROUNDING)
                first = got
            np.testing.assert_array_equal(got, first, err_msg=f"{desc} {config} {isa}")


def k_of(type_name: str) -> int:
    return {256: 512, 128: 384, 64: 192, 32: 160, 1: 75}[block(type_name)]


@pytest.mark.parametrize("type_name", QUANTISED + CODED + VALUES + FLOATS)
def test_up_gate(type_name: str) -> None:
    rng = np.random.default_rng(11)
    k = k_of(type_name)
    for index, (m, n) in enumerate([(1, 40), (7, 17), (34, 33)]):
        gate, gate_values = weights(rng, type_name, n, k)
        up, up_values = weights(rng, type_name, n, k)
        bias_gate, bias_up = rng.standard_normal((2, n)).astype(np.float32)
        activation = ACTIVATIONS[(index + len(type_name)) % len(ACTIVATIONS)]
        for act in activations(type_name):
            x, values, _ = prepare(rng, act, m, k)
            want = gated(activation, values @ gate_values.T + bias_gate, values @ up_values.T + bias_up)
            for layout in layouts(type_name):
                desc = {"type": type_name, "layout": layout, "act": act, "activation": activation}
                args = {
                    "x": x, "bias_gate": bias_gate, "bias_up": bias_up,
                    "w_gate": in_layout(type_name, gate, layout, n, k),
                    "w_up": in_layout(type_name, up, layout, n, k),
                }  # fmt: skip
                outputs = {"y": np.full((m, n), np.nan, np.float32)}
                sweep("up_gate", {**desc, "m": m, "n": n, "k": k}, args, outputs, want)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_accurate_over_their_range(activation: str, isa: str) -> None:
    # Identity matrices hand every value through unchanged.
    k = 64
    eye = np.eye(k, dtype=np.float32)
    x = np.linspace(-30, 30, 101 * k).astype(np.float32).reshape(101, k)
    x[0, :6] = [-100, -88.5, 88.5, 100, 0, 1e-30]
    y = np.empty_like(x)
    desc = {"type": "f32", "act": "f32", "activation": activation, "m": 101, "n": k, "k": k}
    w = eye.view(np.uint8).reshape(-1)
    ops.run("up_gate", desc, None, {"x": x, "w_gate": w, "w_up": w, "y": y}, isa=isa)
    value = x.astype(np.float64)
    if activation == "gelu_tanh":  # the same function without the cancellation of 1 + tanh
        want = value * sigmoid(2 * np.sqrt(2 / np.pi) * (value + 0.044715 * value**3)) * value
    else:
        want = gated(activation, value, value)
    # Far out the value vanishes and the rounding of z itself, amplified, is what remains.
    np.testing.assert_allclose(y, want, rtol=2e-6, atol=1e-11)
    near = np.abs(x) < 2
    np.testing.assert_allclose(y[near], want[near], rtol=1e-6, atol=1e-30)


def routes(rng: np.random.Generator, m: int, used: int, kind: str) -> np.ndarray:
    """Chosen experts [m, used]: spread, all the same, or leaving experts out."""
    if kind == "one":
        return np.full((m, used), 3, np.int32)
    pool = EXPERTS if kind == "spread" else 3
    return np.stack([rng.permutation(pool)[:used] for _ in range(m)]).astype(np.int32)


@pytest.mark.parametrize("type_name", QUANTISED + CODED + VALUES + FLOATS)
def test_products_by_expert(type_name: str) -> None:
    rng = np.random.default_rng(12)
    k, used = k_of(type_name), 2
    for m, n, kind, per_slot in [(1, 40, "spread", False), (6, 17, "few", True), (45, 33, "one", False)]:
        pairs = [weights(rng, type_name, n, k) for _ in range(EXPERTS)]
        others = [weights(rng, type_name, n, k) for _ in range(EXPERTS)]
        bias, bias_up = rng.standard_normal((2, EXPERTS, n)).astype(np.float32)
        ids = routes(rng, m, used, kind)
        workspace = np.zeros(m * used + 2 * EXPERTS + 2, np.int32)
        for act in activations(type_name):
            x, values, _ = prepare(rng, act, m * used if per_slot else m, k)
            token_rows = values.reshape(m, used, k) if per_slot else np.repeat(values[:, None], used, axis=1)
            matrices = np.stack([values for _, values in pairs])[ids]
            want = np.einsum("tsk,tsnk->tsn", token_rows, matrices) + bias[ids]
            for layout in layouts(type_name):
                desc = {"type": type_name, "layout": layout, "act": act, "m": m, "n": n, "k": k,
                        "experts": EXPERTS, "used": used}  # fmt: skip
                w = np.concatenate([in_layout(type_name, raw, layout, n, k) for raw, _ in pairs])
                outputs = {"y": np.full((m, used, n), np.nan, np.float32), "workspace": workspace}
                args = {"x": x, "w": w, "bias": bias, "ids": ids}
                sweep("matmul_id", {**desc, "x_per_slot": per_slot}, args, outputs, want)
                if per_slot:
                    continue
                gate_args = {
                    "x": x, "ids": ids, "w_gate": w, "bias_gate": bias, "bias_up": bias_up,
                    "w_up": np.concatenate([in_layout(type_name, raw, layout, n, k) for raw, _ in others]),
                }  # fmt: skip
                matrices = np.stack([values for _, values in others])[ids]
                both = gated("silu", want, np.einsum("tsk,tsnk->tsn", token_rows, matrices) + bias_up[ids])
                sweep("moe_up_gate", {**desc, "activation": "silu"}, gate_args, outputs, both)


@pytest.mark.parametrize("family", ["matmul_id", "moe_up_gate"])
@pytest.mark.parametrize("bad", [-2, EXPERTS])  # -1 is a row that another device computes
def test_an_expert_that_does_not_exist_is_an_error(family: str, bad: int) -> None:
    n, k, used = 16, 32, 2
    rng = np.random.default_rng(13)
    w = np.concatenate([weights(rng, "q8_0", n, k)[0] for _ in range(EXPERTS)])
    for m in (1, 9):
        x, _, _ = prepare(rng, "q8", m, k)
        ids = np.zeros((m, used), np.int32)
        ids[m - 1, 1] = bad
        args: dict[str, Any] = {"x": x, "ids": ids, "y": np.zeros((m, used, n), np.float32)}
        args["workspace"] = np.zeros(m * used + 2 * EXPERTS + 2, np.int32)
        args |= {"w": w} if family == "matmul_id" else {"w_gate": w, "w_up": w}
        desc = {"type": "q8_0", "act": "q8", "m": m, "n": n, "k": k, "experts": EXPERTS, "used": used}
        for config in ops.candidates(family, desc):
            with pytest.raises(PlanError, match=f"token {m - 1} is routed to expert {bad} of {EXPERTS}"):
                ops.run(family, desc, config, args)
