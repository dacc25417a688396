"""Small vocabularies as GGUF metadata, and a slow reference encoder that says what tokens are right."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from dyno.tokenizer import Tokenizer, _byte_symbols

SAMPLES = [
    "def f(x):\n\treturn x ** 2  # é\r\n",
    "😀 👩‍👩‍👧‍👦 café 日本語テキスト 中文 한국어",
    "\x00\x01\x7f\x1b[0m\u200b\ufeff a",
    "  \n \n\n   x  ",
    "12345 1,234.5 ½ ²",
    "don't WE'LL it'S HelloWorld camelCASE",
    "العربية हिन्दी ไทย e\u0301 \u00a0nbsp \u3000",
    "",
    " ",
    "\n",
]

NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6


def byte_level(
    pre: str = "qwen2", words: tuple[str, ...] = ("the", " return", "ing", "123", "\n\n"), **extra: Any
) -> dict[str, Any]:
    """A byte-level BPE vocabulary that can spell any text and merges the bytes of `words` from the left."""
    symbols = _byte_symbols()
    tokens = [symbols[b] for b in range(256)]
    merges = []
    for word in words:
        parts = [symbols[b] for b in word.encode()]
        joined = parts[0]
        for part in parts[1:]:
            if joined + part not in tokens:
                merges.append(f"{joined} {part}")
                tokens.append(joined + part)
            joined += part
    types = [NORMAL] * len(tokens)
    for text, kind in (("<|start|>", CONTROL), ("<|im_end|>", CONTROL), ("<think>", USER), ("    ", USER)):
        tokens.append(text)
        types.append(kind)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, dtype=np.int32),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": tokens.index("<|start|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.ggml.add_bos_token": False,
        **{f"tokenizer.ggml.{k}": v for k, v in extra.items()},
    }


def control_vocabulary(*names: str, **extra: Any) -> Tokenizer:
    """A tokenizer with `names` as control tokens, beside those of byte_level()."""
    metadata = byte_level(words=("Hello", "end"), **extra)
    metadata["tokenizer.ggml.tokens"] += names
    kinds = [*metadata["tokenizer.ggml.token_type"], *[CONTROL] * len(names)]
    metadata["tokenizer.ggml.token_type"] = np.array(kinds, dtype=np.int32)
    return Tokenizer.from_metadata(metadata)


def sentencepiece(
    words: tuple[str, ...] = ("▁the", "▁return", "ing", "▁▁▁▁"), **extra: Any
) -> dict[str, Any]:
    """A SentencePiece vocabulary with byte fallback; every prefix of a word is a token, early words score
    best.
    """
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256
    for character in "▁abcdefghijklmnopqrstuvwxyz()é中":
        tokens.append(character)
        types.append(NORMAL)
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in tokens:
                tokens.append(word[:end])
                types.append(NORMAL)
    tokens.append("<turn>")
    types.append(USER)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, dtype=np.int32),
        "tokenizer.ggml.scores": -np.arange(len(tokens), dtype=np.float32),
        "tokenizer.ggml.add_bos_token": False,
        **{f"tokenizer.ggml.{k}": v for k, v in extra.items()},
    }


def gemma4(words: tuple[str, ...] = ("▁the", "▁a▁b", "\n\n", "é▁"), **extra: Any) -> dict[str, Any]:
    """As files of Gemma 4 hold it: merges of characters with "▁" for a blank, and byte tokens."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{b:02X}>" for b in range(256))]
    types = [CONTROL] * 3 + [UNKNOWN] + [BYTE] * 256
    merges = []
    for word in words:
        for end in range(1, len(word) + 1):
            for part in {word[:end], word[end - 1]}:
                if part not in tokens:
                    tokens.append(part)
                    types.append(NORMAL)
            if end > 1 and f"{word[: end - 1]} {word[end - 1]}" not in merges:
                merges.append(f"{word[: end - 1]} {word[end - 1]}")
    for text, kind in (
        ("<turn|>", CONTROL),
        ("<tool>", USER),
        (tokens[-1], NORMAL),
    ):  # a text may stand twice
        tokens.append(text)
        types.append(kind)
    return {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, dtype=np.int32),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_bos_token": False,
        **{f"tokenizer.ggml.{k}": v for k, v in extra.items()},
    }


def encode_gemma4(metadata: dict[str, Any], text: str) -> list[int]:
    """Line by line, join the leftmost of the neighbours whose merge stands first until nothing joins."""
    ids = {t: i for i, t in enumerate(metadata["tokenizer.ggml.tokens"])}
    ranks = {tuple(m.split(" ")): i for i, m in enumerate(metadata["tokenizer.ggml.merges"])}
    result = []
    for is_end, line in itertools.groupby(text.replace(" ", "▁"), lambda c: c == "\n"):
        parts = list(line)
        while True:
            found = [(ranks[p], i) for i, p in enumerate(itertools.pairwise(parts)) if p in ranks]
            if not found:
                break
            _, i = min(found)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        del is_end
        for part in parts:
            result += [ids[part]] if part in ids else [ids[f"<0x{b:02X}>"] for b in part.encode()]
    return result


def encode_sentencepiece(metadata: dict[str, Any], text: str) -> list[int]:
    """SentencePiece's own rule: join the leftmost of the best-scored neighbours until nothing joins; bytes
    else.
    """
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    scores = metadata["tokenizer.ggml.scores"]
    ids = {t: i for i, t in enumerate(tokens)}
    mergeable = {t: float(scores[i]) for t, i in ids.items() if types[i] in (NORMAL, USER)}
    parts = list(text.replace(" ", "▁"))
    while True:
        pairs = enumerate(itertools.pairwise(parts))
        found = [(mergeable[a + b], -i) for i, (a, b) in pairs if a + b in mergeable]
        if not found:
            break
        i = -max(found)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    result = []
    for part in parts:
        result += [ids[part]] if part in ids else [ids[f"<0x{b:02X}>"] for b in part.encode()]
    return result
