"""Cases of the families that multiply with weights, and of copy.

Weights are random blocks of every type with ordinary scales; what they mean is left to the public `gguf`
package. Activations in q8 are quantised here, from the description in csrc/ops/copy/act_q8.h.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
from dyno import _core

from ops import reference
from ops.cases import EXACT, F32, cases, normal, to_cache
from ops.harness import Case, expect_close

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

FLOATS = ("f32", "f16", "bf16")
HALVES = 1e-6  # NMSE of sums that end as halves
# Bytes of a block where its f16 scales lie; mxfp4 has an exponent byte instead.
SCALES: dict[str, tuple[int, ...]] = {
    "q4_0": (0,),
    "q4_1": (0, 2),
    "q5_0": (0,),
    "q5_1": (0, 2),
    "q8_0": (0,),
    "q2_k": (80, 82),
    "q3_k": (108,),
    "q4_k": (0, 2),
    "q5_k": (0, 2),
    "q6_k": (208,),
    "iq4_nl": (0,),
    "iq4_xs": (0,),
    "mxfp4": (),
}


class Weights:
    """A stack of random matrices [count, n, k] of one type: bytes in a layout, and values in float64."""

    def __init__(self, rng: np.random.Generator, dtype: str, layout: str, count: int, n: int, k: int) -> None:
        qtype = gguf.GGMLQuantizationType[dtype.upper()]
        if dtype in FLOATS:
            plain = gguf.quants.quantize(normal(rng, count * n, k), qtype).view(np.uint8)
        else:
            elements, size = gguf.GGML_QUANT_SIZES[qtype]
            blocks = rng.integers(0, 256, (count * n * (k // elements), size)).astype(np.uint8)
            for at in SCALES[dtype]:
                scale = (rng.uniform(0.01, 0.1, len(blocks)) * rng.choice([-1, 1], len(blocks))).astype(
                    np.float16
                )
                blocks[:, at : at + 2] = scale.reshape(-1, 1).view(np.uint8)
            if dtype == "mxfp4":
                blocks[:, 0] = rng.integers(120, 126, len(blocks))
            plain = blocks.reshape(count * n, -1)
        wanted = plain.view(F32) if dtype == "f32" else plain
        values = gguf.quants.dequantize(wanted, qtype)
        self.values = values.reshape(count, n, k).astype(np.float64)
        matrices = np.ascontiguousarray(plain).reshape(count, -1)
        if layout != "plain":
            repacked = [_core.ops.repack(dtype, matrix, n, k, layout=layout) for matrix in matrices]
            matrices = np.stack(repacked)
        self.bytes = matrices.reshape(-1)


def activations(
    rng: np.random.Generator, act: str, rows: int, k: int
) -> tuple[NDArray[Any], NDArray[np.float64]]:
    """Rows as matmul takes them, and the values that they mean [rows, k]."""
    x = normal(rng, rows, k)
    if act == "f32":
        return x, x.astype(np.float64)
    blocks = x.reshape(rows, k // 32, 32)
    d = (np.abs(blocks).max(axis=-1) / F32(127)).astype(F32)
    q = np.rint(blocks / d[..., None]).astype(np.int8)
    sums = q.reshape(rows, k // 16, 16).sum(axis=-1).astype(np.int16)
    packed = np.zeros((rows, _core.ops.act_q8_row_bytes(k)), np.uint8)
    packed[:, :k] = q.reshape(rows, k).view(np.uint8)
    packed[:, k : k + k // 8] = d.view(np.uint8)
    packed[:, k + k // 8 : k + k // 4] = sums.view(np.uint8)
    return packed, (q * d[..., None].astype(np.float64)).reshape(rows, k)


def kinds() -> Iterator[tuple[str, str, str]]:
    """Every (type, layout, act) that has kernels."""
    for dtype in FLOATS:
        yield dtype, "plain", "f32"
    for dtype in SCALES:
        yield dtype, "plain", "q8"
        yield dtype, "x16", "q8"
    for dtype in ("q4_0", "q6_k"):
        yield dtype, "plain", "f32"
        yield dtype, "x16", "f32"


def normed(
    rng: np.random.Generator, x: NDArray[np.float64], *, weight: bool = True
) -> tuple[dict[str, Any], NDArray[np.float64]]:
    """Arguments of a norm inside of a product, and the rows that the product then sees."""
    args: dict[str, Any] = {"norm_eps": 1e-5}
    if weight:
        args["norm_weight"] = normal(rng, x.shape[-1])
    wide = args["norm_weight"].astype(np.float64) if weight else None
    return args, reference.rms_norm(x, wide, None, 1e-5)


@cases("matmul")
def matmul_cases() -> Iterator[Case]:
    def make(
        kind: tuple[str, str, str],
        m: int,
        n: int,
        k: int,
        *,
        batch: int = 1,
        gap: int = 0,
        extras: bool = False,
        norm: bool = False,
    ) -> Case:
        dtype, layout, act = kind

        def build(rng: np.random.Generator) -> Any:
            w = Weights(rng, dtype, layout, batch, n, k)
            x, x_values = activations(rng, act, m * batch, k)
            args: dict[str, Any] = {"x": x, "w": w.bytes, "y_stride": n * batch + gap}
            if norm:
                inside, x_values = normed(rng, x_values)
                args |= inside
            want = np.einsum("mbk,bnk->mbn", x_values.reshape(m, batch, k), w.values)
            if extras:
                args |= {"bias": normal(rng, n), "residual": normal(rng, m, n * batch + gap), "scale": 0.5}
                residual = args["residual"][:, : n * batch].reshape(m, batch, n)
                want = residual + 0.5 * (want + args["bias"].astype(np.float64))

            def check(out: Any) -> None:
                expect_close(out["y"][:, : n * batch], want.reshape(m, n * batch), EXACT)
                assert (out["y"][:, n * batch :] == 77).all(), "the gap between rows was written"

            return args, {"y": np.full((m, n * batch + gap), 77, F32)}, check

        desc = {"type": dtype, "layout": layout, "act": act, "m": m, "n": n, "k": k, "batch": batch}
        desc["norm"] = norm
        return Case("matmul", desc, build, f"gap={gap}-extras={extras}")

    for kind in kinds():
        yield make(kind, 1, 21, 256)
        yield make(kind, 7, 40, 512, gap=3, extras=True)
    yield make(("f32", "plain", "f32"), 1, 1, 1)
    yield make(("f16", "plain", "f32"), 5, 3, 37, batch=3)
    yield make(("q8_0", "plain", "q8"), 4, 33, 96, batch=2, extras=True)
    yield make(("q4_0", "x16", "q8"), 130, 50, 1056)
    for dtype in (*FLOATS[1:], *SCALES):
        yield make((dtype, "gpu", "f32"), 1, 37, 768, extras=True, norm=True)
        yield make((dtype, "gpu", "f32"), 3, 37, 768, gap=5)
    for m in (1, 8, 11):
        yield make(("q4_0", "gpu", "f32"), m, 50, 6176, norm=True)
        yield make(("f16", "gpu", "f32"), m, 16, 3104)


@cases("matmul_id")
def matmul_id_cases() -> Iterator[Case]:
    def make(
        kind: tuple[str, str, str], m: int, used: int, *, per_slot: bool, bias: bool, one: bool = False
    ) -> Case:
        dtype, layout, act = kind
        n, k, experts = 35, 256, 6

        def build(rng: np.random.Generator) -> Any:
            w = Weights(rng, dtype, layout, experts, n, k)
            x, x_values = activations(rng, act, m * used if per_slot else m, k)
            # Some experts stay without a token; with `one` all but one.
            ids = np.full((m, used), 4) if one else np.argsort(rng.random((m, experts - 1)), axis=1)[:, :used]
            rows = x_values.reshape(m, used, k) if per_slot else np.repeat(x_values[:, None], used, axis=1)
            want = np.einsum("muk,munk->mun", rows, w.values[ids])
            args: dict[str, Any] = {"x": x, "w": w.bytes, "ids": ids.astype(np.int32)}
            if bias:
                args["bias"] = normal(rng, experts, n)
                want += args["bias"].astype(np.float64)[ids]

            def check(out: Any) -> None:
                expect_close(out["y"], want, EXACT)

            outputs = {
                "y": np.empty((m, used, n), F32),
                "workspace": np.zeros(m * used + 2 * experts + 2, np.int32),
            }
            return args, outputs, check

        desc = {"type": dtype, "layout": layout, "act": act, "m": m, "n": n, "k": k, "experts": experts}
        desc |= {"used": used, "x_per_slot": per_slot}
        return Case("matmul_id", desc, build, f"bias={bias}-one={one}")

    for kind in kinds():
        yield make(kind, 5, 3, per_slot=False, bias=False)
    for kind in (("f16", "plain", "f32"), ("mxfp4", "x16", "q8"), ("q5_k", "plain", "q8")):
        yield make(kind, 1, 1, per_slot=False, bias=True)
        yield make(kind, 33, 2, per_slot=True, bias=True)
        yield make(kind, 20, 1, per_slot=False, bias=False, one=True)


@cases("up_gate")
def up_gate_cases() -> Iterator[Case]:
    def make(
        kind: tuple[str, str, str], m: int, n: int, activation: str, *, bias: bool = False, norm: bool = False
    ) -> Case:
        dtype, layout, act = kind
        k = 256

        def build(rng: np.random.Generator) -> Any:
            gate, up = (Weights(rng, dtype, layout, 1, n, k) for _ in range(2))
            x, x_values = activations(rng, act, m, k)
            args: dict[str, Any] = {"x": x, "w_gate": gate.bytes, "w_up": up.bytes}
            if norm:
                inside, x_values = normed(rng, x_values)
                args |= inside
            g, u = x_values @ gate.values[0].T, x_values @ up.values[0].T
            if bias:
                args |= {"bias_gate": normal(rng, n), "bias_up": normal(rng, n)}
                g, u = g + args["bias_gate"].astype(np.float64), u + args["bias_up"].astype(np.float64)
            want = reference.gated(g, u, activation)

            def check(out: Any) -> None:
                expect_close(out["y"], want, EXACT)

            return args, {"y": np.empty((m, n), F32)}, check

        desc = {"type": dtype, "layout": layout, "act": act, "m": m, "n": n, "k": k, "activation": activation}
        desc["norm"] = norm
        return Case("up_gate", desc, build, f"bias={bias}")

    for kind in kinds():
        yield make(kind, 3, 37, "silu")
    for activation in ("silu", "gelu_tanh", "swiglu_oai"):
        yield make(("f32", "plain", "f32"), 1, 1, activation, bias=True)
        yield make(("q8_0", "x16", "q8"), 41, 20, activation, bias=True)
    for dtype in (*FLOATS[1:], *SCALES):
        yield make((dtype, "gpu", "f32"), 2, 35, "silu", bias=True, norm=True)
        yield make((dtype, "gpu", "f32"), 1, 35, "gelu_tanh")


@cases("moe_up_gate")
def moe_up_gate_cases() -> Iterator[Case]:
    def make(
        kind: tuple[str, str, str],
        m: int,
        used: int,
        activation: str,
        *,
        bias: bool = False,
        norm: bool = False,
        one: bool = False,
    ) -> Case:
        dtype, layout, act = kind
        n, k, experts = 19, 256, 5

        def build(rng: np.random.Generator) -> Any:
            gate, up = (Weights(rng, dtype, layout, experts, n, k) for _ in range(2))
            x, x_values = activations(rng, act, m, k)
            ids = np.full((m, used), 2) if one else np.argsort(rng.random((m, experts - 1)), axis=1)[:, :used]
            args: dict[str, Any] = {
                "x": x,
                "w_gate": gate.bytes,
                "w_up": up.bytes,
                "ids": ids.astype(np.int32),
            }
            if norm:
                inside, x_values = normed(rng, x_values, weight=used > 1)
                args |= inside
            g = np.einsum("mk,munk->mun", x_values, gate.values[ids])
            u = np.einsum("mk,munk->mun", x_values, up.values[ids])
            if bias:
                args |= {"bias_gate": normal(rng, experts, n), "bias_up": normal(rng, experts, n)}
                g += args["bias_gate"].astype(np.float64)[ids]
                u += args["bias_up"].astype(np.float64)[ids]
            want = reference.gated(g, u, activation)

            def check(out: Any) -> None:
                expect_close(out["y"], want, EXACT)

            outputs = {
                "y": np.empty((m, used, n), F32),
                "workspace": np.zeros(m * used + 2 * experts + 2, np.int32),
            }
            return args, outputs, check

        desc = {"type": dtype, "layout": layout, "act": act, "m": m, "n": n, "k": k, "experts": experts}
        desc |= {"used": used, "activation": activation, "norm": norm}
        return Case("moe_up_gate", desc, build, f"bias={bias}-one={one}")

    for kind in kinds():
        yield make(kind, 4, 2, "silu")
    for activation in ("silu", "gelu_tanh", "swiglu_oai"):
        yield make(("bf16", "plain", "f32"), 1, 1, activation, bias=True)
        yield make(("mxfp4", "x16", "q8"), 30, 3, activation, bias=True)
    for dtype in (*FLOATS[1:], *SCALES):
        yield make((dtype, "gpu", "f32"), 3, 2, "silu", bias=True, norm=True)
    yield make(("q4_k", "gpu", "f32"), 8, 1, "swiglu_oai", norm=True, one=True)


@cases("qkv")
def qkv_cases() -> Iterator[Case]:
    def make(
        types: str, m: int, heights: tuple[int, int, int], k: int, *, norm: bool, bias: bool = False
    ) -> Case:
        dtypes = (types.split() * 3)[:3] if " " not in types else types.split()
        products = [i for i in range(3) if heights[i] > 0]
        gap = 3 if bias else 0

        def build(rng: np.random.Generator) -> Any:
            x = normal(rng, m, k)
            x_values = x.astype(np.float64)
            args: dict[str, Any] = {"x": x}
            if norm:
                inside, x_values = normed(rng, x_values)
                args |= inside
            want, outputs = {}, {}
            for i in products:
                name, n = "qkv"[i], heights[i]
                w = Weights(rng, dtypes[i], "gpu", 1, n, k)
                args |= {f"w_{name}": w.bytes, f"{name}_stride": n + gap}
                want[name] = x_values @ w.values[0].T
                if bias:
                    args[f"bias_{name}"] = normal(rng, n)
                    want[name] = want[name] + args[f"bias_{name}"].astype(np.float64)
                outputs[name] = np.full((m, n + gap), 77, F32)

            def check(out: Any) -> None:
                for name, values in want.items():
                    expect_close(out[name][:, : values.shape[1]], values, EXACT)
                    assert (out[name][:, values.shape[1] :] == 77).all(), "the gap between rows was written"

            return args, outputs, check

        n, n_k, n_v = heights
        desc = {"type": dtypes[0], "type_k": dtypes[1], "type_v": dtypes[2], "layout": "gpu"}
        desc |= {"m": m, "n": n, "n_k": n_k, "n_v": n_v, "k": k, "norm": norm}
        return Case("qkv", desc, build, f"bias={bias}")

    for dtype in (*FLOATS[1:], *SCALES):
        yield make(dtype, 1, (48, 16, 17), 512, norm=True, bias=True)
    for pair in (
        "q2_k q3_k",
        "q2_k q4_k",
        "q3_k q4_k",
        "q3_k q5_k",
        "q3_k q6_k",
        "q4_0 q8_0",
        "q4_k q5_k",
        "q4_k q6_k",
        "q4_k q8_0",
        "q5_k q6_k",
        "q5_k q8_0",
        "q6_k q8_0",
        "iq4_xs q5_k",
        "iq4_xs q6_k",
    ):
        first, second = pair.split()
        yield make(f"{first} {first} {second}", 2, (80, 21, 33), 768, norm=True)
        yield make(f"{first} {second} {first}", 1, (37, 64, 16), 256, norm=False)
    yield make("q4_k q6_k q4_k", 8, (33, 19, 0), 1024, norm=True)
    yield make("q8_0", 19, (40, 24, 8), 96, norm=True)


@cases("moe_down_sum")
def moe_down_sum_cases() -> Iterator[Case]:
    def make(
        dtype: str, m: int, used: int, k: int, *, n: int = 35, bias: bool = False, one: bool = False
    ) -> Case:
        experts = max(used + 2, 6)

        def build(rng: np.random.Generator) -> Any:
            w = Weights(rng, dtype, "gpu", experts, n, k)
            x = normal(rng, m, used, k)
            x[:, 0] *= F32(1e5)  # a slot far beyond the range of halves
            ids = np.full((m, used), 4) if one else np.argsort(rng.random((m, experts)), axis=1)[:, :used]
            args: dict[str, Any] = {"x": x, "w": w.bytes, "ids": ids.astype(np.int32)}
            args |= {"weights": normal(rng, m, used), "scale": 0.75}
            args["weights"][:, 0] *= F32(1e-5)
            each = np.einsum("muk,munk->mun", x.astype(np.float64), w.values[ids])
            if bias:
                args |= {"bias": normal(rng, experts, n), "residual": normal(rng, m, n)}
                each += args["bias"].astype(np.float64)[ids]
            residual = args["residual"].astype(np.float64) if bias else None
            want = reference.moe_sum(each, args["weights"].astype(np.float64), residual, 0.75)

            def check(out: Any) -> None:
                expect_close(out["out"], want, EXACT)

            return args, {"out": np.empty((m, n), F32)}, check

        desc = {"type": dtype, "layout": "gpu", "m": m, "n": n, "k": k, "experts": experts, "used": used}
        return Case("moe_down_sum", desc, build, f"bias={bias}-one={one}")

    for dtype in (*FLOATS[1:], *SCALES):
        yield make(dtype, 2, 3, 256, bias=True)
    for m, used, k in ((1, 1, 32), (1, 8, 768), (8, 5, 1440), (3, 10, 96)):
        yield make("q4_0", m, used, k, bias=m == 8)
        yield make("mxfp4", m, used, k, one=True)


@cases("copy")
def copy_cases() -> Iterator[Case]:
    def make(act: str, m: int, k: int, gap: int) -> Case:
        row = _core.ops.act_q8_row_bytes(k) if act == "q8" else 4 * k

        def build(rng: np.random.Generator) -> Any:
            x = normal(rng, m, k + gap)
            x[0, : min(k, 32)] = 0.0

            def check(out: Any) -> None:
                got = out["out"]
                if act == "f32":
                    np.testing.assert_array_equal(got[:, :row], np.ascontiguousarray(x[:, :k]).view(np.uint8))
                else:
                    q = got[:, :k].view(np.int8).reshape(m, k // 32, 32).astype(np.float64)
                    d = np.ascontiguousarray(got[:, k : k + k // 8]).view(F32)
                    sums = np.ascontiguousarray(got[:, k + k // 8 : k + k // 4]).view(np.int16)
                    blocks = x[:, :k].reshape(m, k // 32, 32)
                    np.testing.assert_allclose(d, np.abs(blocks).max(axis=-1) / 127, rtol=1e-6)
                    assert (np.abs(q * d[..., None] - blocks) <= 0.5001 * d[..., None]).all()
                    np.testing.assert_array_equal(sums, q.reshape(m, k // 16, 16).sum(axis=-1))
                assert (got[:, row:] == 77).all(), "the gap between rows was written"

            args = {"x": x, "x_stride": k + gap, "out_stride_bytes": row + gap}
            return args, {"out": np.full((m, row + gap), 77, np.uint8)}, check

        return Case("copy", {"act": act, "m": m, "k": k}, build, f"gap={gap}")

    yield make("q8", 1, 32, 0)
    yield make("q8", 9, 1056, 64)
    yield make("q8", 70, 256, 0)
    yield make("f32", 1, 1, 0)
    yield make("f32", 33, 37, 4)


@cases("mla_expand")
def mla_expand_cases() -> Iterator[Case]:
    def make(
        m: int,
        heads: int,
        shape: tuple[int, int, int, int],
        weight: str = "f16 plain",
        cache: str = "f16",
        gap: int = 0,
        v_weight: str | None = None,
    ) -> Case:
        nope, rope, dv, lora = shape
        k_type, k_layout = weight.split()
        v_type, v_layout = (v_weight or weight).split()

        def build(rng: np.random.Generator) -> Any:
            rows, latents = to_cache(normal(rng, m, lora + rope), cache)
            k_b = Weights(rng, k_type, k_layout, heads, lora, nope)
            v_b = Weights(rng, v_type, v_layout, heads, dv, lora)
            row = rows.reshape(m, -1).shape[1]
            padded = np.full((m, row + gap), 255, np.uint8)
            padded[:, :row] = rows.reshape(m, -1)
            rotary = np.broadcast_to(latents[:, None, lora:], (m, heads, rope))
            nope_keys = np.einsum("ml,hln->mhn", latents[:, :lora], k_b.values)
            keys = np.concatenate([nope_keys, rotary], axis=-1)
            values = np.einsum("ml,hnl->mhn", latents[:, :lora], v_b.values)

            def check(out: Any) -> None:
                for name, want in (("keys", keys), ("values", values)):
                    expect_close(out[name].view(np.float16).astype(F32), want, HALVES)

            args = {"latents": padded, "row_bytes": row + gap, "k_b": k_b.bytes, "v_b": v_b.bytes}
            outputs = {
                "keys": np.full((m, heads, 2 * (nope + rope)), 77, np.uint8),
                "values": np.full((m, heads, 2 * dv), 77, np.uint8),
            }
            return args, outputs, check

        desc = {"m": m, "heads": heads, "nope": nope, "rope": rope, "dv": dv, "lora": lora}
        desc |= {"k_type": k_type, "v_type": v_type, "cache_type": cache}
        desc |= {"k_layout": k_layout, "v_layout": v_layout}
        return Case("mla_expand", desc, build, f"gap={gap}")

    yield make(1, 1, (1, 1, 1, 1))
    yield make(5, 3, (20, 6, 12, 20))
    yield make(130, 2, (40, 8, 24, 72), gap=16)
    yield make(7, 2, (136, 16, 144, 64), "f32 plain", "f32")
    yield make(70, 17, (32, 16, 32, 96), "bf16 gpu", "bf16")
    for dtype in SCALES:
        k = 256 if dtype.endswith("_k") or dtype == "iq4_xs" else 32
        yield make(3, 2, (k, 32, 16, k), f"{dtype} gpu", "q8_0")
    # Matrices that end within a stripe, and what a whole kv_b of an older file becomes.
    yield make(65, 3, (32, 8, 20, 40), "f16 gpu", v_weight="f16 plain")
    yield make(9, 2, (64, 8, 64, 64), "f32 plain", v_weight="q4_0 gpu", gap=2)
