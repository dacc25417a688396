"""Random histories of a scheduler: each text is the one that its request gets alone."""

from __future__ import annotations

import contextlib
import random
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from dyno import Engine, Sampling, Scheduler
from dyno._drafts import Judge
from dyno._requests import Handling
from dyno._writing import drawn_tokens
from dyno.errors import ClosedError, PlanError
from dyno.scheduler import Speculation
from sparse_shapes import SPARSE_SHAPES, selected, with_vocabulary

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dyno._requests import Request

EXACT: dict[str, Any] = {"profile": None, "numerics": "exact", "threads": 1}
REQUESTS = 10
MODELS = {
    "llama-tiny": "draft",
    "qwen3moe-tiny": "ngram",
    "gemma3-tiny": "ngram",  # most layers have a window
    "gpt-oss-tiny": "draft",
    "deepseek2-v3-tiny": "ngram",  # latent attention
    "qwen35-tiny": "mtp",  # recurrent state
    "deepseek32": "ngram",  # sparse attention, in contexts that it does not read whole
    "glm-dsa": "ngram",
}


class Stepped(Scheduler):
    """A scheduler whose steps the test makes, so that a seed gives one history."""

    def _run_steps(self) -> None:
        with self._changed:
            while not self._closing:
                self._changed.wait()
        self._fail_all(ClosedError("closed"))


