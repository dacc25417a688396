"""Models of random weights of every architecture in dimensions that no shipped file has."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from dyno.testing import BLOCK_GEOMETRY, TensorSpec, pack_tensor, random_blocks, tiny_gguf
from random_newer import NEWER, draft_head, write_newer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

# The type that a quantiser takes if rows are not a multiple of 256, as in llama.cpp.
_NARROW = {
    "q2_k": "q4_0",
    "q3_k": "q4_0",
    "q4_k": "q5_0",
    "q5_k": "q5_1",
    "q6_k": "q8_0",
    "iq4_xs": "iq4_nl",
}


LATENT = ("deepseek2", "deepseek32", "glm-dsa")
SPARSE = ("deepseek32", "glm-dsa")


@dataclass(frozen=True)
class Shape:
    """Dimensions of a model; what an architecture lacks is ignored."""

    architecture: str
    types: tuple[str, ...]
    """Types of the matrices, one after the other."""
    n_embd: int
    heads: int
    kv_heads: int
    head_dim: int
    n_ff: int
    n_vocab: int
    n_layers: int = 2
    rotary: int | None = None
    """Rotary elements of a head; None: all, or half where the architecture has partial rotation."""
    experts: int = 0
    used: int = 0
    n_ff_expert: int = 0
    shared: int = 0
    """Shared experts."""
    groups: int = 1
    groups_used: int = 1
    dense_layers: int = 1
    """Leading layers without experts, where the architecture has them."""
    window: int = 24
    q_lora: int = 0
    kv_lora: int = 0
    nope: int = 0
    v_head: int = 0
    split_kv_b: bool = True
    tied: bool = False
    taps: int = 4
    """Of a short convolution."""
    linear_keys: int = 0
    """Key heads of the gated delta rule."""
    linear_values: int = 0
    linear_dim: int = 0
    linear_state: int = 0
    """Rows of a state of Mamba-2."""
    full_head_dim: int = 0
    """Of layers without a window, where it differs."""
    shared_kv: int = 0
    """Last layers that read the cache of others."""
    layer_input: int = 0
    """Width of per-layer embeddings."""
    index_heads: int = 17
    """Of the indexer of sparse attention, where the architecture has one."""
    index_dim: int = 72
    metadata: Mapping[str, object] = field(default_factory=dict)

    def has_indexer(self, layer: int) -> bool:
        """Whether a layer of sparse attention has an indexer, or uses the selection of an earlier layer."""
        types = self.metadata.get("attention.indexer.types")
        return types is None or bool(types[layer])  # type: ignore[index]

    @property
    def name(self) -> str:
        """For people and as a test's id."""
        parts = [self.architecture, f"d{self.n_embd}", f"h{self.heads}-{self.kv_heads}x{self.head_dim}"]
        if self.experts:
            parts.append(f"e{self.used}of{self.experts}")
        return "-".join([*parts, *dict.fromkeys(self.types)])


