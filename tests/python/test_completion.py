"""Whole texts with tokens, reasons and log-probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING

import dyno
import pytest
from dyno.errors import ContextLengthError, PlanError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROMPT = "def read_file(path):"


@pytest.fixture(scope="module")
def engine(trained_model: Path) -> Iterator[dyno.Engine]:
    with dyno.Engine(trained_model, device="cpu", profile=None, ctx=128, threads=1) as opened:
        yield opened


@pytest.mark.parametrize("stop", [(), "return", ["\n\n", "self"]])
def test_a_text_is_what_the_pieces_give(engine: dyno.Engine, stop: str | list[str]) -> None:
    warm = {"temperature": 0.7, "seed": 3, "stop": stop}
    (found,) = engine.complete(PROMPT, 40, **warm)  # type: ignore[arg-type]
    assert found.text == "".join(engine.generate(PROMPT, 40, **warm))  # type: ignore[arg-type]
    assert engine.detokenize(found.tokens).startswith(found.text)
    assert found.logprobs == []


def test_reasons(engine: dyno.Engine) -> None:
    (whole,) = engine.complete(PROMPT, 30)
    assert (whole.finish_reason, len(whole.tokens)) == ("length", 30)
    word = whole.text[8:12]
    (stopped,) = engine.complete(PROMPT, 30, stop=word)
    assert (stopped.finish_reason, stopped.text) == ("stop", whole.text[: whole.text.index(word)])
    end = next(iter(engine.tokenizer.end_of_generation))
    (ended,) = engine.complete(PROMPT, 30, logit_bias={end: 1000.0})
    assert (ended.finish_reason, ended.text, ended.tokens) == ("stop", "", [end])
    assert "".join(engine.generate(PROMPT, 7, logit_bias={end: 1000.0})) == ""
    on = list(engine.generate(PROMPT, 7, slot=0, ignore_end=True, logit_bias={end: 1000.0}))
    assert "".join(on) == engine.detokenize([end] * 7)
    assert engine.position(0) == len(engine.tokenize(PROMPT)) + 6  # the last token is not decoded
    (full,) = engine.complete([5] * 126)
    assert (full.finish_reason, len(full.tokens)) == ("length", 3)


def test_several_with_log_probabilities(engine: dyno.Engine) -> None:
    texts = engine.complete(PROMPT, 12, n=3, temperature=1.2, seed=5, logprobs=2)
    assert len({each.text for each in texts}) == 3
    assert engine.complete(PROMPT, 12, temperature=1.2, seed=7, logprobs=2) == texts[2:]
    for each in texts:
        assert [p.token for p in each.logprobs] == each.tokens
        assert all(p.logprob <= p.top[0][1] <= 0 and len(p.top) == 2 for p in each.logprobs)
    assert engine.complete(PROMPT, 12, n=0) == []


def test_impossible_arguments(engine: dyno.Engine) -> None:
    with pytest.raises(PlanError, match="n must be a whole number of at least 0, not -1"):
        engine.complete(PROMPT, n=-1)
    with pytest.raises(ContextLengthError, match="the prompt has 200 tokens, ctx is 128"):
        engine.complete([5] * 200)
    with pytest.raises(PlanError, match="slot 9 does not exist"):
        engine.complete(PROMPT, slot=9)
    with pytest.raises(PlanError, match="the prompt is empty"):
        engine.complete("")
