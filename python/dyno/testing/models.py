"""Tiny random models with the tensor names, shapes and metadata of an architecture, in any dimensions and
types."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from dyno.testing.blocks import TENSOR_TYPE_IDS, pack_tensor, random_blocks, random_type
from dyno.testing.gguf_writer import Array, TensorSpec, hand_written_gguf, tiny_gguf

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping
    from pathlib import Path

# Features of each architecture beyond the common decoder: biases of q, k and v; norms of each q and k head;
# experts.
_ARCHITECTURES: Final[dict[str, frozenset[str]]] = {
    "llama": frozenset(),
    "qwen2": frozenset({"qkv_bias"}),
    "qwen3": frozenset({"qk_norm"}),
    "qwen3moe": frozenset({"qk_norm", "experts"}),
}


def byte_vocabulary(n_vocab: int, *, words: bool = False) -> dict[str, object]:
    """Metadata of a byte-level BPE vocabulary without merges: 256 bytes, one end token, and then unused
    tokens.

    Args:
        n_vocab: Number of tokens, 258 or more.
        words: Whether the tokens after the end token are two blanks and invented words. All tokens then have
            text, so that a tokenizer can be made.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    stand_ins = iter(range(256, 512))
    letters = {b: chr(b) if b in printable else chr(next(stand_ins)) for b in range(256)}
    tokens = [letters[b] for b in range(256)] + ["<|endoftext|>"]
    kinds = [1] * 256 + [3]
    for i in range(len(tokens), n_vocab):
        tokens.append(f"w{i}" if words else f"<|unused_{i}|>")
        kinds.append(1 if words else 5)
    if words:
        tokens[257] = letters[32] * 2  # the only merge
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": Array("int32", kinds),
        "tokenizer.ggml.merges": [f"{letters[32]} {letters[32]}"],
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 256,
        "tokenizer.ggml.add_bos_token": False,
    }


