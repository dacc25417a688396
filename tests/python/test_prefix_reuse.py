"""Prompts that begin like texts that run or have ended: what is reused, and that answers do not change."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from chat_model import chat_model
from dyno import Engine, PlanError, Sampling, Scheduler, StepError
from dyno._prefixes import common_prefix
from dyno._requests import Handling
from waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

CTX = 192


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("model") / "m.gguf", n_layers=2)


def opened(path: Path, device: str = "cpu", **settings: Any) -> Engine:
    given = {"numerics": "exact", "sequences": 3, "ctx": CTX, "threads": 1, "ubatch": 32, **settings}
    return Engine(path, device=device, profile=None, **given)


@pytest.fixture(scope="module")
def engine(path: Path, device: str) -> Iterator[Engine]:
    with opened(path, device) as made:
        yield made


def drawn(
    scheduler: Scheduler, prompt: Sequence[int], count: int = 8, **handling: Any
) -> tuple[list[int], int]:
    """Tokens of a text, and how many of its prompt were reused."""
    each = list(scheduler.drawn(prompt, Sampling(), count, handling=Handling(ignore_end=True, **handling)))
    return [one.token for one in each], each[0].cached


def alone(engine: Engine, prompt: Sequence[int], count: int = 8) -> list[int]:
    with Scheduler(engine) as scheduler:
        return drawn(scheduler, prompt, count, reuse=False)[0]


def numbers(seed: int, count: int) -> list[int]:
    return [int(each) for each in np.random.default_rng(seed).integers(1, 250, count)]


def test_common_prefix_is_that_of_a_loop() -> None:
    rng = np.random.default_rng(0)
    for _ in range(500):
        held, prompt = ([int(t) for t in rng.integers(0, 2, int(rng.integers(0, 12)))] for _ in range(2))
        most = max(min(len(held), len(prompt) - 1), 0)
        wanted = next((i for i in range(most) if held[i] != prompt[i]), most)
        assert common_prefix(held, prompt) == wanted


def test_a_running_text_gives_its_beginning(engine: Engine) -> None:
    prompt = numbers(1, 80)
    wanted = alone(engine, [*prompt, 5, 6])
    with Scheduler(engine) as scheduler:
        first = scheduler.drawn(prompt, Sampling(), 100, handling=Handling(ignore_end=True))
        next(first)
        assert drawn(scheduler, [*prompt, 5, 6]) == (wanted, 80)
        assert scheduler.totals()["copied_tokens"] == 80
        assert drawn(scheduler, [*prompt, 5, 6], reuse=False) == (wanted, 0)
        first.close()


def test_an_ended_text_stays_for_others_while_there_is_a_sequence(engine: Engine) -> None:
    base = numbers(2, 60)
    with Scheduler(engine) as scheduler:
        long = [*base, *numbers(3, 60)]
        drawn(scheduler, long)
        assert drawn(scheduler, [*base, 1, 2])[1] == 60  # copied: the long one is there still
        assert drawn(scheduler, [*long, 9])[1] == len(long)
        assert scheduler.totals()["copied_tokens"] == 60 + len(long)
        # Two other texts need sequences: the one that was not used for the longest time is forgotten.
        for seed in (4, 5):
            assert drawn(scheduler, numbers(seed, 30))[1] == 0
        assert drawn(scheduler, [*long, 9])[1] == len(long)
        assert drawn(scheduler, [*base, 1, 2])[1] == 60


def test_prompts_that_come_together_compute_their_beginning_once(engine: Engine) -> None:
    base = numbers(6, 120)
    prompts = [[*base, *numbers(7 + i, 10)] for i in range(6)]
    wanted = [alone(engine, prompt) for prompt in prompts]
    with Scheduler(engine) as scheduler, ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda prompt: drawn(scheduler, prompt), prompts))
        totals = scheduler.totals()
    assert [tokens for tokens, _ in found] == wanted
    # A prompt does not wait for the last few tokens.
    assert 5 * (120 - 32) < totals["reused_tokens"] <= 5 * 120
    assert totals["prompt_tokens"] + totals["reused_tokens"] == 6 * 130


@pytest.mark.parametrize("cache_tokens", [0, CTX, 300])
@pytest.mark.parametrize("seed", range(3))
def test_any_interleaving_gives_each_what_it_gets_alone(
    path: Path, seed: int, device: str, cache_tokens: int
) -> None:
    draw = random.Random(seed)
    bases = [numbers(20 + i, draw.randrange(20, 90)) for i in range(3)]
    prompts = []
    for i in range(24):
        base = draw.choice(bases)
        prompts.append([*base[: draw.randrange(1, len(base) + 1)], *numbers(50 + i, draw.randrange(0, 40))])
    counts = [draw.randrange(1, 40) for _ in prompts]
    with opened(path, device, cache_tokens=cache_tokens) as engine:
        wanted = [alone(engine, prompt, count) for prompt, count in zip(prompts, counts, strict=True)]
        with Scheduler(engine, step_tokens=draw.randrange(4, 40)) as scheduler:
            most = [0]
            session = engine._open()
            scheduler._events.stepped = lambda _: most.append(session.cached_positions)  # type: ignore[method-assign]

            def work(i: int) -> list[int]:
                if i % 7 == 3:  # a client that goes
                    text = scheduler.drawn(prompts[i], Sampling(), counts[i])
                    next(text)
                    text.close()
                if i % 5 == 4:
                    engine.embed([prompts[i]])
                return drawn(scheduler, prompts[i], counts[i])[0]

            with ThreadPoolExecutor(8) as pool:
                assert list(pool.map(work, range(len(prompts)))) == wanted
            totals = scheduler.totals()
        assert totals["reused_tokens"] > 0
        if cache_tokens:
            assert 0 < max(most) <= cache_tokens


def together(
    engine: Engine, scheduler: Scheduler, work: Callable[[Sequence[int]], list[int]], prompts: list[list[int]]
) -> list[list[int]]:
    """Texts that all wait before the first one begins."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        with engine._lock:
            found = [pool.submit(work, prompt) for prompt in prompts]
            until(lambda: scheduler.load()["waiting"] == len(prompts))
        return [each.result() for each in found]


