"""Cases of the families that multiply with weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ops import byte_rows, half_tiles, reference
from ops.cases import EXACT, F32, cases, normal
from ops.harness import Case, expect_close, expect_zeros
from ops.product_data import ON_GPU, SCALES, Weights, activations, kinds, normed
from ops.rounding import operand
from ops.weight_blocks import GPU_FORMS

if TYPE_CHECKING:
    from collections.abc import Iterator


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
        tiles: int = 0,
    ) -> Case:
        """`tiles`: x comes as f16 tiles of that height, blocks of a row in very different scales."""
        dtype, layout, act = kind

        def build(rng: np.random.Generator) -> Any:
            w = Weights(rng, dtype, layout, batch, n, k)
            x, x_values = activations(rng, act, m * batch, k)
            args: dict[str, Any] = {"x": x, "w": w.bytes, "y_stride": n * batch + gap}
            if tiles:
                del args["x"]
                factors = np.repeat(2.0 ** rng.integers(-9, 3, (m, k // 256)), 256, axis=1)
                args["x_tiles"] = half_tiles.encode(x_values * factors, tiles)
                x_values = half_tiles.decode(args["x_tiles"], m, k, tiles).values
            if norm:
                inside, x_values = normed(rng, x_values)
                args |= inside
            exact = x_values if tiles else operand(x_values)
            want = np.einsum("mbk,bnk->mbn", exact.reshape(m, batch, k), w.values)
            if extras:
                args |= {"bias": normal(rng, n), "residual": normal(rng, m, n * batch + gap), "scale": 0.5}
                residual = args["residual"][:, : n * batch].reshape(m, batch, n)
                want = residual + 0.5 * (want + args["bias"].astype(np.float64))

            def check(out: Any) -> None:
                expect_close(out["y"][:, : n * batch], want.reshape(m, n * batch), EXACT)
                assert (out["y"][:, n * batch :] == 77).all(), "the gap between rows was written"

            return args, {"y": np.full((m, n * batch + gap), 77, F32)}, check

        desc = {"type": dtype, "layout": layout, "act": act, "m": m, "n": n, "k": k, "batch": batch}
        desc |= {"norm": norm, "x_tiles": tiles}
        return Case(
            "matmul", desc, build, f"gap={gap}-extras={extras}" + (f"-tiles={tiles}" if tiles else "")
        )

    for kind in kinds():
        yield make(kind, 1, 21, 256)
        yield make(kind, 7, 40, 512, gap=3, extras=True)
    yield make(("f32", "plain", "f32"), 1, 1, 1)
    yield make(("f16", "plain", "f32"), 5, 3, 37, batch=3)
    # A router: every width of tile, k in unequal parts.
    yield make(("f32", "plain", "f32"), 70, 130, 352, gap=3, extras=True)
    yield make(("f32", "plain", "f32"), 131, 61, 288, extras=True)
    yield make(("f32", "plain", "f32"), 259, 29, 416, gap=1)
    yield make(("q8_0", "plain", "q8"), 4, 33, 96, batch=2, extras=True)
    yield make(("q4_0", "x16", "q8"), 130, 50, 1056)
    for dtype in ON_GPU:
        yield make((dtype, "gpu", "f32"), 1, 37, 768, extras=True, norm=True)
        yield make((dtype, "gpu", "f32"), 3, 37, 768, gap=5)
        yield make((dtype, "gpu", "f32"), 21, 70, 1280, gap=5, extras=True)  # k for a cluster's 16 blocks
    for dtype in (*SCALES, *GPU_FORMS):
        # The same in super-blocks, in unequal parts; several tiles of rows and tokens, not all full.
        yield make((dtype, "gpu", "f32"), 67, 150, 4352, gap=2, extras=True)
    # Longer than the part of a row that the launch keeps which norms it and makes half rows of it.
    yield make(("q4_k", "gpu", "f32"), 5, 20, 15360, norm=True)
    for dtype in ("q4_0", "q8_0"):
        yield make((dtype, "gpu", "f32"), 9, 300, 4384)  # half a tile of k at the end
        yield make((dtype, "gpu", "f32"), 1, 100, 4384, extras=True)
        yield make((dtype, "gpu", "f32"), 1, 84, 544, batch=3)
        yield make((dtype, "gpu", "f32"), 18, 34, 2080, batch=3)
    for m in (1, 9, 40):
        yield make(("q8_16", "gpu", "f32"), m, 45, 4416)  # three tiles of the last chunk
    for m in (1, 8, 11):
        yield make(("q4_0", "gpu", "f32"), m, 50, 6176, norm=True)
        yield make(("f16", "gpu", "f32"), m, 16, 3104)
    # More wide tiles than a chip has multiprocessors, so that blocks of wgmma_wide multiply several.
    yield make(("q4_k", "gpu", "f32"), 300, 9000, 512)
    yield make(("q8_0", "gpu", "f32"), 300, 9000, 224, gap=3, extras=True)
    for height in (16, 32, 64):
        yield make(("q4_k", "gpu", "f32"), 5, 21, 256, tiles=height)
        yield make(("q4_k", "gpu", "f32"), 67, 150, 4352, gap=2, extras=True, tiles=height)
        yield make(("q4_k", "gpu", "f32"), height, 300, 1280, tiles=height)


@cases("matmul_id")
def matmul_id_cases() -> Iterator[Case]:
    def make(
        kind: tuple[str, str, str],
        m: int,
        used: int,
        *,
        per_slot: bool,
        bias: bool,
        one: bool = False,
        none: float = 0,
        n: int = 35,
        k: int = 256,
    ) -> Case:
        """`none`: the share of rows without an expert, because another device multiplies them."""
        dtype, layout, act = kind
        experts = 6

        def build(rng: np.random.Generator) -> Any:
            w = Weights(rng, dtype, layout, experts, n, k)
            x, x_values = activations(rng, act, m * used if per_slot else m, k)
            # Some experts stay without a token; with `one` all but one.
            ids = np.full((m, used), 4) if one else np.argsort(rng.random((m, experts - 1)), axis=1)[:, :used]
            x_values = operand(x_values)
            rows = x_values.reshape(m, used, k) if per_slot else np.repeat(x_values[:, None], used, axis=1)
            want = np.einsum("muk,munk->mun", rows, w.values[ids])
            args: dict[str, Any] = {"x": x, "w": w.bytes, "ids": ids.astype(np.int32)}
            absent = rng.random((m, used)) < none if none else np.zeros((m, used), bool)
            args["ids"][absent] = -1
            if bias:
                args["bias"] = normal(rng, experts, n)
                want += args["bias"].astype(np.float64)[ids]

            want[absent] = 0

            def check(out: Any) -> None:
                expect_close(out["y"], want, EXACT)
                expect_zeros(out["y"][absent], "rows without an expert")

            outputs = {
                "y": np.full((m, used, n), np.nan, F32),
                "workspace": np.zeros(m * used + 2 * experts + 2, np.int32),
            }
            return args, outputs, check

        desc = {"type": dtype, "layout": layout, "act": act, "m": m, "n": n, "k": k, "experts": experts}
        desc |= {"used": used, "x_per_slot": per_slot}
        return Case("matmul_id", desc, build, f"bias={bias}-one={one}" + (f"-none={none}" if none else ""))

    for kind in kinds():
        yield make(kind, 5, 3, per_slot=False, bias=False)
    for kind in (("f16", "plain", "f32"), ("mxfp4", "x16", "q8"), ("q5_k", "plain", "q8")):
        yield make(kind, 1, 1, per_slot=False, bias=True)
        yield make(kind, 33, 2, per_slot=True, bias=True)
        yield make(kind, 20, 1, per_slot=False, bias=False, one=True)
    absent_in = [("q4_0", "x16", "q8"), ("q5_k", "plain", "q8"), ("f16", "plain", "f32")]
    absent_in += [(dtype, "gpu", "f32") for dtype in ("f16", "q4_0", "q4_k", "q8_0", "mxfp4")]
    for kind in absent_in:
        yield make(kind, 1, 4, per_slot=False, bias=True, none=0.5)
        yield make(kind, 7, 3, per_slot=True, bias=True, none=0.6)
        yield make(kind, 33, 2, per_slot=True, bias=False, none=0.7)
    for kind in absent_in[-3:-1]:
        yield make(kind, 1, 3, per_slot=True, bias=True, none=1)
    # Experts with several tiles of rows, and columns that end within a block.
    yield make(("q4_0", "gpu", "f32"), 600, 2, per_slot=True, bias=True, n=150, k=96)
    yield make(("f16", "gpu", "f32"), 500, 1, per_slot=False, bias=False, one=True, n=70, k=160)
    # About 35 rows for each expert, and n of whole vectors.
    yield make(("q4_k", "gpu", "f32"), 176, 1, per_slot=True, bias=True, n=148)
    yield make(("q8_0", "gpu", "f32"), 88, 2, per_slot=False, bias=False, n=280, k=96)
    # Several chunks of the ring, of which the last one may have a tile and a half.
    for dtype, k in (("iq4_nl", 864), ("iq4_xs", 1024), ("q4_16", 1024)):
        yield make((dtype, "gpu", "f32"), 2, 2, per_slot=False, bias=True, k=k)
        yield make(kind, 70, 3, per_slot=False, bias=False, none=1)
        yield make(kind, 1500, 3, per_slot=False, bias=False, none=0.9, n=9)
        # More stripes, and chunks of k, than blocks of a few multiprocessors take at once.
        yield make(kind, 8, 4, per_slot=True, bias=True, none=0.5, n=50, k=1792)
    for dtype in ON_GPU:
        yield make((dtype, "gpu", "f32"), 5, 3, per_slot=False, bias=True)
    for dtype in ("f16", "q4_0", "q4_k", "mxfp4"):
        yield make((dtype, "gpu", "f32"), 33, 2, per_slot=True, bias=False)
        yield make((dtype, "gpu", "f32"), 20, 1, per_slot=False, bias=False, one=True)
    # More tiles than a few multiprocessors have places for what they know of them.
    yield make(("q4_0", "gpu", "f32"), 9, 2, per_slot=False, bias=False, n=1100)


@cases("up_gate")
def up_gate_cases() -> Iterator[Case]:
    def make(
        kind: tuple[str, str, str],
        m: int,
        n: int,
        activation: str,
        *,
        bias: bool = False,
        norm: bool = False,
        k: int = 256,
        tiles: int = 0,
    ) -> Case:
        """`tiles`: y leaves as f16 tiles of that height."""
        dtype, layout, act = kind

        def build(rng: np.random.Generator) -> Any:
            gate, up = (Weights(rng, dtype, layout, 1, n, k) for _ in range(2))
            x, x_values = activations(rng, act, m, k)
            args: dict[str, Any] = {"x": x, "w_gate": gate.bytes, "w_up": up.bytes}
            if norm:
                inside, x_values = normed(rng, x_values)
                args |= inside
            x_values = operand(x_values)
            g, u = x_values @ gate.values[0].T, x_values @ up.values[0].T
            if bias:
                args |= {"bias_gate": normal(rng, n), "bias_up": normal(rng, n)}
                g, u = g + args["bias_gate"].astype(np.float64), u + args["bias_up"].astype(np.float64)
            want = reference.gated(g, u, activation)

            def check(out: Any) -> None:
                expect_close(out["y"], want, EXACT)

            def check_tiles(out: Any) -> None:
                half_tiles.check(out["y_tiles"], operand(want), tiles)

            if tiles:
                return args, {"y_tiles": np.zeros(half_tiles.size(m, n, tiles), np.uint8)}, check_tiles
            return args, {"y": np.empty((m, n), F32)}, check

        desc = {"type": dtype, "layout": layout, "act": act, "m": m, "n": n, "k": k, "activation": activation}
        desc |= {"norm": norm, "y_tiles": tiles}
        return Case("up_gate", desc, build, f"bias={bias}" + (f"-tiles={tiles}" if tiles else ""))

    for kind in kinds():
        yield make(kind, 3, 37, "silu")
    for activation in ("silu", "gelu_tanh", "swiglu_oai", "relu"):
        yield make(("f32", "plain", "f32"), 1, 1, activation, bias=True)
        yield make(("q8_0", "x16", "q8"), 41, 20, activation, bias=True)
    for dtype in ON_GPU:
        yield make((dtype, "gpu", "f32"), 2, 35, "silu", bias=True, norm=True)
        yield make((dtype, "gpu", "f32"), 1, 35, "gelu_tanh")
    for dtype in (*SCALES, *GPU_FORMS):
        yield make((dtype, "gpu", "f32"), 37, 84, "silu", bias=True, k=4352)  # as of matmul
        yield make((dtype, "gpu", "f32"), 21, 40, "silu", k=1280, norm=True)
    for height in (16, 32, 64):
        kind = ("q4_k", "gpu", "f32")
        yield make(kind, 5, 256, "silu", tiles=height)
        yield make(kind, 67, 768, "silu", k=1280, norm=True, tiles=height)
        yield make(kind, height, 512, "silu", bias=True, k=4352, tiles=height)


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
        none: float = 0,
        k: int = 256,
        n: int = 19,
        shared: int = 0,
        as_bytes: bool = False,
    ) -> Case:
        """`none`: as of matmul_id. `shared`: rows of the shared expert's pair. `as_bytes`: x is there as
        byte rows too."""
        dtype, layout, act = kind
        experts = max(used + 1, 5)

        def build(rng: np.random.Generator) -> Any:
            gate, up = (Weights(rng, dtype, layout, experts, n, k) for _ in range(2))
            x, x_values = activations(rng, act, m, k)
            if as_bytes and activation != "swiglu_oai":  # which cuts off large values
                units = -(-k // byte_rows.UNIT)
                x *= F32(2.0) ** np.repeat(rng.integers(-3, 4, (m, units)), byte_rows.UNIT, axis=1)[:, :k]
                x_values = x.astype(np.float64)
            ids = np.full((m, used), 2) if one else np.argsort(rng.random((m, experts - 1)), axis=1)[:, :used]
            args: dict[str, Any] = {
                "x": x,
                "w_gate": gate.bytes,
                "w_up": up.bytes,
                "ids": ids.astype(np.int32),
            }
            if as_bytes:
                args["x_bytes"] = byte_rows.encode(x)
            absent = rng.random((m, used)) < none if none else np.zeros((m, used), bool)
            args["ids"][absent] = -1
            if norm:
                inside, x_values = normed(rng, x_values, weight=used > 1)
                args |= inside
            x_values = operand(x_values)
            g = np.einsum("mk,munk->mun", x_values, gate.values[ids])
            u = np.einsum("mk,munk->mun", x_values, up.values[ids])
            if bias:
                args |= {"bias_gate": normal(rng, experts, n), "bias_up": normal(rng, experts, n)}
                g += args["bias_gate"].astype(np.float64)[ids]
                u += args["bias_up"].astype(np.float64)[ids]
            want = reference.gated(g, u, activation)
            want[absent] = 0
            outputs = {
                "y": np.full((m, used, n), np.nan, F32),
                "workspace": np.zeros(m * used + 2 * experts + 2, np.int32),
            }
            if shared:
                own_gate, own_up = (Weights(rng, dtype, layout, 1, shared, k) for _ in range(2))
                args |= {"shared_gate": own_gate.bytes, "shared_up": own_up.bytes}
                outputs["shared_y"] = np.full((m, shared), np.nan, F32)
                own = reference.gated(
                    x_values @ own_gate.values[0].T, x_values @ own_up.values[0].T, activation
                )

            def check(out: Any) -> None:
                expect_close(out["y"], want, EXACT)
                expect_zeros(out["y"][absent], "rows without an expert")
                if shared:
                    expect_close(out["shared_y"], own, EXACT)

            return args, outputs, check

        desc = {"type": dtype, "layout": layout, "act": act, "m": m, "n": n, "k": k, "experts": experts}
        desc |= {"used": used, "activation": activation, "norm": norm} | (
            {"shared": shared} if shared else {}
        )
        if as_bytes:
            desc["bytes"] = True
        return Case("moe_up_gate", desc, build, f"bias={bias}-one={one}" + (f"-none={none}" if none else ""))

    for kind in kinds():
        yield make(kind, 4, 2, "silu")
    for activation in ("silu", "gelu_tanh", "swiglu_oai", "relu"):
        yield make(("bf16", "plain", "f32"), 1, 1, activation, bias=True)
        yield make(("mxfp4", "x16", "q8"), 30, 3, activation, bias=True)
    absent_in = [("q4_0", "x16", "q8"), ("q5_k", "plain", "q8"), ("f16", "plain", "f32")]
    absent_in += [(dtype, "gpu", "f32") for dtype in ("f16", "q4_0", "q4_k", "q8_0", "mxfp4")]
    for kind in absent_in:
        yield make(kind, 1, 4, "silu", bias=True, none=0.5)
        yield make(kind, 30, 3, "gelu_tanh", none=0.7)
    for kind in absent_in[-3:-1]:
        yield make(kind, 3, 3, "silu", bias=True, norm=True, none=0.4)
        yield make(kind, 1, 3, "silu", bias=True, none=1)
        yield make(kind, 70, 3, "silu", none=1)
        yield make(kind, 8, 4, "silu", none=0.5, k=1792)
    for dtype in ON_GPU:
        yield make((dtype, "gpu", "f32"), 3, 2, "silu", bias=True, norm=True)
    yield make(("q4_k", "gpu", "f32"), 8, 1, "swiglu_oai", norm=True, one=True)
    for dtype in ON_GPU:
        yield make((dtype, "gpu", "f32"), 5, 3, "silu", bias=True)
    for dtype in ("f16", "q4_0", "q4_k", "mxfp4"):
        yield make((dtype, "gpu", "f32"), 33, 2, "gelu_tanh")
        yield make((dtype, "gpu", "f32"), 20, 1, "silu", one=True)
    for dtype in ON_GPU:
        if dtype not in ("f16", "bf16"):
            kind = (dtype, "gpu", "f32")
            yield make(kind, 1, 3, "silu", bias=True, k=768, shared=35, as_bytes=True)
            yield make(kind, 5, 3, "gelu_tanh", none=0.3, k=1280, as_bytes=True)
    for dtype in ("q4_0", "q4_k", "mxfp4"):
        kind = (dtype, "gpu", "f32")
        yield make(kind, 1, 4, "gelu_tanh", bias=True, none=0.5, k=768, shared=37, as_bytes=True)
        yield make(kind, 1, 3, "silu", none=1, k=512, shared=70, as_bytes=True)
        yield make(kind, 1, 1, "swiglu_oai", k=2048, shared=16, as_bytes=True)
    # More items than blocks, and more than a block keeps the sums of.
    yield make(("q4_0", "gpu", "f32"), 1, 6, "silu", k=2080, n=210, shared=333, as_bytes=True)
    yield make(("q8_0", "gpu", "f32"), 4, 8, "relu", k=512, n=700, as_bytes=True)
    for dtype in ("q4_0", "q8_0", "mxfp4"):
        kind = (dtype, "gpu", "f32")
        yield make(kind, 1, 4, "swiglu_oai", k=2880, n=67, bias=True, as_bytes=True)
        yield make(kind, 2, 4, "silu", k=96, as_bytes=True)
        yield make(kind, 70, 2, "silu", k=2080, as_bytes=True)
    # Experts with several tiles of rows, tiles that are not full, and columns that end within a block.
    for dtype, k in (("f16", 96), ("q4_0", 96), ("q4_k", 256), ("mxfp4", 96)):
        yield make((dtype, "gpu", "f32"), 600, 2, "silu", k=k, n=150, bias=True)
    # About 44 rows for each expert, and n of whole vectors.
    for dtype, activation, k in (
        ("q4_0", "silu", 96),
        ("q4_k", "gelu_tanh", 256),
        ("mxfp4", "swiglu_oai", 160),
    ):
        yield make((dtype, "gpu", "f32"), 176, 1, activation, k=k, n=148, bias=True)
    yield make(("q4_0", "gpu", "f32"), 600, 2, "gelu_tanh", k=96, n=150, none=0.4)
    yield make(("mxfp4", "gpu", "f32"), 601, 1, "swiglu_oai", k=160, n=130, one=True)
    yield make(("q8_0", "gpu", "f32"), 333, 3, "silu", k=320, n=70)


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
                want[name] = operand(x_values) @ w.values[0].T
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

    for dtype in ON_GPU:
        yield make(dtype, 1, (48, 16, 17), 512, norm=True, bias=True)
        # Tiles of rows that end within a product, and tokens that fill no tile.
        yield make(dtype, 37, (150, 40, 33), 1280, norm=False, bias=True)
        yield make(dtype, 21, (40, 33, 16), 768, norm=True)
    # Several tiles of tokens, and a product that ends within a block's rows of w.
    yield make("q4_k", 300, (300, 140, 33), 512, norm=False, bias=True)
    yield make("q8_0", 300, (300, 140, 33), 512, norm=True)
    yield make("q4_0", 1031, (300, 140, 33), 512, norm=True)
    yield make("q4_0", 21, (300, 70, 0), 512, norm=True)
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
        dtype: str,
        m: int,
        used: int,
        k: int,
        *,
        n: int = 35,
        bias: bool = False,
        one: bool = False,
        shared: int = 0,
    ) -> Case:
        """`shared`: k of the shared expert's product."""
        experts = max(used + 2, 6)
        settled = m % 2 == 0  # whether ids may be read before the launch before this one is over

        def build(rng: np.random.Generator) -> Any:
            w = Weights(rng, dtype, "gpu", experts, n, k)
            x = normal(rng, m, used, k)
            x[:, 0] *= F32(1e5)  # a slot far beyond the range of halves
            ids = np.full((m, used), 4) if one else np.argsort(rng.random((m, experts)), axis=1)[:, :used]
            args: dict[str, Any] = {"x": x, "w": w.bytes, "ids": ids.astype(np.int32)}
            args |= {"weights": normal(rng, m, used), "scale": 0.75, "settled": int(settled)}
            args["weights"][:, 0] *= F32(1e-5)
            each = np.einsum("muk,munk->mun", operand(x.astype(np.float64)), w.values[ids])
            if bias:
                args |= {"bias": normal(rng, experts, n), "residual": normal(rng, m, n)}
                each += args["bias"].astype(np.float64)[ids]
            residual = args["residual"].astype(np.float64) if bias else None
            want = reference.moe_sum(each, args["weights"].astype(np.float64), residual, 0.75)
            if shared:
                own = Weights(rng, dtype, "gpu", 1, n, shared)
                args |= {"shared_x": normal(rng, m, shared), "shared_w": own.bytes}
                want = want + 0.75 * (operand(args["shared_x"].astype(np.float64)) @ own.values[0].T)

            def check(out: Any) -> None:
                expect_close(out["out"], want, EXACT)

            return args, {"out": np.full((m, n), np.nan, F32)}, check

        desc = {"type": dtype, "layout": "gpu", "m": m, "n": n, "k": k, "experts": experts, "used": used}
        desc |= {"shared": shared}
        return Case("moe_down_sum", desc, build, f"bias={bias}-one={one}-settled={settled}")

    for dtype in ON_GPU:
        yield make(dtype, 2, 3, 256, bias=True)
    for m, used, k in ((1, 1, 32), (1, 8, 768), (8, 5, 1440), (3, 10, 96)):
        yield make("q4_0", m, used, k, bias=m == 8)
        yield make("mxfp4", m, used, k, one=True)
    for dtype in ON_GPU:
        yield make(dtype, 1, 3, 256, bias=True, shared=512)
    for dtype in ("q4_0", "q8_0", "mxfp4"):
        yield make(dtype, 1, 2, 1408, shared=2816)  # as of deepseek2-lite: a half chunk ends each row
        yield make(dtype, 3, 2, 96, bias=True, shared=32)
        yield make(dtype, 8, 3, 32, shared=1440)
    yield make("q4_k", 1, 6, 512, shared=1280)
