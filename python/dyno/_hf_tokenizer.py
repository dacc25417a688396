"""Configures a Hugging Face `tokenizers.Tokenizer` from a vocabulary."""

from __future__ import annotations

from typing import Any

from dyno._vocabulary import TokenType, Vocabulary
from dyno.errors import ModelError

# All splits of a token are looked up, which is quadratic in its length. Real tokens have fewer than 100
# characters.
_LONGEST_TOKEN = 2048


def build(vocabulary: Vocabulary) -> Any:
    """The encoder for `vocabulary`.

    Raises:
        ModelError: The merges name tokens that the vocabulary lacks.
    """
    from tokenizers import AddedToken, Tokenizer

    try:
        hf = Tokenizer(_bpe(vocabulary) if vocabulary.bytes_are_symbols else _characters(vocabulary))
    except Exception as error:  # the library raises Exception itself for a merge outside the vocabulary
        raise ModelError(f"[tokenizer] the vocabulary is inconsistent: {error}") from error
    if vocabulary.pre is not None:
        hf.pre_tokenizer = _pre_tokenizer(vocabulary.pre.splits, raw=vocabulary.pre.raw)
    if not vocabulary.bytes_are_symbols:
        hf.normalizer = _sentencepiece_normalizer(vocabulary.add_space_prefix)
    # Added tokens are split off before the text is processed further. Special ones are split off only if the
    # caller asks for it.
    special, plain = [], []
    for text, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN) and text:
            special.append(AddedToken(text, normalized=False, special=True))
        elif kind == TokenType.USER_DEFINED and text:
            plain.append(AddedToken(text, normalized=False, special=False))
    hf.add_special_tokens(special)
    hf.add_tokens(plain)
    return hf


def _bpe(vocabulary: Vocabulary) -> Any:
    from tokenizers.models import BPE

    assert vocabulary.pre is not None  # read() sets it for this model
    return BPE(
        vocab={token: i for i, token in enumerate(vocabulary.tokens)},
        merges=vocabulary.merges,
        ignore_merges=vocabulary.pre.ignore_merges,
    )


def _pre_tokenizer(splits: tuple[str, ...], *, raw: bool = False) -> Any:
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    steps: list[Any] = [Split(Regex(pattern), behavior="isolated") for pattern in splits]
    return Sequence(steps if raw else [*steps, ByteLevel(add_prefix_space=False, use_regex=False)])


def _characters(vocabulary: Vocabulary) -> Any:
    """The encoder for a vocabulary of characters (SentencePiece), with merges from the file or merges
    computed from scores."""
    from tokenizers.models import BPE

    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    byte_tokens = any(f"<0x{b:02X}>" in ids for b in range(256))
    unknown = None if vocabulary.unknown is None else vocabulary.tokens[vocabulary.unknown]
    return BPE(
        vocab=ids,
        merges=vocabulary.merges if vocabulary.pre is not None else _merges_by_score(vocabulary, ids),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=byte_tokens,
    )


def _merges_by_score(vocabulary: Vocabulary, ids: dict[str, int]) -> list[tuple[str, str]]:
    """The merges of SentencePiece: all pairs of tokens whose concatenation is a token, with the best score
    first.

    All splits of one token have the same score. The one with the longer left part comes first, as in the
    converters of Hugging Face.
    """
    # Tokens of these types are never the result of a merge, because their texts are only names.
    names = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.BYTE)
    ranked: list[tuple[float, int, int, int, int, str, str]] = []
    for token, kind, score in zip(vocabulary.tokens, vocabulary.types, vocabulary.scores, strict=True):
        if kind in names:
            continue
        if len(token) > _LONGEST_TOKEN:
            raise ModelError(f"token {token[:32]!r}... has {len(token)} characters; at most {_LONGEST_TOKEN}")
        for cut in range(1, len(token)):
            left = token[:cut]
            left_id = ids.get(left)
            if left_id is None:
                continue
            right = token[cut:]
            right_id = ids.get(right)
            if right_id is not None:
                ranked.append((-score, -len(left), -len(right), left_id, right_id, left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _sentencepiece_normalizer(add_space_prefix: bool) -> Any:
    from tokenizers.normalizers import Prepend, Replace, Sequence

    replace = Replace(" ", "▁")
    return Sequence([Prepend("▁"), replace]) if add_space_prefix else Sequence([replace])
