"""The ops of one layer in NumPy float64, written for reading: what every kernel is compared with.

Arrays have the shapes of the C++ Args structs (csrc/ops/args.h); nothing here is fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ops.rounding import operand, softmax_weights

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Array = NDArray[np.float64]

Run = tuple[int, int, int, int]  # first_token, n_tokens, position, slot


def rms_norm(x: Array, weight: Array | None, residual: Array | None, eps: float) -> Array:
    """x [..., n] -> x / sqrt(mean(x^2) + eps) * weight + residual."""
    out = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    if weight is not None:
        out = out * weight
    return out if residual is None else out + residual


def layer_norm(
    x: Array, weight: Array | None, bias: Array | None, residual: Array | None, eps: float
) -> Array:
    """x [..., n] -> (x - mean(x)) / sqrt(var(x) + eps) * weight + bias + residual."""
    x = x - np.mean(x, axis=-1, keepdims=True)
    out = rms_norm(x, weight, None, eps)
    out = out if bias is None else out + bias
    return out if residual is None else out + residual


def index_scores(q: Array, weights: Array, keys: Array, runs: Sequence[Run]) -> list[Array]:
    """q [m, heads, dk], weights [m, heads], keys [slots, ctx, dk] -> the scores of each token's positions."""
    scores: list[Array] = [np.zeros(0)] * len(q)
    for first_token, n_tokens, position, slot in runs:
        for t in range(n_tokens):
            row = first_token + t
            products = q[row] @ keys[slot, : position + t + 1].T
            scores[row] = weights[row] @ np.maximum(products, 0)
    return scores


def rope(
    x: Array, positions: Sequence[int], inv_freq: Array, *, n_rot: int, offset: int, neox: bool, mscale: float
) -> Array:
    """x [m, heads, head_dim], rotated in dimensions [offset, offset + n_rot)."""
    out = x.copy()
    half = n_rot // 2
    first = np.arange(half) if neox else 2 * np.arange(half)
    second = first + (half if neox else 1)
    for token, position in enumerate(positions):
        angle = position * inv_freq
        cos, sin = np.cos(angle) * mscale, np.sin(angle) * mscale
        a, b = x[token, :, offset + first], x[token, :, offset + second]
        # Indexing with a scalar and an array puts the array's axis first.
        out[token, :, offset + first] = a * cos[:, None] - b * sin[:, None]
        out[token, :, offset + second] = a * sin[:, None] + b * cos[:, None]
    return out


