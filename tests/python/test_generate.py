"""The loop from logits to text, with scripted logits instead of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from dyno._generate import Sampling, StopFilter, drawn, pieces, uniforms
from dyno.errors import PlanError
from dyno.tokenizer import Tokenizer
from vocabularies import byte_level

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

TOKENIZER = Tokenizer.from_metadata(byte_level(words=()))


def script(tokens: list[int]) -> tuple[NDArray[np.float32], Callable[[int], NDArray[np.float32] | None]]:
    """Logits that make greedy drawing give `tokens`, then a full context."""
    rows = [np.eye(len(TOKENIZER), dtype=np.float32)[t] for t in tokens]
    left = iter(rows[1:])
    return rows[0], lambda token: next(left, None)


def answer(text: str, stop: tuple[str, ...] = (), max_tokens: int = 1000, end: bool = True) -> list[str]:
    tokens = TOKENIZER.encode(text, parse_special=True)
    assert TOKENIZER.eos is not None
    first, step = script([*tokens, TOKENIZER.eos] if end else tokens)
    return list(
        pieces(
            drawn(first, step, lambda logits: int(logits.argmax())),
            TOKENIZER.stream(),
            StopFilter(stop),
            TOKENIZER.end_of_generation,
            max_tokens,
        )
    )


def test_text_ends_at_the_end_token_and_does_not_show_it() -> None:
    assert "".join(answer("héllo 😀")) == "héllo 😀"
    assert "".join(answer("a<|im_end|>b")) == "a"


def test_pieces_are_whole_characters() -> None:
    assert answer("é😀") == ["é", "😀"]


def test_max_tokens_counts_tokens() -> None:
    assert "".join(answer("abcdef", max_tokens=3)) == "abc"
    assert "".join(answer("😀", max_tokens=2)) == "\ufffd"


def test_a_full_context_ends_the_text() -> None:
    assert "".join(answer("abc", end=False)) == "abc"


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one\n\ntwo", ("\n\n",), "one"),
        ("one\ntwo\n", ("\n\n",), "one\ntwo\n"),
        ("abcabd", ("abd",), "abc"),
        ("aab", ("ab",), "a"),
        ("xyz", ("z", "yz"), "x"),
        ("stop", ("stop",), ""),
        ("sto", ("stop",), "sto"),
        ("a😀b", ("😀",), "a"),
    ],
)
def test_stop_strings(text: str, stop: tuple[str, ...], expected: str) -> None:
    assert "".join(answer(text, stop)) == expected


def test_nothing_that_may_become_a_stop_string_is_shown_early() -> None:
    stopper = StopFilter(["abc"])
    assert [stopper.push(c) for c in "xabab"] == ["x", "", "", "ab", ""]
    assert stopper.finish() == "ab"


def test_empty_stop_string() -> None:
    with pytest.raises(PlanError, match="empty"):
        StopFilter(["a", ""])


def test_stop_strings_are_few_and_short() -> None:
    """Each one is looked for in each piece of a text."""
    assert not StopFilter(["a" * 256] * 32).stopped
    with pytest.raises(PlanError, match="stop has 33 strings; expected at most 32"):
        StopFilter(["a"] * 33)
    with pytest.raises(PlanError, match="a stop string has 257 characters; expected at most 256"):
        StopFilter(["a", "b" * 257])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -2),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 2.0),
        ("seed", -1),
    ],
)
def test_impossible_sampling_values(name: str, value: float) -> None:
    with pytest.raises(PlanError, match=f"{name}.*{value}"):
        Sampling(**{name: value})


def test_all_tokens_have_two_names() -> None:
    assert Sampling(top_k=-1).for_engine() == Sampling(top_k=0).for_engine() != Sampling().for_engine()
    with pytest.raises(PlanError, match=r"at least -1 \(0 or -1: all tokens\)"):
        Sampling(top_k=-2)


def test_random_numbers_do_not_depend_on_how_many_are_asked_for() -> None:
    at_once = uniforms(Sampling(seed=3).random(), 100)
    source = Sampling(seed=3).random()
    assert np.array_equal(at_once, np.concatenate([uniforms(source, n) for n in (1, 60, 39)]))
    assert at_once.dtype == np.float32

    class JustBelowOne:
        def random(self, count: int) -> NDArray[np.float64]:
            return np.full(count, np.nextafter(1.0, 0.0))

    assert (uniforms(JustBelowOne(), 2) < 1).all()  # type: ignore[arg-type]


def test_sampling_is_greedy_at_zero_and_repeatable_above() -> None:
    logits = np.random.default_rng(0).normal(size=64).astype(np.float32)
    assert Sampling().sampler()(logits) == logits.argmax()
    flat = {"temperature": 2.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    draws = [
        [draw(logits) for _ in range(40)] for draw in (Sampling(seed=s, **flat).sampler() for s in (1, 1, 2))
    ]
    assert draws[0] == draws[1]
    assert draws[0] != draws[2]
    assert len(set(draws[0])) > 5
