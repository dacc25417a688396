"""Sequences longer than sparse attention reads: checkpoints, copies, and clients of a server."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from dyno import Engine
from dyno.server import Options
from served import KEY, serving
from sparse_shapes import SPARSE_SHAPES, selected, with_vocabulary

if TYPE_CHECKING:
    from pathlib import Path

    from dyno import _core
    from numpy.typing import NDArray
    from random_models import Shape

CTX = 130
EXACT: dict[str, Any] = {"profile": None, "numerics": "exact", "ctx": CTX}
CLIENTS = 4


def name(shape: Shape) -> str:
    return f"{shape.name}-top{selected(shape)}"


@pytest.fixture(params=SPARSE_SHAPES, ids=name)
def shape(request: pytest.FixtureRequest) -> Shape:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def path(shape: Shape, tmp_path: Path) -> Path:
    return with_vocabulary(tmp_path / "m.gguf", shape)


class History:
    """Random calls of an engine with three sequences, with the tokens that each one should hold."""

    def __init__(self, engine: Engine, most: int) -> None:
        self.engine, self.dice = engine, random.Random(most)
        self.held: list[list[int]] = [[], [], []]
        self._kept: list[tuple[_core.Checkpoint, list[int]]] = []
        self._counts = [1, 1, 2, 5, max(most - 1, 1), most, most + 1]
        self.copies = self.returns = 0

    def _becomes(self, slot: int, tokens: list[int], same: int) -> None:
        """A sequence holds other tokens, of which the first `same` stayed there."""
        self.held[slot] = list(tokens)
        self._kept = [(c, its) for c, its in self._kept if c.slot != slot or len(its) <= same]

    def _forget(self, slot: int) -> None:
        self.engine.reset(slot)
        self._becomes(slot, [], 0)

    def change(self) -> None:
        """One call that computes nothing."""
        dice = self.dice
        action, (slot, other) = dice.randrange(5), dice.sample(range(3), 2)
        if action == 0:
            self.engine.set(ubatch=dice.choice([1, 3, 7, 64]))
        elif action == 1:
            back = dice.randrange(len(self.held[slot]) + 1)
            self.engine.rewind(back, slot)
            self._becomes(slot, self.held[slot][:back], back)
        elif action == 2:
            self._forget(other)
            while sum(map(len, self.held)) + len(self.held[slot]) > 2 * CTX:
                self._forget(3 - slot - other)
            self.engine.copy_sequence(slot, other)
            self.held[other] = list(self.held[slot])
            self.copies += bool(self.held[slot])
        elif action == 3:
            self._kept = [*self._kept[-2:], (self.engine.checkpoint(slot), list(self.held[slot]))]
        elif self._kept:
            checkpoint, tokens = dice.choice(self._kept)
            self.returns += len(self.held[checkpoint.slot]) > len(tokens) > 0
            self.engine.restore(checkpoint)
            self._becomes(checkpoint.slot, tokens, len(tokens))

    def feed(self) -> dict[int, NDArray[np.float32]]:
        """Random tokens for some sequences; their last logits by sequence."""
        batch = {}
        for slot in self.dice.sample(range(3), self.dice.randrange(1, 4)):
            count = min(self.dice.choice(self._counts), CTX - len(self.held[slot]))
            if count == 0:
                self._forget(slot)
            batch[slot] = [self.dice.randrange(288) for _ in range(max(count, 1))]
        coming = sum(map(len, batch.values()))
        while sum(map(len, self.held)) + coming > 2 * CTX:
            self._forget(max(range(3), key=lambda slot: len(self.held[slot])))
        found = self.engine.logits_batch(batch, reset=False, rows="last")
        for slot, tokens in batch.items():
            self.held[slot] += tokens
        return {slot: rows[-1] for slot, rows in found.items()}


def test_any_order_of_calls_gives_the_logits_of_a_sequence_alone(path: Path, shape: Shape) -> None:
    beyond = 0
    with (
        Engine(path, **EXACT, sequences=3, cache_tokens=2 * CTX, threads=2, ubatch=7) as engine,
        Engine(path, **EXACT, threads=1) as alone,
    ):
        history = History(engine, selected(shape))
        for _ in range(90):
            history.change()
            for slot, found in history.feed().items():
                held = history.held[slot]
                wanted = alone.logits(held, rows="last")[-1]
                assert np.allclose(found, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max()), held
                beyond += len(held) > selected(shape)
    assert min(history.copies, history.returns, beyond) > 0


def test_clients_of_a_server_get_what_each_gets_alone(path: Path, shape: Shape) -> None:
    """Their prompts share beginnings, and grow past the number of selected positions."""
    dice = random.Random(7)
    base = [dice.randrange(250) for _ in range(90)]
    prompts = [[*base[: dice.randrange(10, 90)], *(dice.randrange(250) for _ in range(9))] for _ in range(12)]
    body = {"temperature": 0, "max_tokens": 25}
    with Engine(path, **EXACT, threads=1) as engine:
        alone = [engine.complete(prompt, max_tokens=25, temperature=0)[0] for prompt in prompts]
    settings = {"numerics": "exact", "ubatch": 16, "cache_tokens": 2 * CTX}
    with serving(path, Options(model="m", api_key=KEY), sequences=3, ctx=CTX, **settings) as server:

        def text(prompt: list[int]) -> Any:
            response = server.client.post("/v1/completions", json={"prompt": prompt, **body})
            return response.json()["choices"][0]["text"]

        with ThreadPoolExecutor(CLIENTS) as pool:
            assert list(pool.map(text, prompts)) == [each.text for each in alone]
        totals = server.scheduler.totals()
    assert totals["reused_tokens"] > 0
    assert totals["prompt_tokens"] + totals["reused_tokens"] == sum(map(len, prompts))
