"""Writes a GGUF file with the tensor shapes and types of a public model and random weights, to measure speed.

    python benchmarks/synthetic_model.py qwen35moe-35b-a3b Q4_0 out.gguf
    python benchmarks/synthetic_model.py gemma4-26b-a4b Q4_K out.gguf --layers 6    # a slice
    python benchmarks/synthetic_model.py qwen35moe-35b-a3b Q4_0 out.gguf --head     # and a head that drafts

The time of a mixture of experts depends on the experts that its router picks. So each tensor has mean zero
and a gain that keeps the hidden states of different tokens apart. All experts of all layers are used. The
busiest ones serve several times as many tokens as the mean, as in trained models. The text of such a model is
noise. It has no vocabulary; `--words` gives it one of bytes and made-up words, for servers.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import gguf
import numpy as np
from dyno.testing import Array, byte_vocabulary
from dyno.testing.blocks import random_blocks, random_type, row_bytes
from rich.console import Console

if TYPE_CHECKING:
    from collections.abc import Callable

POOL_WEIGHTS = 1 << 24
"""Random weights of one type and deviation, of which every tensor takes a part that begins elsewhere."""
ROUTER_SKEW = 0.35
"""Deviation of the logarithm of a router row's length: the busiest expert gets several times the mean."""


class ModelFile:
    """Metadata and tensors of one synthetic model, which are written tensor by tensor.

    Args:
        architecture: `general.architecture` of the file; also the prefix of its keys.
        dtype: Weight type of the matrices, by its lower-case name.
        layers: Number of layers; what a layer adds to the residual is scaled by it.
    """

    def __init__(self, architecture: str, dtype: str, layers: int, seed: int) -> None:
        self.architecture, self.dtype, self.layers = architecture, dtype, layers
        self.rng = np.random.default_rng(seed)
        self.keys: dict[str, Any] = {"block_count": layers}
        self.tensors: list[tuple[str, tuple[int, ...], str, float, float]] = []
        self._pools: dict[tuple[str, float, int], memoryview] = {}

    def matrix(self, name: str, *shape: int, gain: float = 1.0, dtype: str | None = None) -> None:
        """A matrix in NumPy order. `gain` is the deviation of its product with a vector of deviation one."""
        kind = dtype or self.dtype
        if shape[-1] % random_type(kind)[1]:
            kind = "q8_0" if shape[-1] % 32 == 0 else "f16"
        self.tensors.append((name, shape, kind, 0.0, gain * shape[-1] ** -0.5))

    def residual(self, name: str, *shape: int) -> None:
        """A matrix whose product is added to the residual stream."""
        self.matrix(name, *shape, gain=(2 * self.layers) ** -0.5)

    def vector(self, name: str, *shape: int, mean: float = 1.0, std: float = 0.0) -> None:
        """Float32 values, such as the weights of a norm."""
        self.tensors.append((name, shape, "f32", mean, std))

    def router(self, name: str, experts: int, width: int, *, gain: float = 1.0) -> None:
        """A float32 router, some of whose rows are longer than others."""
        self.tensors.append((name, (experts, width), "router", 0.0, gain * width**-0.5))

    def _data(self, shape: tuple[int, ...], kind: str, mean: float, std: float) -> list[memoryview]:
        if kind in ("f32", "router"):
            values = self.rng.normal(mean, std, shape)
            if kind == "router":
                values *= np.exp(ROUTER_SKEW * self.rng.normal(size=(shape[0], 1)))
            return [memoryview(values.astype(np.float32).tobytes())]
        row, width = row_bytes(kind, shape[-1]), shape[-1]
        key = kind, std, width
        if key not in self._pools:
            weights = max(POOL_WEIGHTS // width, 1) * width
            blocks = random_blocks(kind, weights, self.rng, std=std, row_elements=width)
            self._pools[key] = memoryview(blocks)
        pool, left = self._pools[key], int(np.prod(shape[:-1])) * row
        begin, parts = int(self.rng.integers(len(pool) // row)) * row, []
        while left:
            parts.append(pool[begin : begin + left])
            left, begin = left - len(parts[-1]), 0
        return parts

    def write(self, path: Path, name: str, *, words: bool = False) -> int:
        """Writes the file, with a vocabulary if `words`, and returns its bytes of tensors."""
        writer = gguf.GGUFWriter(path, self.architecture)
        writer.add_name(name)
        if words:
            add_words(writer, self.keys["vocab_size"])
        else:
            writer.add_tokenizer_model("none")
        for key, value in self.keys.items():
            full = f"{self.architecture}.{key}"
            if isinstance(value, list):
                writer.add_array(full, value)
            elif isinstance(value, float):
                writer.add_float32(full, value)
            else:
                writer.add_uint32(full, value)
        for tensor, shape, name_of_type, _, _ in self.tensors:
            stored = "f32" if name_of_type == "router" else name_of_type
            count = int(np.prod(shape[:-1])) * row_bytes(stored, shape[-1])
            # The package knows no types of ik_llama.cpp; it writes the number.
            kind = cast("gguf.GGMLQuantizationType", random_type(stored)[0])
            writer.add_tensor_info(tensor, shape, np.dtype(np.float32), count, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        assert writer.fout is not None
        out, total = writer.fout[0], 0
        writer.write_padding(out, out.tell())
        for _, shape, kind, mean, std in self.tensors:
            parts = self._data(shape, kind, mean, std)
            for part in parts:
                out.write(part)
            count = sum(len(part) for part in parts)
            writer.write_padding(out, count)
            total += count
        writer.close()
        return total


def add_words(writer: gguf.GGUFWriter, count: int) -> None:
    """A vocabulary of `count` tokens that all have text: a server sends an event for each of them."""
    for key, value in byte_vocabulary(count, words=True).items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, list(value.values if isinstance(value, Array) else value))


def experts(f: ModelFile, layer: str, width: int, ff: int, count: int, *, merged: bool = False) -> None:
    """Router and experts of one layer; `merged` puts gate and up into one tensor."""
    # Gemma 4 divides the router's input by the root of its width.
    f.router(layer + "ffn_gate_inp.weight", count, width, gain=width**0.5 if merged else 1.0)
    if merged:
        f.matrix(layer + "ffn_gate_up_exps.weight", count, 2 * ff, width)
    else:
        f.matrix(layer + "ffn_gate_exps.weight", count, ff, width)
        f.matrix(layer + "ffn_up_exps.weight", count, ff, width)
    f.residual(layer + "ffn_down_exps.weight", count, width, ff)


def feed_forward(f: ModelFile, layer: str, width: int, ff: int, suffix: str = "") -> None:
    """Gate, up and down matrices of a dense feed-forward."""
    f.matrix(f"{layer}ffn_gate{suffix}.weight", ff, width)
    f.matrix(f"{layer}ffn_up{suffix}.weight", ff, width)
    f.residual(f"{layer}ffn_down{suffix}.weight", width, ff)


def attention(
    f: ModelFile, layer: str, width: int, heads: int, kv: int, head: int, *, q: int = 1, v: bool = True,
    norms: bool = True,
) -> None:  # fmt: skip
    """Projections of one attention, and norms of its heads; `q` is 2 where queries carry a gate."""
    f.matrix(layer + "attn_q.weight", q * heads * head, width)
    f.matrix(layer + "attn_k.weight", kv * head, width)
    if v:
        f.matrix(layer + "attn_v.weight", kv * head, width)
    if norms:
        f.vector(layer + "attn_q_norm.weight", head)
        f.vector(layer + "attn_k_norm.weight", head)
    f.residual(layer + "attn_output.weight", width, heads * head)


def qwen35moe(dtype: str, layers: int | None, seed: int, head: bool = False) -> ModelFile:
    """Qwen3.5-35B-A3B: three gated delta rules to one full attention, 8 of 256 experts and a shared one.

    Args:
        dtype: Weight type of the matrices.
        layers: So many of the first layers; None for all.
        seed: Of the random weights.
        head: The block that predicts a further token stands behind the layers.
    """
    f = ModelFile("qwen35moe", dtype, layers or 40, seed)
    width, heads, kv, dim, ff, vocab = 2048, 16, 2, 256, 512, 248_320
    keys, values, state, taps = 16, 32, 128, 4
    f.keys |= {
        "context_length": 262_144, "embedding_length": width, "vocab_size": vocab,
        "attention.head_count": heads, "attention.head_count_kv": kv, "attention.key_length": dim,
        "attention.value_length": dim, "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e7,
        "rope.dimension_count": dim // 4, "rope.dimension_sections": [11, 11, 10, 0],
        "expert_count": 256, "expert_used_count": 8, "expert_feed_forward_length": ff,
        "expert_shared_feed_forward_length": ff, "full_attention_interval": 4, "ssm.conv_kernel": taps,
        "ssm.state_size": state, "ssm.group_count": keys, "ssm.time_step_rank": values,
        "ssm.inner_size": values * state,
    }  # fmt: skip
    f.matrix("token_embd.weight", vocab, width, gain=width**0.5)
    f.matrix("output.weight", vocab, width, dtype="q6_k")
    f.vector("output_norm.weight", width)
    if head:
        f.keys |= {"block_count": f.layers + 1, "nextn_predict_layers": 1}
    for i in range(f.layers + head):
        layer = f"blk.{i}."
        f.vector(layer + "attn_norm.weight", width)
        f.vector(layer + "post_attention_norm.weight", width)
        if i == f.layers:
            f.matrix(layer + "nextn.eh_proj.weight", width, 2 * width)
            for norm in ("enorm", "hnorm", "shared_head_norm"):
                f.vector(f"{layer}nextn.{norm}.weight", width)
        if (i + 1) % 4 == 0 or i == f.layers:
            attention(f, layer, width, heads, kv, dim, q=2)
        else:
            channels = (2 * keys + values) * state
            f.matrix(layer + "attn_qkv.weight", channels, width)
            f.matrix(layer + "attn_gate.weight", values * state, width)
            f.vector(layer + "ssm_conv1d.weight", channels, taps, mean=0.0, std=0.5)
            f.matrix(layer + "ssm_beta.weight", values, width)
            f.matrix(layer + "ssm_alpha.weight", values, width)
            f.vector(layer + "ssm_a", values, mean=-0.5, std=0.1)
            f.vector(layer + "ssm_dt.bias", values, mean=0.0, std=0.1)
            f.vector(layer + "ssm_norm.weight", state)
            f.residual(layer + "ssm_out.weight", width, values * state)
        experts(f, layer, width, ff, 256)
        feed_forward(f, layer, width, ff, "_shexp")
        f.vector(layer + "ffn_gate_inp_shexp.weight", 1, width, mean=0.0, std=width**-0.5)
    return f


def gemma4(dtype: str, layers: int | None, seed: int) -> ModelFile:
    """Gemma 4 26B-A4B: five windows to one full attention, a dense feed-forward beside 8 of 128 experts."""
    f = ModelFile("gemma4", dtype, layers or 30, seed)
    width, heads, vocab = 2816, 16, 262_144
    local = [(i + 1) % 6 != 0 for i in range(f.layers)]
    f.keys |= {
        "context_length": 262_144, "embedding_length": width, "vocab_size": vocab,
        "feed_forward_length": 2112, "attention.head_count": heads,
        "attention.head_count_kv": [8 if each else 2 for each in local], "attention.key_length": 512,
        "attention.value_length": 512, "attention.key_length_swa": 256, "attention.value_length_swa": 256,
        "attention.layer_norm_rms_epsilon": 1e-6, "attention.sliding_window": 1024,
        "attention.sliding_window_pattern": local, "attention.shared_kv_layers": 0,
        "embedding_length_per_layer_input": 0, "rope.dimension_count": 512, "rope.dimension_count_swa": 256,
        "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4, "final_logit_softcapping": 30.0,
        "expert_count": 128, "expert_used_count": 8, "expert_feed_forward_length": 704,
    }  # fmt: skip
    f.vector("rope_freqs.weight", 256)
    f.matrix("token_embd.weight", vocab, width, dtype="q6_k")
    f.vector("output_norm.weight", width)
    for i in range(f.layers):
        layer = f"blk.{i}."
        attention(f, layer, width, heads, 8 if local[i] else 2, 256 if local[i] else 512, v=local[i])
        norms = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "post_ffw_norm_1")
        for norm in (*norms, "pre_ffw_norm_2", "post_ffw_norm_2"):
            f.vector(f"{layer}{norm}.weight", width)
        f.vector(layer + "layer_output_scale.weight", 1)
        feed_forward(f, layer, width, 2112)
        experts(f, layer, width, 704, 128, merged=True)
        f.vector(layer + "ffn_gate_inp.scale", width)
        f.vector(layer + "ffn_down_exps.scale", 128)
    return f


def grouped(
    architecture: str, dtype: str, layers: int, seed: int, *, width: int, heads: int, kv: int, head: int,
    vocab: int, ff: int, base: float, count: int = 0, used: int = 8, tied: bool = False, norms: bool = True,
) -> ModelFile:  # fmt: skip
    """Grouped-query attention, and in each layer a dense feed-forward or `used` of `count` experts."""
    f = ModelFile(architecture, dtype, layers, seed)
    f.keys |= {
        "context_length": 131_072, "embedding_length": width, "vocab_size": vocab, "feed_forward_length": ff,
        "attention.head_count": heads, "attention.head_count_kv": kv, "attention.key_length": head,
        "attention.value_length": head, "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": base,
        "rope.dimension_count": head,
    }  # fmt: skip
    if count:
        f.keys |= {"expert_count": count, "expert_used_count": used, "expert_feed_forward_length": ff}
    # A tied matrix is also the output; with the gain of an embedding its logits would be far too large.
    f.matrix("token_embd.weight", vocab, width, gain=1.0 if tied else width**0.5)
    f.vector("output_norm.weight", width)
    if not tied:
        f.matrix("output.weight", vocab, width, dtype="q6_k")
    for i in range(f.layers):
        layer = f"blk.{i}."
        f.vector(layer + "attn_norm.weight", width)
        f.vector(layer + "ffn_norm.weight", width)
        attention(f, layer, width, heads, kv, head, norms=norms)
        if count:
            experts(f, layer, width, ff, count)
        else:
            feed_forward(f, layer, width, ff)
    return f


def qwen3_small(dtype: str, layers: int | None, seed: int) -> ModelFile:
    """Qwen3 0.6B: dense, embedding and output in one matrix."""
    return grouped(
        "qwen3", dtype, layers or 28, seed, width=1024, heads=16, kv=8, head=128, vocab=151_936, ff=3072,
        base=1e6, tied=True,
    )  # fmt: skip


def llama_small(dtype: str, layers: int | None, seed: int) -> ModelFile:
    """Llama 3.2 1B: dense, embedding and output in one matrix."""
    return grouped(
        "llama", dtype, layers or 16, seed, width=2048, heads=32, kv=8, head=64, vocab=128_256, ff=8192,
        base=5e5, tied=True, norms=False,
    )  # fmt: skip


def llama_large(dtype: str, layers: int | None, seed: int) -> ModelFile:
    """Llama 3.1 8B: dense."""
    return grouped(
        "llama", dtype, layers or 32, seed, width=4096, heads=32, kv=8, head=128, vocab=128_256, ff=14_336,
        base=5e5, norms=False,
    )  # fmt: skip


def qwen3moe(dtype: str, layers: int | None, seed: int) -> ModelFile:
    """Qwen3 30B-A3B: 8 of 128 experts in each layer."""
    return grouped(
        "qwen3moe", dtype, layers or 48, seed, width=2048, heads=32, kv=4, head=128, vocab=151_936, ff=768,
        base=1e6, count=128,
    )  # fmt: skip


MODELS: dict[str, Callable[[str, int | None, int], ModelFile]] = {
    "qwen3-0.6b": qwen3_small,
    "llama-1b": llama_small,
    "llama-8b": llama_large,
    "qwen3moe-30b-a3b": qwen3moe,
    "qwen35moe-35b-a3b": qwen35moe,
    "gemma4-26b-a4b": gemma4,
}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("type", help="weight type of the matrices, such as Q4_0")
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, help="the first N layers instead of all")
    parser.add_argument("--head", action="store_true", help="with a head that drafts (qwen35moe-35b-a3b)")
    parser.add_argument("--words", action="store_true", help="with a vocabulary")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    try:
        random_blocks(args.type.lower(), 256, np.random.default_rng(0))
    except ValueError as e:
        parser.error(str(e))
    if args.layers is not None and args.layers < 1:
        parser.error(f"--layers is {args.layers}; expected 1 or more")
    if args.head and args.model != "qwen35moe-35b-a3b":
        parser.error(f"--head: {args.model} is written without one; take qwen35moe-35b-a3b")
    more = {"head": True} if args.head else {}
    file = MODELS[args.model](args.type.lower(), args.layers, args.seed, **more)
    written = file.write(args.out, f"{args.model} {args.type.upper()}, random weights", words=args.words)
    Console().print(f"{args.out}: {written / 2**30:.2f} GiB, {file.layers} layers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
