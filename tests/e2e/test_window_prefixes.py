"""Prompts of a server whose model keeps windows alone: beginnings are reused where they are there."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from dyno import Engine, Sampling, Scheduler
from dyno._drafts import Speculation
from dyno._requests import Handling, SchedulerEvents, Step
from dyno._writing import drawn_tokens, reusable
from random_models import SHAPES, Shape, random_model

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SHAPE = next(shape for shape in SHAPES if shape.architecture == "gpt-oss" and shape.n_layers == 3)

WINDOWED = [
    replace(shape, metadata={**shape.metadata, "context_length": 8192})
    for shape in SHAPES
    if shape.architecture in {"gemma3", "gpt-oss", "gemma4", "olmo2", "muse-glimmer"} and shape.n_embd < 300
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("model") / "m.gguf", SHAPE)


def opened(path: Path, **settings: Any) -> Engine:
    given = {"numerics": "exact", "sequences": 3, "ctx": 2048, "threads": 1, "ubatch": 128}
    given |= {"window_cache": "window", **settings}
    return Engine(path, device="cpu", profile=None, **given)


def drawn(
    scheduler: Scheduler, prompt: Sequence[int], count: int = 4, **handling: Any
) -> tuple[list[int], int]:
    """Tokens of a text, and how many of its prompt were reused."""
    each = list(scheduler.drawn(prompt, Sampling(), count, handling=Handling(ignore_end=True, **handling)))
    return [one.token for one in each], each[0].cached


def numbers(seed: int, count: int, n_vocab: int = SHAPE.n_vocab) -> list[int]:
    return [int(each) for each in np.random.default_rng(seed).integers(1, n_vocab, count)]


def wanted(path: Path, *prompts: Sequence[int]) -> list[list[int]]:
    with opened(path, window_cache="full") as engine, Scheduler(engine) as scheduler:
        return [drawn(scheduler, prompt, reuse=False)[0] for prompt in prompts]


def test_windows_are_kept_on_request(path: Path) -> None:
    with opened(path) as engine, opened(path, window_cache="auto") as other:
        assert engine.plan["cache_window"] == SHAPE.window
        assert other.plan["cache_window"] == 0  # the context is short


@pytest.mark.parametrize("shape", WINDOWED, ids=lambda shape: shape.name)
def test_texts_of_the_default_are_those_of_each_alone(tmp_path: Path, shape: Shape) -> None:
    """Beginnings longer than the window, after and beside other texts."""
    path = random_model(tmp_path / "m.gguf", shape)
    n_vocab = shape.n_vocab
    base = numbers(50, 1200, n_vocab)
    prompts = [
        [*base, *numbers(51, 500, n_vocab)],
        numbers(52, 300, n_vocab),
        [*base, *numbers(53, 600, n_vocab)],
        [*base, *numbers(54, 40, n_vocab)],
        [*base[:1100], *numbers(55, 30, n_vocab)],
    ]
    with opened(path, window_cache="full", ctx=8192) as engine, Scheduler(engine) as scheduler:
        right = [drawn(scheduler, prompt, reuse=False)[0] for prompt in prompts]
    with opened(path, window_cache="auto", ctx=8192) as engine, Scheduler(engine) as scheduler:
        assert engine.plan["window_stride"] == 1024
        found = [drawn(scheduler, prompt) for prompt in prompts]
        with ThreadPoolExecutor(4) as pool:
            beside = list(pool.map(lambda prompt: drawn(scheduler, prompt), reversed(prompts)))
    assert [text for text, _ in found] == right
    assert [text for text, _ in beside] == right[::-1]
    # The stop before the place where the prompts part; that place, which was kept for the third text; and a
    # place less than 256 tokens before it.
    at_stop = 1200 if shape.window == 1 else 1024
    assert [cached for _, cached in found] == [0, 0, at_stop, 1200, 1100]


def test_a_prompt_that_was_cancelled_is_read_again(path: Path) -> None:
    prompt = numbers(60, 3000)
    (right,) = wanted(path, prompt[:1900])
    cancelled = threading.Event()

    class Cancels(SchedulerEvents):
        steps = 0

        def stepped(self, step: Step) -> None:
            self.steps += 1
            if self.steps == 10:
                cancelled.set()

    with opened(path, ctx=4096) as engine, Scheduler(engine, events=Cancels()) as scheduler:
        assert list(scheduler.drawn(prompt, Sampling(), 4, cancelled=cancelled)) == []
        tokens, cached = drawn(scheduler, prompt[:1900])
    assert tokens == right
    assert cached == 1280  # ten steps of 128 tokens


def test_a_smaller_model_with_windows_drafts(path: Path) -> None:
    prompt = numbers(61, 1500)
    with opened(path, window_cache="full") as engine, Scheduler(engine) as scheduler:
        right = drawn(scheduler, prompt, 40)[0]
    with (
        opened(path, ctx=4096) as small,
        opened(path, ctx=4096) as engine,
        Scheduler(engine, speculation=Speculation(most=8, min_p=0, draft=small)) as scheduler,
    ):
        for _ in range(2):
            assert drawn(scheduler, prompt, 40)[0] == right
        assert scheduler.drafts.accepted > 0


def test_a_chat_without_a_scheduler_goes_on_at_the_end_of_its_prompt(path: Path) -> None:
    first, more = numbers(62, 700), numbers(63, 100)
    (right,) = wanted(path, [*first, *more])
    with opened(path) as engine:
        answer = [each.token for each in drawn_tokens(engine, first, Sampling(), 600, 0)]
        held = [*first, *answer]
        assert reusable(engine, [*first, *more], held, 0) == 700
        tokens = drawn_tokens(engine, [*first, *more], Sampling(), 4, 0, held=held)
        assert [each.token for each in tokens] == right


def test_vectors_are_those_of_the_full_cache(path: Path) -> None:
    texts = [numbers(70 + i, 700 + 300 * i) for i in range(5)]
    with opened(path) as engine, opened(path, window_cache="full") as other:
        assert np.array_equal(engine.embed(texts), other.embed(texts))


def test_the_third_text_begins_where_the_second_has_left_the_first(path: Path) -> None:
    base = numbers(1, 900)
    prompts = [[*base, *numbers(seed, 500)] for seed in (2, 3, 4, 5)]
    right = wanted(path, *prompts)
    with opened(path) as engine, Scheduler(engine) as scheduler:
        found = [drawn(scheduler, prompt) for prompt in prompts]
        totals = scheduler.totals()
    assert [tokens for tokens, _ in found] == right
    assert [cached for _, cached in found] == [0, 0, 900, 900]
    assert totals["reused_tokens"] == 1800
    with opened(path, window_cache="full") as engine, Scheduler(engine) as scheduler:
        assert [drawn(scheduler, prompt)[1] for prompt in prompts] == [0, 900, 900, 900]


def test_the_next_turn_goes_on_at_the_end_of_the_prompt(path: Path) -> None:
    """As with templates that leave the reasoning of earlier turns out."""
    first = numbers(6, 700)
    second = [*first, *numbers(7, 300)]
    (right,) = wanted(path, second)
    with opened(path, sequences=1) as engine, Scheduler(engine) as scheduler:
        drawn(scheduler, first, 900)  # the answer is longer than the rows that stay
        assert engine._open().rewindable(1000) == 700
        assert drawn(scheduler, second) == (right, 700)


def test_a_new_text_leaves_no_place_of_the_old_one(path: Path) -> None:
    """It would take the room of a place where a prompt can go on."""
    with opened(path, sequences=1) as engine, Scheduler(engine) as scheduler:
        drawn(scheduler, numbers(40, 400))
        drawn(scheduler, numbers(41, 700))
        assert [each.position for each in scheduler._prefixes._checkpoints] == [700]


def test_prompts_that_come_together(path: Path) -> None:
    base = numbers(8, 800)
    prompts = [
        *([*base, *numbers(9 + i, 20)] for i in range(3)),
        *([*base, *numbers(20 + i, 600)] for i in range(3)),
    ]
    right = wanted(path, *prompts)
    with (
        opened(path, cache_tokens=5000) as engine,
        Scheduler(engine) as scheduler,
        ThreadPoolExecutor(6) as pool,
    ):
        found = list(pool.map(lambda prompt: drawn(scheduler, prompt), prompts))
        totals = scheduler.totals()
    assert [tokens for tokens, _ in found] == right
    assert totals["reused_tokens"] > 0
    assert totals["prompt_tokens"] + totals["reused_tokens"] >= sum(map(len, prompts))


def test_drafts_are_taken_back(path: Path) -> None:
    repeated = numbers(30, 60) * 12
    with opened(path, window_cache="full") as engine, Scheduler(engine) as scheduler:
        right = drawn(scheduler, repeated, 200)[0]
    with opened(path) as engine, Scheduler(engine, speculation=Speculation(most=16)) as scheduler:
        assert drawn(scheduler, repeated, 200)[0] == right
