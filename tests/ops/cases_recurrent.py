"""Cases of the families with recurrent state: short_conv, linear_attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ops import reference_recurrent
from ops.cases import EXACT, F32, cases, normal
from ops.harness import Case, expect_close

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ops.reference import Run

# One sequence from its beginning; one that goes on; several, not in the order of their slots, one empty.
BEGINS: list[Run] = [(0, 1, 0, 0)]
GOES_ON: list[Run] = [(0, 5, 3, 1)]
SEVERAL: list[Run] = [(0, 1, 7, 2), (1, 19, 0, 0), (20, 0, 4, 3), (20, 3, 2, 1)]


def _reach(runs: list[Run]) -> tuple[int, int, int]:
    """Tokens, slots and positions of a slot."""
    m = max(first + count for first, count, *_ in runs)
    return m, max(slot for *_, slot in runs) + 1, max(p + count for _, count, p, _ in runs)


def _wide(x: Any) -> Any:
    return None if x is None else x.astype(np.float64)


@cases("short_conv")
def short_conv_cases() -> Iterator[Case]:
    def make(
        n: int,
        taps: int,
        runs: list[Run],
        *,
        silu: bool = False,
        gated: bool = False,
        bias: bool = False,
        gap: int = 0,
    ) -> Case:
        m, slots, positions = _reach(runs)

        def build(rng: np.random.Generator) -> Any:
            x = normal(rng, m, n + gap)
            args: dict[str, Any] = {
                "x": x, "x_stride": n + gap, "y_stride": n + gap, "w": normal(rng, n, taps), "runs": runs,
                "slot_positions": positions,
            }  # fmt: skip
            if gated:
                args |= {"before": normal(rng, m, n), "after": normal(rng, m, n)}
            if bias:
                args["bias"] = normal(rng, n)
            state = normal(rng, slots, taps - 1, n)

            def check(out: Any) -> None:
                y, states = reference_recurrent.short_conv(
                    _wide(x[:, :n]),
                    _wide(args["w"]),
                    _wide(args.get("bias")),
                    _wide(state),
                    runs,
                    silu=silu,
                    before=_wide(args.get("before")),
                    after=_wide(args.get("after")),
                )
                expect_close(out["y"][:, :n], y, EXACT)
                expect_close(out["state"], states, EXACT)
                assert (out["y"][:, n:] == 77).all(), "the gap between rows was written"

            return args, {"y": np.full((m, n + gap), 77, F32), "state": state}, check

        desc = {"m": m, "n": n, "taps": taps, "silu": silu, "gated": gated}
        return Case("short_conv", desc, build, f"bias={bias}-gap={gap}-runs={len(runs)}")

    yield make(1, 2, BEGINS)
    yield make(5, 3, GOES_ON, gated=True)
    yield make(33, 4, BEGINS, silu=True)
    yield make(160, 4, SEVERAL, silu=True, gap=3)
    yield make(200, 3, SEVERAL, gated=True, gap=1)
    yield make(19, 4, SEVERAL, silu=True, bias=True)
    for taps in (5, 6, 7, 8):
        yield make(37, taps, SEVERAL, gated=taps % 2 == 0)
    yield make(70, 4, [(0, 150, 2, 1)], silu=True)
    yield make(3, 4, [(0, 2100, 0, 0)], silu=True)
    # One token of each of many sequences, between them prompts that end a strip or begin one.
    counts = [1] * 40 + [48, 1, 33, 1, 0, 17] + [1] * 9
    first = [sum(counts[:i]) for i in range(len(counts))]
    yield make(
        21, 4, [(at, count, i % 3, i) for i, (at, count) in enumerate(zip(first, counts, strict=True))]
    )
    # More runs than a grid has blocks in one direction.
    yield make(1, 2, [(i, 1, i % 2, i) for i in range(66_000)])


@cases("linear_attention")
def linear_attention_cases() -> Iterator[Case]:
    def make(
        k_heads: int, v_heads: int, dk: int, dv: int, runs: list[Run], *, rule: str = "delta",
        grouped: bool = False, channel_decay: bool = False, gap: int = 0, slow: bool = False,
    ) -> Case:  # fmt: skip
        m, slots, positions = _reach(runs)
        delta = rule == "delta"

        def build(rng: np.random.Generator) -> Any:
            keys, values, steps = k_heads * dk, v_heads * dv, v_heads * (dk if channel_decay else 1)
            row = 2 * keys + values + gap
            qkv = normal(rng, m, row)  # q, k and v of a token side by side, as a convolution leaves them
            # Some heads forget at once, others hardly anything.
            decay = -np.exp(rng.uniform(-8 if slow else -5, -4 if slow else 3, v_heads)).astype(F32)
            args: dict[str, Any] = {
                "q": qkv.reshape(-1), "k": qkv.reshape(-1)[keys:], "v": qkv.reshape(-1)[2 * keys :],
                "q_stride": row, "k_stride": row, "v_stride": row, "out_stride": values + gap,
                "step": normal(rng, m, steps), "decay": decay, "step_bias": normal(rng, steps), "eps": 1e-6,
                "runs": runs, "slot_positions": positions,
            }  # fmt: skip
            if delta:
                args["beta"] = normal(rng, m, v_heads)
            else:
                args["skip"] = normal(rng, v_heads)
            state = normal(rng, slots, v_heads, dk, dv)

            def check(out: Any) -> None:
                wide = _wide(qkv)
                want, states = reference_recurrent.linear_attention(
                    wide[:, :keys].reshape(m, k_heads, dk),
                    wide[:, keys : 2 * keys].reshape(m, k_heads, dk),
                    wide[:, 2 * keys : 2 * keys + values].reshape(m, v_heads, dv),
                    _wide(args["step"]).reshape(m, v_heads, -1),
                    _wide(args.get("beta")),
                    _wide(decay),
                    _wide(args["step_bias"]),
                    _wide(args.get("skip")),
                    _wide(state),
                    runs,
                    grouped=grouped,
                    eps=1e-6,
                )
                expect_close(out["out"][:, :values], want.reshape(m, values), EXACT)
                expect_close(out["state"], states, EXACT)
                assert (out["out"][:, values:] == 77).all(), "the gap between rows was written"

            return args, {"out": np.full((m, values + gap), 77, F32), "state": state}, check

        desc = {
            "m": m, "k_heads": k_heads, "v_heads": v_heads, "dk": dk, "dv": dv, "rule": rule,
            "grouped": grouped, "channel_decay": channel_decay,
        }  # fmt: skip
        return Case("linear_attention", desc, build, f"gap={gap}-runs={len(runs)}-slow={slow}")

    yield make(1, 1, 1, 1, BEGINS)
    yield make(2, 6, 16, 16, GOES_ON)
    yield make(2, 6, 24, 20, SEVERAL, grouped=True, gap=3)
    yield make(1, 2, 128, 128, [(0, 2, 0, 0)])
    yield make(2, 4, 32, 48, [(0, 70, 0, 0)])
    yield make(1, 2, 128, 128, [(0, 75, 3, 0)])
    yield make(1, 1, 200, 40, [(0, 45, 3, 1)])
    yield make(1, 1, 500, 36, [(0, 21, 3, 0)], gap=2)
    # Hardly any decay: every token of a chunk depends on all before it.
    yield make(1, 1, 32, 33, [(0, 130, 1, 0)], slow=True)
    yield make(2, 6, 16, 32, SEVERAL, rule="additive", grouped=True)
    yield make(1, 3, 19, 7, [(0, 67, 5, 1)], rule="additive", gap=1)
    yield make(3, 3, 16, 16, SEVERAL, channel_decay=True)
    yield make(2, 2, 40, 33, [(0, 40, 2, 0)], channel_decay=True, gap=2)
