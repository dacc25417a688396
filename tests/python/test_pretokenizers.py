"""How the named pre-tokenizers cut text; expected pieces follow from the published patterns, by hand."""

from __future__ import annotations

import time

import numpy as np
import pytest
from dyno import _hf_tokenizer, _pretokenizers
from dyno.errors import ModelError, UnsupportedError
from dyno.tokenizer import Tokenizer, _bpe_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from vocabularies import SAMPLES, byte_level, encode_gemma4, gemma4


def cut(name: str, text: str) -> list[str]:
    pieces = _hf_tokenizer._pre_tokenizer(_pretokenizers.find(name).splits).pre_tokenize_str(text)
    return [_bpe_bytes(piece, 1).decode() for piece, _ in pieces]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("gpt-2", "I'll don't 1234, x\n  y", ["I", "'ll", " don", "'t", " 1234", ",", " x", "\n ", " y"]),
        ("gpt-2", "I'LL", ["I", "'", "LL"]),
        ("qwen2", "I'LL x1234", ["I", "'LL", " x", "1", "2", "3", "4"]),
        ("qwen2", "a.b()\n\n  c", ["a", ".b", "()\n\n", " ", " c"]),
        ("stablelm2", "12", ["1", "2"]),
        ("llama-bpe", "12345 it'S", ["123", "45", " it", "'S"]),
        ("glm4", "12345", ["123", "45"]),
        ("glm5", "12345", ["123", "45"]),
        ("gpt-4o", "HelloWorld's 12345/\n", ["Hello", "World's", " ", "123", "45", "/\n"]),
        ("tekken", "HelloWorld's 12", ["Hello", "World", "'s", " ", "1", "2"]),
        ("starcoder", "abc 123", ["abc", " ", "1", "2", "3"]),
        ("smollm", "x=12", ["x", "=", "1", "2"]),
        ("deepseek-v3", "12345日本語ab,c", ["123", "45", "日本語", "ab", ",c"]),
        ("deepseek-v3", "x == 10\n\n", ["x", " ==", " ", "10", "\n\n"]),
        ("deepseek-llm", "Ab c\n 123 中文!", ["Ab", " c", "\n", " ", "123", " ", "中文", "!"]),
        ("deepseek-coder", "x=12\ny", ["x", "=", "1", "2", "\n", "y"]),
        ("kimi-k2", "中文ab HelloWorld", ["中文", "ab", " Hello", "World"]),
        ("bailingmoe", "a\n\nb'LL", ["a", "\n\n", "b", "'LL"]),
        ("falcon", "a+b 12345", ["a", "+", "b", " ", "123", "45"]),
        ("bloom", "a b,c", ["a", " b", ",", "c"]),
        ("viking", "ab 12", ["ab", " ", "1", "2"]),
        ("minicpm5", "12345x", ["123", "45", "x"]),
        ("seed-coder", "a!\n", ["a", "!", "\n"]),
        ("qwen35", "e\u0301x", ["e\u0301x"]),
    ],
)
def test_cuts(name: str, text: str, expected: list[str]) -> None:
    assert cut(name, text) == expected


def test_classes_are_not_normalised() -> None:
    """The deepseek-llm classes list letters (Kelvin sign, iota) that normalisation turns into others."""
    assert cut("deepseek-llm", "\u212a\u1fbe1") == ["\u212a\u1fbe", "1"]
    assert cut("deepseek-llm", "\u212ab") == ["\u212a", "b"]  # ASCII letters are in the punctuation class too
    assert cut("deepseek-llm", "Kb") == ["Kb"]


@settings(max_examples=300, deadline=None)
@given(text=st.text("  \t\u00a0\u3000\x0b\x85\u2028\r\na1.中", max_size=12))
def test_deepseek_llm_cuts_as_its_published_pattern(text: str) -> None:
    """Which looks for blanks at the end from each blank on."""
    ours = _pretokenizers.find("deepseek-llm").splits
    published = tuple(r"\s+$" if r"\s+$" in split else split for split in ours)
    assert published != ours
    pieces = [piece for piece, _ in _hf_tokenizer._pre_tokenizer(published).pre_tokenize_str(text)]
    assert [piece for piece, _ in _hf_tokenizer._pre_tokenizer(ours).pre_tokenize_str(text)] == pieces


@pytest.mark.parametrize(
    "name", sorted({_pretokenizers.find(name).splits: name for name in _pretokenizers.names()}.values())
)
def test_a_run_of_blanks_before_a_digit_is_walked_over_once(name: str) -> None:
    """Steps cannot be counted inside the library. 300,000 blanks take a fraction of a second, and minutes if
    a walk over the others begins at each of them.
    """
    cutter = _hf_tokenizer._pre_tokenizer(_pretokenizers.find(name).splits)
    for blank in " \t":
        begun = time.process_time()
        pieces = cutter.pre_tokenize_str(blank * 300_000 + "1")
        assert time.process_time() - begun < 40
        assert pieces[-1][1][1] == 300_001


@pytest.mark.parametrize("name", sorted(set(_pretokenizers.names()) - {_pretokenizers.GEMMA4}))
def test_every_one_keeps_all_text(name: str) -> None:
    tokenizer = Tokenizer.from_metadata(byte_level(name))
    for text in SAMPLES:
        assert "".join(cut(name, text)) == text
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_unknown_name_is_an_error_that_says_it() -> None:
    with pytest.raises(UnsupportedError, match=r"'qwen-two'.*most similar known name is 'qwen"):
        Tokenizer.from_metadata(byte_level("qwen-two"))


def test_missing_name_is_an_error() -> None:
    metadata = byte_level()
    del metadata["tokenizer.ggml.pre"]
    with pytest.raises(UnsupportedError, match=r"no tokenizer\.ggml\.pre"):
        Tokenizer.from_metadata(metadata)


@pytest.mark.parametrize(("name", "whole"), [("llama-bpe", True), ("tekken", True), ("qwen2", False)])
def test_words_that_are_tokens(name: str, whole: bool) -> None:
    """Some take a word that is a token whole, others only what the merges reach."""
    metadata = byte_level(name, words=())
    metadata["tokenizer.ggml.tokens"].append("xyz")
    metadata["tokenizer.ggml.token_type"] = np.append(metadata["tokenizer.ggml.token_type"], 1)
    assert (len(Tokenizer.from_metadata(metadata).encode("xyz")) == 1) is whole


@pytest.mark.parametrize("text", [*SAMPLES, "the the a b\n\n\na b the", " a b é the\n <tool> the"])
def test_gemma4_joins_characters_of_a_line(text: str) -> None:
    metadata = gemma4()
    tokenizer = Tokenizer.from_metadata(metadata)
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    if "<tool>" not in text:  # an added token is cut out first
        assert tokens == encode_gemma4(metadata, text)


def test_gemma4_starts_with_bos_and_ends_with_the_turn() -> None:
    metadata = gemma4()
    del metadata["tokenizer.ggml.add_bos_token"]
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.encode("the")[0] == 2
    assert metadata["tokenizer.ggml.tokens"].index("<turn|>") in tokenizer.vocabulary.end_of_generation


def test_a_pre_tokenizer_of_the_other_kind_is_an_error() -> None:
    with pytest.raises(ModelError, match=r"'gemma4' contradicts tokenizer\.ggml\.model = 'gpt2'"):
        Tokenizer.from_metadata(byte_level("gemma4"))
    with pytest.raises(ModelError, match="'qwen2' contradicts"):
        Tokenizer.from_metadata(gemma4(pre="qwen2"))
