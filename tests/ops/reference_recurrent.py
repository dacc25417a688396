"""Ops with recurrent state in NumPy float64, token by token, written for reading."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ops.reference import Array, Run


def short_conv(
    x: Array,
    w: Array,
    bias: Array | None,
    state: Array,
    runs: Sequence[Run],
    *,
    silu: bool,
    before: Array | None,
    after: Array | None,
) -> tuple[Array, Array]:
    """x [m, n] and state [slots, taps - 1, n] -> y [m, n] and the states after it; w [n, taps]."""
    taps = w.shape[1]
    y, states = np.zeros_like(x), state.copy()
    u = x if before is None else before * x
    for first, count, position, slot in runs:
        if count == 0:
            continue
        past = np.zeros_like(state[slot]) if position == 0 else states[slot]
        rows = np.concatenate([past, u[first : first + count]])
        out = np.stack([np.sum(w.T * rows[t : t + taps], axis=0) for t in range(count)])
        if bias is not None:
            out += bias
        if silu:
            out = out / (1 + np.exp(-out))
        y[first : first + count] = out if after is None else out * after[first : first + count]
        states[slot] = rows[len(rows) - (taps - 1) :]
    return y, states


def linear_attention(
    q: Array,
    k: Array,
    v: Array,
    step: Array,
    beta: Array | None,
    decay: Array,
    step_bias: Array,
    skip: Array | None,
    state: Array,
    runs: Sequence[Run],
    *,
    grouped: bool,
    eps: float,
) -> tuple[Array, Array]:
    """q, k [m, k_heads, dk], v [m, v_heads, dv], step [m, v_heads, 1 or dk], state [slots, v_heads, dk, dv]
    -> out like v, and the states after it. With `beta` [m, v_heads] the gated delta rule, else Mamba-2's.
    """
    out, states = np.zeros_like(v), state.copy()
    k_heads, v_heads, dk = k.shape[1], v.shape[1], k.shape[2]
    steps = np.logaddexp(0, step + step_bias.reshape(v_heads, -1))
    if beta is not None:
        q = q / np.sqrt(np.sum(q * q, axis=-1, keepdims=True) + eps) / np.sqrt(dk)
        k = k / np.sqrt(np.sum(k * k, axis=-1, keepdims=True) + eps)
    for first, count, position, slot in runs:
        if position == 0 and count > 0:
            states[slot] = 0
        for t in range(first, first + count):
            for head in range(v_heads):
                key_head = head // (v_heads // k_heads) if grouped else head % k_heads
                query, key = q[t, key_head], k[t, key_head]
                s = np.exp(decay[head] * steps[t, head])[:, None] * states[slot, head]
                if beta is None:
                    u = steps[t, head, 0] * v[t, head]
                else:
                    u = (v[t, head] - s.T @ key) / (1 + np.exp(-beta[t, head]))
                s = s + np.outer(key, u)
                states[slot, head] = s
                out[t, head] = s.T @ query
                if skip is not None:
                    out[t, head] += skip[head] * v[t, head]
    return out, states
