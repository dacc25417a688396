"""Random models of architectures whose layers differ in kind: recurrent ones beside attention, gemma4."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dyno.testing import TensorSpec
    from random_models import Shape, Writer

NEMOTRON = ("nemotron_h", "nemotron_h_moe")
RECURRENT = (
    *("qwen35", "qwen35moe", "qwen3next", "lfm2", "lfm2moe", "granitehybrid", "kimi-linear"),
    *NEMOTRON,
)
NEWER = (*RECURRENT, "gemma4")


def _is_recurrent(s: Shape, i: int) -> bool:
    return i % 3 != 1


def _nemotron_kind(i: int) -> str:
    return ("mamba", "ffn", "attention", "ffn")[i % 4]


def _is_local(i: int) -> bool:
    return i % 2 == 0


def _delta_rule(w: Writer, layer: str, residual: float) -> None:
    s = w.shape
    keys, values = s.linear_keys * s.linear_dim, s.linear_values * s.linear_dim
    w.matrix(layer + "attn_qkv.weight", 2 * keys + values, s.n_embd)
    w.matrix(layer + "attn_gate.weight", values, s.n_embd)
    w.vector(layer + "ssm_conv1d.weight", 2 * keys + values, s.taps, mean=0.0, std=0.5)
    if s.architecture == "qwen3next":
        w.matrix(layer + "ssm_ba.weight", 2 * s.linear_values, s.n_embd)
    else:
        w.matrix(layer + "ssm_beta.weight", s.linear_values, s.n_embd)
        w.matrix(layer + "ssm_alpha.weight", s.linear_values, s.n_embd)
    w.vector(layer + "ssm_a", s.linear_values, mean=-0.5)
    w.vector(layer + "ssm_dt.bias", s.linear_values, mean=0.0)
    w.vector(layer + "ssm_norm.weight", s.linear_dim)
    w.matrix(layer + "ssm_out.weight", s.n_embd, values, gain=residual)


def _mamba2(w: Writer, layer: str, residual: float) -> None:
    s = w.shape
    inner = s.linear_values * s.linear_dim
    channels = inner + 2 * s.linear_keys * s.linear_state
    w.matrix(layer + "ssm_in.weight", inner + channels + s.linear_values, s.n_embd)
    w.vector(layer + "ssm_conv1d.weight", channels, s.taps, mean=0.0, std=0.5)
    w.vector(layer + "ssm_conv1d.bias", channels, mean=0.0)
    w.vector(layer + "ssm_a", s.linear_values, 1, mean=-0.5)
    w.vector(layer + "ssm_d", s.linear_values, 1)
    w.vector(layer + "ssm_dt.bias", s.linear_values, mean=0.0)
    w.vector(layer + "ssm_norm.weight", s.linear_keys, inner // s.linear_keys)
    w.matrix(layer + "ssm_out.weight", s.n_embd, inner, gain=residual)


def _kimi_delta(w: Writer, layer: str, residual: float) -> None:
    s = w.shape
    width = s.heads * s.linear_dim
    for name in "qkv":
        w.matrix(f"{layer}attn_{name}.weight", width, s.n_embd)
        w.vector(f"{layer}ssm_conv1d_{name}.weight", 1, width, 1, s.taps, mean=0.0, std=0.5)
    for name in "fg":
        w.matrix(f"{layer}ssm_{name}_a.weight", s.linear_dim, s.n_embd)
        w.matrix(f"{layer}ssm_{name}_b.weight", width, s.linear_dim)
    w.vector(layer + "ssm_dt.bias", width, mean=0.0)
    w.vector(layer + "ssm_a", 1, 1, s.heads, 1, mean=-0.5)
    w.matrix(layer + "ssm_beta.weight", s.heads, s.n_embd)
    w.vector(layer + "ssm_norm.weight", s.linear_dim)
    w.matrix(layer + "attn_output.weight", s.n_embd, width, gain=residual)


def _latent(w: Writer, layer: str, residual: float) -> None:
    s, rotary = w.shape, w.shape.rotary or 0
    w.matrix(layer + "attn_q.weight", s.heads * (s.nope + rotary), s.n_embd)
    w.matrix(layer + "attn_kv_a_mqa.weight", s.kv_lora + rotary, s.n_embd)
    w.vector(layer + "attn_kv_a_norm.weight", s.kv_lora)
    w.matrix(layer + "attn_k_b.weight", s.heads, s.kv_lora, s.nope)
    w.matrix(layer + "attn_v_b.weight", s.heads, s.v_head, s.kv_lora)
    w.matrix(layer + "attn_output.weight", s.n_embd, s.heads * s.v_head, gain=residual)


def _plain_attention(w: Writer, layer: str, residual: float) -> None:
    s = w.shape
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    for name, rows in (("q", q), ("k", kv), ("v", kv)):
        w.matrix(f"{layer}attn_{name}.weight", rows, s.n_embd)
    w.matrix(layer + "attn_output.weight", s.n_embd, q, gain=residual)


def _short_conv(w: Writer, layer: str, residual: float) -> None:
    n = w.shape.n_embd
    w.matrix(layer + "shortconv.in_proj.weight", 3 * n, n)
    w.vector(layer + "shortconv.conv.weight", n, w.shape.taps, mean=0.0, std=0.5)
    w.matrix(layer + "shortconv.out_proj.weight", n, n, gain=residual)


def _attention(
    w: Writer, layer: str, residual: float, *, gated: bool, head_dim: int, own: str = "qkv"
) -> None:
    s = w.shape
    q, kv = s.heads * head_dim, s.kv_heads * head_dim
    w.matrix(layer + "attn_q.weight", 2 * q if gated else q, s.n_embd)
    w.vector(layer + "attn_q_norm.weight", head_dim)
    if "k" in own:
        w.matrix(layer + "attn_k.weight", kv, s.n_embd)
        w.vector(layer + "attn_k_norm.weight", head_dim)
    if "v" in own:
        w.matrix(layer + "attn_v.weight", kv, s.n_embd)
    w.matrix(layer + "attn_output.weight", s.n_embd, q, gain=residual)


def _mixture(w: Writer, layer: str, residual: float) -> None:
    s = w.shape
    w.matrix(layer + "ffn_gate_inp.weight", s.experts, s.n_embd, kind="f32")
    if s.architecture == "gemma4":
        w.matrix(layer + "ffn_gate_up_exps.weight", s.experts, 2 * s.n_ff_expert, s.n_embd)
    else:
        w.matrix(layer + "ffn_gate_exps.weight", s.experts, s.n_ff_expert, s.n_embd)
        w.matrix(layer + "ffn_up_exps.weight", s.experts, s.n_ff_expert, s.n_embd)
    w.matrix(layer + "ffn_down_exps.weight", s.experts, s.n_embd, s.n_ff_expert, gain=residual)
    if s.architecture in ("lfm2moe", "kimi-linear"):
        w.vector(layer + "exp_probs_b.bias", s.experts, mean=0.0)
    if s.shared:
        width = s.shared * s.n_ff_expert
        w.matrix(layer + "ffn_gate_shexp.weight", width, s.n_embd)
        w.matrix(layer + "ffn_up_shexp.weight", width, s.n_embd)
        w.matrix(layer + "ffn_down_shexp.weight", s.n_embd, width, gain=residual)
        if s.architecture.startswith("qwen"):
            w.matrix(layer + "ffn_gate_inp_shexp.weight", 1, s.n_embd, kind="f32")


def _dense(w: Writer, layer: str, residual: float) -> None:
    s = w.shape
    w.matrix(layer + "ffn_gate.weight", s.n_ff, s.n_embd)
    w.matrix(layer + "ffn_up.weight", s.n_ff, s.n_embd)
    w.matrix(layer + "ffn_down.weight", s.n_embd, s.n_ff, gain=residual)


def _gemma4_layer(w: Writer, i: int, residual: float) -> None:
    s, layer = w.shape, f"blk.{i}."
    head_dim = s.head_dim if _is_local(i) else s.full_head_dim
    own = "" if i >= s.n_layers - s.shared_kv else "qkv" if _is_local(i) or s.layer_input else "qk"
    _attention(w, layer, residual, gated=False, head_dim=head_dim, own=own)
    for name in ("post_attention_norm", "ffn_norm", "post_ffw_norm"):
        w.vector(f"{layer}{name}.weight", s.n_embd)
    _dense(w, layer, residual)
    if s.experts:
        _mixture(w, layer, residual)
        for name in (
            "post_ffw_norm_1.weight",
            "pre_ffw_norm_2.weight",
            "post_ffw_norm_2.weight",
            "ffn_gate_inp.scale",
        ):
            w.vector(layer + name, s.n_embd)
        w.vector(layer + "ffn_down_exps.scale", s.experts)
    if s.layer_input:
        w.matrix(layer + "inp_gate.weight", s.layer_input, s.n_embd)
        w.matrix(layer + "proj.weight", s.n_embd, s.layer_input)
        w.vector(layer + "post_norm.weight", s.n_embd)
    w.vector(layer + "layer_output_scale.weight", 1, mean=0.8)


def _nemotron_layer(w: Writer, i: int, residual: float) -> None:
    """One sub-layer; feed-forwards are relu² without a gate."""
    s, layer, kind = w.shape, f"blk.{i}.", _nemotron_kind(i)
    if kind != "ffn":
        (_mamba2 if kind == "mamba" else _plain_attention)(w, layer, residual)
        return
    if not s.experts:
        w.matrix(layer + "ffn_up.weight", s.n_ff, s.n_embd)
        w.matrix(layer + "ffn_down.weight", s.n_embd, s.n_ff, gain=residual)
        return
    w.matrix(layer + "ffn_gate_inp.weight", s.experts, s.n_embd, kind="f32")
    w.vector(layer + "exp_probs_b.bias", s.experts, mean=0.0)
    w.matrix(layer + "ffn_up_exps.weight", s.experts, s.n_ff_expert, s.n_embd)
    w.matrix(layer + "ffn_down_exps.weight", s.experts, s.n_embd, s.n_ff_expert, gain=residual)
    w.matrix(layer + "ffn_up_shexp.weight", s.shared * s.n_ff_expert, s.n_embd)
    w.matrix(layer + "ffn_down_shexp.weight", s.n_embd, s.shared * s.n_ff_expert, gain=residual)


def _nemotron_metadata(s: Shape) -> dict[str, Any]:
    kinds = [_nemotron_kind(i) for i in range(s.n_layers)]
    return {
        "attention.head_count_kv": [s.kv_heads if kind == "attention" else 0 for kind in kinds],
        "feed_forward_length": [(s.n_ff_expert or s.n_ff) if kind == "ffn" else 0 for kind in kinds],
        "attention.layer_norm_epsilon": 1e-5,
        "rope.scaling.finetuned": False,
        "expert_weights_scale": 2.5,
        **_mamba2_metadata(s),
    }


def _mamba2_metadata(s: Shape) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": s.taps,
        "ssm.state_size": s.linear_state,
        "ssm.group_count": s.linear_keys,
        "ssm.time_step_rank": s.linear_values,
        "ssm.inner_size": s.linear_values * s.linear_dim,
    }


def write_newer(w: Writer, residual: float) -> dict[str, Any]:
    """The tensors of all layers and of the final norm; gives the metadata that goes with them."""
    s = w.shape
    for i in range(s.n_layers):
        layer = f"blk.{i}."
        w.vector(layer + "attn_norm.weight", s.n_embd)
        if s.architecture == "gemma4":
            _gemma4_layer(w, i, residual)
            continue
        if s.architecture in NEMOTRON:
            _nemotron_layer(w, i, residual)
            continue
        qwen = s.architecture.startswith("qwen")
        if s.architecture == "granitehybrid":
            (_mamba2 if _is_recurrent(s, i) else _plain_attention)(w, layer, residual)
        elif s.architecture == "kimi-linear":
            (_kimi_delta if _is_recurrent(s, i) else _latent)(w, layer, residual)
        elif not _is_recurrent(s, i):
            _attention(w, layer, residual, gated=qwen, head_dim=s.head_dim)
        elif qwen:
            _delta_rule(w, layer, residual)
        else:
            _short_conv(w, layer, residual)
        w.vector(layer + ("post_attention_norm.weight" if qwen else "ffn_norm.weight"), s.n_embd)
        if s.experts and (qwen or s.architecture == "granitehybrid" or i >= s.dense_layers):
            _mixture(w, layer, residual)
        else:
            _dense(w, layer, residual)
    w.vector(
        "token_embd_norm.weight" if s.architecture.startswith("lfm2") else "output_norm.weight", s.n_embd
    )
    if s.architecture == "gemma4":
        return _gemma4_metadata(w)
    if s.architecture in NEMOTRON:
        return _nemotron_metadata(s)
    recurrent = [_is_recurrent(s, i) for i in range(s.n_layers)]
    if s.architecture == "granitehybrid":
        return {
            "attention.head_count_kv": [0 if r else s.kv_heads for r in recurrent],
            "rope.scaling.finetuned": False,
            **_mamba2_metadata(s),
            "embedding_scale": 6.0,
            "residual_scale": 0.4,
            "attention.scale": 0.15,
            "logit_scale": 3.0,
        }
    if s.architecture == "kimi-linear":
        return {
            "attention.head_count_kv": [0 if r else 1 for r in recurrent],
            "attention.key_length": s.kv_lora + (s.rotary or 0),
            "attention.value_length": s.kv_lora,
            "attention.key_length_mla": s.nope + (s.rotary or 0),
            "attention.value_length_mla": s.v_head,
            "attention.kv_lora_rank": s.kv_lora,
            "ssm.conv_kernel": s.taps,
            "kda.head_dim": s.linear_dim,
            "leading_dense_block_count": s.dense_layers,
            "expert_gating_func": 2,
            "expert_weights_scale": 2.4,
        }
    if s.architecture.startswith("lfm2"):
        return {
            "attention.head_count_kv": [0 if r else s.kv_heads for r in recurrent],
            "shortconv.l_cache": s.taps,
            "leading_dense_block_count": s.dense_layers,
        }
    return {
        "attention.recurrent_layers": recurrent,
        "ssm.conv_kernel": s.taps,
        "ssm.state_size": s.linear_dim,
        "ssm.group_count": s.linear_keys,
        "ssm.time_step_rank": s.linear_values,
        "ssm.inner_size": s.linear_values * s.linear_dim,
    }


def draft_head(w: Writer, metadata: dict[str, Any]) -> list[TensorSpec]:
    """The tensors of a head for drafts of the qwen35 family, one block after the others. Changes the metadata
    accordingly."""
    s = w.shape
    layer = f"blk.{s.n_layers}."
    metadata[f"{s.architecture}.block_count"] = s.n_layers + 1
    metadata[f"{s.architecture}.nextn_predict_layers"] = 1
    metadata[f"{s.architecture}.attention.recurrent_layers"] += [False]
    w.vector(layer + "attn_norm.weight", s.n_embd)
    _attention(w, layer, 1.0, gated=True, head_dim=s.head_dim)
    w.vector(layer + "post_attention_norm.weight", s.n_embd)
    (_mixture if s.experts else _dense)(w, layer, 1.0)
    w.matrix(layer + "nextn.eh_proj.weight", s.n_embd, 2 * s.n_embd)
    for name in ("enorm", "hnorm", "shared_head_norm"):
        w.vector(f"{layer}nextn.{name}.weight", s.n_embd)
    return w.tensors


def _gemma4_metadata(w: Writer) -> dict[str, Any]:
    s = w.shape
    # "Proportional" rope of the full layers: the first share of their frequencies turns.
    w.numbers(
        "rope_freqs.weight", [1.0 if i < s.full_head_dim // 8 else 1e30 for i in range(s.full_head_dim // 2)]
    )
    if s.layer_input:
        width = s.layer_input * s.n_layers
        w.matrix("per_layer_token_embd.weight", s.n_vocab, width)
        w.matrix("per_layer_model_proj.weight", width, s.n_embd)
        w.vector("per_layer_proj_norm.weight", s.layer_input)
    return {
        "attention.key_length": s.full_head_dim,
        "attention.value_length": s.full_head_dim,
        "attention.key_length_swa": s.head_dim,
        "attention.value_length_swa": s.head_dim,
        "attention.sliding_window": s.window,
        "attention.sliding_window_pattern": [_is_local(i) for i in range(s.n_layers)],
        "attention.shared_kv_layers": s.shared_kv,
        "embedding_length_per_layer_input": s.layer_input,
        "rope.dimension_count": s.full_head_dim,
        "rope.dimension_count_swa": s.head_dim,
        "rope.freq_base": 1_000_000.0,
        "rope.freq_base_swa": 10_000.0,
        "final_logit_softcapping": 5.0,
    }