def test_texts_wait_again_when_the_cache_is_full(path: Path, device: str) -> None:
    prompts = [numbers(i, 20) for i in range(3)]
    with opened(path, device, cache_tokens=CTX) as engine:
        wanted = [alone(engine, prompt, 120) for prompt in prompts]
        with Scheduler(engine) as scheduler:
            found = together(engine, scheduler, lambda prompt: drawn(scheduler, prompt, 120)[0], prompts)
            totals = scheduler.totals()
            assert totals["stopped"] > 0  # 3 x 140 tokens do not fit into 192
            assert totals["recomputed_tokens"] > 0
            assert totals["prompt_tokens"] + totals["reused_tokens"] == 3 * 20  # each prompt once
        assert found == wanted


def test_penalties_and_seeds_outlast_a_stop(path: Path) -> None:
    prompts = [numbers(i, 20) for i in range(3)]
    sampling = Sampling(temperature=1.0, top_k=0, seed=3, repeat_penalty=1.2, presence_penalty=0.5)

    def tokens(scheduler: Scheduler, prompt: Sequence[int]) -> list[int]:
        handling = Handling(ignore_end=True)
        return [each.token for each in scheduler.drawn(prompt, sampling, 100, handling=handling)]

    with opened(path) as engine, Scheduler(engine) as scheduler:
        wanted = [tokens(scheduler, prompt) for prompt in prompts]
    with opened(path, cache_tokens=CTX) as engine, Scheduler(engine) as scheduler:
        assert together(engine, scheduler, lambda prompt: tokens(scheduler, prompt), prompts) == wanted
        assert scheduler.totals()["stopped"] > 0


def test_tokens_that_nobody_knows_are_not_in_the_way(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = numbers(9, 150)
    with opened(path, cache_tokens=CTX) as engine:
        wanted = alone(engine, long)
        with Scheduler(engine) as scheduler:
            for seed in range(3):
                drawn(scheduler, numbers(seed, 50))

            def fail() -> None:
                raise PlanError("made to fail")

            with monkeypatch.context() as patch:
                patch.setattr(scheduler, "_batch", fail)
                with pytest.raises(StepError):
                    drawn(scheduler, [1, 2])
            assert drawn(scheduler, long) == (wanted, 0)
        engine.reset()
        with Scheduler(engine) as scheduler:
            engine.logits(numbers(7, 100), slot=2)  # nor does an outsider
            assert drawn(scheduler, long) == (wanted, 0)


def test_an_outsider_s_tokens_count_and_are_not_reused(path: Path) -> None:
    prompt = numbers(1, 60)
    with opened(path, cache_tokens=CTX) as engine:
        wanted = alone(engine, prompt, 30)
        with Scheduler(engine) as scheduler:
            drawn(scheduler, prompt)
            engine.logits(numbers(9, 100), slot=0)
            found = [drawn(scheduler, prompt, 30)[0] for _ in range(3)]
            assert found == [wanted] * 3
            stop = threading.Event()
            assert next(scheduler.drawn(prompt, Sampling(), 5, stop)).cached in (0, 59)
