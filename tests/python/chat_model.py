"""A tiny model of random weights with a chat template and its control tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dyno.testing import tiny_model
from dyno.testing.gguf_writer import Array
from dyno.testing.models import byte_vocabulary

if TYPE_CHECKING:
    from pathlib import Path

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.tool_calls %}"
    "{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{% endif %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{% if thinking %}<think>{% endif %}{% endif %}{# </think> #}"
)
CONTROL = ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>")
N_VOCAB = 288


def numerics(device: str) -> str:
    """With which a text beside others is the text alone: on a GPU other kernels compute a batch."""
    return "default" if device == "cpu" else "exact"


def chat_model(
    path: Path,
    template: str | None = TEMPLATE,
    pooling_type: int | None = None,
    vocabulary: dict[int, str] | None = None,
    **options: int,
) -> Path:
    keys = byte_vocabulary(N_VOCAB)
    tokens, kinds = list(keys["tokenizer.ggml.tokens"]), [1] * 256 + [3] + [5] * (N_VOCAB - 257)  # type: ignore[call-overload]
    for i, name in enumerate(CONTROL, 257):
        tokens[i], kinds[i] = name, 3
    tokens[261], kinds[261] = "ĠĠ", 1  # the result of the only merge
    for i, name in (vocabulary or {}).items():
        tokens[i] = name
    keys["tokenizer.ggml.tokens"] = tokens
    keys["tokenizer.ggml.token_type"] = Array("int32", kinds)
    keys["tokenizer.ggml.eos_token_id"] = tokens.index("<|end|>")
    if pooling_type is not None:
        keys["llama.pooling_type"] = pooling_type
    if template is not None:
        keys["tokenizer.chat_template"] = template
    return tiny_model(path, n_vocab=N_VOCAB, metadata=keys, **{"n_layers": 1, "n_ctx": 512, **options})
