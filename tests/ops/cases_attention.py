"""Cases of attention and of what surrounds it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ops import half_tiles, reference
from ops.cache_types import LOSS, as_pairs, from_cache, from_pairs, to_cache
from ops.cases import EXACT, F32, cases, normal
from ops.cases_index_select import chosen_positions
from ops.harness import Case, expect_close
from ops.product_data import HALVES, SCALES, Weights
from ops.rounding import operand
from ops.weight_blocks import GPU_FORMS, geometry

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray


def rotated(
    x: Any, args: dict[str, Any], positions: NDArray[Any], *, n_rot: int, offset: int, neox: bool
) -> Any:
    """Heads x [m, heads, width] as an op with these arguments rotates them, in float64."""
    inv_freq = args["inv_freq"].astype(np.float64)
    return reference.rope(
        x, positions.tolist(), inv_freq, n_rot=n_rot, offset=offset, neox=neox, mscale=args["mscale"]
    )


def normed(x: Any, args: dict[str, Any], name: str) -> Any:
    """x by the norm of that name, if the op has one."""
    return reference.rms_norm(x, args[name].astype(np.float64), None, args["eps"]) if name in args else x


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
    paired: bool = False,
    gap: int = 0,
    deep: int = 0,
    tiles: int = 0,
    selected: int = 0,
) -> Case:
    """`tiles`: out leaves as f16 tiles of that height. `selected`: positions that a token reads.

    `deep`: the depth for which a GPU divides the keys, if not the depth of the runs. `paired`: keys and
    values are f16 pairs.
    """
    k_type, v_type = types.split()
    m = max(first + count for first, count, _, _ in runs)
    ctx = max(position + count for _, count, position, _ in runs) + 2
    slots = max(slot for *_, slot in runs) + 1
    scale = float(1 / np.sqrt(dk))

    def build(rng: np.random.Generator) -> Any:
        q = normal(rng, m, heads * dk + gap) * F32(2)
        keys, key_values = to_cache(normal(rng, slots, ctx, kv_heads, dk), k_type)
        values, value_values = to_cache(normal(rng, slots, ctx, kv_heads, dv), v_type)
        if paired:
            keys, values = as_pairs(keys.view(F32)), as_pairs(values.view(F32))
        args: dict[str, Any] = {
            "q": q,
            "q_stride": heads * dk + gap,
            "out_stride": heads * dv + gap,
            "k_cache": np.ascontiguousarray(keys).reshape(-1),
            "slot_positions": ctx,
            "runs": runs,
            **({"depth": deep} if deep else {}),
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
        chosen = chosen_positions(rng, runs, selected) if selected else None
        if chosen is not None:
            args["selected_stride"] = selected + gap
            args["selected"] = np.hstack([chosen, np.full((m, gap), -9, np.int32)])
        want = reference.attention(
            q[:, : heads * dk].reshape(m, heads, dk).astype(np.float64),
            key_values,
            value_values,
            runs,
            scale=scale,
            softcap=softcap,
            window=window,
            sinks=args["sinks"].astype(np.float64) if sinks else None,
            selected=chosen,
        ).reshape(m, heads * dv)

        def check(out: Any) -> None:
            expect_close(out["out"][:, : heads * dv], want, EXACT)
            assert (out["out"][:, heads * dv :] == 77).all(), "the gap between rows was written"

        def check_tiles(out: Any) -> None:
            half_tiles.check(out["out_tiles"], operand(want), tiles)

        if tiles:
            size = half_tiles.size(m, heads * dv, tiles)
            return args, {"out_tiles": np.zeros(size, np.uint8)}, check_tiles
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
        "out_tiles": tiles,
        "selected": selected,
        "paired": paired,
    }
    label = f"runs{len(runs)}-ctx{ctx}-window{window}" + (f"-tiles={tiles}" if tiles else "")
    label += f"-deep={deep}" if deep else ""
    return Case("attention", desc, build, label)


@cases("attention")
def attention_cases() -> Iterator[Case]:
    yield make(1, 1, 1, 1, [(0, 1, 0, 0)])
    yield make(2, 1, 16, 16, [(0, 5, 0, 0)], gap=3)
    # Decode at depths around the block sizes.
    for depth in (0, 63, 64, 129, 500):
        yield make(4, 2, 32, 24, [(0, 1, depth, 0)])
    for types in ("f16 f16", "bf16 bf16", "q8_0 q8_0"):
        yield make(8, 2, 128, 128, [(0, 1, 1500, 0)], types)
    for types in ("f16 f16", "bf16 bf16", "q8_0 q8_0"):
        yield make(6, 1, 96, 64, [(0, 2, 300, 1), (2, 1, 5, 0)], types, window=170)
    yield make(5, 1, 72, 40, [(0, 3, 600, 0)], "f16 f16", gap=3)
    # Groups of one to seven heads, keys that fill no tile of them.
    for heads, kv_heads, depth in ((3, 3, 200), (8, 4, 139), (3, 1, 77), (4, 1, 67), (14, 2, 90)):
        for types in ("f16 f16", "q8_0 q8_0"):
            yield make(heads, kv_heads, 160, 96, [(0, 1, depth, 0)], types)
    # Heads of a position that a thread takes together: eight, six, seven or one of them.
    shapes = ((16, 8, 300), (16, 16, 130), (12, 12, 95), (21, 7, 67), (64, 8, 190), (11, 11, 64))
    for heads, kv_heads, depth in shapes:
        for types in ("f16 f16", "q8_0 q8_0", "bf16 q8_0"):
            yield make(heads, kv_heads, 64, 32, [(0, 1, depth, 0)], types)
    runs = [(0, 2, 260, 1), (2, 1, 5, 0), (3, 1, 129, 2)]
    yield make(24, 8, 72, 40, runs, "f16 f16", window=100, sinks=True)
    yield make(16, 8, 20, 27, [(0, 1, 333, 0)], softcap=15.0, gap=3)
    yield make(32, 4, 128, 128, [(i, 1, 83 * i % 390, 5 - i) for i in range(6)], "q8_0 q8_0")
    yield make(2, 1, 256, 192, [(0, 1, 700, 0)], "f16 f16", softcap=20.0)
    # Prompts, from an empty cache and behind one.
    yield make(4, 4, 64, 64, [(0, 70, 0, 0)])
    yield make(6, 2, 20, 20, [(0, 33, 100, 1)])
    yield make(3, 1, 24, 40, [(0, 131, 7, 0)])
    # Several sequences of different length in one batch, some decoding.
    yield make(8, 2, 80, 80, [(0, 1, 9, 2), (1, 17, 0, 0), (18, 1, 140, 1), (19, 2, 64, 3)])
    # A step of more sequences than a warp has lanes: a token of each, and one of them with several.
    many = [(i, 1, 37 * i % 150, 39 - i) for i in range(40)]
    yield make(8, 2, 128, 128, many, "f16 f16")
    yield make(16, 2, 64, 64, many, "bf16 bf16", window=33, sinks=True)
    yield make(8, 2, 128, 128, [(i, 1, 29 * i % 140, 70 - i) for i in range(71)], "f16 f16")
    yield make(3, 3, 128, 128, [(i, 1, 127 + i, i) for i in range(5)], "f16 f16", gap=4)
    yield make(6, 2, 64, 64, [(1, 1, 300, 0), (0, 1, 16, 1), (2, 1, 15, 2)], "f16 f16", gap=3)
    yield make(6, 2, 64, 64, [(0, 5, 60, 36), *((i + 5, 1, 41 * i % 170, i) for i in range(36))], "q8_0 q8_0")
    # The same, whose rows the next product multiplies as they leave.
    for tiles in (16, 32, 64):
        yield make(8, 2, 128, 128, many, "f16 f16", tiles=tiles)
        yield make(32, 8, 64, 64, many[:13], "bf16 bf16", window=33, sinks=True, tiles=tiles)
    yield make(16, 2, 128, 128, [(1, 1, 300, 0), (0, 1, 16, 1), (2, 1, 15, 2)], "f16 f16", gap=8, tiles=16)
    # Every pair of cache types.
    for k_type in ("f32", "f16", "bf16", "q8_0"):
        for v_type in ("f32", "f16", "bf16", "q8_0"):
            yield make(4, 2, 32, 64, [(0, 3, 70, 0)], f"{k_type} {v_type}")
    yield make(4, 1, 36, 20, [(0, 9, 60, 0)], "f16 bf16")
    # Few tokens over caches of f16 and q8_0, heads of fours, and heads of which 16 rows do not fit.
    for types in ("f16 q8_0", "q8_0 f16"):
        yield make(8, 2, 128, 128, [(0, 1, 1500, 0)], types)
        yield make(6, 1, 96, 64, [(0, 2, 300, 1), (2, 1, 5, 0)], types, window=170, sinks=True)
        yield make(8, 2, 64, 64, [(i, 1, 37 * i % 150, 11 - i) for i in range(12)], types)
        yield make(6, 2, 256, 192, [(0, 9, 333, 0)], types, softcap=20.0, gap=1)
    # Rows of q8_0 that a GPU copies in pieces of 16 bytes, in several turns, with new tokens in any tile.
    for types in ("q8_0 q8_0", "q8_0 f16", "f16 q8_0"):
        runs = [(0, 7, 1390, 1), (7, 1, 141, 0), (8, 3, 0, 2)]
        yield make(16, 4, 64, 64, runs, types, softcap=20.0)
        yield make(6, 2, 256, 256, [(0, 2, 600, 0)], types, window=300, sinks=True, gap=4)
    yield make(12, 2, 128, 128, [(0, 21, 509, 1), (21, 1, 700, 0)], "q8_0 q8_0")
    for types in ("f16 f16", "bf16 bf16"):
        yield make(6, 2, 100, 100, [(0, 1, 300, 1), (1, 2, 40, 0)], types)
        yield make(3, 1, 36, 20, [(0, 4, 200, 0)], types, window=77, sinks=True, gap=1)
        yield make(5, 1, 260, 508, [(0, 2, 150, 0)], types)
        yield make(8, 4, 256, 256, [(0, 12, 333, 0)], types)
    yield make(2, 2, 72, 44, [(0, 5, 140, 0)], "f16 f16", v_in_k=True)
    # The switches of a Desc.
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
    # Heads wider than 256: tokens at depths around the tiles, several sequences, prompts whose last blocks
    # are cut, with every switch, and widths of no whole eights.
    for depth in (0, 15, 64, 511, 1500):
        yield make(8, 1, 512, 512, [(0, 1, depth, 0)], "f16 f16")
    for types in ("f16 f16", "bf16 bf16", "q8_0 q8_0"):
        yield make(16, 2, 512, 512, [(0, 1, 700, 0)], types, window=300, sinks=True)
        yield make(16, 2, 512, 512, [(0, 40, 90, 1), (40, 3, 10, 0)], types)
        yield make(4, 1, 288, 416, [(0, 70, 200, 0)], types, softcap=20.0)
    yield make(8, 1, 512, 512, [(i, 1, 61 * i % 333, 11 - i) for i in range(12)], "f16 f16")
    yield make(3, 1, 264, 504, [(0, 5, 300, 0)], "bf16 bf16", softcap=15.0, gap=3)
    yield make(2, 1, 512, 320, [(0, 150, 129, 0)], "f16 q8_0", window=77, sinks=True)
    yield make(3, 1, 301, 261, [(0, 45, 100, 0)], "f16 f16", gap=1)
    yield make(2, 2, 512, 264, [(0, 33, 40, 0)], "f16 f16", v_in_k=True)
    # f32 caches: all head sizes that go in pairs of halves, rows of no whole eights or fours.
    yield make(2, 2, 192, 128, [(0, 150, 200, 0)])
    yield make(3, 1, 190, 126, [(0, 40, 129, 1)], gap=1)
    yield make(8, 1, 128, 128, [(0, 70, 333, 1), (70, 3, 10, 0)], window=150, sinks=True)
    yield make(3, 3, 75, 41, [(0, 140, 129, 0)], gap=1)
    yield make(2, 1, 96, 96, [(0, 33, 900, 0)], softcap=20.0)
    # Keys and values that are pairs: several tiles and blocks of keys, heads that end within a panel.
    yield make(2, 2, 192, 128, [(0, 150, 200, 0)], paired=True)
    yield make(1, 1, 192, 128, [(0, 300, 0, 0)], paired=True)
    yield make(4, 2, 184, 120, [(0, 41, 129, 1)], gap=4, paired=True)
    yield make(8, 1, 128, 128, [(0, 70, 333, 1), (70, 3, 10, 0)], window=150, sinks=True, paired=True)
    yield make(3, 3, 72, 40, [(0, 140, 129, 0)], gap=4, paired=True)
    yield make(2, 1, 96, 96, [(0, 33, 900, 0)], softcap=20.0, paired=True)
    yield make(3, 1, 64, 64, [(0, 1, 65, 0), (1, 2, 1100, 1)], paired=True)
    # Divisions for deep contexts: most parts have no keys. Tokens of one sequence, of several, of one each.
    for deep in (3_000, 40_000, 1 << 20):
        for types in ("f16 f16", "q8_0 q8_0"):
            yield make(8, 2, 128, 128, [(0, 12, 700, 0)], types, deep=deep)
            yield make(16, 2, 64, 64, [(0, 9, 190, 1), (9, 1, 900, 0)], types, deep=deep)
            yield make(8, 4, 128, 128, [(i, 1, 60 * i, i) for i in range(10)], types, deep=deep)
        yield make(8, 2, 128, 128, [(0, 40, 300, 0)], "bf16 bf16", window=200, sinks=True, deep=deep)
        yield make(4, 2, 256, 256, [(0, 20, 500, 0)], "f16 f16", softcap=20.0, deep=deep)
        yield make(3, 1, 301, 261, [(0, 30, 600, 0)], "f16 f16", gap=1, deep=deep)
    # Latent attention: values within the keys, one kv head.
    yield make(16, 1, 576, 512, [(0, 1, 77, 0)], "f16 f16", v_in_k=True)
    yield make(10, 1, 40, 20, [(0, 30, 40, 0)], v_in_k=True)
    yield make(16, 1, 576, 512, [(0, 1, 1300, 0)], v_in_k=True)
    yield make(20, 1, 576, 512, [(0, 2, 700, 1), (2, 1, 0, 0)], "f16 f16", v_in_k=True, gap=5)
    yield make(6, 2, 136, 72, [(0, 1, 300, 0)], "bf16 bf16", v_in_k=True)
    # f32 latents: blocks of a few keys and of several steps, kv heads, widths that end within 16, two runs.
    for depth in (0, 8, 23, 255):
        yield make(16, 1, 576, 512, [(0, 1, depth, 0)], v_in_k=True)
    yield make(20, 1, 576, 512, [(0, 2, 700, 1), (2, 1, 0, 0)], v_in_k=True, gap=5)
    yield make(6, 2, 136, 72, [(0, 1, 300, 0)], v_in_k=True)
    yield make(12, 1, 104, 88, [(0, 3, 375, 0)], v_in_k=True, window=137, softcap=15.0, sinks=True)
    # Selected positions: fewer and more than a block of keys, tokens that see fewer than they may read.
    for types in ("f32 f32", "f16 f16", "bf16 bf16"):
        yield make(20, 1, 576, 512, [(0, 2, 300, 1), (2, 1, 0, 0)], types, v_in_k=True, gap=5, selected=97)
    yield make(3, 1, 40, 20, [(0, 30, 40, 0)], v_in_k=True, selected=1)
    yield make(70, 1, 72, 48, [(0, 9, 60, 0)], "f16 f16", v_in_k=True, selected=64)
    yield make(9, 1, 96, 64, [(0, 3, 150, 1), (3, 70, 0, 0)], "q8_0 q8_0", v_in_k=True, selected=33)
    yield make(130, 1, 48, 40, [(0, 1, 90, 0)], v_in_k=True, selected=65, softcap=15.0, sinks=True)
    for types in ("f32 f32", "f16 f16"):
        yield make(10, 1, 576, 512, [(0, 1, 2999, 0)], types, v_in_k=True, selected=2048)
        yield make(18, 1, 576, 512, [(0, 70, 90, 1)], types, v_in_k=True, selected=130)
    runs = [(0, 2, 800, 1), (2, 1, 1100, 0), (3, 1, 40, 2)]
    yield make(9, 1, 576, 512, runs, "q8_0 q8_0", v_in_k=True, selected=512)
    yield make(33, 1, 64, 64, runs, "bf16 bf16", v_in_k=True, selected=600, gap=2)
    yield make(5, 1, 600, 544, [(0, 2, 200, 0)], v_in_k=True, selected=70)
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
        v_norm: bool = False,
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
                return rotated(x, args, positions, n_rot=n_rot, offset=offset, neox=neox)

            wide_q = q[:, : heads * q_dim].reshape(m, heads, q_dim).astype(np.float64)
            wide_k = k[:, : kv_heads * dk].reshape(m, kv_heads, dk).astype(np.float64)
            outputs: dict[str, Any] = {}
            if latent:
                assert nope is not None
                want_q = rotate(wide_q[..., nope:], 0)
                wide_k[..., :rest] = normed(wide_k[..., :rest], args, "k_norm")
                want_k = rotate(wide_k, rest)
                args["q"] = q
                outputs["q_out"] = np.full((m, heads * dk + gap), 77, F32)
                args["q_out_stride"] = heads * dk + gap
            else:
                want_q = rotate(normed(wide_q, args, "q_norm"), 0)
                want_k = rotate(normed(wide_k, args, "k_norm"), 0)
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
                    rows = np.ascontiguousarray(v[first : first + count, : kv_heads * dv])
                    if v_norm:
                        wide = rows.reshape(count, kv_heads, dv).astype(np.float64)
                        normed_rows = reference.rms_norm(wide, None, None, args["eps"]).reshape(count, -1)
                        expect_close(from_cache(cells, v_type), normed_rows, LOSS[v_type])
                        continue
                    np.testing.assert_array_equal(cells, to_cache(rows, v_type)[0])
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
            "v_norm": v_norm,
            "latent": latent,
        }
        return Case("qkv_rope_store", desc, build, f"runs{len(runs)}-gap{gap}")

    yield make(1, 1, 2, 1, 2, [(0, 1, 0, 0)])
    yield make(3, 1, 20, 7, 12, [(0, 2, 3, 1), (2, 3, 0, 0)], neox=False, q_norm=True, gap=3)
    yield make(4, 2, 128, 128, 128, [(0, 1, 900, 0)], "f16 f16", q_norm=True, k_norm=True)
    yield make(8, 4, 64, 64, 64, [(0, 1, 7, 2), (1, 1, 0, 0), (2, 1, 3, 1)], "f16 f16")
    yield make(4, 2, 96, 160, 48, [(0, 8, 2, 0)], "bf16 q8_0", neox=False, k_norm=True)
    yield make(4, 2, 64, 64, 64, [(i, 1, 5 * i % 31, 39 - i) for i in range(40)], "f16 f16", q_norm=True)
    yield make(2, 2, 64, 64, 32, [(0, 4, 3, 33), *((i + 4, 1, i, i) for i in range(33))], "q8_0 q8_0")
    yield make(6, 3, 80, 96, 80, [(0, 2, 1, 0)], "f32 bf16", gap=4)
    yield make(2, 1, 256, 192, 256, [(0, 3, 1, 0)], "q8_0 f16", q_norm=True, k_norm=True)
    # Norms of values, where heads of values are wider or narrower than keys.
    yield make(4, 2, 64, 96, 64, [(0, 3, 5, 1), (3, 1, 0, 0)], v_norm=True, gap=1)
    yield make(16, 2, 512, 512, 512, [(0, 2, 30, 0)], "f16 f16", q_norm=True, k_norm=True, v_norm=True)
    yield make(3, 1, 160, 32, 48, [(0, 7, 0, 0)], "f16 q8_0", neox=False, k_norm=True, v_norm=True)
    yield make(5, 1, 36, 32, 4, [(0, 3, 4, 0)], nope=9, k_norm=True, gap=2)
    yield make(16, 1, 576, 512, 64, [(0, 2, 77, 0)], "f16 f16", nope=128, k_norm=True, neox=False)
    yield make(2, 1, 96, 64, 32, [(0, 1, 5, 0)], "q8_0 q8_0", nope=1)
    # U-batches of prompts.
    prompts = [(0, 700, 2, 1), (700, 331, 0, 0)]
    yield make(3, 1, 64, 96, 48, prompts, "f16 q8_0", q_norm=True, k_norm=True, gap=2)
    yield make(2, 1, 96, 64, 32, prompts, "f16 f16", nope=8, k_norm=True)


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
        paired: bool = False,
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
            exact = cache == "f32"  # keys and values are f32 then, else f16
            wide = operand(latents[:, :lora])
            nope_keys = np.einsum("ml,hln->mhn", wide, k_b.values)
            keys = np.concatenate([nope_keys, rotary], axis=-1)
            values = np.einsum("ml,hnl->mhn", wide, v_b.values)

            def check(out: Any) -> None:
                for name, want in (("keys", keys), ("values", values)):
                    if paired:
                        got = from_pairs(out[name])
                    else:
                        got = out[name].view(F32 if exact else np.float16).astype(F32)
                    expect_close(got, want, EXACT if exact else HALVES)

            args = {"latents": padded, "row_bytes": row + gap, "k_b": k_b.bytes, "v_b": v_b.bytes}
            outputs = {
                "keys": np.full((m, heads, (4 if exact else 2) * (nope + rope)), 77, np.uint8),
                "values": np.full((m, heads, (4 if exact else 2) * dv), 77, np.uint8),
            }
            return args, outputs, check

        desc = {"m": m, "heads": heads, "nope": nope, "rope": rope, "dv": dv, "lora": lora}
        desc |= {"k_type": k_type, "v_type": v_type, "cache_type": cache}
        desc |= {"k_layout": k_layout, "v_layout": v_layout, "paired": paired}
        return Case("mla_expand", desc, build, f"gap={gap}")

    yield make(1, 1, (1, 1, 1, 1))
    yield make(5, 3, (20, 6, 12, 20))
    yield make(130, 2, (40, 8, 24, 72), gap=16)
    yield make(7, 2, (136, 16, 144, 64), "f32 plain", "f32")
    yield make(70, 17, (32, 16, 32, 96), "bf16 gpu", "bf16")
    for dtype in (*SCALES, *GPU_FORMS):
        k = geometry(dtype)[0]
        yield make(3, 2, (k, 32, 16, k), f"{dtype} gpu", "q8_0")
        yield make(67, 2, (k, 32, 16, k), f"{dtype} gpu", "f32")
    yield make(200, 2, (128, 64, 128, 512), "f16 gpu", "f32")
    yield make(5, 3, (21, 6, 13, 23), "bf16 plain", "f32", gap=4)
    yield make(131, 1, (200, 5, 136, 36), "f16 plain", "f32")
    # Matrices that end within a stripe, and what a whole kv_b of an older file becomes.
    yield make(65, 3, (32, 8, 20, 40), "f16 gpu", v_weight="f16 plain")
    yield make(9, 2, (64, 8, 64, 64), "f32 plain", v_weight="q4_0 gpu", gap=2)
    # Pairs: whole blocks of latents and columns, and parts of them.
    yield make(260, 2, (128, 64, 128, 512), "q4_0 gpu", "f32", paired=True)
    yield make(131, 17, (136, 8, 40, 72), "f32 plain", "f32", gap=4, paired=True)
    yield make(5, 1, (8, 16, 264, 100), "bf16 plain", "f32", paired=True)
    # Several tiles of other caches: whole blocks of latents, and parts of them.
    yield make(260, 2, (128, 64, 128, 512), "q4_0 gpu")
    yield make(129, 3, (96, 32, 136, 160), "q8_0 gpu", "q8_0")
    yield make(70, 2, (130, 8, 66, 96), "f16 plain", "bf16")
