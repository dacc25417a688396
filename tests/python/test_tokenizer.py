"""Tokenizers from metadata: encoding, decoding, special tokens, streaming, and files that contradict
themselves.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from dyno import _pretokenizers
from dyno.errors import ModelError, PlanError, UnsupportedError
from dyno.tokenizer import _LONG, Tokenizer
from vocabularies import SAMPLES, byte_level, encode_sentencepiece, gemma4, sentencepiece
from waiting import LONG

if TYPE_CHECKING:
    from pathlib import Path


NORMAL, BYTE = 1, 6


def bpe(**extra: Any) -> Tokenizer:
    return Tokenizer.from_metadata(byte_level(**extra))


def spm(**extra: Any) -> Tokenizer:
    return Tokenizer.from_metadata(sentencepiece(**extra))


@pytest.mark.parametrize("text", SAMPLES)
@pytest.mark.parametrize("parse_special", [False, True])
def test_round_trip(text: str, parse_special: bool) -> None:
    for tokenizer in (bpe(), bpe(add_space_prefix=True), spm(), spm(add_space_prefix=False)):
        assert tokenizer.decode(tokenizer.encode(text, parse_special=parse_special)) == text


def test_merges_are_used() -> None:
    tokenizer = bpe()
    tokens = tokenizer.vocabulary.tokens
    assert [tokens[t] for t in tokenizer.encode("the return")] == ["the", "Ġreturn"]


def test_special_names_are_text_unless_asked() -> None:
    tokenizer = bpe()
    text = "a<|im_end|>b"
    plain, parsed = tokenizer.encode(text), tokenizer.encode(text, parse_special=True)
    assert tokenizer.eos not in plain
    assert len(parsed) == 3
    assert parsed[1] == tokenizer.eos
    assert tokenizer.decode(plain) == text
    assert tokenizer.decode(parsed) == "ab"
    assert tokenizer.decode(parsed, special=True) == text


@pytest.mark.parametrize("parse_special", [False, True])
def test_user_defined_tokens_are_always_taken_and_always_shown(parse_special: bool) -> None:
    tokenizer = bpe()
    ids = tokenizer.encode("<think>x", parse_special=parse_special)
    assert ids[0] == tokenizer.vocabulary.tokens.index("<think>")
    assert tokenizer.decode(ids) == "<think>x"


def test_bos_and_eos_follow_the_file() -> None:
    assert bpe().encode("x")[0] != bpe().bos
    both = bpe(add_bos_token=True, add_eos_token=True)
    ids = both.encode("x")
    assert (ids[0], ids[-1]) == (both.bos, both.eos)
    assert both.encode("x", add_special=False) == ids[1:-1]
    assert both.decode(ids) == "x"


def test_bos_where_the_file_says_nothing() -> None:
    """Then it is what the kind of tokenizer does."""
    kinds = ((byte_level("llama-bpe"), True), (byte_level("qwen2"), False), (sentencepiece(), True))
    for metadata, adds in kinds:
        del metadata["tokenizer.ggml.add_bos_token"]
        tokenizer = Tokenizer.from_metadata(metadata)
        assert (tokenizer.encode("a")[0] == tokenizer.bos) is adds


def test_end_of_generation() -> None:
    assert bpe().end_of_generation == {bpe().eos}
    with_eot = bpe(eot_token_id=5)
    assert with_eot.end_of_generation == {with_eot.eos, 5}


def test_end_of_generation_in_the_harmony_format() -> None:
    metadata = byte_level()
    start = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] += ["<|return|>", "<|call|>", "<|end|>"]
    metadata["tokenizer.ggml.token_type"] = np.append(metadata["tokenizer.ggml.token_type"], [3, 3, 3])
    found = Tokenizer.from_metadata(metadata).end_of_generation
    assert {start, start + 1} <= found
    assert start + 2 not in found


# ---- SentencePiece ----


@pytest.mark.parametrize("space_prefix", [True, False])
def test_sentencepiece_follows_the_scores(space_prefix: bool) -> None:
    words = ("▁the", "▁return", "ing", "he", "▁th", "nin", "in", "ab", "bc", "cd", "▁a")
    metadata = sentencepiece(words, add_space_prefix=space_prefix)
    tokenizer = Tokenizer.from_metadata(metadata)
    rng = random.Random(7)
    for _ in range(300):
        text = "".join(rng.choice("abcdehinrtu  é中x😀") for _ in range(rng.randint(1, 24)))
        assert tokenizer.encode(text) == encode_sentencepiece(metadata, " " * space_prefix + text), text
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_sentencepiece_bytes_for_what_it_cannot_spell() -> None:
    tokenizer = spm(add_space_prefix=False)
    tokens = tokenizer.vocabulary.tokens
    assert [tokens[t] for t in tokenizer.encode("a😀")] == ["a", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>"]


def test_names_of_byte_tokens_are_plain_text() -> None:
    tokenizer = spm(add_space_prefix=False)
    assert tokenizer.vocabulary.tokens.index("<0x0A>") not in tokenizer.encode("<0x0A>")
    assert tokenizer.decode(tokenizer.encode("<0x0A>")) == "<0x0A>"


def test_a_token_that_only_looks_like_a_byte_is_text() -> None:
    metadata = sentencepiece(add_space_prefix=False)
    tokens = metadata["tokenizer.ggml.tokens"]
    for place, name in ((-1, "<0xZZ>"), (-2, "<0x-1>"), (-3, "<0x 1>")):
        metadata["tokenizer.ggml.token_type"][place], tokens[place] = NORMAL, name
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.decode(range(len(tokens) - 3, len(tokens))) == "<0x 1><0x-1><0xZZ>"
    metadata["tokenizer.ggml.token_type"][-1] = BYTE
    with pytest.raises(ModelError, match="byte token '<0xZZ>' is not of the form"):
        Tokenizer.from_metadata(metadata).decode([0])


def test_space_prefix_comes_off_only_where_it_was_put() -> None:
    tokenizer = spm(add_bos_token=True)
    assert tokenizer.decode(tokenizer.encode("the")) == "the"
    assert tokenizer.decode(tokenizer.encode(" the")) == " the"
    assert tokenizer.decode(tokenizer.encode("<turn>")) == "<turn>"


# ---- streams ----


@pytest.mark.parametrize("make", [bpe, spm])
def test_stream_never_emits_half_a_character(make: Any) -> None:
    tokenizer = make()
    text = "a😀é中\u0301b"
    stream = tokenizer.stream()
    shown = [stream.push(t) for t in tokenizer.encode(text)]
    assert "\ufffd" not in "".join(shown)
    assert ("".join(shown) + stream.finish()).removeprefix(" ") == text


def test_stream_marks_a_character_that_never_ends() -> None:
    tokenizer = bpe()
    stream = tokenizer.stream()
    ids = tokenizer.encode("😀")[:-1]
    assert "".join(stream.push(t) for t in ids) == ""
    assert stream.finish() == "\ufffd"
    assert tokenizer.decode(ids) == "\ufffd"


# ---- long texts ----


@pytest.mark.parametrize("name", _pretokenizers.names())
@pytest.mark.parametrize("parse_special", [False, True])
def test_long_texts_become_the_tokens_that_each_text_alone_becomes(name: str, parse_special: bool) -> None:
    """A long text is encoded by another call of the library than a short one."""
    text = "".join(SAMPLES * 30) + "a<|im_end|><think><turn|>" * 100
    made = [gemma4()] if name == _pretokenizers.GEMMA4 else [byte_level(name), sentencepiece()]
    for metadata in made:
        tokenizer = Tokenizer.from_metadata(metadata)
        tokens = tokenizer.encode(text, parse_special=parse_special)
        assert len(text) > _LONG
        assert tokens == tokenizer._hf.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(tokens, special=True) == text
        assert tokenizer.least_tokens(text) <= len(tokens)


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    tokenizer = bpe()
    tokenizer.encode("a" * _LONG)  # makes the tables
    text = "the return 123 " * 100_000
    released, ran = threading.Lock(), threading.Event()

    def run() -> None:
        with released:
            ran.set()

    released.acquire()
    other = threading.Thread(target=run)
    other.start()
    interval, end = sys.getswitchinterval(), time.monotonic() + LONG
    sys.setswitchinterval(1000)  # so the other thread runs only if this one lets it
    try:
        released.release()
        tokens = tokenizer.encode(text)
        while not (ran_meanwhile := ran.is_set()) and time.monotonic() < end:
            tokenizer.encode(text)  # a busy machine may let the other thread wait for a core
    finally:
        sys.setswitchinterval(interval)
    other.join()
    assert ran_meanwhile
    assert len(tokens) > 300_000


def test_the_least_number_of_tokens() -> None:
    tokenizer = bpe()  # the longest name is <|im_end|>, of 10 bytes
    assert [tokenizer.least_tokens("x" * n) for n in (0, 1, 10, 11, 1000)] == [0, 1, 1, 2, 100]
    # An unknown token stands for any number of characters.
    metadata = sentencepiece(unknown_token_id=0)
    metadata["tokenizer.ggml.tokens"][3] = "[unused]"
    unknown = Tokenizer.from_metadata(metadata)
    assert unknown.least_tokens("x" * 1000) == 1
    assert spm().least_tokens("the" * 5) == 2  # the longest is four blanks, each of three bytes


# ---- what must be refused ----


def changed(change: dict[str, Any]) -> dict[str, Any]:
    metadata = byte_level() | {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    return {k: v for k, v in metadata.items() if v is not None}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": None}, "tokens is missing"),
        ({"tokens": np.arange(3)}, "array of strings"),
        ({"tokens": ["a", "b", "a"], "token_type": None}, "'a' has two ids: 0 and 2"),
        ({"merges": None}, "needs tokenizer.ggml.merges"),
        ({"merges": ["ab"]}, r"merges\[0\] = 'ab'"),
        ({"merges": ["a "]}, r"merges\[0\]"),
        ({"token_type": np.zeros(3, np.int32)}, "3 values for"),
        ({"token_type": "x"}, "array of numbers"),
        (
            {"tokens": ["a", "b"], "token_type": np.array([1, np.nan])},
            r"token_type\[1\] is nan, not a number",
        ),
        (
            {"tokens": ["a", "b"], "token_type": np.array([np.inf, 1])},
            r"token_type\[0\] is inf, not a number",
        ),
        ({"bos_token_id": 10**6}, "bos_token_id = 1000000"),
        ({"eos_token_id": "x"}, "eos_token_id must be a whole number"),
        ({"eot_token_id": -7}, "eot_token_id = -7"),
        ({"add_bos_token": 1}, "must be a boolean"),
        ({"add_bos_token": True, "bos_token_id": None}, "bos_token_id is missing"),
        ({"model": 3}, "must be a string"),
    ],
)
def test_contradictions_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Tokenizer.from_metadata(changed(change))


def test_merge_outside_the_vocabulary() -> None:
    with pytest.raises(ModelError, match="inconsistent"):
        Tokenizer.from_metadata(changed({"merges": ["xx yy"]})).encode("a")


def test_scores_are_needed_and_must_be_numbers() -> None:
    metadata = sentencepiece()
    metadata["tokenizer.ggml.scores"][5] = np.nan
    with pytest.raises(ModelError, match=r"scores\[5\]"):
        Tokenizer.from_metadata(metadata)
    del metadata["tokenizer.ggml.scores"]
    with pytest.raises(ModelError, match=r"needs tokenizer\.ggml\.scores"):
        Tokenizer.from_metadata(metadata)


@pytest.mark.parametrize("model", ["bert", "t5", "rwkv"])
def test_other_tokenizers_are_named(model: str) -> None:
    with pytest.raises(UnsupportedError, match=repr(model)):
        Tokenizer.from_metadata(changed({"model": model}))


@pytest.mark.parametrize("model", [None, "none", "no_vocab"])
def test_no_vocabulary(model: str | None) -> None:
    with pytest.raises(ModelError, match="no vocabulary"):
        Tokenizer.from_metadata(changed({"model": model}))


def test_text_that_cannot_be_spelled_is_an_error_not_a_loss() -> None:
    metadata = byte_level(words=())
    tokens = metadata["tokenizer.ggml.tokens"]
    tokens[tokens.index("z")] = "[unused]"
    with pytest.raises(PlanError, match="byte 0x7A"):
        Tokenizer.from_metadata(metadata).encode("fizz")
    metadata = sentencepiece(unknown_token_id=-1)
    tokens = metadata["tokenizer.ggml.tokens"]
    tokens[tokens.index("<0xF0>")] = "[unused]"
    with pytest.raises(PlanError, match="😀"):
        Tokenizer.from_metadata(metadata).encode("a😀")


@pytest.mark.parametrize("token", [-1, 10**6])
def test_tokens_outside_the_vocabulary(token: int) -> None:
    with pytest.raises(PlanError, match=rf"\[tokenizer\] token {token} is outside .* expected 0 to \d+"):
        bpe().decode([token])


@pytest.mark.parametrize(
    "tokens", [5, None, "12", b"12", [1.5], ["1"], [None], [True], [[1]], np.ones((2, 2), np.int32)], ids=repr
)
def test_what_is_no_list_of_token_ids(tokens: Any) -> None:
    with pytest.raises(PlanError, match=r"\[tokenizer\] (tokens|a token id) must be"):
        bpe().decode(tokens)


def test_one_that_is_no_token_id() -> None:
    for token in ("1", 1.0, None):
        with pytest.raises(PlanError, match="a token id must be a whole number"):
            bpe().piece(token)  # type: ignore[arg-type]
    ids = bpe().encode("fizz buzz")
    assert bpe().decode(np.array(ids)) == bpe().decode(iter(ids)) == bpe().decode(ids) == "fizz buzz"


def test_lone_surrogate() -> None:
    with pytest.raises(PlanError, match="position 1"):
        bpe().encode("a\ud800")


def test_a_wrong_byte_of_the_command_line() -> None:
    """Python passes on such bytes as halves of pairs."""
    with pytest.raises(
        PlanError, match=r"position 2: the byte 0xfc is not UTF-8; convert the text with iconv"
    ):
        bpe().encode(b"Gr\xfc\xdf".decode("utf-8", "surrogateescape"))


def test_hostile_token_length() -> None:
    metadata = sentencepiece()
    metadata["tokenizer.ggml.tokens"].append("b" * 100_000)
    metadata["tokenizer.ggml.token_type"] = np.append(metadata["tokenizer.ggml.token_type"], 1)
    metadata["tokenizer.ggml.scores"] = np.append(metadata["tokenizer.ggml.scores"], 0.0)
    with pytest.raises(ModelError, match="100000 characters"):
        Tokenizer.from_metadata(metadata).encode("b")


def test_from_a_file(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "vocabulary.gguf"
    metadata = byte_level()
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(metadata["tokenizer.ggml.tokens"])
    writer.add_token_types(metadata["tokenizer.ggml.token_type"].tolist())
    writer.add_token_merges(metadata["tokenizer.ggml.merges"])
    writer.add_bos_token_id(0)
    writer.add_add_bos_token(True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert Tokenizer.from_gguf(path).encode("the return") == [0, *bpe().encode("the return")]
