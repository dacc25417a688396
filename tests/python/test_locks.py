"""The handler of a signal never waits for a lock that the call in whose middle it runs holds."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from chat_model import chat_model
from dyno import ClosedError, Engine, PlanError, Sampling, Scheduler, _grammar, _sampling
from dyno._locks import for_one_call, is_mine
from dyno._requests import Handling
from dyno._sampling import HostSampler
from dyno.chat._rendering import Renderer
from dyno.chat.template import ChatTemplate
from dyno.errors import DeviceLostError
from dyno.scheduler import SchedulerEvents, Speculation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from dyno._requests import Drawn, Step

LONG = 120
"""Seconds after which a wait is one for ever."""
HANDLER = "the handler of a signal runs in the middle of a call"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("model") / "m.gguf", n_layers=1)


@pytest.fixture
def engine(path: Path) -> Iterator[Engine]:
    with Engine(path, device="cpu", profile=None, threads=1, ctx=128, sequences=3, numerics="exact") as made:
        yield made


@contextlib.contextmanager
def handled(handler: Callable[[], object]) -> Iterator[Callable[[], None]]:
    """A function that raises a signal with this handler, once; a wait for ever ends with TimeoutError."""
    left = [handler]

    def now() -> None:
        if left and threading.current_thread() is threading.main_thread():
            signal.raise_signal(signal.SIGUSR1)
            assert not left, "the handler has not run"

    def hangs(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGUSR1, lambda *_: left.pop()()), signal.signal(signal.SIGALRM, hangs)
    try:
        signal.alarm(LONG)
        yield now
        assert not left, "no signal was raised"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGUSR1, before[0])
        signal.signal(signal.SIGALRM, before[1])


def before(use: Callable[..., Any], now: Callable[[], None]) -> Callable[..., Any]:
    """`use`, with a signal before it."""

    def signalled(*args: Any, **options: Any) -> Any:
        now()
        return use(*args, **options)

    return signalled


def refusal(use: Callable[[], object]) -> str:
    """The message of the PlanError that `use` raises."""
    with pytest.raises(PlanError) as refused:
        use()
    return str(refused.value)


class Reader:
    """A text of a scheduler that a thread of its own reads."""

    def __init__(self, scheduler: Scheduler, prompt: list[int]) -> None:
        drawn = scheduler.drawn(prompt, Sampling(), 90, handling=Handling(ignore_end=True))
        pool = ThreadPoolExecutor(1)
        self._ended: Future[list[Drawn]] = pool.submit(lambda: list(drawn))
        pool.shutdown(wait=False)

    def end(self) -> BaseException | None:
        """The error that ended the text."""
        return self._ended.exception(LONG)


class Stops(SchedulerEvents):
    """A scheduler's thread stops after a step, until it may go on."""

    def __init__(self, then: Callable[[], object] = lambda: None) -> None:
        self.stopped, self._goes_on, self._then = threading.Event(), threading.Event(), then

    def stepped(self, step: Step) -> None:
        self.stopped.set()
        assert self._goes_on.wait(LONG)
        self._then()

    def go_on(self) -> None:
        self._goes_on.set()


def wants_the_engine(engine: Engine) -> tuple[Scheduler, Reader, Callable[[], None]]:
    """A scheduler whose thread is about to take the engine's lock for a text, and does so when it may."""
    scheduler, wants, goes_on = Scheduler(engine), threading.Event(), threading.Event()
    locked = scheduler._locked

    def slow() -> contextlib.AbstractContextManager[None]:
        wants.set()
        assert goes_on.wait(LONG)
        return locked()

    scheduler._locked = slow  # type: ignore[method-assign]
    reader = Reader(scheduler, [1, 2, 3])
    assert wants.wait(LONG)
    return scheduler, reader, goes_on.set