class Sometimes(Judge):
    """Drafts in most steps, whatever they cost."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__()
        self._dice = dice

    def wants(self, texts: int) -> bool:
        return self._dice.random() < 0.8

    def stepped(self, *_: object, **__: object) -> None:
        return None


@dataclass
class Asked:
    """A request of a history."""

    prompt: list[int]
    sampling: Sampling
    most: int
    handling: Handling
    cancelled: threading.Event = field(default_factory=threading.Event)
    request: Request | None = None

    def tokens(self) -> list[int]:
        """The tokens that the request was told."""
        assert self.request is not None
        return [each.token for each in iter(self.request.take, None)]

    def alone(self, engine: Engine) -> list[int]:
        """The tokens that the request gets in an engine without a scheduler."""
        engine.reset()
        found = []
        for each in drawn_tokens(engine, self.prompt, self.sampling, self.most, 0):
            found.append(each.token)
            if each.token in engine.tokenizer.end_of_generation and not self.handling.ignore_end:
                break
        return found


def asked(dice: random.Random, ctx: int, n_vocab: int) -> Iterator[Asked]:
    """Requests whose prompts share beginnings, up to all tokens but the last, or all of them."""
    base = [dice.randrange(3, n_vocab) for _ in range(ctx)]
    past = [base[: ctx // 3], [5, 6, 7, 8] * (ctx // 16)]
    for _ in range(REQUESTS):
        more = [dice.randrange(3, n_vocab) for _ in range(dice.randrange(1, 9))]
        before = dice.choice(past)
        prompt = dice.choice(
            [before, [*before[:-1], more[0]], before[: dice.randrange(1, len(before) + 1)], [*before, *more]]
        )[:ctx]
        past.append(prompt)
        warm = {"temperature": 1.0, "seed": dice.randrange(99), "top_k": 5}
        options: dict[str, Any] = dice.choice([{}, warm, {"repeat_penalty": 1.3}, {**warm, "logprobs": 1}])
        handling = Handling(reuse=dice.random() < 0.85, ignore_end=dice.random() < 0.5)
        yield Asked(prompt, Sampling(**options), dice.choice([1, 2, 10, 30, ctx]), handling)


def speculation(kind: str, dice: random.Random, twin: Engine) -> Speculation:
    most = dice.choice([1, 3, 8])
    if kind == "ngram":
        return Speculation(most, min_p=0)
    return Speculation(most, min_p=0, draft=twin) if kind == "draft" else Speculation(most, 0, head=True)


def model_of(name: str, tiny_dir: Path, tmp_path: Path) -> Path:
    """The shipped model of a name, or one of random weights."""
    if name.endswith("-tiny"):
        return tiny_dir / f"{name}.gguf"
    shape = next(shape for shape in SPARSE_SHAPES if shape.architecture == name)
    assert selected(shape) < 48, "less than the shortest context of a history"
    return with_vocabulary(tmp_path / "m.gguf", shape)


def check(scheduler: Scheduler, engine: Engine, cache_tokens: int) -> None:
    """The session holds the tokens that the scheduler believes in."""
    session = engine._open()
    for request in scheduler._running:
        assert session.position(request.owner.slot) == len(request.held)
        assert not engine._slots.is_free(request.owner.slot)
    for slot, tokens in scheduler._prefixes._kept.items():
        if slot not in engine._slots.foreign:  # the next admission forgets such tokens
            assert session.position(slot) >= len(tokens)
    positions = [session.position(slot) for slot in range(int(engine.settings["sequences"]))]
    assert sum(positions) <= cache_tokens


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", MODELS)
def test_each_text_is_what_it_is_alone(name: str, seed: int, tiny_dir: Path, tmp_path: Path) -> None:
    dice = random.Random(f"{name} {seed}")
    path, ctx, sequences = model_of(name, tiny_dir, tmp_path), dice.choice([48, 96]), dice.choice([2, 3])
    cache_tokens = dice.randrange(ctx, ctx * sequences + 1)
    context = {"ctx": ctx, "sequences": sequences, "ubatch": dice.choice([3, 7, 33])}
    with (
        Engine(path, **EXACT, **context, cache_tokens=cache_tokens) as engine,
        Engine(path, **EXACT, ctx=ctx) as alone,
        Engine(tiny_dir / "llama-tiny.gguf", **EXACT, **context) as twin,
    ):
        empty = engine._open().cache_memory
        room = dice.choice([sequences, sequences + 1, 7, 33])
        drafts = speculation(MODELS[name], dice, twin)
        all_asked: list[Asked] = []
        with Stepped(engine, max_waiting=REQUESTS, step_tokens=room, speculation=drafts) as scheduler:
            assert scheduler._drafting is not None
            scheduler._drafting.judge = Sometimes(dice)
            coming = asked(dice, ctx, int(engine.model["n_vocab"]))
            left: Asked | None = next(coming)
            while left is not None or scheduler._waiting or scheduler._running:
                while left is not None and dice.random() < 0.3:
                    request = scheduler._submit(
                        left.prompt, left.sampling, left.most, left.cancelled, left.handling
                    )
                    left.request = request
                    all_asked.append(left)
                    left = next(coming, None)
                if all_asked and dice.random() < 0.02:
                    dice.choice(all_asked).cancelled.set()
                if dice.random() < 0.1 and (free := engine._slots.free(sequences)):
                    outside(engine, dice.choice(free))
                scheduler._step()
                check(scheduler, engine, cache_tokens)
            totals, counts = scheduler.totals(), scheduler.drafts
        whole = 0
        for each in all_asked:
            found, wanted = each.tokens(), each.alone(alone)
            whole += len(found)
            assert found == (wanted[: len(found)] if each.cancelled.is_set() else wanted)
        assert totals["generated_tokens"] == whole
        if not any(each.cancelled.is_set() for each in all_asked):
            assert totals["prompt_tokens"] + totals["reused_tokens"] == sum(len(a.prompt) for a in all_asked)
        assert counts.accepted <= counts.tokens
        assert engine._slots.free(sequences) == list(range(sequences))
        session = engine._open()
        for slot in range(sequences):
            session.reset(slot)
            session.trim(slot)
        assert session.cache_memory == empty


def outside(engine: Engine, slot: int) -> None:
    """A call that does not go through the scheduler takes a sequence and leaves it, if there is memory."""
    with contextlib.suppress(PlanError):
        engine.logits([9, 8, 7, 6, 5], slot=slot, rows="none")
