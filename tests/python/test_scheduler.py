"""Continuous batching: each generation gives what it gives alone; slots, queue and errors."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from chat_model import chat_model, numerics
from dyno import ClosedError, Engine, PlanError, QueueFullError, Sampling, Scheduler, StepError
from dyno._requests import Handling, Request
from dyno._sampling import HostSampler
from dyno._writing import drawn_tokens
from dyno.errors import ModelError
from dyno.testing import tiny_model
from waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROMPTS = ["a", "def main", "x" * 70, "one two three", "zz", "class Shape:" * 9, "b" * 33]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, device: str) -> Iterator[Engine]:
    path = chat_model(tmp_path_factory.mktemp("model") / "m.gguf", n_layers=2)
    settings = {"sequences": 3, "ctx": 256, "threads": 2, "ubatch": 32, "numerics": numerics(device)}
    with Engine(path, device=device, profile=None, **settings) as opened:
        yield opened


def texts(engine: Engine, **options: object) -> list[str]:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(lambda p: "".join(engine.generate(p, 20, **options)), PROMPTS))  # type: ignore[arg-type]


def test_many_at_once_give_what_each_gives_alone(engine: Engine) -> None:
    for options in ({}, {"temperature": 0.9, "seed": 5}, {"repeat_penalty": 1.3}):
        alone = ["".join(engine.generate(p, 20, **options)) for p in PROMPTS]  # type: ignore[arg-type]
        assert len(set(alone)) > 4  # a text of one prompt would not pass for that of another
        for step_tokens in (None, 5):
            with Scheduler(engine, step_tokens=step_tokens) as scheduler:
                assert texts(engine, **options) == alone
                assert scheduler.load()["running"] == scheduler.load()["waiting"] == 0


def test_steps_hold_several_sequences(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[list[int]] = []
    with Scheduler(engine, step_tokens=10) as scheduler:
        batch = scheduler._batch

        end = time.monotonic() + 120

        def counted() -> list[object]:
            assert time.monotonic() < end, "not all texts have come"
            if not sizes and len(scheduler._running) + len(scheduler._waiting) < len(PROMPTS):
                return []  # on a busy machine the first text could end before the second one comes
            made = batch()
            sizes.append([len(tokens) for _, tokens in made])
            return made

        monkeypatch.setattr(scheduler, "_batch", counted)
        texts(engine)
    assert all(sum(step) <= 10 for step in sizes)
    assert max(len(step) for step in sizes) == 3
    # A long prompt is read in parts while others go on.
    assert any(1 in step and max(step) > 1 for step in sizes)


def test_a_prompt_goes_on_where_it_differs_from_what_a_slot_holds(engine: Engine) -> None:
    prompt = engine.tokenize("x" * 60)
    alone = [each.token for each in _drawn(engine, [*prompt, 5], 8)]
    fed: list[int] = []
    with Scheduler(engine) as scheduler:
        list(scheduler.drawn(prompt, Sampling(), 4))
        take = scheduler._take_slot

        def watched(request: object, session: object) -> bool:
            took = take(request, session)  # type: ignore[arg-type]
            fed.append(len(request.pending))  # type: ignore[attr-defined]
            return took

        scheduler._take_slot = watched  # type: ignore[method-assign]
        assert [each.token for each in scheduler.drawn([*prompt, 5], Sampling(), 8)] == alone
        assert fed == [1]
        for slot in range(3):  # others have used the slots: nothing of them may be trusted
            engine.logits(prompt[:-3], slot=slot)
        assert [each.token for each in scheduler.drawn([*prompt, 5], Sampling(), 8)] == alone
        assert fed == [1, len(prompt) + 1]


def _drawn(engine: Engine, prompt: list[int], count: int) -> list[object]:
    with Scheduler(engine) as scheduler:
        return list(scheduler.drawn(prompt, Sampling(), count))


def test_a_full_queue_refuses_and_cancelling_frees(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with Scheduler(engine, max_waiting=1) as scheduler:
        batch, cancelled = scheduler._batch, threading.Event()
        monkeypatch.setattr(scheduler, "_batch", list)  # no step does anything from now on
        with ThreadPoolExecutor(4) as pool:
            held = [pool.submit(list, scheduler.drawn([1, 2], Sampling(), 9, cancelled)) for _ in range(4)]
            until(lambda: scheduler.load()["running"] == 3 and scheduler.load()["waiting"] == 1)
            with pytest.raises(QueueFullError, match="no more than 1 may wait"):
                next(scheduler.drawn([1, 2], Sampling(), 1))
            cancelled.set()
            assert [each.result(120) for each in held] == [[]] * 4
        assert scheduler.load()["running"] == scheduler.load()["waiting"] == 0
        monkeypatch.setattr(scheduler, "_batch", batch)
        assert len(list(scheduler.drawn([1, 2], Sampling(), 3))) == 3


def test_the_context_ends_a_text(engine: Engine) -> None:
    with Scheduler(engine) as scheduler:
        prompt = [1] * 250
        assert len(list(scheduler.drawn(prompt, Sampling(logit_bias={2: -1e9}), 100))) <= 7
        with pytest.raises(PlanError, match="expected 1 to 256"):
            next(scheduler.drawn([1] * 257, Sampling(), 1))
        with pytest.raises(PlanError, match="token 99999 is not one of"):
            next(scheduler.drawn([99999], Sampling(), 1))


def test_a_failed_step_ends_its_requests_and_no_others(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Scheduler(engine) as scheduler:

        def fail() -> None:
            raise PlanError("made to fail")

        with monkeypatch.context() as patch:
            patch.setattr(scheduler, "_batch", fail)
            # The request is not wrong, so its client must not be told so.
            with pytest.raises(StepError, match="a step failed: made to fail"):
                list(scheduler.drawn([1, 2], Sampling(), 3))
            assert scheduler.failure is not None
        assert len(list(scheduler.drawn([1, 2], Sampling(), 3))) == 3
        assert scheduler.failure is None


def test_a_draw_that_fails_ends_its_own_request(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise ValueError("made to fail")

    monkeypatch.setattr(HostSampler, "draw", fail)
    monkeypatch.setattr(Request, "keep_prompt_logprobs", fail)
    with Scheduler(engine) as scheduler:
        other = scheduler.drawn([1, 2], Sampling(), 100, handling=Handling(ignore_end=True))
        next(other)
        with pytest.raises(ValueError, match="made to fail"):
            list(scheduler.drawn([3, 4], Sampling(repeat_penalty=1.3), 5))
        with pytest.raises(ValueError, match="made to fail"):
            list(scheduler.drawn([3, 4], Sampling(), 5, handling=Handling(prompt_logprobs=0)))
        assert len(list(other)) == 99
        assert scheduler.failure is None


@pytest.mark.parametrize("more", [{}, {"repeat_penalty": 1.3, "logprobs": 2**70}])
def test_counts_past_the_engine_s_numbers_mean_all(engine: Engine, more: dict[str, float]) -> None:
    def drawn(top_k: int, last_n: int) -> list[int]:
        sampling = Sampling(1.0, top_k, 0.9, 0.0, seed=4, repeat_last_n=last_n, **more)  # type: ignore[arg-type]
        return [each.token for each in scheduler.drawn([3, 4, 5], sampling, 10)]

    alone = "".join(engine.generate("ab", 10, 1.0, top_k=3_000_000_000, seed=3))
    assert alone == "".join(engine.generate("ab", 10, 1.0, top_k=0, seed=3))
    with Scheduler(engine) as scheduler:
        other = scheduler.drawn([1, 2], Sampling(), 40, handling=Handling(ignore_end=True))
        next(other)
        assert drawn(3_000_000_000, 2**70) == drawn(2**70, 2**40) == drawn(0, -1)
        assert len(list(other)) == 39
    for wrong in ({"temperature": 1e39}, {"logit_bias": {2**40: 1.0}}, {"logit_bias": {-1: 1.0}}):
        with pytest.raises(PlanError, match=r"must be|expected a token id"):
            Sampling(**wrong)  # type: ignore[arg-type]


def test_the_context_does_not_change_under_a_scheduler(engine: Engine) -> None:
    with Scheduler(engine) as scheduler:
        with pytest.raises(PlanError, match="while a scheduler is open; close the scheduler first"):
            engine.set_context(ctx=64, sequences=2)
        assert engine.settings["ctx"] == 256
        assert len(list(scheduler.drawn([1] * 100, Sampling(), 3, handling=Handling(ignore_end=True)))) == 3
    engine.set_context(ctx=256, sequences=3)


def test_the_context_does_not_change_while_a_scheduler_is_opened(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(settings: object) -> None:
        with pytest.raises(PlanError, match="while a scheduler is open"):
            engine.set_context(ctx=64, sequences=2)
        with pytest.raises(PlanError, match="already has a scheduler"):
            Scheduler(engine)
        raise KeyboardInterrupt

    monkeypatch.setattr("dyno.scheduler.speculation_of", opened)
    with pytest.raises(KeyboardInterrupt):
        Scheduler(engine)
    engine.set_context(ctx=256, sequences=3)  # nothing is left of it


def test_one_scheduler_an_engine_and_none_after_close(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Scheduler(engine) as scheduler:
        with pytest.raises(PlanError, match="already has a scheduler"):
            Scheduler(engine)
        monkeypatch.setattr(scheduler, "_batch", list)  # no text ends by itself
        with ThreadPoolExecutor(1) as pool:
            endless = pool.submit(list, scheduler.drawn([1, 2], Sampling(), 250))
            until(lambda: scheduler.load()["running"] == 1)
            scheduler.close()
            with pytest.raises(ClosedError, match="the scheduler is closed"):
                endless.result(120)
        with pytest.raises(ClosedError, match="the scheduler is closed"):
            next(scheduler.drawn([1, 2], Sampling(), 1))
    for wrong in ({"max_waiting": -1}, {"step_tokens": 2}):
        with pytest.raises(PlanError, match="expected at least"):
            Scheduler(engine, **wrong)  # type: ignore[arg-type]
    assert len(list(engine.generate("a", 3))) > 0


@pytest.mark.parametrize("given", [{"step_tokens": 3}, {"step_tokens": 4}, {"ubatch": 2}, {}])
def test_a_step_has_room_for_each_sequence(
    tmp_path: Path, given: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = chat_model(tmp_path / "m.gguf")
    with Engine(model, device="cpu", profile=None, threads=1, ctx=64, sequences=4, **given) as engine:
        if given == {"step_tokens": 3}:
            with pytest.raises(PlanError, match="step_tokens is 3; expected at least one for each of the 4"):
                Scheduler(engine)
            engine.settings.origins["step_tokens"] = "profile.yaml:12"
            with caplog.at_level("WARNING", "dyno"), Scheduler(engine) as scheduler:
                assert scheduler._room == 4
            assert "step_tokens is 3 (profile.yaml:12); a step has room for the 4 sequences" in caplog.text
            return
        with Scheduler(engine) as scheduler:
            assert scheduler._room == max(4, given.get("step_tokens", engine.settings["ubatch"]))
    assert not caplog.records


def test_a_model_without_a_vocabulary_draws_with_settings_of_the_host(tmp_path: Path) -> None:
    """Only rules and DRY need the texts of tokens."""
    path = tiny_model(tmp_path / "m.gguf", vocabulary=False)
    settings: list[dict[str, Any]] = [{"logprobs": 1}, {"repeat_penalty": 1.5}, {"logit_bias": {7: 100.0}}]
    with Engine(path, profile=None, ctx=32) as engine:
        alone = [[*drawn_tokens(engine, [1, 2, 3], Sampling(**each), 5, 0)] for each in settings]
        with Scheduler(engine) as scheduler:
            handling = Handling(reuse=False)
            found = [
                [*scheduler.drawn([1, 2, 3], Sampling(**each), 5, handling=handling)] for each in settings
            ]
            for each in ({"dry_multiplier": 1.0}, {"regex": "a"}):
                with pytest.raises(ModelError, match="no vocabulary"):
                    next(scheduler.drawn([1, 2, 3], Sampling(**each), 5))
    assert [[each.token for each in text] for text in found] == [[e.token for e in text] for text in alone]
    assert [each.token for each in found[2]] == [7] * 5
    assert all(each.logprobs is not None for each in found[0])