class Writer:
    """Collects tensors of unit gain."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape = shape
        self.rng = np.random.default_rng(seed)
        self.tensors: list[TensorSpec] = []
        self._matrices = 0

    def vector(self, name: str, *size: int, mean: float = 1.0, std: float = 0.1) -> None:
        values = self.rng.normal(mean, std, int(np.prod(size))).astype(np.float32)
        self.tensors.append(TensorSpec(name, size, "f32", pack_tensor("f32", values)))

    def numbers(self, name: str, values: list[float]) -> None:
        data = pack_tensor("f32", np.array(values, np.float32))
        self.tensors.append(TensorSpec(name, (len(values),), "f32", data))

    def matrix(self, name: str, *size: int, gain: float = 1.0, kind: str | None = None) -> None:
        if kind is None:
            kind = self.shape.types[self._matrices % len(self.shape.types)]
            self._matrices += 1
        if size[-1] % BLOCK_GEOMETRY[kind][0]:
            kind = _NARROW[kind]
        std = gain * size[-1] ** -0.5
        data = random_blocks(kind, int(np.prod(size)), self.rng, std=std)
        self.tensors.append(TensorSpec(name, size, kind, data))


def _indexer(w: Writer, layer: str) -> None:
    s = w.shape
    w.matrix(layer + "indexer.attn_q_b.weight", s.index_heads * s.index_dim, s.q_lora)
    w.matrix(layer + "indexer.attn_k.weight", s.index_dim, s.n_embd)
    w.vector(layer + "indexer.k_norm.weight", s.index_dim)
    w.vector(layer + "indexer.k_norm.bias", s.index_dim, mean=0.0)
    w.matrix(layer + "indexer.proj.weight", s.index_heads, s.n_embd, kind="f32")


def _attention(w: Writer, layer: str, residual: float) -> None:
    s = w.shape
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    if s.architecture in LATENT:
        key = s.nope + (s.rotary or 0)
        if s.q_lora:
            w.matrix(layer + "attn_q_a.weight", s.q_lora, s.n_embd)
            w.vector(layer + "attn_q_a_norm.weight", s.q_lora)
            w.matrix(layer + "attn_q_b.weight", s.heads * key, s.q_lora)
            if s.architecture in SPARSE and s.has_indexer(int(layer.split(".")[1])):
                _indexer(w, layer)
        else:
            w.matrix(layer + "attn_q.weight", s.heads * key, s.n_embd)
        w.matrix(layer + "attn_kv_a_mqa.weight", s.kv_lora + (s.rotary or 0), s.n_embd)
        w.vector(layer + "attn_kv_a_norm.weight", s.kv_lora)
        if s.split_kv_b:
            w.matrix(layer + "attn_k_b.weight", s.heads, s.kv_lora, s.nope)
            w.matrix(layer + "attn_v_b.weight", s.heads, s.v_head, s.kv_lora)
        else:
            w.matrix(layer + "attn_kv_b.weight", s.heads * (s.nope + s.v_head), s.kv_lora)
        w.matrix(layer + "attn_output.weight", s.n_embd, s.heads * s.v_head, gain=residual)
        return
    if s.architecture == "bailingmoe2":
        w.matrix(layer + "attn_qkv.weight", q + 2 * kv, s.n_embd)
    else:
        for name, rows in (("attn_q", q), ("attn_k", kv), ("attn_v", kv)):
            w.matrix(f"{layer}{name}.weight", rows, s.n_embd)
            if s.architecture in ("qwen2", "qwen2moe", "glm4moe", "gpt-oss", "seed_oss"):
                w.vector(f"{layer}{name}.bias", rows, mean=0.0)
    normed = ("qwen3", "qwen3moe", "gemma3", "bailingmoe2", "glm4moe", "hunyuan-moe", "muse-glimmer")
    if s.architecture in normed:
        w.vector(layer + "attn_q_norm.weight", s.head_dim)
        w.vector(layer + "attn_k_norm.weight", s.head_dim)
    if s.architecture == "muse-glimmer":
        w.matrix(layer + "attn_gate.weight", q, s.n_embd)
    if s.architecture in ("minimax-m2", "olmo2"):
        w.vector(layer + "attn_q_norm.weight", q)
        w.vector(layer + "attn_k_norm.weight", kv)
    if s.architecture == "gpt-oss":
        w.vector(layer + "attn_sinks.weight", s.heads, mean=0.0, std=1.0)
        w.vector(layer + "attn_output.bias", s.n_embd, mean=0.0)
    w.matrix(layer + "attn_output.weight", s.n_embd, q, gain=residual)


def _experts(w: Writer, layer: str, residual: float) -> None:
    s = w.shape
    w.matrix(layer + "ffn_gate_inp.weight", s.experts, s.n_embd, kind="f32")
    for name, rows, cols, gain in (
        ("gate", s.n_ff_expert, s.n_embd, 1.0),
        ("up", s.n_ff_expert, s.n_embd, 1.0),
        ("down", s.n_embd, s.n_ff_expert, residual),
    ):
        w.matrix(f"{layer}ffn_{name}_exps.weight", s.experts, rows, cols, gain=gain)
        if s.architecture == "gpt-oss":
            w.vector(f"{layer}ffn_{name}_exps.bias", s.experts, rows, mean=0.0)
    if s.architecture == "gpt-oss":
        w.vector(layer + "ffn_gate_inp.bias", s.experts, mean=0.0)
    biased = ("glm4moe", "bailingmoe2", "minimax-m2", "ernie4_5-moe")
    if s.architecture in biased or (s.architecture in LATENT and s.q_lora):
        w.vector(layer + "exp_probs_b.bias", s.experts, mean=0.0)
    if s.shared:
        width = s.shared * s.n_ff_expert
        w.matrix(layer + "ffn_gate_shexp.weight", width, s.n_embd)
        w.matrix(layer + "ffn_up_shexp.weight", width, s.n_embd)
        w.matrix(layer + "ffn_down_shexp.weight", s.n_embd, width, gain=residual)
        if s.architecture == "qwen2moe":
            w.matrix(layer + "ffn_gate_inp_shexp.weight", 1, s.n_embd, kind="f32")


def _metadata(s: Shape) -> dict[str, Any]:
    rotary = s.rotary or s.head_dim
    keys: dict[str, Any] = {
        "block_count": s.n_layers,
        "context_length": 4096,
        "embedding_length": s.n_embd,
        "feed_forward_length": s.n_ff,
        "attention.head_count": s.heads,
        "attention.head_count_kv": s.kv_heads,
        "attention.key_length": s.head_dim,
        "attention.value_length": s.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10000.0,
        "rope.dimension_count": rotary,
    }
    if s.architecture in LATENT:
        keys |= {
            "attention.kv_lora_rank": s.kv_lora,
            "leading_dense_block_count": s.dense_layers,
            "expert_gating_func": 2 if s.q_lora else 1,
            "expert_weights_norm": bool(s.q_lora),
            "expert_weights_scale": 2.5 if s.q_lora else 1.0,
        }
        own = {"key_length": s.nope + rotary, "value_length": s.v_head}
        if s.split_kv_b:
            keys |= {f"attention.{name}_mla": value for name, value in own.items()}
            own = {"key_length": s.kv_lora + rotary, "value_length": s.kv_lora}
        keys |= {f"attention.{name}": value for name, value in own.items()}
        if s.q_lora:
            keys["attention.q_lora_rank"] = s.q_lora
        if s.architecture in SPARSE:
            keys["attention.indexer.head_count"] = s.index_heads
            keys["attention.indexer.key_length"] = s.index_dim
    if s.architecture in ("glm4moe", "bailingmoe2"):
        keys |= {
            "leading_dense_block_count": s.dense_layers,
            "expert_gating_func": 2,
            "expert_weights_norm": True,
            "expert_weights_scale": 1.5,
        }
    if s.architecture == "ernie4_5-moe":
        keys["leading_dense_block_count"] = s.dense_layers
    if s.architecture in ("gemma3", "gpt-oss", "olmo2", "muse-glimmer"):
        keys["attention.sliding_window"] = s.window
    if s.architecture == "granitemoe":
        keys |= {"embedding_scale": 3.0, "residual_scale": 0.5, "logit_scale": 2.0, "attention.scale": 0.1}
    if s.experts:
        keys |= {
            "expert_count": s.experts,
            "expert_used_count": s.used,
            "expert_feed_forward_length": s.n_ff_expert,
            "expert_group_count": s.groups,
            "expert_group_used_count": s.groups_used,
        }
        if s.architecture == "granitemoe":
            keys["feed_forward_length"] = s.n_ff_expert
            keys["expert_shared_feed_forward_length"] = s.shared * s.n_ff_expert
        elif s.architecture == "llama":
            keys["feed_forward_length"] = s.n_ff_expert
        elif s.shared:
            keys["expert_shared_count"] = s.shared
    return {f"{s.architecture}.{name}": value for name, value in {**keys, **s.metadata}.items()}


def random_model(path: Path, shape: Shape, seed: int = 0, *, head: bool = False) -> Path:
    """Writes a model of `shape` without a vocabulary. `head`: with one for drafts, of the qwen35 family.

    Raises:
        KeyError: Rows that are no multiple of a type's block, of a type that nothing stands in for.
    """
    metadata, tensors = random_parts(shape, seed)
    if head:
        tensors += draft_head(Writer(shape, seed + 1), metadata)
    return tiny_gguf(path, metadata, tensors)


def random_parts(shape: Shape, seed: int = 0) -> tuple[dict[str, Any], list[TensorSpec]]:
    """Metadata and tensors of the same model, for a file that is written otherwise."""
    s, w = shape, Writer(shape, seed)
    residual = (2 * s.n_layers) ** -0.5
    w.matrix("token_embd.weight", s.n_vocab, s.n_embd, gain=s.n_embd**0.5)
    if s.architecture in NEWER:
        keys = _metadata(s) | {f"{s.architecture}.{k}": v for k, v in write_newer(w, residual).items()}
        if not s.tied:
            w.matrix("output.weight", s.n_vocab, s.n_embd)
        return {"general.architecture": s.architecture, "general.name": s.name, **keys}, w.tensors
    with_dense = (*LATENT, "glm4moe", "bailingmoe2", "ernie4_5-moe")
    leading = s.dense_layers if s.architecture in with_dense else 0
    norm = "post_attention_norm" if s.architecture in ("glm4moe", "gpt-oss", "seed_oss") else "ffn_norm"
    for i in range(s.n_layers):
        layer = f"blk.{i}."
        if s.architecture != "olmo2":
            w.vector(layer + "attn_norm.weight", s.n_embd)
        _attention(w, layer, residual)
        if s.architecture != "olmo2":
            w.vector(f"{layer}{norm}.weight", s.n_embd)
        if s.architecture in ("gemma3", "olmo2", "muse-glimmer"):
            w.vector(layer + "post_attention_norm.weight", s.n_embd)
            w.vector(layer + "post_ffw_norm.weight", s.n_embd)
        if s.experts and i >= leading:
            _experts(w, layer, residual)
        else:
            w.matrix(layer + "ffn_gate.weight", s.n_ff, s.n_embd)
            w.matrix(layer + "ffn_up.weight", s.n_ff, s.n_embd)
            w.matrix(layer + "ffn_down.weight", s.n_embd, s.n_ff, gain=residual)
    w.vector("output_norm.weight", s.n_embd)
    if not (s.tied or s.architecture == "gemma3"):
        w.matrix("output.weight", s.n_vocab, s.n_embd)
    return {"general.architecture": s.architecture, "general.name": s.name, **_metadata(s)}, w.tensors


_KEYS: dict[str, object] = {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0}
_YARN = {**_KEYS, "rope.scaling.original_context_length": 64, "rope.scaling.yarn_log_multiplier": 0.07}

_MLA = {"rotary": 32, "nope": 64, "v_head": 64}

SHAPES = [
    # One query head for each key-value head, and all of them for one; narrow rows, odd vocabularies.
    Shape("llama", ("q8_0",), 96, 3, 1, 64, 160, 321),
    Shape("llama", ("q4_0", "q6_k"), 480, 6, 6, 80, 224, 1000, tied=True),
    Shape("llama", ("q4_k", "q6_k"), 512, 16, 1, 128, 768, 333),
    Shape("llama", ("f16",), 384, 4, 2, 96, 416, 97, n_layers=3),
    Shape("llama", ("q5_0", "q8_0"), 192, 3, 3, 64, 0, 515, experts=3, used=1, n_ff_expert=96),
    Shape("qwen2", ("q5_1", "q8_0"), 448, 7, 1, 64, 608, 257, tied=True),
    Shape("qwen2", ("q5_k", "q6_k"), 1280, 10, 2, 128, 1024, 511),
    Shape("qwen3", ("iq4_nl", "q5_0"), 320, 5, 5, 128, 352, 301),
    Shape("qwen3", ("iq4_xs", "q3_k"), 256, 6, 2, 96, 512, 4099),
    Shape("qwen3moe", ("q4_0", "q8_0"), 288, 4, 1, 64, 0, 499, experts=60, used=8, n_ff_expert=96),
    Shape("qwen3moe", ("q4_k", "q6_k"), 256, 4, 2, 80, 0, 321, experts=10, used=3, n_ff_expert=256),
    Shape("qwen3moe", ("bf16",), 160, 2, 2, 128, 0, 129, experts=3, used=1, n_ff_expert=32),
    Shape(
        "deepseek2", ("q5_0", "q8_0"), 224, 3, 1, 0, 288, 323,
        experts=10, used=3, n_ff_expert=64, shared=2, q_lora=96, kv_lora=128, **_MLA,
    ),
    Shape(
        "deepseek2", ("q4_k", "q8_0"), 512, 4, 1, 0, 512, 401,
        experts=60, used=8, n_ff_expert=256, shared=1, groups=4, groups_used=2,
        q_lora=256, kv_lora=512, rotary=64, nope=128, v_head=128, metadata=_YARN,
    ),
    Shape(
        "deepseek2", ("q4_0",), 160, 5, 1, 0, 192, 211, n_layers=3,
        experts=3, used=1, n_ff_expert=96, shared=1, kv_lora=96, split_kv_b=False, metadata=_YARN, **_MLA,
    ),
    Shape(
        "deepseek32", ("q4_0", "q8_0"), 192, 3, 1, 0, 224, 263, metadata={"attention.indexer.top_k": 256},
        experts=12, used=3, n_ff_expert=64, shared=1, groups=4, groups_used=2, q_lora=64, kv_lora=96, **_MLA,
    ),
    Shape(
        "glm-dsa", ("q5_0", "q8_0"), 160, 2, 1, 0, 192, 261, metadata={"attention.indexer.top_k": 300},
        experts=8, used=3, n_ff_expert=64, shared=1, q_lora=64, kv_lora=64, **_MLA,
    ),
    Shape("gemma3", ("q4_0", "q6_k"), 320, 4, 2, 256, 480, 263, n_layers=7),
    Shape("gemma3", ("q8_0",), 96, 6, 1, 80, 224, 1027, n_layers=6, window=7),
    Shape("gpt-oss", ("mxfp4", "q8_0"), 352, 8, 1, 64, 0, 201, experts=10, used=3, n_ff_expert=96),
    Shape(
        "gpt-oss", ("q5_1",), 96, 5, 5, 96, 0, 203, n_layers=3, window=9,
        experts=60, used=8, n_ff_expert=64,
    ),
    Shape(
        "glm4moe", ("q4_1", "q8_0"), 288, 12, 1, 64, 320, 303, rotary=32,
        experts=10, used=8, n_ff_expert=96, shared=1,
    ),
    Shape(
        "glm4moe", ("q2_k", "q4_k"), 256, 6, 3, 128, 256, 345, rotary=64, n_layers=3, dense_layers=2,
        experts=60, used=3, n_ff_expert=256, shared=1,
    ),
    Shape(
        "granitemoe", ("q4_0", "q5_0"), 192, 6, 2, 64, 0, 411,
        experts=10, used=8, n_ff_expert=160, shared=1,
    ),
    Shape(
        "granitemoe", ("iq4_nl", "q8_0"), 224, 7, 1, 96, 0, 413, tied=True,
        experts=60, used=3, n_ff_expert=32,
    ),
    Shape(
        "bailingmoe2", ("q8_0", "q4_0"), 160, 4, 1, 80, 192, 313, rotary=40, n_layers=3,
        experts=60, used=8, n_ff_expert=64, shared=1, groups=4, groups_used=2,
    ),
    Shape(
        "bailingmoe2", ("q3_k", "q5_k"), 768, 3, 3, 128, 256, 317, rotary=64,
        experts=10, used=3, n_ff_expert=256, shared=1, groups=2, groups_used=1,
    ),
    Shape(
        "ernie4_5-moe", ("q4_k", "q8_0"), 256, 4, 1, 64, 320, 311, n_layers=3, tied=True,
        experts=10, used=3, n_ff_expert=96, shared=2,
    ),
    Shape(
        "hunyuan-moe", ("q5_0",), 160, 5, 1, 64, 0, 309,
        experts=12, used=4, n_ff_expert=64, shared=1,
    ),
    Shape(
        "minimax-m2", ("q4_0", "q6_k"), 288, 6, 2, 96, 0, 307, rotary=48,
        experts=24, used=8, n_ff_expert=64,
    ),
    Shape(
        "mistral3", ("q8_0", "q4_k"), 256, 4, 1, 64, 256, 295, metadata={
            "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 16, "rope.scaling.yarn_log_multiplier": 1.0,
            "attention.temperature_scale": 0.3,
        },
    ),
    Shape(
        "muse-glimmer", ("q5_1", "q6_k"), 224, 6, 2, 64, 288, 293, n_layers=5, window=9,
        metadata={"logit_scale": 0.5, "final_logit_softcapping": 5.0},
    ),
    Shape(
        "qwen2moe", ("q4_0", "q8_0"), 192, 4, 2, 48, 0, 291,
        experts=12, used=4, n_ff_expert=64, shared=3,
    ),
    Shape("olmo2", ("q4_1", "q8_0"), 192, 3, 3, 96, 224, 305, n_layers=5, window=11),
    Shape("seed_oss", ("q8_0", "q4_0"), 224, 5, 1, 96, 288, 299),
    Shape("smollm3", ("iq4_nl", "q5_1"), 160, 4, 2, 64, 192, 297, n_layers=5, tied=True),
    # Layers of several kinds.
    Shape(
        "qwen35", ("q4_k", "q8_0"), 256, 4, 1, 64, 320, 289, n_layers=5, rotary=16,
        linear_keys=2, linear_values=6, linear_dim=48,
    ),
    Shape(
        "qwen35", ("f16",), 96, 2, 2, 32, 128, 287, n_layers=3, rotary=8, tied=True, taps=3,
        linear_keys=3, linear_values=3, linear_dim=20,
    ),
    Shape(
        "qwen35moe", ("q5_0", "q8_0"), 160, 4, 2, 64, 0, 285, n_layers=4, rotary=32,
        experts=12, used=4, n_ff_expert=64, shared=1, linear_keys=2, linear_values=4, linear_dim=32,
    ),
    Shape(
        "qwen3next", ("q6_k", "q4_0"), 256, 4, 2, 64, 0, 283, n_layers=4, rotary=16,
        experts=10, used=3, n_ff_expert=96, shared=2, linear_keys=2, linear_values=6, linear_dim=32,
    ),
    Shape("lfm2", ("q4_0", "q8_0"), 160, 5, 1, 32, 224, 281, n_layers=5, taps=3, tied=True),
    Shape(
        "lfm2moe", ("iq4_nl", "q8_0"), 192, 4, 2, 48, 160, 279, n_layers=4, taps=5, tied=True,
        experts=10, used=3, n_ff_expert=64,
    ),
    Shape(
        "gemma4", ("q8_0", "q4_0"), 160, 4, 2, 32, 192, 277, n_layers=4, window=9, tied=True,
        full_head_dim=96,
    ),
    Shape(
        "gemma4", ("q5_0", "q6_k"), 256, 4, 1, 64, 320, 275, n_layers=4, window=17, tied=True,
        full_head_dim=128, experts=12, used=4, n_ff_expert=96,
    ),
    Shape(
        "gemma4", ("q4_k", "q8_0"), 256, 2, 1, 64, 256, 273, n_layers=6, window=11, tied=True,
        full_head_dim=96, shared_kv=2, layer_input=64,
    ),
    Shape(
        "granitehybrid", ("q8_0", "q4_0"), 160, 4, 2, 32, 96, 271, n_layers=4, tied=True,
        experts=10, used=3, n_ff_expert=96, shared=1,
        linear_keys=2, linear_values=6, linear_dim=32, linear_state=24,
    ),
    Shape(
        "kimi-linear", ("q5_0", "q8_0"), 160, 3, 1, 0, 192, 269, n_layers=4,
        experts=10, used=3, n_ff_expert=64, shared=1, linear_dim=32, kv_lora=96, **_MLA,
    ),
    Shape(
        "nemotron_h", ("q4_0", "q8_0"), 160, 4, 2, 32, 224, 267, n_layers=6,
        linear_keys=2, linear_values=6, linear_dim=32, linear_state=24,
    ),
    Shape(
        "nemotron_h_moe", ("q5_0", "q8_0"), 192, 4, 1, 64, 0, 265, n_layers=5, tied=True,
        experts=10, used=3, n_ff_expert=96, shared=2,
        linear_keys=2, linear_values=4, linear_dim=32, linear_state=32,
    ),
    # Nobody makes these, but the format allows them: no multiples of 32, many experts, all of them used.
    Shape("llama", ("f16",), 84, 3, 1, 40, 100, 97),
    Shape("llama", ("f32",), 50, 3, 1, 22, 70, 91),
    Shape("llama", ("q8_0",), 128, 31, 1, 512, 96, 97),
    Shape("qwen3moe", ("f16",), 100, 2, 1, 36, 0, 97, experts=7, used=5, n_ff_expert=44),
    Shape("qwen3moe", ("q8_0",), 128, 2, 1, 64, 0, 97, experts=512, used=10, n_ff_expert=32),
    Shape("qwen3moe", ("q8_0",), 128, 2, 1, 64, 0, 97, experts=40, used=33, n_ff_expert=32),
    Shape("gemma3", ("bf16",), 100, 2, 1, 320, 100, 97, n_layers=6),
    Shape(
        "gpt-oss", ("q8_0",), 96, 3, 3, 64, 0, 97, window=1,
        experts=5, used=5, n_ff_expert=32,
    ),
]  # fmt: skip
"""Head sizes, ratios, widths, expert counts and types that real and converted files have or could have."""