def tiny_model(
    path: str | os.PathLike[str],
    architecture: str = "llama",
    *,
    n_layers: int = 2,
    n_embd: int = 64,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    head_dim: int | None = None,
    n_ff: int = 128,
    n_vocab: int = 288,
    n_ctx: int = 256,
    n_experts: int = 8,
    n_experts_used: int = 2,
    n_ff_expert: int = 64,
    dtype: str = "f32",
    dtypes: Mapping[str, str] | None = None,
    tied_embeddings: bool = False,
    vocabulary: bool = True,
    rope_base: float = 10000.0,
    metadata: Mapping[str, object] | None = None,
    seed: int = 0,
) -> Path:
    """Write a model with random weights that the engine can load and run. Its output is noise.

    Args:
        path: File to write.
        architecture: llama, qwen2, qwen3 or qwen3moe.
        n_layers: Number of layers.
        n_embd: Width of the residual stream.
        n_heads: Query heads.
        n_kv_heads: Key and value heads.
        head_dim: Elements of a head; None: n_embd / n_heads.
        n_ff: Inner width of the dense FFN.
        n_vocab: Rows of the embedding; at least 257 with a vocabulary.
        n_ctx: Context length that the file states.
        n_experts: Experts per layer (qwen3moe).
        n_experts_used: Experts per token (qwen3moe).
        n_ff_expert: Inner width of an expert (qwen3moe).
        dtype: Type of all matrices. Vectors and the router stay f32. The row length must be a multiple of its
            block.
        dtypes: Types by tensor name ("blk.0.attn_q.weight"), with or without the layer ("attn_q.weight").
        tied_embeddings: Whether to leave `output.weight` out.
        vocabulary: Whether to write a byte-level BPE tokenizer.
        rope_base: Base of the rotary embedding.
        metadata: Keys to add or replace.
        seed: Seed of the weights.

    Returns:
        `path`.

    Raises:
        ValueError: The architecture is unknown, or a shape does not fit the type.
    """
    if architecture not in _ARCHITECTURES:
        raise ValueError(f"no tiny model of {architecture!r}; expected one of {sorted(_ARCHITECTURES)}")
    if vocabulary and n_vocab < 257:
        raise ValueError(f"n_vocab is {n_vocab}; a byte vocabulary needs 257 or more (or vocabulary=False)")
    traits = _ARCHITECTURES[architecture]
    dim = head_dim if head_dim is not None else n_embd // n_heads
    rng = np.random.default_rng(seed)
    tensors: list[TensorSpec] = []

    def vector(name: str, size: int, mean: float) -> None:
        values = rng.normal(mean, 0.1, size).astype(np.float32)
        tensors.append(TensorSpec(name, (size,), "f32", pack_tensor("f32", values)))

    def matrix(name: str, *shape: int, std: float | None = None, kind: str | None = None) -> None:
        # Unit gain by default, so that activations neither vanish nor explode over the layers.
        short = name.split(".", 2)[2] if name.startswith("blk.") else name
        chosen = (dtypes or {}).get(name) or (dtypes or {}).get(short) or kind or dtype
        number, block, _ = random_type(chosen)
        if shape[-1] % block:
            raise ValueError(f"{name}: rows of {shape[-1]} elements do not fit the blocks of {chosen}")
        scale = std if std is not None else shape[-1] ** -0.5
        data = random_blocks(chosen, int(np.prod(shape)), rng, std=scale, row_elements=shape[-1])
        tensors.append(TensorSpec(name, shape, number, data))

    matrix("token_embd.weight", n_vocab, n_embd, std=1.0)
    residual = (2 * n_layers) ** -0.5  # scale of the contribution of a layer to the residual stream
    q_size, kv_size = n_heads * dim, n_kv_heads * dim
    for i in range(n_layers):
        layer = f"blk.{i}."
        vector(layer + "attn_norm.weight", n_embd, 1.0)
        for name, rows in (("attn_q", q_size), ("attn_k", kv_size), ("attn_v", kv_size)):
            matrix(f"{layer}{name}.weight", rows, n_embd)
            if "qkv_bias" in traits:
                vector(f"{layer}{name}.bias", rows, 0.0)
        if "qk_norm" in traits:
            vector(layer + "attn_q_norm.weight", dim, 1.0)
            vector(layer + "attn_k_norm.weight", dim, 1.0)
        matrix(layer + "attn_output.weight", n_embd, q_size, std=residual * q_size**-0.5)
        vector(layer + "ffn_norm.weight", n_embd, 1.0)
        if "experts" in traits:
            matrix(layer + "ffn_gate_inp.weight", n_experts, n_embd, kind="f32")
            matrix(layer + "ffn_gate_exps.weight", n_experts, n_ff_expert, n_embd)
            matrix(layer + "ffn_up_exps.weight", n_experts, n_ff_expert, n_embd)
            down = residual * n_ff_expert**-0.5
            matrix(layer + "ffn_down_exps.weight", n_experts, n_embd, n_ff_expert, std=down)
        else:
            matrix(layer + "ffn_gate.weight", n_ff, n_embd)
            matrix(layer + "ffn_up.weight", n_ff, n_embd)
            matrix(layer + "ffn_down.weight", n_embd, n_ff, std=residual * n_ff**-0.5)
    vector("output_norm.weight", n_embd, 1.0)
    if not tied_embeddings:
        matrix("output.weight", n_vocab, n_embd)

    prefix = architecture + "."
    keys: dict[str, object] = {
        "general.architecture": architecture,
        "general.name": f"{architecture} of random weights",
        prefix + "block_count": n_layers,
        prefix + "context_length": n_ctx,
        prefix + "embedding_length": n_embd,
        prefix + "feed_forward_length": n_ff,
        prefix + "attention.head_count": n_heads,
        prefix + "attention.head_count_kv": n_kv_heads,
        prefix + "attention.key_length": dim,
        prefix + "attention.value_length": dim,
        prefix + "attention.layer_norm_rms_epsilon": 1e-6,
        prefix + "rope.freq_base": rope_base,
        prefix + "rope.dimension_count": dim,
        prefix + "vocab_size": n_vocab,
    }
    if "experts" in traits:
        keys[prefix + "expert_count"] = n_experts
        keys[prefix + "expert_used_count"] = n_experts_used
        keys[prefix + "expert_feed_forward_length"] = n_ff_expert
    if vocabulary:
        keys |= byte_vocabulary(n_vocab)
    keys |= dict(metadata or {})
    known = all(
        isinstance(tensor.dtype, str) or tensor.dtype in TENSOR_TYPE_IDS.values() for tensor in tensors
    )
    return (tiny_gguf if known else hand_written_gguf)(path, keys, tensors)
