"""Calls that a scheduler hands over at the start of its next step."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from dyno import Engine, PlanError, Sampling, Scheduler
from dyno import scheduler as module
from dyno._requests import Handling, Request, SchedulerEvents
from dyno._sampling import uniforms
from dyno._teller import Teller
from dyno.testing import tiny_model

if TYPE_CHECKING:
    from pathlib import Path


WAIT_S = 120


def test_calls_keep_their_order_and_end_before_close() -> None:
    made: list[int] = []
    teller = Teller()
    for number in range(1000):
        teller.later(made.append, number)
        if number % 7 == 0:
            teller.tell_all()
    teller.close()
    assert made == list(range(1000))


def test_nothing_is_called_before_it_is_handed_over() -> None:
    made: list[int] = []
    teller = Teller()
    teller.later(made.append, 1)
    assert made == []
    teller.close()
    assert made == [1]


def test_a_fault_of_one_reader_leaves_the_calls_of_the_others(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> None:
        raise ValueError("of a reader")

    made: list[int] = []
    teller = Teller()
    teller.later(fails)
    teller.later(made.append, 1)
    teller.close()
    assert made == [1]
    assert "of a reader" in caplog.text


def test_tokens_reach_their_readers_while_the_next_step_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second step ends only after the reader has the token of the first one."""
    has_first = threading.Event()
    steps = []
    computed = module.computed

    def second_waits(session: object, batch: list[tuple[Request, list[int]]]) -> object:
        steps.append(len(batch))
        if len(steps) == 2:
            assert has_first.wait(WAIT_S), "no token of the first step came"
        return computed(session, batch)

    monkeypatch.setattr(module, "computed", second_waits)
    path = tmp_path / "tiny.gguf"
    tiny_model(path)
    with Engine(path, device="cpu", profile=None) as engine, Scheduler(engine) as scheduler:
        drawn = scheduler.drawn([1, 2, 3], Sampling(), 4, handling=Handling(ignore_end=True))
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(next, drawn).result(WAIT_S)
            has_first.set()
            rest = pool.submit(list, drawn).result(WAIT_S)
    assert first.token >= 0
    assert len(rest) == 3
    assert scheduler.failure is None


def test_numbers_of_draws_are_the_ones_of_single_draws() -> None:
    sampling = Sampling(temperature=0.7, seed=11)
    request = Request([1], 1, sampling, None, threading.Event())
    numbers = [request.next_draw()[-1] for _ in range(200)]
    assert numbers == uniforms(sampling.random(), 200).tolist()


def test_a_thread_that_does_not_start_leaves_the_engine_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuses(thread: threading.Thread) -> None:
        if thread.name == "dyno-scheduler":
            raise RuntimeError("can't start new thread")
        start(thread)

    before = set(threading.enumerate())
    path = tmp_path / "tiny.gguf"
    tiny_model(path)
    with Engine(path, device="cpu", profile=None) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuses)
            with pytest.raises(RuntimeError, match="new thread"):
                Scheduler(engine)
        new = set(threading.enumerate()) - before
        assert not [each for each in new if each.name == "dyno-teller"]
        with Scheduler(engine):
            assert len("".join(engine.generate([1, 2], max_tokens=2))) >= 0
            assert engine._scheduler is not None


def test_readers_have_their_tokens_while_another_call_has_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is taken behind the first step, before its tokens are told."""
    path = tmp_path / "tiny.gguf"
    tiny_model(path)
    with Engine(path, device="cpu", profile=None) as engine, Scheduler(engine) as scheduler:
        first_step, told = threading.Event(), threading.Event()
        taken = threading.Event()

        def other_call() -> None:
            assert first_step.wait(WAIT_S)
            with engine._lock:
                taken.set()
                told.wait(WAIT_S)

        other = threading.Thread(target=other_call)
        other.start()
        stepped = scheduler._events.stepped

        def behind(step: object) -> None:
            stepped(step)  # type: ignore[arg-type]
            if not first_step.is_set():
                first_step.set()
                assert taken.wait(WAIT_S)

        monkeypatch.setattr(scheduler._events, "stepped", behind)
        drawn = scheduler.drawn([1, 2, 3], Sampling(), 3, handling=Handling(ignore_end=True))
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(next, drawn).result(WAIT_S / 2).token >= 0
            told.set()
            assert len(pool.submit(list, drawn).result(WAIT_S)) == 2
        other.join()


def test_a_hook_that_closes_its_scheduler_gets_an_error(tmp_path: Path) -> None:
    """It would wait for its own thread."""

    class Events(SchedulerEvents):
        def first_token(self, seconds: float) -> None:
            with pytest.raises(PlanError, match="close it in another thread"):
                scheduler.close()
            told.set()

    told = threading.Event()
    path = tmp_path / "tiny.gguf"
    tiny_model(path)
    with Engine(path, device="cpu", profile=None) as engine, Scheduler(engine, events=Events()) as scheduler:
        assert len(list(scheduler.drawn([1, 2], Sampling(), 2, handling=Handling(ignore_end=True)))) == 2
        assert told.is_set()
