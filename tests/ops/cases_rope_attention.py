"""Cases of rope_attention: qkv_rope_store and attention in one launch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ops import reference
from ops.cache_types import LOSS, from_cache, to_cache
from ops.cases import EXACT, F32, cases, normal
from ops.cases_attention import normed, rotated
from ops.harness import Case, expect_close

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray


FLIPS = {"f32": EXACT, "f16": 1e-9, "bf16": 1e-7, "q8_0": 1e-7}
"""NMSE of results over keys of which a few were rounded the other way, because a rotation in float32 differs
from one in float64."""


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
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    settled: bool = True,
    gap: int = 0,
    deep: int = 0,
) -> Case:
    k_type, v_type = types.split()
    latent = nope is not None
    m = max(first + count for first, count, _, _ in runs)
    ctx = max(position + count for _, count, position, _ in runs) + 1
    slots = max(slot for *_, slot in runs) + 1
    rest = dk - n_rot if latent else 0
    scale = float(1 / np.sqrt(dk))

    def build(rng: np.random.Generator) -> Any:
        q = normal(rng, m, heads * dk + gap) * F32(2)
        k = normal(rng, m, kv_heads * dk + gap)
        positions = np.zeros(m, np.int32)
        for first, count, position, _ in runs:
            positions[first : first + count] = position + np.arange(count)
        inv_freq = (10_000.0 ** (-2 * np.arange(n_rot // 2) / n_rot)).astype(F32)
        args: dict[str, Any] = {
            "q": q,
            "q_stride": heads * dk + gap,
            "k": k,
            "k_stride": kv_heads * dk + gap,
            "inv_freq": inv_freq,
            "mscale": 1.25,
            "eps": 1e-5,
            "positions": positions,
            "scale": scale,
            "slot_positions": ctx,
            "runs": runs,
            **({"depth": deep} if deep else {}),
            "settled": int(settled),
            "out_stride": heads * dv + gap,
        }
        if latent:
            rotary = normal(rng, m, heads, nope + n_rot)
            args["q_rotary"] = rotary
        else:
            v = normal(rng, m, kv_heads * dv + gap)
            args |= {"v": v, "v_stride": kv_heads * dv + gap}
        if q_norm:
            args["q_norm"] = normal(rng, dk)
        if k_norm:
            args["k_norm"] = normal(rng, rest if latent else dk)
        if window is not None:
            args["window"] = window
        if softcap is not None:
            args["softcap"] = softcap
        if sinks:
            args["sinks"] = normal(rng, heads)

        outputs: dict[str, NDArray[Any]] = {"out": np.full((m, heads * dv + gap), 77, F32)}
        widths = {"k_cache": (k_type, dk)} if latent else {"k_cache": (k_type, dk), "v_cache": (v_type, dv)}
        row_bytes = {}
        for name, (dtype, width) in widths.items():
            packed, _ = to_cache(normal(rng, slots, ctx, kv_heads * width), dtype)
            row_bytes[name] = packed.shape[-1]
            between = rng.integers(0, 256, (slots, ctx, 4 * gap)).astype(np.uint8)
            outputs[name] = np.concatenate([packed, between], axis=-1)
            for _, count, position, slot in runs:  # NaN: what stood there is not read
                outputs[name][slot, position : position + count, : row_bytes[name]] = 0xFF
            args[name.replace("cache", "row_bytes")] = outputs[name].shape[-1]
        before = {name: outputs[name].copy() for name in widths}

        def rotate(x: Any, offset: int) -> Any:
            return rotated(x, args, positions, n_rot=n_rot, offset=offset, neox=neox)

        wide_q = q[:, : heads * dk].reshape(m, heads, dk).astype(np.float64)
        wide_k = k[:, : kv_heads * dk].reshape(m, kv_heads, dk).astype(np.float64)
        if latent:
            wide_q[..., rest:] = rotate(rotary[..., nope:].astype(np.float64), 0)
            wide_k[..., :rest] = normed(wide_k[..., :rest], args, "k_norm")
            want_k = rotate(wide_k, rest)
        else:
            wide_q = rotate(normed(wide_q, args, "q_norm"), 0)
            want_k = rotate(normed(wide_k, args, "k_norm"), 0)

        # The caches as they shall be, and what that makes of the queries.
        fresh = {"k_cache": want_k.reshape(m, -1)}
        if not latent:
            fresh["v_cache"] = v[:, : kv_heads * dv].astype(np.float64)
        if v_norm:
            heads_of_values = fresh["v_cache"].reshape(m, kv_heads, dv)
            fresh["v_cache"] = reference.rms_norm(heads_of_values, None, None, args["eps"]).reshape(m, -1)
        kept = np.ones((slots, ctx), bool)
        values = {}
        for name, (dtype, width) in widths.items():
            filled = from_cache(before[name][..., : row_bytes[name]], dtype)
            for first, count, position, slot in runs:
                kept[slot, position : position + count] = False
                rows = fresh[name][first : first + count].astype(F32)
                filled[slot, position : position + count] = to_cache(rows, dtype)[1]
            values[name] = filled.reshape(slots, ctx, kv_heads, width)
        keys = values["k_cache"]
        want = reference.attention(
            wide_q,
            keys,
            keys[..., :dv] if latent else values["v_cache"],
            runs,
            scale=scale,
            softcap=softcap,
            window=window,
            sinks=args["sinks"].astype(np.float64) if sinks else None,
        ).reshape(m, heads * dv)

        def check(out: Any) -> None:
            for name, (dtype, _) in widths.items():
                got = out[name][..., : row_bytes[name]]
                np.testing.assert_array_equal(out[name][kept], before[name][kept])
                np.testing.assert_array_equal(
                    out[name][..., row_bytes[name] :], before[name][..., row_bytes[name] :]
                )
                for first, count, position, slot in runs:
                    cells = from_cache(got[slot, position : position + count], dtype)
                    expect_close(cells, fresh[name][first : first + count], LOSS[dtype])
            expect_close(out["out"][:, : heads * dv], want, FLIPS[k_type])
            assert (out["out"][:, heads * dv :] == 77).all(), "the gap between rows was written"

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
        "sinks": sinks,
        "windowed": window is not None,
        "softcap": softcap is not None,
    }
    return Case(
        "rope_attention",
        desc,
        build,
        f"runs{len(runs)}-ctx{ctx}-settled={settled}-gap{gap}" + (f"-deep={deep}" if deep else ""),
    )


@cases("rope_attention")
def rope_attention_cases() -> Iterator[Case]:
    yield make(1, 1, 2, 1, 2, [(0, 1, 0, 0)])
    yield make(3, 1, 20, 7, 12, [(0, 2, 3, 1), (2, 3, 0, 0)], neox=False, q_norm=True, gap=3)
    # One token at depths around the tiles and blocks of keys.
    for depth in (0, 15, 16, 127, 128, 1500):
        yield make(8, 2, 128, 128, 128, [(0, 1, depth, 0)], "f16 f16", q_norm=True, k_norm=True)
    yield make(32, 4, 128, 128, 128, [(0, 1, 300, 1)], "f16 f16", q_norm=True, k_norm=True, settled=False)
    yield make(16, 2, 64, 64, 64, [(0, 1, 200, 0)], "f16 f16", sinks=True, window=128)
    yield make(8, 2, 128, 128, 64, [(0, 1, 260, 0)], "q8_0 q8_0", neox=False)
    yield make(4, 2, 256, 256, 256, [(0, 1, 140, 0)], "bf16 bf16", softcap=20.0, q_norm=True, k_norm=True)
    # One token with few query rows for a kv head, windows around tiles, rotations of a part of a head.
    yield make(8, 8, 64, 64, 64, [(0, 1, 33, 1)], "f16 f16", neox=False, k_norm=True)
    yield make(12, 4, 128, 128, 64, [(0, 1, 519, 0)], "bf16 bf16", q_norm=True, window=129)
    yield make(28, 4, 128, 128, 128, [(0, 1, 1030, 0)], "f16 f16", neox=False, sinks=True)
    yield make(16, 2, 64, 64, 16, [(0, 1, 70, 0)], "bf16 bf16", window=1, settled=False)
    yield make(5, 1, 64, 64, 32, [(0, 1, 2100, 0)], "f16 f16", q_norm=True, window=2000)
    # Several steps of each block, and parts without keys.
    yield make(8, 1, 128, 128, 128, [(0, 1, 5000, 0)], "f16 f16", k_norm=True)
    yield make(7, 1, 64, 64, 64, [(0, 1, 1900, 0)], "bf16 bf16", sinks=True)
    # Several tokens of a sequence and several sequences; new keys in more than one block.
    yield make(6, 1, 96, 64, 48, [(0, 2, 127, 1), (2, 1, 5, 0)], "f16 f16", window=100, k_norm=True)
    yield make(5, 1, 72, 40, 72, [(0, 8, 250, 0)], "f16 f16", gap=3)
    yield make(8, 4, 64, 64, 32, [(0, 1, 7, 2), (1, 5, 0, 0), (6, 1, 390, 1)], "q8_0 q8_0", q_norm=True)
    yield make(64, 2, 64, 64, 64, [(0, 3, 130, 0)], "bf16 bf16", neox=False)
    yield make(4, 2, 96, 160, 48, [(0, 8, 2, 0)], "bf16 q8_0", k_norm=True)
    for heads, dim in ((16, 64), (8, 128), (4, 256)):  # q8_0 in several turns, new tokens in two tiles
        yield make(
            heads, heads // 4, dim, dim, dim, [(0, 6, 1019, 1), (6, 2, 140, 0)], "q8_0 q8_0", k_norm=True
        )
    # Divisions for deep contexts: most parts have no keys.
    for deep in (3_000, 40_000, 1 << 20):
        for types in ("f16 f16", "q8_0 q8_0"):
            yield make(16, 2, 128, 128, 128, [(0, 1, 900, 0)], types, q_norm=True, k_norm=True, deep=deep)
            yield make(8, 2, 64, 64, 64, [(0, 7, 700, 0)], types, settled=False, deep=deep)
            yield make(8, 4, 128, 128, 64, [(0, 1, 300, 1), (1, 1, 77, 0)], types, k_norm=True, deep=deep)
        yield make(28, 4, 128, 128, 128, [(0, 1, 640, 0)], "bf16 bf16", sinks=True, window=200, deep=deep)
    # A bound of the depth that is too low, which must cost only time.
    yield make(8, 2, 128, 128, 128, [(0, 1, 1500, 0)], "f16 f16", q_norm=True, deep=200)
    yield make(16, 1, 576, 512, 64, [(0, 1, 1300, 0)], "f16 f16", nope=128, k_norm=True, neox=False, deep=200)
    # Norms of values.
    for types in ("f16 f16", "bf16 bf16", "q8_0 q8_0"):
        yield make(8, 4, 128, 128, 128, [(0, 1, 300, 0)], types, q_norm=True, k_norm=True, v_norm=True)
        yield make(
            4, 2, 256, 256, 256, [(0, 3, 140, 0), (3, 1, 9, 1)], types, k_norm=True, v_norm=True, window=99
        )
    yield make(6, 2, 64, 64, 64, [(0, 1, 70, 1)], "f16 f16", v_norm=True, settled=False)
    yield make(3, 1, 20, 12, 20, [(0, 2, 5, 0)], q_norm=True, v_norm=True, gap=1)
    # Latents.
    for depth in (0, 31, 256, 1300):
        yield make(16, 1, 576, 512, 64, [(0, 1, depth, 0)], "f16 f16", nope=128, k_norm=True, neox=False)
    yield make(20, 1, 576, 512, 64, [(0, 3, 700, 1), (3, 1, 0, 0)], "bf16 bf16", nope=128, k_norm=True)
    yield make(6, 1, 136, 64, 24, [(0, 8, 250, 0)], "f16 f16", nope=9, settled=False, gap=2)
    yield make(40, 1, 96, 64, 32, [(0, 2, 5, 0)], "f16 f16", nope=16, neox=False, k_norm=True)
    yield make(5, 1, 36, 32, 4, [(0, 3, 4, 0)], nope=9, k_norm=True, gap=2)
    for depth in (0, 31, 256, 1300):
        yield make(16, 1, 576, 512, 64, [(0, 1, depth, 0)], nope=128, k_norm=True, neox=False)
    yield make(20, 1, 576, 512, 64, [(0, 3, 700, 1), (3, 1, 0, 0)], nope=128, k_norm=True)
    yield make(6, 1, 136, 64, 24, [(0, 8, 250, 0)], nope=9, settled=False, gap=2)
    yield make(40, 1, 96, 64, 32, [(0, 2, 5, 0)], nope=16, neox=False, k_norm=True)
