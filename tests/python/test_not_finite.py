"""Logits that are not finite end a text with the same error on each device, also where the device draws."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dyno
import numpy as np
import pytest
from dyno import Sampling, Scheduler, _core
from dyno._requests import Handling
from dyno.errors import ModelError
from dyno.testing import tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GPUS = [d for d in _core.devices() if d["kind"] == "cuda" and not _core.device_problem(d)]
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not GPUS, reason=f"no GPU: {_core.no_cuda_reason()}")]
PROMPT = np.array([1, 7, 3, 11, 5], np.int32)
DAMAGED = 200  # the token whose embedding is spoilt
WAYS = (
    {},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.5, "top_p": 0.8},
    {"temperature": 1.0},
)


@pytest.fixture(params=[np.nan, np.inf, -np.inf], ids=str)
def damaged(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model that is sound as long as nobody feeds it one token."""
    path = tiny_model(tmp_path / "damaged.gguf", n_ctx=64)
    (table,) = (t for t in _core.Gguf(path).tensors() if t["name"] == "token_embd.weight")
    whole = bytearray(path.read_bytes())
    at = table["offset"] + DAMAGED * table["shape"][1] * 4
    whole[at : at + 4] = np.float32(request.param).tobytes()
    path.write_bytes(whole)
    return path


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=ON_GPU)], ids=["cpu", "cuda"])
def engine(request: pytest.FixtureRequest, damaged: Path) -> Iterator[dyno.Engine]:
    with dyno.Engine(damaged, device=request.param, profile=None, sequences=2) as engine:
        yield engine


def generation(engine: dyno.Engine, forced: list[int], settings: dict[str, Any]) -> Any:
    engine.reset(0)
    found = engine._session.generation(PROMPT, **settings)
    found.queue(np.full(len(forced), 0.5, np.float32), np.array(forced, np.int32))
    return found


@pytest.mark.parametrize("settings", WAYS, ids=lambda settings: "-".join(settings) or "greedy")
def test_a_draw_names_the_position_and_leaves_the_sequence_as_it_was(
    engine: dyno.Engine, settings: dict[str, Any]
) -> None:
    sound = generation(engine, [-1] * 4, settings)
    want = [sound.next() for _ in range(4)]
    found = generation(engine, [-1, DAMAGED, -1, -1, -1, -1], settings)
    assert [found.next(), found.next()] == want[:2]
    for _ in range(2):  # it stays so
        with pytest.raises(ModelError, match="logits after position 6 are not finite"):
            found.next()
        assert (engine.position(), found.token, found.queued) == (6, DAMAGED, 4)
    # The session is none the worse, in this slot and in others.
    again = generation(engine, [-1] * 4, settings)
    assert [again.next() for _ in range(4)] == want
    other = engine._session.generation(PROMPT, slot=1, **settings)
    other.queue(np.full(4, 0.5, np.float32))
    assert [other.next() for _ in range(4)] == want


def test_a_prompt_that_ends_so_has_no_first_draw(engine: dyno.Engine) -> None:
    with pytest.raises(ModelError, match="logits after position 2 are not finite"):
        list(engine.generate([1, 2, DAMAGED], max_tokens=4))
    engine.reset()  # its slot is free again
    with Scheduler(engine) as scheduler:
        # No score of a token may be NaN, which JSON does not have.
        scored = scheduler.drawn([1, DAMAGED, 2], Sampling(), 4, handling=Handling(prompt_logprobs=0))
        with pytest.raises(ModelError, match=r"logits after position [01] are not finite"):
            list(scored)
    engine.reset()
    with pytest.raises(ModelError, match="logits after position 1 are not finite"):
        engine.diagnostics.greedy_after([1, DAMAGED, 2])
    assert len(list(engine.generate([1, 2, 3], max_tokens=4))) > 0