def test_a_lock_knows_its_thread() -> None:
    lock = threading.RLock()
    assert not is_mine(lock)
    with for_one_call(lock, "part"):
        assert is_mine(lock)
        with ThreadPoolExecutor(1) as pool:
            assert not pool.submit(is_mine, lock).result()
            assert pool.submit(for_one_call, lock, "part").result() is lock, "another thread may wait"
        with pytest.raises(PlanError, match=rf"^\[part\] {HANDLER} of this part; use the part when"):
            for_one_call(lock, "part")
        with pytest.raises(PlanError, match=r"of this part, and can only end\(\) it; use"):
            for_one_call(lock, "part", "end() it")
    assert not is_mine(lock)


def test_of_the_tokenizer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, told = engine.tokenizer, []
    want = tokenizer.encode("abc")
    with handled(lambda: told.append(refusal(lambda: tokenizer.encode("x")))) as now:
        monkeypatch.setattr(tokenizer, "_ids", before(tokenizer._ids, now))
        assert tokenizer.encode("abc") == want
    assert HANDLER in told[0]
    assert tokenizer.encode("abc") == want


def test_of_a_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    template, told = ChatTemplate("{{ messages[0].content }}"), []

    def render(text: str) -> str:
        return template.render([{"role": "user", "content": text}]).text

    assert render("first") == "first"
    with handled(lambda: told.append(refusal(lambda: render("handler")))) as now:
        monkeypatch.setattr(Renderer, "_exchange", staticmethod(before(Renderer._exchange, now)))
        assert render("second") == "second"
    assert HANDLER in told[0]
    assert render("third") == "third"