def sigmoid_gate(x: Array, gate: Array) -> Array:
    """x [m, n] times the sigmoid of gate [m, gates], each of which scales n / gates elements."""
    return x * np.repeat(1 / (1 + np.exp(-gate)), x.shape[1] // gate.shape[1], axis=1)


def route_probabilities(logits: Array, gating: str) -> Array:
    """Probabilities [m, experts] of a softmax or a sigmoid; softmax_selected keeps the logits."""
    if gating == "softmax":
        e = np.exp(logits - logits.max(axis=-1, keepdims=True))
        return e / e.sum(axis=-1, keepdims=True)
    return 1 / (1 + np.exp(-logits)) if gating == "sigmoid" else logits


def route_choice(
    logits: Array, bias: Array | None, *, used: int, groups: int, groups_used: int, gating: str
) -> NDArray[np.int32]:
    """The chosen experts [m, used]: best score first, the lower id of equals."""
    scores = route_probabilities(logits, gating)
    scores = scores if bias is None else scores + bias
    m, experts = scores.shape
    by_group = scores.reshape(m, groups, experts // groups)
    group_scores = np.sort(by_group, axis=-1)[:, :, -2:].sum(axis=-1)
    best_groups = np.argsort(-group_scores, axis=-1, kind="stable")[:, :groups_used]
    allowed = np.zeros((m, groups), bool)
    np.put_along_axis(allowed, best_groups, True, axis=1)
    scores = np.where(np.repeat(allowed, experts // groups, axis=1), scores, -np.inf)
    return np.argsort(-scores, axis=-1, kind="stable")[:, :used].astype(np.int32)


def route_weights(
    logits: Array, ids: NDArray[np.int32], *, gating: str, normalize: bool, scale: float
) -> Array:
    """Weights [m, used] of given experts."""
    weights = np.take_along_axis(route_probabilities(logits, gating), ids.astype(np.int64), axis=1)
    if gating == "softmax_selected":
        weights = route_probabilities(weights, "softmax")
    if normalize:
        weights = weights / np.maximum(weights.sum(axis=-1, keepdims=True), 2.0**-14)
    return weights * scale


def moe_sum(x: Array, weights: Array, residual: Array | None, scale: float) -> Array:
    """x [m, used, n] -> residual + scale * sum of weight * x over the slots."""
    out = scale * np.einsum("mun,mu->mn", x, weights)
    return out if residual is None else out + residual


def moe_split(ids: Array, places: Array) -> tuple[Array, Array]:
    """Of ids [m, used]: their place or -1, and the id where there is no place or -1."""
    found = places[ids]
    return np.where(found >= 0, found, -1), np.where(found >= 0, -1, ids)


def gated(gate: Array, up: Array, activation: str) -> Array:
    """The activations of ops::Activation, element by element."""

    def sigmoid(x: Array) -> Array:
        return 0.5 * (1 + np.tanh(0.5 * x))

    if activation == "silu":
        return gate * sigmoid(gate) * up
    if activation == "gelu_tanh":
        return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
    if activation == "relu":
        return np.maximum(gate, 0) * up
    gate = np.minimum(gate, 7)
    return gate * sigmoid(1.702 * gate) * (np.clip(up, -7, 7) + 1)


def attention(
    q: Array,
    keys: Array,
    values: Array,
    runs: Sequence[Run],
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Array | None = None,
    selected: Array | None = None,
) -> Array:
    """q [m, heads, dk], keys [slots, ctx, kv_heads, dk], values [slots, ctx, kv_heads, dv] -> [m, heads, dv].

    `selected` [m, positions]: the positions that a token reads, with -1 after them.

    A query at position p sees the keys j <= p of its slot, within a window only those with p - j < window.
    """
    m, heads, _ = q.shape
    group = heads // keys.shape[2]
    q, keys, values = operand(q * scale), operand(keys), operand(values)
    out = np.zeros((m, heads, values.shape[3]))
    for first_token, n_tokens, position, slot in runs:
        for t in range(n_tokens):
            p = position + t
            begin = 0 if window is None else max(0, p - window + 1)
            for head in range(heads):
                read = np.arange(begin, p + 1)
                if selected is not None:
                    read = selected[first_token + t][selected[first_token + t] >= 0]
                k, v = keys[slot, read, head // group], values[slot, read, head // group]
                scores = k @ q[first_token + t, head]
                if softcap is not None:
                    scores = softcap * np.tanh(scores / softcap)
                top = max(scores.max(), -np.inf if sinks is None else sinks[head])
                weights = np.exp(scores - top)
                total = weights.sum() + (0 if sinks is None else np.exp(sinks[head] - top))
                out[first_token + t, head] = softmax_weights(weights) @ v / total
    return out


def kept_tokens(logits: Array, *, top_k: int, top_p: float, min_p: float) -> NDArray[np.int64]:
    """Ids that survive top-k, then top-p, then min-p; best first, the lower id of equals."""
    order = np.argsort(-logits, kind="stable")
    if top_k > 0:
        order = order[:top_k]
    p = np.exp(logits[order] - logits[order[0]])
    if top_p < 1:
        mass = np.cumsum(p) / p.sum()
        keep = max(1, int(np.searchsorted(mass, top_p)) + 1)
        order, p = order[:keep], p[:keep]
    return order[p >= min_p * p[0]]


def sample(
    logits: Array, *, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float
) -> int:
    """Walks the kept tokens in the order of their ids until the cumulative probability exceeds `uniform`."""
    if temperature == 0:
        return int(np.argmax(logits))
    kept = np.sort(kept_tokens(logits, top_k=top_k, top_p=top_p, min_p=min_p))
    p = np.exp((logits[kept] - logits[kept].max()) / temperature)
    return int(kept[min(np.searchsorted(np.cumsum(p) / p.sum(), uniform, side="right"), len(kept) - 1)])
