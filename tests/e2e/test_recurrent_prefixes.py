"""A scheduler over models with recurrent state: a beginning that two prompts shared gets a checkpoint."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from dyno import Engine, Sampling, Scheduler
from dyno._requests import Handling
from random_models import SHAPES, random_model
from random_newer import RECURRENT

if TYPE_CHECKING:
    from pathlib import Path

STATEFUL = {shape.architecture: shape for shape in SHAPES if shape.architecture in RECURRENT}


def numbers(seed: int, count: int) -> list[int]:
    return [int(each) for each in np.random.default_rng(seed).integers(1, 80, count)]


def drawn(scheduler: Scheduler, prompt: list[int], reuse: bool = True) -> tuple[list[int], int]:
    handling = Handling(reuse=reuse, ignore_end=True)
    each = list(scheduler.drawn(prompt, Sampling(), 6, handling=handling))
    return [one.token for one in each], each[0].cached


@pytest.mark.parametrize("architecture", sorted(STATEFUL))
def test_the_third_prompt_of_a_beginning_reuses_it(tmp_path: Path, architecture: str, device: str) -> None:
    path = random_model(tmp_path / "m.gguf", STATEFUL[architecture])
    base = numbers(1, 40)
    prompts = [[*base, *numbers(2 + i, 5)] for i in range(8)]
    settings: dict[str, Any] = {"numerics": "exact", "sequences": 3, "ctx": 96, "ubatch": 32, "threads": 1}
    with Engine(path, device=device, profile=None, **settings) as engine:
        with Scheduler(engine) as scheduler:
            wanted = [drawn(scheduler, prompt, reuse=False)[0] for prompt in prompts]
        with Scheduler(engine) as scheduler:
            found = [drawn(scheduler, prompt) for prompt in prompts[:4]]
            assert [tokens for tokens, _ in found] == wanted[:4]
            # The first one computes, the second one shows where prompts part, and then the state is known.
            assert [cached for _, cached in found] == [0, 0, 40, 40]
            last = [*prompts[3], *found[3][0]]
            tokens, cached = drawn(scheduler, last)
            assert cached == len(last) - 1  # a text goes on where it ended
            with ThreadPoolExecutor(4) as pool:
                assert [t for t, _ in pool.map(lambda p: drawn(scheduler, p), prompts * 2)] == wanted * 2
        with Scheduler(engine) as scheduler:
            assert drawn(scheduler, last, reuse=False)[0] == tokens