def test_of_rules(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llguidance")
    tokenizer, told = engine.tokenizer, []

    class Compiled(dict[Any, Any]):
        def __contains__(self, key: object) -> bool:
            now()
            return super().__contains__(key)

    monkeypatch.setattr(_grammar, "_compiled", Compiled())
    with handled(lambda: told.append(refusal(lambda: _grammar._tokens(tokenizer)))) as now:
        assert _grammar._tokens(tokenizer) is _grammar._compiled[tokenizer]
    assert HANDLER in told[0]


def test_of_a_search_in_the_vocabulary(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, told = engine.tokenizer, []
    want = _sampling._holding(tokenizer, ("a",), 100)
    with handled(lambda: told.append(refusal(lambda: _sampling._holding(tokenizer, ("a",), 100)))) as now:
        monkeypatch.setattr(tokenizer, "piece", before(tokenizer.piece, now))
        assert set(_sampling._holding(tokenizer, ("b",), 100)).isdisjoint(want)
    assert HANDLER in told[0]


def test_a_handler_in_the_tokenizer_closes_a_scheduler_that_needs_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rules of a text encode in the scheduler's thread; a hook does here."""
    tokenizer = engine.tokenizer
    events = Stops(lambda: tokenizer.encode("scheduler"))
    scheduler = Scheduler(engine, events=events)
    reader = Reader(scheduler, [1, 2, 3])
    assert events.stopped.wait(LONG)
    want = tokenizer.encode("main")

    def close() -> None:
        events.go_on()
        scheduler.close()
        engine.close()

    with handled(close) as now:
        monkeypatch.setattr(tokenizer, "_ids", before(tokenizer._ids, now))
        assert tokenizer.encode("main") == want
    assert isinstance(reader.end(), ClosedError)
    scheduler.close()
    assert engine._scheduler is None


def test_a_handler_in_a_call_of_the_engine_closes_its_scheduler(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, reader, go_on = wants_the_engine(engine)

    def close() -> None:
        go_on()
        scheduler.close()
        assert engine._scheduler is scheduler, "its thread waits for the call of this one"

    with handled(close) as now:
        monkeypatch.setattr(engine, "_check_batch", before(engine._check_batch, now))
        assert np.isfinite(engine.logits([1, 2, 3], slot=2)).all()
    assert isinstance(reader.end(), ClosedError)
    scheduler.close()
    with Scheduler(engine):
        assert "".join(engine.generate("a", 3))


def test_a_handler_in_a_call_of_the_draft_model_closes_the_scheduler(
    engine: Engine, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(path, device="cpu", profile=None, threads=1, ctx=128, sequences=3) as draft:
        scheduler = Scheduler(engine, speculation=Speculation(draft=draft))
        assert scheduler._drafting is not None
        model, wants, goes_on = scheduler._drafting._model, threading.Event(), threading.Event()
        assert model is not None
        drafts = model.draft

        def slow(*given: Any) -> Any:
            wants.set()
            assert goes_on.wait(LONG)
            return drafts(*given)

        monkeypatch.setattr(scheduler._drafting.judge, "wants", lambda texts: True)
        monkeypatch.setattr(model, "draft", slow)
        reader = Reader(scheduler, [1, 2, 3])
        assert wants.wait(LONG)
        with handled(lambda: (goes_on.set(), scheduler.close())) as now:
            monkeypatch.setattr(draft, "_check_batch", before(draft._check_batch, now))
            assert np.isfinite(draft.logits([1, 2, 3], slot=2)).all()
        assert isinstance(reader.end(), ClosedError)
        scheduler.close()


def test_drafts_that_are_not_freed_are_told_by_close(
    engine: Engine, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise DeviceLostError("made to fail")

    with Engine(path, device="cpu", profile=None, threads=1, ctx=128, sequences=3) as draft:
        scheduler = Scheduler(engine, speculation=Speculation(draft=draft))
        monkeypatch.setattr(scheduler._drafting, "close", fails)
        with pytest.raises(DeviceLostError, match="made to fail"):
            scheduler.close()
        assert engine._scheduler is None
        scheduler.close()


@pytest.mark.parametrize("use", ["generate", "embed"])
def test_a_scheduler_that_ends_is_a_closed_one(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, use: str
) -> None:
    """Its thread takes it from the engine, maybe between two looks of a caller."""
    scheduler = Scheduler(engine)
    scheduler.close()
    looks = [scheduler]

    class Ends(Engine):
        @property
        def _scheduler(self) -> Scheduler | None:  # type: ignore[override]
            return looks.pop() if looks else None

    monkeypatch.setattr(engine, "__class__", Ends)
    with pytest.raises(ClosedError, match="the scheduler is closed"):
        list(engine.generate([1, 2, 3], 2)) if use == "generate" else engine.embed([[1, 2, 3]])


def test_text_before_rules_needs_no_lock_of_the_vocabulary(engine: Engine) -> None:
    """Python 3.11 has one lock for all cached properties: a handler may have interrupted its holder."""
    pytest.importorskip("llguidance")
    tokenizer = engine.tokenizer
    tokenizer.__dict__.pop("_pieces", None)
    HostSampler(Sampling(rules_after="</think>"), tokenizer, int(engine.model["n_vocab"]), [1])
    assert "_pieces" in tokenizer.__dict__


def test_a_handler_in_a_call_of_the_engine_closes_both(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, reader, go_on = wants_the_engine(engine)
    with handled(lambda: (go_on(), scheduler.close(), engine.close())) as now:
        monkeypatch.setattr(engine, "_check_batch", before(engine._check_batch, now))
        with pytest.raises(ClosedError):
            engine.logits([1, 2, 3], slot=2)
    assert isinstance(reader.end(), ClosedError)
    scheduler.close()
    assert engine._scheduler is None


def test_a_handler_begins_and_continues_no_text_in_a_call_of_the_engine(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler's thread would write it, which waits for the call."""
    told: list[str] = []
    with Scheduler(engine):
        running = engine.generate("a", 50)
        next(running)

        def handler() -> None:
            told.append(refusal(lambda: next(engine.generate([1, 2, 3], 2))))
            told.append(refusal(lambda: engine.embed([[1, 2, 3]])))
            told.append(refusal(lambda: list(running)))

        with handled(handler) as now:
            monkeypatch.setattr(engine, "_check_batch", before(engine._check_batch, now))
            assert np.isfinite(engine.logits([1, 2, 3], slot=1)).all()
        assert len(told) == 3
        assert all(HANDLER in each for each in told)
        # An exception ends a generator, so the message tells that the rest of the text does not come.
        ended = ["; this text has ended" in each for each in told]
        assert ended == [False, False, True]
        assert list(running) == []
        assert "".join(engine.generate("a", 3))


class Signalling(deque[Any]):
    """A queue that raises a signal when it gets a request, under the scheduler's lock."""

    def __init__(self, now: Callable[[], None]) -> None:
        super().__init__()
        self._now = now

    def append(self, each: Any) -> None:
        self._now()
        super().append(each)


def test_a_handler_closes_a_scheduler_that_takes_a_request(engine: Engine) -> None:
    scheduler = Scheduler(engine)
    with handled(scheduler.close) as now:
        scheduler._waiting = Signalling(now)
        with pytest.raises(ClosedError, match="the scheduler is closed"):
            next(engine.generate("a"))
    scheduler.close()
    assert engine._scheduler is None


def test_a_handler_closes_the_engine_of_a_scheduler_that_takes_a_request(path: Path) -> None:
    """The scheduler's thread puts texts back into its queue if the cache has no room, and computes then."""
    with Engine(
        path, device="cpu", profile=None, threads=1, ctx=128, cache_tokens=128, sequences=3, numerics="exact"
    ) as engine:
        scheduler = Scheduler(engine)
        stops, goes_on = threading.Event(), threading.Event()
        that_fits, batch_of = scheduler._that_fits, scheduler._batch
        come: set[int] = set()

        def when_both_have_come() -> Any:
            # A text that has the cache alone, while the other's thread has not begun, never makes it short.
            come.update(id(each) for each in scheduler._running)
            return batch_of() if len(come) == 2 else []

        scheduler._batch = when_both_have_come  # type: ignore[method-assign]

        def slow(session: Any, batch: Any) -> Any:
            if len(batch) > 1 and scheduler._prefixes.lacks(session, 2):
                stops.set()
                assert goes_on.wait(LONG)
            return that_fits(session, batch)

        scheduler._that_fits = slow  # type: ignore[method-assign]
        readers = [Reader(scheduler, list(range(1 + i, 30 + i))) for i in range(2)]
        assert stops.wait(LONG)

        def close() -> None:
            goes_on.set()
            engine.close()

        with handled(close) as now:
            scheduler._waiting = Signalling(now)
            with pytest.raises(ClosedError):
                next(engine.generate([1, 2, 3]))
        assert all(isinstance(reader.end(), ClosedError) for reader in readers)
        scheduler.close()


def test_a_forked_child_gets_no_text_of_its_parent(engine: Engine) -> None:
    """It waited for a thread that it does not have."""
    with Scheduler(engine) as scheduler:
        text = scheduler.drawn([1, 2, 3], Sampling(), 50, handling=Handling(ignore_end=True))
        next(text)
        with scheduler._changed:
            child = os.fork()
        if child == 0:
            code = 1
            try:
                signal.alarm(LONG)
                told = []
                for use in (lambda: list(text), lambda: next(scheduler.drawn([1], Sampling(), 2))):
                    try:
                        use()
                    except Exception as error:
                        told.append(str(error))
                scheduler.close()
                code = 0 if [f"in process {os.getppid()}" in each for each in told] == [True] * 2 else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert len(list(text)) == 49


def test_a_forked_child_compiles_and_searches_while_its_parent_does() -> None:
    """A thread of the parent has the lock, and the child does not have the thread."""
    has_both, goes_on = threading.Event(), threading.Event()

    def works() -> None:
        with _grammar._compiling, _sampling._searching:
            has_both.set()
            assert goes_on.wait(LONG)

    thread = threading.Thread(target=works)
    thread.start()
    try:
        assert has_both.wait(LONG)
        if (child := os.fork()) == 0:
            locks = (_grammar._compiling, _sampling._searching)
            os._exit(0 if all(lock.acquire(blocking=False) for lock in locks) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        goes_on.set()
        thread.join()
