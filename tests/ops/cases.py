"""The shapes that the contract suite runs, by family: small, odd, and one for each thing a Desc can say.

To add a family: write a generator of cases and decorate it with @cases("its name").
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from dyno import _core

from ops import reference
from ops.harness import Case, expect_close

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

F32 = np.float32
EXACT = 1e-11  # NMSE of f32 arithmetic against float64

GENERATORS: dict[str, Callable[[], Iterator[Case]]] = {}


def cases(family: str) -> Callable[[Callable[[], Iterator[Case]]], Callable[[], Iterator[Case]]]:
    """Registers a generator of a family's cases."""

    def register(generator: Callable[[], Iterator[Case]]) -> Callable[[], Iterator[Case]]:
        assert family not in GENERATORS, f"{family} has two generators"
        GENERATORS[family] = generator
        return generator

    return register


def all_cases() -> list[Case]:
    """Every case of every family, in a stable order."""
    from ops import cases_products  # noqa: F401  (registers its generators)

    return [case for family in sorted(GENERATORS) for case in GENERATORS[family]()]


def normal(rng: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    """Standard normal values as f32."""
    return rng.standard_normal(shape).astype(F32)


def to_bf16(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to nearest even."""
    bits = x.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def to_cache(x: NDArray[np.float32], dtype: str) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    """Rows [..., n] as bytes [..., row_bytes] of a cache type, and the values that these bytes mean."""
    if dtype == "f32":
        return x.view(np.uint8), x.astype(np.float64)
    if dtype == "f16":
        half = x.astype(np.float16)
        return half.view(np.uint8), half.astype(np.float64)
    if dtype == "bf16":
        bits = to_bf16(x)
        return bits.view(np.uint8), (bits.astype(np.uint32) << 16).view(F32).astype(np.float64)
    assert dtype == "q8_0"
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    amax = np.abs(blocks).max(axis=-1, keepdims=True)
    inverse = np.divide(F32(127), amax, out=np.zeros_like(amax), where=amax > 0)
    q = np.rint(blocks.astype(np.float64) * inverse).astype(np.int8)
    d = (amax / F32(127)).astype(np.float16)
    packed = np.concatenate([d.view(np.uint8), q.view(np.uint8)], axis=-1)
    return packed.reshape(*x.shape[:-1], -1), (q * d.astype(np.float64)).reshape(x.shape)


# NMSE that the rounding of a cache type costs.
LOSS = {"f32": EXACT, "f16": 1e-6, "bf16": 1e-4, "q8_0": 1e-4}


def from_cache(packed: NDArray[np.uint8], dtype: str) -> NDArray[np.float64]:
    """The values of rows [..., row_bytes] of a cache type."""
    packed = np.ascontiguousarray(packed)
    if dtype == "f32":
        return packed.view(F32).astype(np.float64)
    if dtype == "f16":
        return packed.view(np.float16).astype(np.float64)
    if dtype == "bf16":
        return (packed.view(np.uint16).astype(np.uint32) << 16).view(F32).astype(np.float64)
    blocks = packed.reshape(*packed.shape[:-1], -1, 34)
    scale = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float64)
    return (blocks[..., 2:].view(np.int8) * scale).reshape(*packed.shape[:-1], -1)


def router_weights(
    rng: np.random.Generator, dtype: str, experts: int, k: int
) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    """A plain matrix [experts, k] as bytes, and its values."""
    packed, values = to_cache(normal(rng, experts, k) / F32(np.sqrt(k)), dtype)
    return np.ascontiguousarray(packed).reshape(-1), values


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
    def make(m: int, n: int, rows: int = 1, *, weight: bool = True, add: bool = False, gap: int = 0) -> Case:
        def build(rng: np.random.Generator) -> Any:
            row = rows * n
            x = normal(rng, m, row + gap)
            args: dict[str, Any] = {"x": x, "eps": 1e-5, "x_stride": row + gap, "out_stride": row + gap}
            if weight:
                args["weight"] = normal(rng, n)
            if add:
                args["residual"] = normal(rng, m, row)

            def check(out: Any) -> None:
                want = reference.rms_norm(
                    x[:, :row].reshape(m, rows, n).astype(np.float64),
                    args["weight"].astype(np.float64) if weight else None,
                    args["residual"].reshape(m, rows, n).astype(np.float64) if add else None,
                    1e-5,
                )
                expect_close(out["out"][:, :row], want.reshape(m, row), EXACT)
                assert (out["out"][:, row:] == 77).all(), "the gap between rows was written"

            return args, {"out": np.full((m, row + gap), 77, F32)}, check

        desc = {"m": m, "n": n, "rows_per_token": rows, "add": add}
        return Case("norm", desc, build, f"weight={weight}-gap={gap}")

    yield make(1, 1)
    yield make(3, 17, add=True)
    yield make(2, 64, 3, gap=5)
    yield make(1, 2048)
    yield make(33, 130, weight=False, add=True)
    yield make(5, 128, 16, gap=64)


@cases("rope")
def rope_cases() -> Iterator[Case]:
    def make(
        m: int, heads: int, dim: int, n_rot: int, offset: int, neox: bool, start: int, gap: int = 0
    ) -> Case:
        def build(rng: np.random.Generator) -> Any:
            row = heads * dim
            x = normal(rng, m, row + gap)
            positions = (start + np.arange(m)).astype(np.int32)
            inv_freq = (10000.0 ** (-np.arange(n_rot // 2) / (n_rot // 2))).astype(F32)
            args = {"positions": positions, "inv_freq": inv_freq, "mscale": 1.25, "x_stride": row + gap}

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


@cases("moe_route")
def moe_route_cases() -> Iterator[Case]:
    def make(
        m: int,
        experts: int,
        used: int,
        gating: str,
        *,
        groups: int = 1,
        groups_used: int = 1,
        normalize: bool = False,
        bias: bool = False,
        pinned: bool = False,
    ) -> Case:
        def build(rng: np.random.Generator) -> Any:
            # Distinct logits at steps well above rounding, so that every order is decided.
            logits = (rng.permuted(np.tile(np.arange(experts), (m, 1)), axis=1) * (8.0 / experts) - 4).astype(
                F32
            )
            args: dict[str, Any] = {"logits": logits, "scale": 2.5}
            if bias:
                args["selection_bias"] = (rng.permutation(experts) * (0.37 / experts)).astype(F32)
            if pinned:
                picks = rng.permuted(np.tile(np.arange(experts), (m, 1)), axis=1)[:, :used]
                args["pinned"] = np.ascontiguousarray(picks, np.int32)

            def check(out: Any) -> None:
                wide = logits.astype(np.float64)
                ids = args.get("pinned")
                if ids is None:
                    bias64 = args["selection_bias"].astype(np.float64) if bias else None
                    ids = reference.route_choice(
                        wide, bias64, used=used, groups=groups, groups_used=groups_used, gating=gating
                    )
                np.testing.assert_array_equal(out["ids"], ids)
                want = reference.route_weights(wide, ids, gating=gating, normalize=normalize, scale=2.5)
                np.testing.assert_allclose(out["weights"], want, rtol=2e-6)

            outputs = {"ids": np.full((m, used), -1, np.int32), "weights": np.empty((m, used), F32)}
            return args, outputs, check

        desc = {
            "m": m,
            "experts": experts,
            "used": used,
            "groups": groups,
            "groups_used": groups_used,
            "gating": gating,
            "normalize": normalize,
        }
        return Case("moe_route", desc, build, f"bias={bias}-pinned={pinned}")

    for gating in ("softmax", "sigmoid", "softmax_selected"):
        yield make(1, 1, 1, gating)
        yield make(5, 13, 3, gating, normalize=True)
        yield make(9, 128, 8, gating, bias=True)
        yield make(4, 10, 10, gating, pinned=True, normalize=True)
        yield make(6, 32, 4, gating, groups=8, groups_used=2, bias=True, normalize=True)
    yield make(70, 256, 8, "sigmoid", groups=8, groups_used=4, bias=True, normalize=True)


@cases("moe_sum")
def moe_sum_cases() -> Iterator[Case]:
    def make(m: int, n: int, used: int, residual: bool) -> Case:
        def build(rng: np.random.Generator) -> Any:
            args: dict[str, Any] = {
                "x": normal(rng, m, used, n),
                "weights": normal(rng, m, used),
                "scale": 0.75,
            }
            if residual:
                args["residual"] = normal(rng, m, n)

            def check(out: Any) -> None:
                wide = {k: v.astype(np.float64) for k, v in args.items() if isinstance(v, np.ndarray)}
                want = reference.moe_sum(wide["x"], wide["weights"], wide.get("residual"), 0.75)
                expect_close(out["out"], want, EXACT)

            return args, {"out": np.empty((m, n), F32)}, check

        return Case("moe_sum", {"m": m, "n": n, "used": used}, build, f"residual={residual}")

    yield make(1, 1, 1, True)
    yield make(1, 1030, 8, True)
    yield make(7, 33, 3, False)
    yield make(40, 520, 2, True)


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


@cases("attention")
def attention_cases() -> Iterator[Case]:
    def make(
        heads: int,
        kv_heads: int,
        dk: int,
        dv: int,
        runs: list[reference.Run],
        types: str = "f32 f32",
        *,
        window: int | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        v_in_k: bool = False,
        gap: int = 0,
    ) -> Case:
        k_type, v_type = types.split()
        m = max(first + count for first, count, _, _ in runs)
        ctx = max(position + count for _, count, position, _ in runs) + 2
        slots = max(slot for *_, slot in runs) + 1
        scale = float(1 / np.sqrt(dk))

        def build(rng: np.random.Generator) -> Any:
            q = normal(rng, m, heads * dk + gap) * F32(2)
            keys, key_values = to_cache(normal(rng, slots, ctx, kv_heads, dk), k_type)
            values, value_values = to_cache(normal(rng, slots, ctx, kv_heads, dv), v_type)
            args: dict[str, Any] = {
                "q": q,
                "q_stride": heads * dk + gap,
                "out_stride": heads * dv + gap,
                "k_cache": np.ascontiguousarray(keys).reshape(-1),
                "slot_positions": ctx,
                "runs": runs,
                "settled": 1,
                "scale": scale,
            }
            if v_in_k:
                value_values = key_values[..., :dv]
            else:
                args["v_cache"] = np.ascontiguousarray(values).reshape(-1)
            if window is not None:
                args["window"] = window
            if softcap is not None:
                args["softcap"] = softcap
            if sinks:
                args["sinks"] = normal(rng, heads)
            want = reference.attention(
                q[:, : heads * dk].reshape(m, heads, dk).astype(np.float64),
                key_values,
                value_values,
                runs,
                scale=scale,
                softcap=softcap,
                window=window,
                sinks=args["sinks"].astype(np.float64) if sinks else None,
            ).reshape(m, heads * dv)

            def check(out: Any) -> None:
                expect_close(out["out"][:, : heads * dv], want, EXACT)
                assert (out["out"][:, heads * dv :] == 77).all(), "the gap between rows was written"

            return args, {"out": np.full((m, heads * dv + gap), 77, F32)}, check

        desc = {
            "m": m,
            "heads": heads,
            "kv_heads": kv_heads,
            "dk": dk,
            "dv": dv,
            "k_type": k_type,
            "v_type": v_type,
            "windowed": window is not None,
            "softcap": softcap is not None,
            "sinks": sinks,
            "v_in_k": v_in_k,
        }
        return Case("attention", desc, build, f"runs{len(runs)}-ctx{ctx}-window{window}")

    yield make(1, 1, 1, 1, [(0, 1, 0, 0)])
    yield make(2, 1, 16, 16, [(0, 5, 0, 0)], gap=3)
    # Decode at depths around the block sizes.
    for depth in (0, 63, 64, 129, 500):
        yield make(4, 2, 32, 24, [(0, 1, depth, 0)])
    for types in ("f16 f16", "q8_0 q8_0"):
        yield make(8, 2, 128, 128, [(0, 1, 1500, 0)], types)
    for types in ("f16 f16", "bf16 bf16", "q8_0 q8_0"):
        yield make(6, 1, 96, 64, [(0, 2, 300, 1), (2, 1, 5, 0)], types, window=170)
    yield make(5, 1, 72, 40, [(0, 3, 600, 0)], "f16 f16", gap=3)
    yield make(2, 1, 256, 192, [(0, 1, 700, 0)], "f16 f16", softcap=20.0)
    # Prompts, from an empty cache and behind one.
    yield make(4, 4, 64, 64, [(0, 70, 0, 0)])
    yield make(6, 2, 20, 20, [(0, 33, 100, 1)])
    yield make(3, 1, 24, 40, [(0, 131, 7, 0)])
    # Several sequences of different length in one batch, some decoding.
    yield make(8, 2, 80, 80, [(0, 1, 9, 2), (1, 17, 0, 0), (18, 1, 140, 1), (19, 2, 64, 3)])
    # Every pair of cache types.
    for k_type in ("f32", "f16", "bf16", "q8_0"):
        for v_type in ("f32", "f16", "bf16", "q8_0"):
            yield make(4, 2, 32, 64, [(0, 3, 70, 0)], f"{k_type} {v_type}")
    yield make(4, 1, 36, 20, [(0, 9, 60, 0)], "f16 bf16")
    # What a Desc can switch on.
    yield make(8, 2, 64, 64, [(0, 40, 90, 0)], window=17)
    yield make(2, 2, 16, 16, [(0, 1, 200, 0)], window=1)
    yield make(2, 2, 16, 16, [(0, 80, 0, 0)], "f16 f16", window=500)
    yield make(4, 2, 32, 32, [(0, 20, 50, 0)], softcap=2.0)
    yield make(4, 2, 32, 32, [(0, 1, 50, 0)], softcap=30.0)
    yield make(16, 2, 64, 64, [(0, 12, 150, 0)], "f16 f16", sinks=True, window=128)
    yield make(16, 2, 64, 64, [(0, 1, 150, 0)], sinks=True)
    # Several blocks of keys and of rows in every variant, the last ones cut.
    yield make(2, 2, 192, 128, [(0, 150, 200, 0)], "f16 f16")
    yield make(3, 3, 72, 40, [(0, 140, 129, 0)], "f16 f16", gap=1)
    yield make(8, 1, 128, 128, [(0, 70, 333, 1), (70, 3, 10, 0)], "f16 f16", window=150, sinks=True)
    yield make(4, 1, 64, 64, [(0, 100, 180, 0)], "q8_0 q8_0")
    yield make(4, 2, 256, 256, [(0, 40, 130, 0)], "bf16 bf16", softcap=30.0)
    # Latent attention: values within the keys, one kv head.
    yield make(16, 1, 576, 512, [(0, 1, 77, 0)], "f16 f16", v_in_k=True)
    yield make(10, 1, 40, 20, [(0, 30, 40, 0)], v_in_k=True)
    yield make(16, 1, 576, 512, [(0, 1, 1300, 0)], v_in_k=True)
    yield make(20, 1, 576, 512, [(0, 2, 700, 1), (2, 1, 0, 0)], "f16 f16", v_in_k=True, gap=5)
    yield make(6, 2, 136, 72, [(0, 1, 300, 0)], "bf16 bf16", v_in_k=True)
    yield make(2, 1, 256, 256, [(0, 3, 0, 0)], "bf16 bf16")


@cases("qkv_rope_store")
def qkv_rope_store_cases() -> Iterator[Case]:
    def make(
        heads: int,
        kv_heads: int,
        dk: int,
        dv: int,
        n_rot: int,
        runs: list[reference.Run],
        types: str = "f32 f32",
        *,
        neox: bool = True,
        q_norm: bool = False,
        k_norm: bool = False,
        nope: int | None = None,
        gap: int = 0,
    ) -> Case:
        k_type, v_type = types.split()
        latent = nope is not None
        m = max(first + count for first, count, _, _ in runs)
        ctx = max(position + count for _, count, position, _ in runs) + 1
        slots = max(slot for *_, slot in runs) + 1
        rest = dk - n_rot
        q_dim = nope + n_rot if nope is not None else dk

        def build(rng: np.random.Generator) -> Any:
            q = normal(rng, m, heads * q_dim + gap)
            k = normal(rng, m, kv_heads * dk + gap)
            v = normal(rng, m, kv_heads * dv + gap)
            positions = np.zeros(m, np.int32)
            for first, count, position, _ in runs:
                positions[first : first + count] = position + np.arange(count)
            inv_freq = (10_000.0 ** (-2 * np.arange(n_rot // 2) / n_rot)).astype(F32)
            args: dict[str, Any] = {
                "k": k,
                "k_stride": kv_heads * dk + gap,
                "q_stride": heads * q_dim + gap,
                "positions": positions,
                "inv_freq": inv_freq,
                "mscale": 1.25,
                "eps": 1e-5,
                "slot_positions": ctx,
                "runs": runs,
            }
            if not latent:
                args |= {"v": v, "v_stride": kv_heads * dv + gap}
            if q_norm:
                args["q_norm"] = normal(rng, dk)
            if k_norm:
                args["k_norm"] = normal(rng, rest if latent else dk)

            def rotate(x: Any, offset: int) -> Any:
                return reference.rope(
                    x,
                    positions.tolist(),
                    inv_freq.astype(np.float64),
                    n_rot=n_rot,
                    offset=offset,
                    neox=neox,
                    mscale=1.25,
                )

            def norm(x: Any, name: str) -> Any:
                return reference.rms_norm(x, args[name].astype(np.float64), None, 1e-5) if name in args else x

            wide_q = q[:, : heads * q_dim].reshape(m, heads, q_dim).astype(np.float64)
            wide_k = k[:, : kv_heads * dk].reshape(m, kv_heads, dk).astype(np.float64)
            outputs: dict[str, Any] = {}
            if latent:
                assert nope is not None
                want_q = rotate(wide_q[..., nope:], 0)
                wide_k[..., :rest] = norm(wide_k[..., :rest], "k_norm")
                want_k = rotate(wide_k, rest)
                args["q"] = q
                outputs["q_out"] = np.full((m, heads * dk + gap), 77, F32)
                args["q_out_stride"] = heads * dk + gap
            else:
                want_q = rotate(norm(wide_q, "q_norm"), 0)
                want_k = rotate(norm(wide_k, "k_norm"), 0)
                outputs["q"] = q
            k_bytes = to_cache(np.zeros(kv_heads * dk, F32), k_type)[0].size
            outputs["k_cache"] = rng.integers(0, 256, (slots, ctx, k_bytes + 4 * gap)).astype(np.uint8)
            args["k_row_bytes"] = k_bytes + 4 * gap
            if not latent:
                v_bytes = to_cache(np.zeros(kv_heads * dv, F32), v_type)[0].size
                outputs["v_cache"] = rng.integers(0, 256, (slots, ctx, v_bytes + 4 * gap)).astype(np.uint8)
                args["v_row_bytes"] = v_bytes + 4 * gap
            before = {name: value.copy() for name, value in outputs.items()}

            def check(out: Any) -> None:
                if latent:
                    got = out["q_out"][:, : heads * dk].reshape(m, heads, dk)
                    expect_close(got[..., rest:], want_q, EXACT)
                    assert (got[..., :rest] == 77).all(), "what the product writes was overwritten"
                    assert (out["q_out"][:, heads * dk :] == 77).all()
                else:
                    expect_close(out["q"][:, : heads * dk].reshape(m, heads, dk), want_q, EXACT)
                    np.testing.assert_array_equal(out["q"][:, heads * dk :], q[:, heads * dk :])
                kept = np.ones((slots, ctx), bool)
                for first, count, position, slot in runs:
                    kept[slot, position : position + count] = False
                    cells = out["k_cache"][slot, position : position + count, :k_bytes]
                    want = want_k[first : first + count].reshape(count, -1)
                    expect_close(from_cache(cells, k_type), want, LOSS[k_type])
                    if latent:
                        continue
                    cells = out["v_cache"][slot, position : position + count, :v_bytes]
                    packed, _ = to_cache(
                        np.ascontiguousarray(v[first : first + count, : kv_heads * dv]), v_type
                    )
                    np.testing.assert_array_equal(cells, packed)
                for name in ("k_cache",) if latent else ("k_cache", "v_cache"):
                    np.testing.assert_array_equal(out[name][kept], before[name][kept])
                    width = k_bytes if name == "k_cache" else v_bytes
                    np.testing.assert_array_equal(out[name][..., width:], before[name][..., width:])

            return args, outputs, check

        desc = {
            "m": m,
            "heads": heads,
            "kv_heads": kv_heads,
            "dk": dk,
            "dv": dv,
            "n_rot": n_rot,
            "nope": nope or 0,
            "k_type": k_type,
            "v_type": v_type,
            "neox": neox,
            "q_norm": q_norm,
            "k_norm": k_norm,
            "latent": latent,
        }
        return Case("qkv_rope_store", desc, build, f"runs{len(runs)}-gap{gap}")

    yield make(1, 1, 2, 1, 2, [(0, 1, 0, 0)])
    yield make(3, 1, 20, 7, 12, [(0, 2, 3, 1), (2, 3, 0, 0)], neox=False, q_norm=True, gap=3)
    yield make(4, 2, 128, 128, 128, [(0, 1, 900, 0)], "f16 f16", q_norm=True, k_norm=True)
    yield make(8, 4, 64, 64, 64, [(0, 1, 7, 2), (1, 1, 0, 0), (2, 1, 3, 1)], "f16 f16")
    yield make(4, 2, 96, 160, 48, [(0, 8, 2, 0)], "bf16 q8_0", neox=False, k_norm=True)
    yield make(6, 3, 80, 96, 80, [(0, 2, 1, 0)], "f32 bf16", gap=4)
    yield make(2, 1, 256, 192, 256, [(0, 3, 1, 0)], "q8_0 f16", q_norm=True, k_norm=True)
    yield make(5, 1, 36, 32, 4, [(0, 3, 4, 0)], nope=9, k_norm=True, gap=2)
    yield make(16, 1, 576, 512, 64, [(0, 2, 77, 0)], "f16 f16", nope=128, k_norm=True, neox=False)
    yield make(2, 1, 96, 64, 32, [(0, 1, 5, 0)], "q8_0 q8_0", nope=1)


@cases("norm_route")
def norm_route_cases() -> Iterator[Case]:
    def make(
        m: int,
        k: int,
        experts: int,
        used: int,
        gating: str,
        dtype: str = "f32",
        layout: str = "plain",
        *,
        groups: int = 1,
        groups_used: int = 1,
        normalize: bool = False,
        bias: bool = False,
        pinned: bool = False,
        weight: bool = True,
        gap: int = 0,
    ) -> Case:
        def build(rng: np.random.Generator) -> Any:
            x = normal(rng, m, k + gap)
            plain, wide = router_weights(rng, dtype, experts, k)
            gain = np.abs(normal(rng, k)) + F32(0.5)
            args: dict[str, Any] = {
                "x": x,
                "x_stride": k + gap,
                "eps": 1e-5,
                "scale": 2.5,
                "w": plain if layout == "plain" else _core.ops.repack(dtype, plain, experts, k, layout),
                "normed_stride": k + gap,
            }
            if weight:
                args["norm"] = gain
            if bias:
                args["bias"] = normal(rng, experts)
                args["selection_bias"] = normal(rng, experts) * F32(0.2)
            if pinned:
                picks = rng.permuted(np.tile(np.arange(experts), (m, 1)), axis=1)[:, :used]
                args["pinned"] = np.ascontiguousarray(picks, np.int32)
            want = reference.rms_norm(
                x[:, :k].astype(np.float64), gain.astype(np.float64) if weight else None, None, 1e-5
            )
            logits = want @ wide.T + (args["bias"].astype(np.float64) if bias else 0.0)
            chosen = {"used": used, "groups": groups, "groups_used": groups_used, "gating": gating}
            bias64 = args["selection_bias"].astype(np.float64) if bias else None
            ids = args.get("pinned")
            if ids is None:
                ids = reference.route_choice(logits, bias64, **chosen)

            def check(out: Any) -> None:
                # Sums in another order may swap experts that are equal but for rounding; the weights tell.
                np.testing.assert_array_equal(np.sort(out["ids"]), np.sort(ids))
                weights = reference.route_weights(
                    logits, out["ids"], gating=gating, normalize=normalize, scale=2.5
                )
                np.testing.assert_allclose(out["weights"], weights, rtol=2e-5)
                expect_close(out["normed"][:, :k], want, EXACT)
                assert (out["normed"][:, k:] == 77).all(), "the gap between rows was written"

            outputs = {
                "ids": np.full((m, used), -1, np.int32),
                "weights": np.empty((m, used), F32),
                "normed": np.full((m, k + gap), 77, F32),
            }
            return args, outputs, check

        desc = {
            "type": dtype,
            "layout": layout,
            "m": m,
            "k": k,
            "experts": experts,
            "used": used,
            "groups": groups,
            "groups_used": groups_used,
            "gating": gating,
            "normalize": normalize,
        }
        return Case("norm_route", desc, build, f"bias={bias}-pinned={pinned}-gap={gap}")

    for gating in ("softmax", "sigmoid", "softmax_selected"):
        yield make(1, 1, 1, 1, gating)
        yield make(3, 30, 13, 3, gating, normalize=True, weight=False, gap=2)
        yield make(2, 256, 128, 8, gating, bias=True)
    yield make(1, 2048, 128, 8, "softmax", normalize=True)
    yield make(8, 96, 10, 10, "softmax", "f16", pinned=True, normalize=True)
    yield make(2, 34, 33, 4, "sigmoid", "bf16", gap=1)
    yield make(5, 64, 256, 8, "sigmoid", groups=8, groups_used=4, bias=True, normalize=True)
    yield make(2, 96, 40, 6, "softmax", "f16", "gpu", normalize=True)
    yield make(1, 1056, 300, 5, "softmax", "bf16", "gpu", gap=4)
    yield make(4, 64, 17, 2, "softmax_selected", "f16", "gpu", bias=True)
    yield make(2, 64, 33, 4, "softmax", "q8_0")


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

    for activation in ("silu", "gelu_tanh", "swiglu_oai"):
        yield make(1, 1, activation)
        yield make(7, 37, activation, gap=3)
        yield make(33, 256, activation)


@cases("sample")
def sample_cases() -> Iterator[Case]:
    def make(m: int, n: int, label: str, **settings: float) -> Case:
        chosen = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **settings}

        def build(rng: np.random.Generator) -> Any:
            logits = normal(rng, m, n) * F32(3)
            uniform = rng.random(m).astype(F32)
            uniform[0] = 0.0

            def check(out: Any) -> None:
                for row in range(m):
                    want = reference.sample(
                        logits[row].astype(np.float64), uniform=float(uniform[row]), **chosen
                    )  # type: ignore[arg-type]
                    assert out["out"][row] == want, f"row {row}"

            return {"logits": logits, "uniform": uniform, **chosen}, {"out": np.full(m, -1, np.int32)}, check

        return Case("sample", {"m": m, "n_vocab": n}, build, label)

    yield make(3, 1, "one-token")
    yield make(40, 77, "greedy", temperature=0.0)
    yield make(40, 77, "plain")
    yield make(40, 77, "hot", temperature=2.5)
    yield make(40, 77, "top_k", top_k=5)
    yield make(40, 77, "top_k-past-the-end", top_k=100)
    yield make(40, 77, "top_p", top_p=0.7)
    yield make(40, 77, "min_p", min_p=0.1)
    yield make(40, 300, "all", top_k=40, top_p=0.9, min_p=0.05, temperature=0.8)
    yield make(40, 300, "tiny-top_p", top_p=1e-6)
    yield make(2, 40_000, "large", top_k=40, top_p=0.95, temperature=0.7)


def device(**properties: Any) -> dict[str, Any]:
    """A DeviceInfo dict of a plain CPU, with some properties replaced."""
    return {
        "kind": "cpu",
        "isa": "avx2",
        "cores": 8,
        "l1d_bytes": 32 << 10,
        "l2_bytes": 1 << 20,
        **properties,
    }
