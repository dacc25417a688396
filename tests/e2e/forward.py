"""A second implementation of the architectures, in NumPy with float64 and without any code of the engine.

It follows the equations of the architectures and not the engine's layers. Only the reader of the file and its
weight types are the engine's, which have tests of their own.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from dyno import _core
from forward_parts import Rows, gelu, l2, relu2, rms, sigmoid, silu, softmax

QWEN_LINEAR = ("qwen35", "qwen35moe", "qwen3next")
NEMOTRON = ("nemotron_h", "nemotron_h_moe")
SPARSE = ("deepseek32", "glm-dsa")
LATENT = ("kimi-linear", "deepseek2", *SPARSE)
KNOWN = (
    *QWEN_LINEAR, *NEMOTRON, *LATENT, "granitehybrid", "gemma4", "muse-glimmer", "minimax-m2", "lfm2",
    "lfm2moe", "mistral3", "qwen2moe", "olmo2", "smollm3", "ernie4_5-moe", "hunyuan-moe", "seed_oss", "llama",
    "qwen2", "qwen3", "qwen3moe", "gemma3", "gpt-oss", "glm4moe", "granitemoe", "bailingmoe2",
)  # fmt: skip
NORM = (
    *("muse-glimmer", "mistral3", "smollm3", "ernie4_5-moe", "llama", "granitemoe", "deepseek2", *SPARSE),
)
"""Rotation of neighbours; the others rotate element i with i + n / 2."""
GELU = ("gemma3", "gemma4")
SCALED_YARN = ("olmo2", "gpt-oss", "llama", "qwen2", "qwen3", "qwen3moe")
GROUPED = ("bailingmoe2", "deepseek2", *SPARSE)
SIGMOID = ("minimax-m2", "lfm2moe", "kimi-linear", "glm4moe", "bailingmoe2", *NEMOTRON)
SCALED = ("kimi-linear", "glm4moe", "bailingmoe2", "deepseek2", *SPARSE, *NEMOTRON)


class Forward:
    """The logits of a model file for a sequence of tokens."""

    def __init__(self, path: Any) -> None:
        self.file = _core.Gguf(path)
        self.arch = str(self.file.get("general.architecture"))
        if self.arch not in KNOWN:
            raise KeyError(self.arch)
        self.names = {t["name"] for t in self.file.tensors()}
        norm = "layer_norm_epsilon" if self.arch in NEMOTRON else "layer_norm_rms_epsilon"
        self.eps = float(self.get(f"attention.{norm}"))
        self.embd = int(self.get("embedding_length"))
        self.layers = int(self.get("block_count")) - int(self.get("nextn_predict_layers", 0))
        self.heads = int(self.get("attention.head_count"))
        self.kept: dict[str, Rows] = {}
        self.keys: list[tuple[Rows, Rows] | None] = []
        self.chosen: np.ndarray[Any, Any] | None = None
        self.margin = np.inf
        """Of sparse attention: the least distance of a chosen score from one that is not, in deviations."""

    # ---- The file ----

    def get(self, key: str, usual: Any = None) -> Any:
        found = self.file.get(f"{self.arch}.{key}")
        return usual if found is None else found

    def at(self, key: str, layer: int, usual: Any = None) -> Any:
        """A value of one layer, which may be one value of all."""
        found = self.get(key, usual)
        return found[layer] if isinstance(found, np.ndarray | list) else found

    def w(self, name: str, layer: int | None = None) -> Rows:
        full = name if layer is None else f"blk.{layer}.{name}"
        if full not in self.kept:
            self.kept[full] = self.file.dequantize(full).astype(np.float64)
        return self.kept[full]

    def has(self, name: str, layer: int | None = None) -> bool:
        return (name if layer is None else f"blk.{layer}.{name}") in self.names

    def linear(self, x: Rows, name: str, layer: int) -> Rows:
        y = x @ self.w(f"{name}.weight", layer).T
        return y + self.w(f"{name}.bias", layer) if self.has(f"{name}.bias", layer) else y

    # ---- Parts ----

    def rope(
        self,
        x: Rows,
        base: float,
        rotary: int,
        *,
        plain: bool = False,
        factors: Rows | None = None,
        halves: bool | None = None,
    ) -> Rows:
        """Rotate the first elements of each head. `plain`: without scaling. `halves`: of another pairing."""
        half = rotary // 2
        freq = base ** (-2.0 * np.arange(half) / rotary)
        gain = 1.0
        if factors is not None:
            freq = freq / factors
        if self.get("rope.scaling.type") == "linear" and not plain:
            freq = freq / self.get("rope.scaling.factor")
        if self.get("rope.scaling.type") == "yarn" and not plain:
            factor, trained = (
                self.get("rope.scaling.factor"),
                self.get("rope.scaling.original_context_length"),
            )

            def turns(beta: float) -> float:
                return float(rotary * np.log(trained / (beta * 2 * np.pi)) / (2 * np.log(base)))

            low = max(np.floor(turns(self.get("rope.scaling.yarn_beta_fast", 32.0))), 0)
            high = min(np.ceil(turns(self.get("rope.scaling.yarn_beta_slow", 1.0))), rotary - 1)
            ramp = np.clip((np.arange(half) - low) / max(high - low, 0.001), 0, 1)
            freq = freq / factor * ramp + freq * (1 - ramp)
            if self.arch in SCALED_YARN:
                gain = 0.1 * np.log(factor) + 1
        angle = np.arange(len(x))[:, None] * freq
        cos, sin = np.cos(angle)[:, None] * gain, np.sin(angle)[:, None] * gain
        y = x.copy()
        if self.arch not in NORM if halves is None else halves:
            a, b = slice(0, half), slice(half, rotary)
        else:
            a, b = slice(0, rotary, 2), slice(1, rotary, 2)
        y[..., a] = x[..., a] * cos - x[..., b] * sin
        y[..., b] = x[..., a] * sin + x[..., b] * cos
        return y

    def attend(
        self,
        q: Rows,
        k: Rows,
        v: Rows,
        scale: float,
        window: int = 0,
        sinks: Rows | None = None,
        chosen: np.ndarray[Any, Any] | None = None,
    ) -> Rows:
        n, heads = len(q), q.shape[1]
        k, v = (np.repeat(each, heads // each.shape[1], axis=1) for each in (k, v))
        scores = np.einsum("ihd,jhd->hij", q, k) * scale
        i, j = np.arange(n)[:, None], np.arange(n)[None]
        seen = (j <= i) & ((i - j < window) if window else True)
        if chosen is not None:
            seen = seen & chosen
        scores = np.where(seen, scores, -np.inf)
        if sinks is not None:  # a score of each head that attends to nothing
            scores = np.concatenate([scores, np.broadcast_to(sinks[:, None, None], (heads, n, 1))], axis=2)
        return np.einsum("hij,jhd->ihd", softmax(scores)[:, :, :n], v).reshape(n, -1)

    def conv(self, u: Rows, weight: Rows, bias: Rows | float = 0.0) -> Rows:
        """Causal, one kernel a channel, the last tap for the current token."""
        taps = weight.shape[-1]
        kernel = weight.reshape(-1, taps)
        padded = np.vstack([np.zeros((taps - 1, u.shape[1])), u])
        return (
            sum((kernel[:, t] * padded[t : t + len(u)] for t in range(taps)), start=np.zeros_like(u)) + bias
        )

    def glu(self, x: Rows, layer: int, suffix: str = "") -> Rows:
        act = gelu if self.arch in GELU else silu
        inner = act(self.linear(x, f"ffn_gate{suffix}", layer)) * self.linear(x, f"ffn_up{suffix}", layer)
        return self.linear(inner, f"ffn_down{suffix}", layer)

    def experts(self, x: Rows, chosen: np.ndarray[Any, Any], weights: Rows, layer: int) -> Rows:
        out = np.zeros((len(x), self.embd))
        down = self.w("ffn_down_exps.weight", layer)
        merged = self.has("ffn_gate_up_exps.weight", layer)
        act = gelu if self.arch in GELU else silu
        for t, (row, ids) in enumerate(zip(x, chosen, strict=True)):
            for slot, e in enumerate(ids):
                if self.arch in NEMOTRON:
                    inner = relu2(self.w("ffn_up_exps.weight", layer)[e] @ row)
                elif self.arch == "gpt-oss":
                    gate, up = (
                        self.w(f"ffn_{p}_exps.weight", layer)[e] @ row
                        + self.w(f"ffn_{p}_exps.bias", layer)[e]
                        for p in ("gate", "up")
                    )
                    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
                    inner = gate * sigmoid(1.702 * gate) * (up + 1)
                    out[t] += weights[t, slot] * self.w("ffn_down_exps.bias", layer)[e]
                else:
                    both = self.w("ffn_gate_up_exps.weight", layer)[e] if merged else None
                    gate = (
                        both[: len(both) // 2]
                        if both is not None
                        else self.w("ffn_gate_exps.weight", layer)[e]
                    )
                    up = (
                        both[len(both) // 2 :] if both is not None else self.w("ffn_up_exps.weight", layer)[e]
                    )
                    inner = act(gate @ row) * (up @ row)
                out[t] += weights[t, slot] * (down[e] @ inner)
        return out

    def mixture(self, x: Rows, layer: int, router: Rows | None = None) -> Rows:
        used = int(self.get("expert_used_count"))
        logits = (x if router is None else router) @ self.w("ffn_gate_inp.weight", layer).T
        if self.arch == "gpt-oss":
            logits = logits + self.w("ffn_gate_inp.bias", layer)
        corrected = self.has("exp_probs_b.bias", layer)
        by_sigmoid = self.arch in SIGMOID or (self.arch in ("deepseek2", *SPARSE) and corrected)
        scores = sigmoid(logits) if by_sigmoid else softmax(logits)
        ranked = scores + self.w("exp_probs_b.bias", layer) if corrected else scores
        groups = int(self.get("expert_group_count", 1))
        if self.arch in GROUPED and groups > 1:  # only the groups with the best pairs
            each = ranked.reshape(len(x), groups, -1).copy()
            best = np.sort(each, axis=-1)[:, :, -2:].sum(-1)
            left = np.argsort(-best, axis=-1)[:, int(self.get("expert_group_used_count")) :]
            np.put_along_axis(each, left[:, :, None], -np.inf, axis=1)
            ranked = each.reshape(len(x), -1)
        chosen = np.argsort(-ranked, axis=-1, kind="stable")[:, :used]
        weights = np.take_along_axis(scores, chosen, axis=-1)
        if self.arch != "qwen2moe" and (
            self.arch not in ("deepseek2", *SPARSE) or self.get("expert_weights_norm")
        ):
            weights = weights / weights.sum(-1, keepdims=True)
        if self.arch in SCALED:
            weights = weights * self.get("expert_weights_scale", 1.0)
        if self.has("ffn_down_exps.scale", layer):
            weights = weights * self.w("ffn_down_exps.scale", layer)[chosen]
        out = self.experts(x, chosen, weights, layer)
        if self.has("ffn_up_shexp.weight", layer):
            if self.arch in NEMOTRON:
                shared = self.linear(relu2(self.linear(x, "ffn_up_shexp", layer)), "ffn_down_shexp", layer)
            else:
                shared = self.glu(x, layer, "_shexp")
            if self.has("ffn_gate_inp_shexp.weight", layer):
                gate = self.w("ffn_gate_inp_shexp.weight", layer).reshape(-1, self.embd)
                shared = shared * sigmoid(x @ gate.T)
            out = out + shared
        return out

    def feed_forward(self, x: Rows, layer: int) -> Rows:
        if self.has("ffn_gate_inp.weight", layer):
            return self.mixture(x, layer)
        if self.arch in NEMOTRON:
            return self.linear(relu2(self.linear(x, "ffn_up", layer)), "ffn_down", layer)
        return self.glu(x, layer)

    # ---- Mixers ----

    def delta(self, q: Rows, k: Rows, v: Rows, beta: Rows, decay: Rows) -> Rows:
        """The gated delta rule: q, k and decay [n, heads, keys], v [n, heads, values], beta [n, heads]."""
        n, heads, keys = q.shape
        state = np.zeros((heads, keys, v.shape[2]))
        out = np.zeros_like(v)
        for t in range(n):
            state *= np.exp(decay[t])[:, :, None]
            error = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", state, k[t]))
            state += k[t][:, :, None] * error[:, None]
            out[t] = np.einsum("hkv,hk->hv", state, q[t])
        return out

    def gated_delta_net(self, x: Rows, layer: int) -> Rows:
        n, d = len(x), int(self.get("ssm.state_size"))
        nk, nv = int(self.get("ssm.group_count")), int(self.get("ssm.time_step_rank"))
        u = silu(self.conv(self.linear(x, "attn_qkv", layer), self.w("ssm_conv1d.weight", layer)))
        q, k, v = np.split(u, [nk * d, 2 * nk * d], axis=1)
        each = nv // nk
        if self.arch == "qwen3next":
            both = self.linear(x, "ssm_ba", layer).reshape(n, nk, 2, each)
            b, a = both[:, :, 0].reshape(n, nv), both[:, :, 1].reshape(n, nv)
            owner = np.arange(nv) // each
        else:
            b, a = self.linear(x, "ssm_beta", layer), self.linear(x, "ssm_alpha", layer)
            owner = np.arange(nv) % nk
        q = (l2(q.reshape(n, nk, d), self.eps) / np.sqrt(d))[:, owner]
        k = l2(k.reshape(n, nk, d), self.eps)[:, owner]
        decay = self.w("ssm_a", layer) * np.logaddexp(0, a + self.w("ssm_dt.bias", layer))
        o = self.delta(q, k, v.reshape(n, nv, d), sigmoid(b), np.repeat(decay[:, :, None], d, axis=2))
        z = self.linear(x, "attn_gate", layer).reshape(n, nv, d)
        o = rms(o, self.w("ssm_norm.weight", layer), self.eps) * silu(z)
        return self.linear(o.reshape(n, -1), "ssm_out", layer)

    def kimi_delta(self, x: Rows, layer: int) -> Rows:
        n, h, d = len(x), self.heads, int(self.get("kda.head_dim"))
        q, k, v = (
            silu(
                self.conv(self.linear(x, f"attn_{p}", layer), self.w(f"ssm_conv1d_{p}.weight", layer))
            ).reshape(n, h, d)
            for p in "qkv"
        )
        f, g = (
            self.linear(self.linear(x, f"ssm_{p}_a", layer), f"ssm_{p}_b", layer).reshape(n, h, d)
            for p in "fg"
        )
        slope = self.w("ssm_a", layer).reshape(h, 1)
        decay = slope * np.logaddexp(0, f + self.w("ssm_dt.bias", layer).reshape(h, d))
        beta = sigmoid(self.linear(x, "ssm_beta", layer))
        o = self.delta(l2(q, self.eps) / np.sqrt(d), l2(k, self.eps), v, beta, decay)
        o = rms(o, self.w("ssm_norm.weight", layer), self.eps) * sigmoid(g)
        return self.linear(o.reshape(n, -1), "attn_output", layer)

    def mamba2(self, x: Rows, layer: int) -> Rows:
        n, inner, size = len(x), int(self.get("ssm.inner_size")), int(self.get("ssm.state_size"))
        groups, heads = int(self.get("ssm.group_count")), int(self.get("ssm.time_step_rank"))
        wide = inner + 2 * groups * size
        z, u, dt = np.split(self.linear(x, "ssm_in", layer), [inner, inner + wide], axis=1)
        u = silu(self.conv(u, self.w("ssm_conv1d.weight", layer), self.w("ssm_conv1d.bias", layer)))
        xs, b, c = np.split(u, [inner, inner + groups * size], axis=1)
        xs = xs.reshape(n, heads, -1)
        b, c = (np.repeat(each.reshape(n, groups, size), heads // groups, axis=1) for each in (b, c))
        dt = np.logaddexp(0, dt + self.w("ssm_dt.bias", layer))
        a, skip = self.w("ssm_a", layer).reshape(-1), self.w("ssm_d", layer).reshape(-1)
        state = np.zeros((heads, xs.shape[2], size))
        y = np.zeros_like(xs)
        for t in range(n):
            state = np.exp(dt[t] * a)[:, None, None] * state
            state += (dt[t][:, None] * xs[t])[:, :, None] * b[t][:, None]
            y[t] = np.einsum("hds,hs->hd", state, c[t]) + skip[:, None] * xs[t]
        y = (y.reshape(n, -1) * silu(z)).reshape(n, groups, -1)
        y = rms(y, self.w("ssm_norm.weight", layer).reshape(groups, -1), self.eps)
        return self.linear(y.reshape(n, -1), "ssm_out", layer)

    def short_conv(self, x: Rows, layer: int) -> Rows:
        b, c, u = np.split(self.linear(x, "shortconv.in_proj", layer), 3, axis=1)
        return self.linear(
            c * self.conv(b * u, self.w("shortconv.conv.weight", layer)), "shortconv.out_proj", layer
        )

    def choose(self, x: Rows, low: Rows, layer: int) -> np.ndarray[Any, Any]:
        """[n, n]: the positions that a layer of sparse attention reads, by its indexer or an earlier one."""
        types = self.get("attention.indexer.types")
        if types is not None and not types[layer]:
            assert self.chosen is not None
            return self.chosen
        n, most = len(x), int(self.get("attention.indexer.top_k"))
        h, d = (int(self.get(f"attention.indexer.{name}")) for name in ("head_count", "key_length"))
        base, rotary = float(self.get("rope.freq_base")), int(self.get("rope.dimension_count"))
        q = self.linear(low, "indexer.attn_q_b", layer).reshape(n, h, d)
        k = self.linear(x, "indexer.attn_k", layer)
        k = (k - k.mean(-1, keepdims=True)) / np.sqrt(k.var(-1, keepdims=True) + 1e-6)
        k = k * self.w("indexer.k_norm.weight", layer) + self.w("indexer.k_norm.bias", layer)
        halves = self.arch == "deepseek32"
        q = self.rope(q, base, rotary, halves=halves)
        k = self.rope(k[:, None], base, rotary, halves=halves)[:, 0]
        weights = self.linear(x, "indexer.proj", layer) / np.sqrt(h)
        scores = np.einsum("th,ths->ts", weights, np.maximum(np.einsum("thd,sd->ths", q, k) / np.sqrt(d), 0))
        scores[np.arange(n)[None] > np.arange(n)[:, None]] = -np.inf
        order = np.argsort(-scores, axis=1, kind="stable")
        best = order[:, :most]
        for t in range(most, n):
            last, next_one = scores[t, order[t, most - 1]], scores[t, order[t, most]]
            if last != next_one:
                self.margin = min(self.margin, (last - next_one) / scores[t, : t + 1].std())
        self.chosen = np.zeros((n, n), bool)
        np.put_along_axis(self.chosen, best, True, axis=1)
        return self.chosen

    def latent_attention(self, x: Rows, layer: int) -> Rows:
        """MLA, which rotates the last elements of queries and one key of all heads; none in Kimi Linear."""
        n, h, rank = len(x), self.heads, int(self.get("attention.kv_lora_rank"))
        if self.has("attn_q_a.weight", layer):
            x_q = rms(self.linear(x, "attn_q_a", layer), self.w("attn_q_a_norm.weight", layer), self.eps)
            chosen = self.choose(x, x_q, layer) if self.arch in SPARSE else None
            q = self.linear(x_q, "attn_q_b", layer).reshape(n, h, -1)
        else:
            chosen = None
            q = self.linear(x, "attn_q", layer).reshape(n, h, -1)
        both = self.linear(x, "attn_kv_a_mqa", layer)
        latent = rms(both[:, :rank], self.w("attn_kv_a_norm.weight", layer), self.eps)
        shared = both[:, None, rank:]
        rotary, scale = shared.shape[2], q.shape[2] ** -0.5
        nope = q.shape[2] - rotary
        if self.arch != "kimi-linear":
            base = float(self.get("rope.freq_base"))
            q = np.concatenate([q[..., :nope], self.rope(q[..., nope:], base, rotary)], axis=2)
            shared = self.rope(shared, base, rotary)
            if self.get("rope.scaling.type") == "yarn":
                gain = 1 + self.get("rope.scaling.yarn_log_multiplier", 0) * np.log(
                    self.get("rope.scaling.factor")
                )
                scale *= gain**2
        if self.has("attn_k_b.weight", layer):
            k_up, v_up = self.w("attn_k_b.weight", layer), self.w("attn_v_b.weight", layer)
        else:
            up = self.w("attn_kv_b.weight", layer).reshape(h, -1, rank)
            k_up, v_up = up[:, :nope].transpose(0, 2, 1), up[:, nope:]
        k = np.einsum("tr,hrk->thk", latent, k_up)
        k = np.concatenate([k, np.repeat(shared, h, axis=1)], axis=2)
        v = np.einsum("tr,hvr->thv", latent, v_up)
        return self.linear(self.attend(q, k, v, scale, chosen=chosen), "attn_output", layer)

    def attention(self, x: Rows, layer: int) -> Rows:
        arch, n = self.arch, len(x)
        local = self.is_local(layer)
        swa = "_swa" if arch == "gemma4" and local else ""
        d = int(self.get(f"attention.key_length{swa}", self.embd // self.heads))
        kv = int(self.at("attention.head_count_kv", layer, self.heads))
        if arch == "bailingmoe2":
            q, *own = np.split(
                self.linear(x, "attn_qkv", layer), [self.heads * d, (self.heads + kv) * d], axis=1
            )
        else:
            q = self.linear(x, "attn_q", layer)
            own = [self.linear(x, f"attn_{p}", layer) for p in "kv" if self.has(f"attn_{p}.weight", layer)]
        gate: Rows | None = None
        if arch in QWEN_LINEAR:
            parts = q.reshape(n, self.heads, 2, d)
            q, gate = parts[:, :, 0], parts[:, :, 1].reshape(n, -1)
        if arch == "muse-glimmer":
            gate = self.linear(x, "attn_gate", layer)
        whole = arch in ("minimax-m2", "olmo2")
        after = arch == "hunyuan-moe"
        normed = self.has("attn_q_norm.weight", layer)
        rotary = int(self.get(f"rope.dimension_count{swa}", d))
        base = float(self.get("rope.freq_base", 1e4))
        if local:
            base = float(self.get("rope.freq_base_swa", 1e4 if arch == "gemma3" else base))
        factors = self.w("rope_freqs.weight") if self.has("rope_freqs.weight") and not local else None
        turned = not (
            (arch == "muse-glimmer" and not local)
            or (arch == "smollm3" and layer % 4 == 3)
            or arch in ("granitehybrid", *NEMOTRON)
        )

        def placed(y: Rows, name: str) -> Rows:
            weight = self.w(f"attn_{name}_norm.weight", layer) if normed else 1.0
            if normed and whole:
                y = rms(y.reshape(n, -1), weight, self.eps)
            y = y.reshape(n, -1, d)
            if normed and not whole and not after:
                y = rms(y, weight, self.eps)
            if turned:
                y = self.rope(y, base, rotary, plain=local and arch != "gpt-oss", factors=factors)
            return rms(y, weight, self.eps) if normed and after else y

        q = placed(q, "q")
        if self.get("attention.temperature_scale"):
            trained = self.get("rope.scaling.original_context_length")
            warm = 1 + self.get("attention.temperature_scale") * np.log(1 + np.arange(n) // trained)
            q = q * warm[:, None, None]
        last_own = self.layers - int(self.get("attention.shared_kv_layers", 0))
        if arch == "gemma4" and layer >= last_own:
            source = max(i for i in range(last_own) if self.is_local(i) == local)
            k, v = self.keys[source]  # type: ignore[misc]
        else:
            k = placed(own[0], "k")
            v = own[-1].reshape(n, kv, -1)
            if arch == "gemma4":
                v = rms(v, 1.0, self.eps)
        self.keys[layer] = (k, v)
        scale = 1.0 if arch == "gemma4" else float(self.get("attention.scale", d**-0.5))
        window = int(self.get("attention.sliding_window", 0)) if local else 0
        sinks = self.w("attn_sinks.weight", layer) if arch == "gpt-oss" else None
        o = self.attend(q, k, v, scale, window, sinks)
        return self.linear(o if gate is None else o * sigmoid(gate), "attn_output", layer)

    def is_local(self, layer: int) -> bool:
        if not self.get("attention.sliding_window"):
            return False
        if self.arch in ("gemma3", "gpt-oss"):
            return layer % 6 != 5 if self.arch == "gemma3" else layer % 2 == 0
        pattern = self.get("attention.sliding_window_pattern")
        return layer % 4 != 3 if pattern is None else bool(pattern[layer])

    def kind(self, layer: int) -> Literal["attention", "linear", "ffn"]:
        if layer == self.layers:  # of the head that drafts
            return "attention"
        if self.arch in QWEN_LINEAR:
            recurrent = self.get("attention.recurrent_layers")
            if recurrent is not None:
                return "linear" if recurrent[layer] else "attention"
            return "attention" if (layer + 1) % int(self.get("full_attention_interval", 4)) == 0 else "linear"
        if self.arch in NEMOTRON and int(self.at("feed_forward_length", layer)):
            return "ffn"
        return "attention" if int(self.at("attention.head_count_kv", layer, self.heads)) else "linear"

    def mixer(self, x: Rows, layer: int) -> Rows:
        if self.kind(layer) == "attention":
            return self.latent_attention(x, layer) if self.arch in LATENT else self.attention(x, layer)
        if self.arch in QWEN_LINEAR:
            return self.gated_delta_net(x, layer)
        if self.arch == "kimi-linear":
            return self.kimi_delta(x, layer)
        return (self.short_conv if self.arch.startswith("lfm2") else self.mamba2)(x, layer)

    # ---- Blocks ----

    def gemma4_block(self, h: Rows, layer: int, own: Rows | None) -> Rows:
        def norm(x: Rows, name: str) -> Rows:
            return rms(x, self.w(f"{name}.weight", layer), self.eps)

        h = h + norm(self.attention(norm(h, "attn_norm"), layer), "post_attention_norm")
        out = self.glu(norm(h, "ffn_norm"), layer)
        if self.has("ffn_gate_inp.weight", layer):
            routed = rms(h, 1.0, self.eps) * self.embd**-0.5 * self.w("ffn_gate_inp.scale", layer)
            mixed = self.mixture(norm(h, "pre_ffw_norm_2"), layer, routed)
            out = norm(out, "post_ffw_norm_1") + norm(mixed, "post_ffw_norm_2")
        h = h + norm(out, "post_ffw_norm")
        if own is not None:
            u = gelu(self.linear(h, "inp_gate", layer)) * own
            h = h + norm(self.linear(u, "proj", layer), "post_norm")
        return h * self.w("layer_output_scale.weight", layer)

    def block(self, h: Rows, layer: int) -> Rows:
        def norm(x: Rows, name: str, eps: float = self.eps) -> Rows:
            return rms(x, self.w(f"{name}.weight", layer), eps)

        if self.arch in NEMOTRON:
            x = norm(h, "attn_norm")
            return h + (self.feed_forward(x, layer) if self.kind(layer) == "ffn" else self.mixer(x, layer))
        if self.arch == "olmo2":
            h = h + norm(self.mixer(h, layer), "post_attention_norm")
            return h + norm(self.feed_forward(h, layer), "post_ffw_norm")
        if self.arch in ("muse-glimmer", "gemma3"):
            eps = 1e-8 if self.arch == "muse-glimmer" else self.eps
            h = h + norm(self.mixer(norm(h, "attn_norm"), layer), "post_attention_norm", eps)
            return h + norm(self.feed_forward(norm(h, "ffn_norm"), layer), "post_ffw_norm", eps)
        gain = float(self.get("residual_scale", 1.0))
        h = h + gain * self.mixer(norm(h, "attn_norm"), layer)
        second = (
            "post_attention_norm"
            if self.arch in (*QWEN_LINEAR, "seed_oss", "gpt-oss", "glm4moe")
            else "ffn_norm"
        )
        return h + gain * self.feed_forward(norm(h, second), layer)

    def layer_inputs(self, e: Rows, tokens: np.ndarray[Any, Any]) -> Rows | None:
        """[n, layers, width] of per-layer embeddings; None where the model has none."""
        width = int(self.get("embedding_length_per_layer_input", 0))
        if not width:
            return None
        own = self.w("per_layer_token_embd.weight")[tokens].reshape(len(tokens), self.layers, width)
        made = (e @ self.w("per_layer_model_proj.weight").T / np.sqrt(self.embd)).reshape(own.shape)
        made = rms(made, self.w("per_layer_proj_norm.weight"), self.eps)
        return (made + np.sqrt(width) * own) / np.sqrt(2)

    def hidden(self, tokens: np.ndarray[Any, Any]) -> Rows:
        """The rows after the final norm."""
        self.keys = [None] * self.layers
        h = self.w("token_embd.weight")[tokens]
        inputs: Rows | None = None
        if self.arch in GELU:
            h = h * np.sqrt(self.embd)
            inputs = self.layer_inputs(h, tokens)
        elif self.arch == "muse-glimmer":
            h = rms(h, 1.0, self.eps)
        h = h * float(self.get("embedding_scale", 1.0))
        for layer in range(self.layers):
            if self.arch == "gemma4":
                h = self.gemma4_block(h, layer, None if inputs is None else inputs[:, layer])
            else:
                h = self.block(h, layer)
        last = "token_embd_norm" if self.arch.startswith("lfm2") else "output_norm"
        return rms(h, self.w(f"{last}.weight"), self.eps)

    def drafts(self, tokens: np.ndarray[Any, Any]) -> Rows:
        """Logits of the head that drafts: row t is for the token after t + 1, which the text has."""
        rows, layer = self.hidden(tokens)[:-1], self.layers
        self.keys.append(None)

        def norm(x: Rows, name: str) -> Rows:
            return rms(x, self.w(f"nextn.{name}.weight", layer), self.eps)

        given = norm(self.w("token_embd.weight")[tokens[1:]], "enorm")
        h = np.hstack([given, norm(rows, "hnorm")]) @ self.w("nextn.eh_proj.weight", layer).T
        return self.head(norm(self.block(h, layer), "shared_head_norm"))

    def logits(self, tokens: np.ndarray[Any, Any]) -> Rows:
        return self.head(self.hidden(tokens))

    def head(self, rows: Rows) -> Rows:
        name = "output.weight" if self.has("output.weight") else "token_embd.weight"
        out = rows @ self.w(name).T
        scale = float(self.get("logit_scale", 1.0))
        out = out / scale if self.arch.startswith("granite") else out * scale
        cap = float(self.get("final_logit_softcapping", 0.0))
        return cap * np.tanh(out / cap) if cap else out
