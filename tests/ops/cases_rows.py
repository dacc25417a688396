"""Cases of the families that move or transform rows: embed, norm, rope, kv_store, moe_sum, glu, copy,
transfer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from dyno import _core

from ops import reference
from ops.cache_types import to_cache
from ops.cases import EXACT, F32, cases, normal
from ops.harness import Case, expect_close

if TYPE_CHECKING:
    from collections.abc import Iterator


@cases("embed")
def embed_cases() -> Iterator[Case]:
    def make(dtype: str, m: int, n: int, scale: float) -> Case:
        def build(rng: np.random.Generator) -> Any:
            rows = 7
            table, values = to_cache(normal(rng, rows, n), dtype)
            ids = rng.integers(0, rows, m).astype(np.int32)

            def check(out: Any) -> None:
                want = values[ids].astype(F32) * F32(scale)
                np.testing.assert_array_equal(out["out"], want)

            return (
                {"table": table, "rows": rows, "ids": ids, "scale": scale},
                {"out": np.empty((m, n), F32)},
                check,
            )

        return Case("embed", {"type": dtype, "m": m, "n": n}, build)

    yield make("f32", 1, 1, 1.0)
    yield make("f32", 5, 33, 1.0)
    yield make("f16", 9, 65, 8.0)
    yield make("bf16", 3, 7, 1.0)
    yield make("q8_0", 70, 96, 0.5)


@cases("norm")
def norm_cases() -> Iterator[Case]:
    def make(
        m: int,
        n: int,
        rows: int = 1,
        *,
        weight: bool = True,
        add: bool = False,
        gap: int = 0,
        scale: float = 1.0,
        own: bool = False,
        centred: bool = False,
        bias: bool = False,
    ) -> Case:
        def build(rng: np.random.Generator) -> Any:
            row = rows * n
            x = normal(rng, m, row + gap)
            if centred:
                x += F32(3)  # a mean that matters
            if bias:
                bias_values = normal(rng, n)
            args: dict[str, Any] = {"x": x, "eps": 1e-5, "x_stride": row + gap, "out_stride": row + gap}
            if scale != 1.0:
                args["scale"] = scale
            if weight:
                args["weight"] = normal(rng, rows, n) if own else normal(rng, n)
            if own:
                args["weight_stride"] = n
            if add:
                args["residual"] = normal(rng, m, row)
            if bias:
                args["bias"] = bias_values

            def check(out: Any) -> None:
                values = x[:, :row].reshape(m, rows, n).astype(np.float64)
                gain = args["weight"].astype(np.float64) if weight else None
                residual = args["residual"].reshape(m, rows, n).astype(np.float64) if add else None
                if centred:
                    offset = bias_values.astype(np.float64) if bias else None
                    want = reference.layer_norm(values, gain, offset, residual, 1e-5)
                else:
                    want = reference.rms_norm(values, gain, residual, 1e-5)
                expect_close(out["out"][:, :row], want.reshape(m, row) * scale, EXACT)
                assert (out["out"][:, row:] == 77).all(), "the gap between rows was written"

            return args, {"out": np.full((m, row + gap), 77, F32)}, check

        desc = {"m": m, "n": n, "rows_per_token": rows, "add": add, "centred": centred}
        label = f"weight={weight}-gap={gap}-scale={scale}-own={own}" + ("-bias" if bias else "")
        return Case("norm", desc, build, label)

    yield make(1, 1)
    yield make(3, 17, add=True)
    yield make(2, 64, 3, gap=5)
    yield make(1, 2048)
    yield make(33, 130, weight=False, add=True)
    yield make(5, 128, 16, gap=64)
    yield make(3, 65, add=True, scale=0.75)
    yield make(2, 96, 4, own=True)
    yield make(2, 36, 3, own=True, scale=0.5, gap=4)
    yield make(5, 64, centred=True, bias=True)
    yield make(3, 131, centred=True, bias=True, gap=7)
    yield make(1, 17, centred=True, weight=False, add=True, scale=0.75)
    yield make(2, 40, 3, centred=True, bias=True, own=True, gap=4)


@cases("rope")
def rope_cases() -> Iterator[Case]:
    def make(
        m: int, heads: int, dim: int, n_rot: int, offset: int, neox: bool, start: int, gap: int = 0,
        position_scale: float = 0.0,
    ) -> Case:  # fmt: skip
        def build(rng: np.random.Generator) -> Any:
            row = heads * dim
            x = normal(rng, m, row + gap)
            positions = (start + np.arange(m)).astype(np.int32)
            inv_freq = (10000.0 ** (-np.arange(n_rot // 2) / (n_rot // 2))).astype(F32)
            args = {"positions": positions, "inv_freq": inv_freq, "mscale": 1.25, "x_stride": row + gap}
            if position_scale:
                args |= {"position_scale": position_scale, "position_step": 7}

            def check(out: Any) -> None:
                want = reference.rope(
                    x[:, :row].reshape(m, heads, dim).astype(np.float64),
                    positions.tolist(),
                    inv_freq.astype(np.float64),
                    n_rot=n_rot,
                    offset=offset,
                    neox=neox,
                    mscale=1.25,
                )
                growth = 1 + position_scale * np.log1p(positions // 7)
                rotated = slice(offset, offset + n_rot)
                want[:, :, rotated] *= growth[:, None, None]
                got = out["x"][:, :row].reshape(m, heads, dim)
                assert np.abs(got - want).max() < 5e-6, f"off by {np.abs(got - want).max()}"
                expect_close(got, want, 1e-13)
                np.testing.assert_array_equal(out["x"][:, row:], x[:, row:])

            return args, {"x": x}, check

        desc = {"m": m, "heads": heads, "head_dim": dim, "n_rot": n_rot, "offset": offset, "neox": neox}
        return Case("rope", desc, build, f"at{start}-gap{gap}")

    for neox in (False, True):
        yield make(1, 1, 2, 2, 0, neox, 3)
        yield make(7, 3, 20, 12, 4, neox, 0, gap=3)
        yield make(3, 2, 128, 128, 0, neox, 131_000)
        yield make(2, 5, 192, 64, 128, neox, 1_000_000)
        yield make(40, 16, 64, 64, 0, neox, 100)
        yield make(9, 3, 64, 64, 0, neox, 250, position_scale=0.1)
        yield make(70, 2, 24, 24, 0, neox, 0, gap=1, position_scale=0.5)


@cases("kv_store")
def kv_store_cases() -> Iterator[Case]:
    def make(dtype: str, width: int, runs: list[reference.Run], gap: int = 0, offset: int = 0) -> Case:
        m = max(first + count for first, count, _, _ in runs)
        ctx = max(position + count for _, count, position, _ in runs) + 1
        slots = max(slot for *_, slot in runs) + 1

        def build(rng: np.random.Generator) -> Any:
            x = normal(rng, m, width + gap)
            x[0, 0] = 0.0
            x[-1, -1 - gap] = 1e-7  # a subnormal f16
            packed, _ = to_cache(np.ascontiguousarray(x[:, :width]), dtype)
            row = offset + packed.shape[1] + gap
            cache = rng.integers(0, 256, (slots, ctx, row)).astype(np.uint8)
            want = cache.copy()
            for first, count, position, slot in runs:
                cells = want[slot, position : position + count]
                cells[:, offset : offset + packed.shape[1]] = packed[first : first + count]

            def check(out: Any) -> None:
                np.testing.assert_array_equal(out["cache"], want)

            args = {
                "x": x,
                "x_stride": width + gap,
                "row_bytes": row,
                "byte_offset": offset,
                "slot_positions": ctx,
                "runs": runs,
            }
            return args, {"cache": cache}, check

        return Case("kv_store", {"type": dtype, "m": m, "width": width}, build, f"runs{len(runs)}-gap{gap}")

    for dtype in ("f32", "f16", "bf16"):
        yield make(dtype, 1, [(0, 1, 0, 0)])
        yield make(dtype, 37, [(0, 3, 2, 1), (3, 1, 0, 0)], gap=4, offset=8)
    yield make("q8_0", 32, [(0, 1, 5, 0)])
    yield make("q8_0", 160, [(0, 2, 0, 2), (2, 5, 3, 0)], gap=34, offset=68)
    yield make("f16", 512, [(0, 80, 1, 0)])
    step = [(token, 1, token % 3, 69 - token) for token in range(70)]  # one token of each of many sequences
    yield make("f16", 504, step)
    yield make("q8_0", 96, step[:33], gap=4)


@cases("moe_sum")
def moe_sum_cases() -> Iterator[Case]:
    def make(m: int, n: int, used: int, residual: bool, weights: bool = True, *, others: str = "") -> Case:
        """`others`: rows of some slots are `taken` from another device, or `left` out."""

        def build(rng: np.random.Generator) -> Any:
            args: dict[str, Any] = {"x": normal(rng, m, used, n), "scale": 0.75}
            if others == "left":
                args["x"][0, 0] = np.nan  # nobody reads it
            if others == "taken":
                args["other_x"] = normal(rng, m, used, n)
            if others:
                args["other_ids"] = rng.integers(-1, 2, (m, used)).astype(np.int32)
                args["other_ids"][0, 0] = 0
            if weights:
                args["weights"] = normal(rng, m, used)
            if residual:
                args["residual"] = normal(rng, m, n)

            def check(out: Any) -> None:
                wide = {k: v.astype(np.float64) for k, v in args.items() if isinstance(v, np.ndarray)}
                x = wide["x"]
                if others:
                    there = wide.get("other_x", np.zeros_like(x))
                    x = np.where(args["other_ids"][..., None] >= 0, there, x)
                want = reference.moe_sum(
                    x, wide.get("weights", np.ones((m, used))), wide.get("residual"), 0.75
                )
                expect_close(out["out"], want, EXACT)

            return args, {"out": np.empty((m, n), F32)}, check

        return Case(
            "moe_sum", {"m": m, "n": n, "used": used}, build,
            f"residual={residual}-weights={weights}-others={others}",
        )  # fmt: skip

    yield make(1, 1, 1, True)
    yield make(1, 1030, 8, True)
    yield make(7, 33, 3, False)
    yield make(40, 520, 2, True)
    yield make(1, 2048, 1, True, weights=False)
    yield make(7, 33, 3, False, weights=False)
    for others in ("taken", "left"):
        yield make(1, 1030, 8, True, others=others)
        yield make(9, 35, 3, False, others=others)


@cases("glu")
def glu_cases() -> Iterator[Case]:
    def make(m: int, n: int, activation: str, gap: int = 0) -> Case:
        def build(rng: np.random.Generator) -> Any:
            gate, up = normal(rng, m, n + gap) * F32(4), normal(rng, m, n) * F32(4)
            args = {"gate": gate, "gate_stride": n + gap, "up": up, "y_stride": n + gap}

            def check(out: Any) -> None:
                want = reference.gated(gate[:, :n].astype(np.float64), up.astype(np.float64), activation)
                expect_close(out["y"][:, :n], want, EXACT)
                assert (out["y"][:, n:] == 77).all(), "the gap between rows was written"

            return args, {"y": np.full((m, n + gap), 77, F32)}, check

        return Case("glu", {"m": m, "n": n, "activation": activation}, build, f"gap={gap}")

    for activation in ("silu", "gelu_tanh", "swiglu_oai", "relu"):
        yield make(1, 1, activation)
        yield make(7, 37, activation, gap=3)
        yield make(33, 256, activation)

    def of_experts(m: int, width: int, used: int, factors: str) -> Case:
        """Slots side by side whose experts have factors."""
        experts, n = 5, width * used

        def build(rng: np.random.Generator) -> Any:
            gate, up = normal(rng, m, n), normal(rng, m, n)
            ids = rng.integers(0, experts, (m, used)).astype(np.int32)
            scales = {f"{name}_scale": normal(rng, experts) for name in factors.split()}
            args = {"gate": gate, "up": up, "ids": ids, **scales}

            def factor(name: str) -> Any:
                return np.repeat(
                    scales.get(f"{name}_scale", np.ones(experts))[ids].astype(np.float64), width, 1
                )

            def check(out: Any) -> None:
                expect_close(
                    out["y"], reference.gated(gate * factor("gate"), up * factor("up"), "silu"), EXACT
                )

            return args, {"y": np.full((m, n), 77, F32)}, check

        desc = {"m": m, "n": n, "activation": "silu", "experts": experts, "used": used}
        return Case("glu", desc, build, factors)

    yield of_experts(1, 1, 1, "gate up")
    yield of_experts(9, 37, 3, "gate up")
    yield of_experts(4, 64, 5, "up")
    yield of_experts(4, 33, 2, "gate")


@cases("sigmoid_gate")
def sigmoid_gate_cases() -> Iterator[Case]:
    def make(m: int, n: int, gates: int, gap: int = 0) -> Case:
        def build(rng: np.random.Generator) -> Any:
            x, gate = normal(rng, m, n + gap), normal(rng, m, gates) * F32(4)
            args = {"x": x, "x_stride": n + gap, "gate": gate, "y_stride": n + gap}

            def check(out: Any) -> None:
                want = reference.sigmoid_gate(x[:, :n].astype(np.float64), gate.astype(np.float64))
                expect_close(out["y"][:, :n], want, EXACT)
                assert (out["y"][:, n:] == 77).all(), "the gap between rows was written"

            return args, {"y": np.full((m, n + gap), 77, F32)}, check

        return Case("sigmoid_gate", {"m": m, "n": n, "gates": gates}, build, f"gap={gap}")

    yield make(1, 1, 1)
    yield make(7, 37, 37, gap=3)
    yield make(5, 130, 1)
    yield make(33, 96, 4, gap=1)


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


@cases("transfer")
def transfer_cases() -> Iterator[Case]:
    def make(m: int, row: int, fixed: int = 0) -> Case:
        def build(rng: np.random.Generator) -> Any:
            x = rng.integers(0, 256, fixed + m * row).astype(np.uint8)

            def check(out: Any) -> None:
                np.testing.assert_array_equal(out["y"], x)

            return {"x": x}, {"y": np.full(x.shape, 77, np.uint8)}, check

        return Case("transfer", {"m": m, "row": row, "fixed": fixed}, build)

    yield make(1, 1)
    yield make(7, 132)
    yield make(3, 4, 65)
    yield make(300, 1024, 40)  # several threads
