"""Generations that share an engine: each owns a slot and gives the text that it gives alone."""

from __future__ import annotations

import gc
import sys
import threading
from typing import TYPE_CHECKING, Any

import dyno
import numpy as np
import pytest
from dyno.diagnostics import Diagnostics
from dyno.errors import DynoError, PlanError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PROMPTS = ("def read_file(path):", "class Point:\n", "import os\n", "for i in range(10):\n")
ASKED: tuple[dict[str, Any], ...] = (
    {"max_tokens": 24},
    {"max_tokens": 24, "temperature": 0.9, "seed": 5},
    {"max_tokens": 24, "temperature": 1.2, "seed": 6, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    {"max_tokens": 24, "temperature": 0.7, "seed": 7},
)


@pytest.fixture(params=["drawn on the host", "drawn by the session"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two ways that tokens are drawn; a session of the CPU has both."""
    monkeypatch.setattr(Diagnostics, "draws_on_device", request.param == "drawn by the session")


@pytest.fixture
def opened(trained_model: Path) -> Iterator[Callable[[int], dyno.Engine]]:
    engines: list[dyno.Engine] = []

    def open_(sequences: int) -> dyno.Engine:
        engines.append(
            dyno.Engine(trained_model, device="cpu", profile=None, ctx=96, threads=1, sequences=sequences)
        )
        return engines[-1]

    yield open_
    for engine in engines:
        engine.close()


def alone(engine: dyno.Engine, count: int) -> list[str]:
    texts = ["".join(engine.generate(p, **a)) for p, a in zip(PROMPTS[:count], ASKED, strict=False)]
    assert len(set(texts)) == count
    return texts


def begun(engine: dyno.Engine, count: int) -> list[Any]:
    return [engine.generate(p, **a) for p, a in zip(PROMPTS[:count], ASKED, strict=False)]


@pytest.mark.usefixtures("where")
@pytest.mark.parametrize("count", [2, 4])
def test_interleaved_generations_give_what_each_gives_alone(
    opened: Callable[[int], dyno.Engine], count: int
) -> None:
    engine = opened(count)
    want = alone(engine, count)
    texts = [""] * count
    left = dict(enumerate(begun(engine, count)))
    while left:
        for number, generation in list(left.items()):
            piece = next(generation, None)
            if piece is None:
                del left[number]
            else:
                texts[number] += piece
    assert texts == want


@pytest.mark.usefixtures("where")
def test_generations_in_threads_give_what_each_gives_alone(opened: Callable[[int], dyno.Engine]) -> None:
    engine = opened(3)
    want = alone(engine, 3)
    texts: list[list[str]] = [[], [], []]

    def read(number: int) -> None:
        for _ in range(4):
            texts[number].append("".join(begun(engine, 3)[number]))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=read, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert texts == [[text] * 4 for text in want]


@pytest.mark.usefixtures("where")
def test_logits_between_two_pieces(opened: Callable[[int], dyno.Engine]) -> None:
    engine = opened(2)
    (want,) = alone(engine, 1)
    tokens = engine.tokenize(PROMPTS[1])
    logits = engine.logits(tokens)
    (generation,) = begun(engine, 1)
    text = ""
    for piece in generation:  # in slot 1: the highest
        text += piece
        assert np.array_equal(engine.logits(tokens), logits)
    assert text == want


@pytest.mark.usefixtures("where")
def test_one_sequence_is_an_error_for_a_second_user_and_not_a_wrong_text(
    opened: Callable[[int], dyno.Engine],
) -> None:
    engine = opened(1)
    first, second = alone(engine, 2)
    a, b = begun(engine, 2)  # nothing is owned before the first piece
    text = next(a)
    uses: tuple[Callable[[], object], ...] = (
        lambda: next(b),
        lambda: engine.logits([1, 2]),
        lambda: engine.logits_batch({0: [1, 2]}),
        lambda: engine.diagnostics.logits_with_routing([1, 2]),
        lambda: engine.diagnostics.greedy_after([1, 2]),
        lambda: engine.diagnostics.time_ops([1, 2]),
        engine.reset,
        lambda: engine.reset(0),
        lambda: engine.rewind(1),
        lambda: engine.set_context(ctx=64),
        lambda: next(engine.generate("x", slot=0)),
    )
    for use in uses:
        with pytest.raises(PlanError, match=r"sequences=1\).*sequences=2"):
            use()
    assert text + "".join(a) == first
    assert "".join(engine.generate(PROMPTS[1], **ASKED[1])) == second
    engine.reset()
    assert engine.logits([1, 2]).shape[0] == 2
    engine.set_context(ctx=64)
    assert engine.settings["ctx"] == 64


@pytest.mark.usefixtures("where")
def test_a_slot_comes_back_however_a_generation_ends(opened: Callable[[int], dyno.Engine]) -> None:
    engine = opened(1)

    def is_free() -> bool:
        try:
            engine.reset()
        except PlanError:
            return False
        return True

    generation = engine.generate("x = ", max_tokens=9)
    assert is_free()  # not begun
    next(generation)
    assert not is_free()
    generation.close()
    assert is_free()
    generation = engine.generate("x = ", max_tokens=9)
    next(generation)
    del generation
    gc.collect()
    assert is_free()
    generation = engine.generate("x = ", max_tokens=9)
    next(generation)
    with pytest.raises(KeyError):
        generation.throw(KeyError("from outside"))
    assert is_free()
    for _ in engine.generate("x = ", max_tokens=9):
        assert not is_free()
        break
    assert is_free()
    list(engine.generate("x = ", max_tokens=2))
    assert is_free()


def test_an_error_of_the_engine_frees_the_slot(
    opened: Callable[[int], dyno.Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = opened(1)
    generation = engine.generate("x = ")
    next(generation)
    with monkeypatch.context() as patch:
        patch.setattr(dyno.Engine, "_decode", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            list(generation)
    engine.reset()


def test_which_slot(opened: Callable[[int], dyno.Engine]) -> None:
    engine = opened(3)
    length = len(engine.tokenize("x = "))

    def held() -> list[int]:
        return [engine.position(slot) for slot in range(3)]

    first = engine.generate("x = ", max_tokens=5)
    next(first)
    assert held() == [0, 0, length]
    named = engine.generate("x = ", max_tokens=5, slot=0)
    next(named)
    assert held() == [length, 0, length]
    third = engine.generate("x = ", max_tokens=5)
    next(third)
    assert held() == [length] * 3
    with pytest.raises(PlanError, match=r"no slot is free.*sequences=3.*sequences=4"):
        next(engine.generate("x = ", max_tokens=5))
    with pytest.raises(PlanError, match=r"slot 0 belongs to a generation"):
        engine.logits([1])
    named.close()
    assert engine.logits([1]).shape[0] == 1
    wrong: tuple[Any, ...] = (3, -1, "0", 1.5, True)
    for slot in wrong:
        with pytest.raises(PlanError, match=r"slot .* does not exist: .*sequences=3"):
            engine.generate("x", slot=slot)


def test_closing_the_engine_ends_its_generations(opened: Callable[[int], dyno.Engine]) -> None:
    engine = opened(2)
    one, two = begun(engine, 2)
    next(one)
    engine.close()
    for generation in (one, two):
        with pytest.raises(DynoError, match="closed"):
            next(generation)
    with pytest.raises(PlanError, match="closed"):
        engine.generate("x")
