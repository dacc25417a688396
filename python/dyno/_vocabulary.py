"""The vocabulary of a GGUF file: tokens, types, merges or scores, and special ids, checked for
consistency."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

from dyno import _pretokenizers
from dyno._pretokenizers import GEMMA4
from dyno.errors import ModelError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dyno._pretokenizers import PreTokenizer


class Metadata(Protocol):
    """The metadata of a file: anything with `get(key)`, such as a `_core.Gguf` or a plain dict."""

    def get(self, key: str, /) -> object: ...


class TokenType(IntEnum):
    """The types of tokens: values of `tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_INFINITE = float("inf")

# Tokens whose name shows that they end a generation, even if the file does not list their ids.
_END_OF_GENERATION = frozenset(
    (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|eom_id|>", "<|endoftext|>"),
        *("<|end_of_text|>", "<end_of_turn>", "<turn|>", "<end_of_utterance>", "<EOT>", "[EOT]", "[EOS]"),
        "<｜end▁of▁sentence｜>",
    )
)
# In the harmony format, <|end|> closes one of several messages, so it does not end the answer.
_HARMONY = ("<|return|>", "<|call|>", "<|end|>")


@dataclass(frozen=True)
class Vocabulary:
    """The checked vocabulary of a file (`tokenizer.ggml.*`)."""

    model: str
    """`gpt2` (byte-level BPE), `gemma4` (BPE of characters) or `llama` (SentencePiece)."""
    pre: PreTokenizer | None
    """The pre-tokenizer; None for SentencePiece, which has none."""
    tokens: list[str]
    types: list[int]
    scores: list[float]
    """One score per token for SentencePiece; empty for BPE."""
    merges: list[tuple[str, str]]
    """Merges in order of rank for BPE; empty for SentencePiece."""
    bos: int | None
    eos: int | None
    unknown: int | None
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    end_of_generation: frozenset[int]

    @property
    def bytes_are_symbols(self) -> bool:
        """Whether tokens are written in the byte alphabet of GPT-2. Otherwise they are text with "▁" for a
        blank."""
        return self.model == "gpt2"


def has_vocabulary(metadata: Metadata) -> bool:
    """Whether the file has a vocabulary."""
    return metadata.get("tokenizer.ggml.model") not in (None, "none", "no_vocab")


def read(metadata: Metadata) -> Vocabulary:
    """Read and check the vocabulary.

    Raises:
        ModelError: The file has no vocabulary, or its parts contradict each other.
        UnsupportedError: The tokenizer or pre-tokenizer is unknown. The message has its name.
    """
    model = metadata.get("tokenizer.ggml.model")
    if not has_vocabulary(metadata):
        raise ModelError(
            "[tokenizer] the file has no vocabulary (tokenizer.ggml.model); pass token ids, not text"
        )
    if not isinstance(model, str):
        raise ModelError(f"[tokenizer] tokenizer.ggml.model must be a string, not {model!r}")
    if model not in ("gpt2", "llama", GEMMA4):
        raise UnsupportedError(
            f"[tokenizer] unknown tokenizer.ggml.model = {model!r}; known: gpt2, llama, {GEMMA4}"
        )
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    if tokens is None:
        raise ModelError("[tokenizer] tokenizer.ggml.tokens is missing")
    # Files of gemma4 list a few texts twice. The later id is the one to use.
    if len(set(tokens)) != len(tokens) and model != GEMMA4:
        seen: dict[str, int] = {}
        for i, token in enumerate(tokens):
            if seen.setdefault(token, i) != i:
                raise ModelError(f"[tokenizer] token {token!r} has two ids: {seen[token]} and {i}")
    types = _numbers(metadata, "tokenizer.ggml.token_type", len(tokens))
    kinds = _kinds(types) if types is not None else [int(TokenType.NORMAL)] * len(tokens)
    is_bpe = model != "llama"
    pre_name = metadata.get("tokenizer.ggml.pre") or (GEMMA4 if model == GEMMA4 else None)
    pre = _pretokenizers.find(pre_name if pre_name is None else str(pre_name)) if is_bpe else None
    bos = _token_id(metadata, "bos", len(tokens), None if is_bpe else 1)
    eos = _token_id(metadata, "eos", len(tokens), None if is_bpe else 2)
    if pre is not None and pre.raw != (model == GEMMA4):
        raise ModelError(
            f"[tokenizer] tokenizer.ggml.pre = {pre_name!r} contradicts tokenizer.ggml.model = {model!r}"
        )
    vocabulary = Vocabulary(
        model=model,
        pre=pre,
        tokens=tokens,
        types=kinds,
        scores=[] if is_bpe else _scores(metadata, len(tokens)),
        merges=_merges(metadata) if is_bpe else [],
        bos=bos,
        eos=eos,
        unknown=_token_id(metadata, "unknown", len(tokens), None if is_bpe else 0),
        add_bos=_flag(metadata, "add_bos_token", pre.add_bos if pre is not None else True),
        add_eos=_flag(metadata, "add_eos_token", False),
        # Text of byte-level BPE never gets a blank in front, whatever the file says.
        add_space_prefix=_flag(metadata, "add_space_prefix", not is_bpe) and model != "gpt2",
        end_of_generation=_end_of_generation(metadata, tokens, kinds, eos),
    )
    for wanted, token_id, name in ((vocabulary.add_bos, bos, "bos"), (vocabulary.add_eos, eos, "eos")):
        if wanted and token_id is None:
            raise ModelError(
                f"[tokenizer] text of this file starts or ends with its {name.upper()} token, "
                f"but tokenizer.ggml.{name}_token_id is missing"
            )
    return vocabulary


def _strings(metadata: Metadata, key: str) -> list[str] | None:
    value = metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise ModelError(f"[tokenizer] {key} must be an array of strings, not {type(value).__name__}")
    return value


def _numbers(metadata: Metadata, key: str, count: int) -> Sequence[float] | None:
    value = metadata.get(key)
    if value is None:
        return None
    values = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(values, list) or not all(isinstance(v, (int, float)) for v in values):
        raise ModelError(f"[tokenizer] {key} must be an array of numbers, not {type(value).__name__}")
    if len(values) != count:
        raise ModelError(f"[tokenizer] {key} has {len(values)} values for {count} tokens")
    return values


def _kinds(types: Sequence[float]) -> list[int]:
    wrong = next((i for i, kind in enumerate(types) if kind != kind or kind in (_INFINITE, -_INFINITE)), None)
    if wrong is not None:
        raise ModelError(f"[tokenizer] tokenizer.ggml.token_type[{wrong}] is {types[wrong]}, not a number")
    return [int(kind) for kind in types]


def _scores(metadata: Metadata, count: int) -> list[float]:
    scores = _numbers(metadata, "tokenizer.ggml.scores", count)
    if scores is None:
        raise ModelError("[tokenizer] a SentencePiece vocabulary needs tokenizer.ggml.scores")
    values = [float(s) for s in scores]
    for i, value in enumerate(values):
        if value != value:
            raise ModelError(f"[tokenizer] tokenizer.ggml.scores[{i}] is not a number")
    return values


def _merges(metadata: Metadata) -> list[tuple[str, str]]:
    lines = _strings(metadata, "tokenizer.ggml.merges")
    if lines is None:
        raise ModelError("[tokenizer] a BPE vocabulary needs tokenizer.ggml.merges")
    merges = []
    for i, line in enumerate(lines):
        # The first part of a merge is never empty, so a blank at position 0 belongs to it.
        cut = line.find(" ", 1)
        if cut < 0 or cut == len(line) - 1:
            raise ModelError(
                f"[tokenizer] tokenizer.ggml.merges[{i}] = {line!r} is not two parts with a blank"
            )
        merges.append((line[:cut], line[cut + 1 :]))
    return merges


def _token_id(metadata: Metadata, name: str, count: int, default: int | None) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = metadata.get(key)
    if value is None:
        return default if default is not None and default < count else None
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelError(f"[tokenizer] {key} must be a whole number, not {value!r}")
    if value in (-1, 0xFFFFFFFF):  # converters write these values for "none"
        return None
    if not 0 <= value < count:
        raise ModelError(f"[tokenizer] {key} = {value} lies outside the vocabulary of {count} tokens")
    return value


def _flag(metadata: Metadata, name: str, default: bool) -> bool:
    key = f"tokenizer.ggml.{name}"
    value = metadata.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ModelError(f"[tokenizer] {key} must be a boolean, not {value!r}")
    return value


def _end_of_generation(
    metadata: Metadata, tokens: list[str], types: list[int], eos: int | None
) -> frozenset[int]:
    special = (TokenType.CONTROL, TokenType.USER_DEFINED)
    named = {
        token: i for i, token in enumerate(tokens) if token in _END_OF_GENERATION and types[i] in special
    }
    if all(token in named for token in _HARMONY):
        del named["<|end|>"]
    ids = set(named.values())
    for name in ("eot", "eom"):
        token_id = _token_id(metadata, name, len(tokens), None)
        if token_id is not None:
            ids.add(token_id)
    if eos is not None:
        ids.add(eos)
    return frozenset(ids)
