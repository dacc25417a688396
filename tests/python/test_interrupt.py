"""Ctrl-C while the engine computes."""

from __future__ import annotations

import contextlib
import signal
import sys
from typing import TYPE_CHECKING, Any

import dyno
import numpy as np
import pytest
from dyno.testing import tiny_model
from waiting import LONG

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

COUNT = 16_384
"""Tokens that take far longer than `SOON`, since the thread that gets the signal computes them."""
SOON = 0.05
"""Seconds after which the kernel sends a signal. No thread of the test has to run for it."""


@contextlib.contextmanager
def interrupted() -> Iterator[None]:
    """What runs within is interrupted soon after it began."""
    before = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - the clock belongs to the call
            signal.setitimer(signal.ITIMER_REAL, SOON)
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_an_interrupt_ends_a_decode_between_two_ubatches(tmp_path: Path) -> None:
    """Until the whole prompt was computed, it had no effect: the sequence was as long as the prompt then."""
    model = tiny_model(tmp_path / "m.gguf", n_ctx=COUNT, vocabulary=False)
    with dyno.Engine(model, device="cpu", profile=None, ctx=COUNT, ubatch=4, threads=1) as engine:
        want = engine.logits([1, 2, 3])
        with interrupted():
            engine.logits(np.ones(COUNT - 3, np.int32), reset=False, rows="none")
        assert engine.position() == 3
        assert np.array_equal(engine.logits([1, 2, 3]), want)


def test_an_interrupt_ends_a_decode_within_one_ubatch(tmp_path: Path) -> None:
    """Until the whole u-batch was computed, it had no effect: seconds, if it is long and the CPU slow."""
    model = tiny_model(tmp_path / "m.gguf", n_ctx=COUNT, vocabulary=False)
    with dyno.Engine(model, device="cpu", profile=None, ctx=COUNT, ubatch=COUNT, threads=1) as engine:
        want = engine.logits([1, 2, 3])
        with interrupted():
            engine.logits(np.ones(COUNT - 3, np.int32), reset=False, rows="none")
        assert engine.position() == 3
        assert np.array_equal(engine.logits([1, 2, 3]), want)


@contextlib.contextmanager
def handled(handler: Callable[[], None], begun: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Signals come, and the first one since `begun` holds has this handler. If it hangs, an error ends it."""
    ran: list[None] = []

    def hangs(*_: object) -> None:
        raise TimeoutError

    def comes(*_: object) -> None:
        if begun():
            signal.signal(signal.SIGALRM, hangs)
            signal.setitimer(signal.ITIMER_REAL, 5 * LONG)
            ran.append(None)
            handler()

    before = signal.signal(signal.SIGALRM, comes)
    try:
        signal.setitimer(signal.ITIMER_REAL, SOON, SOON)
        yield
        assert ran, "no signal came in the middle of the call"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_the_handler_of_a_signal_cannot_use_the_session_that_computes(tmp_path: Path) -> None:
    """Its decode would take the memory of the u-batch in whose middle it runs."""
    model = tiny_model(tmp_path / "m.gguf", n_ctx=COUNT, vocabulary=False)
    refused: list[str] = []
    with (
        dyno.Engine(model, device="cpu", profile=None, ctx=COUNT, ubatch=COUNT, threads=1) as engine,
        dyno.Engine(model, device="cpu", profile=None, ctx=16) as other,
    ):
        prompt, session = np.ones(COUNT, np.int32), engine._session
        want = engine.logits(prompt, rows="last")

        def handler() -> None:
            token = np.ones(1, np.int32)
            for use in (lambda: session.decode([(0, token)], "last"), lambda: session.set_kernels([])):
                try:
                    use()
                except dyno.PlanError as error:
                    refused.append(str(error))
            other.logits([1, 2])

        with handled(handler, lambda: engine._in_call):
            found = engine.logits(prompt, rows="last")
        assert len(refused) == 2
        assert all("a signal handler" in why for why in refused)
        assert np.array_equal(found, want), "the decode goes on as if nothing had been"
        session.set_kernels([])


def test_an_interrupt_ends_the_prompt_of_a_generation(tmp_path: Path) -> None:
    """Until the whole prompt was computed, it had no effect; the same generation goes on afterwards."""
    model = tiny_model(tmp_path / "m.gguf", n_ctx=COUNT, vocabulary=False)
    with dyno.Engine(model, device="cpu", profile=None, ctx=COUNT, ubatch=4, threads=1) as engine:
        session = engine._session
        long = session.generation(np.ones(COUNT - 3, np.int32))
        long.queue(np.full(1, 0.5, np.float32))
        with interrupted():
            long.next()
        assert session.position(0) == 0
        short = session.generation(np.arange(1, 40, dtype=np.int32))
        short.queue(np.full(2, 0.5, np.float32))
        first = short.next()
        assert first == int(np.argmax(engine.logits(list(range(1, 40)), rows="last")))
        assert long.queued == 1  # its draw is still to be made


def refusals(uses: Mapping[str, Callable[[], object]]) -> dict[str, str]:
    """Why each of them is refused, by name."""
    refused: dict[str, str] = {}
    for name, use in uses.items():
        try:
            use()
        except dyno.PlanError as error:
            refused[name] = str(error)
    return refused


def test_the_handler_of_a_signal_cannot_use_the_engine_of_its_thread(tmp_path: Path) -> None:
    """It waited for ever for the call in whose middle it ran."""
    model = tiny_model(tmp_path / "m.gguf", n_ctx=COUNT)
    refused: dict[str, str] = {}
    with dyno.Engine(model, device="cpu", profile=None, ctx=COUNT, ubatch=COUNT, threads=1) as engine:
        prompt = np.ones(COUNT, np.int32)
        want = engine.logits(prompt, rows="last")
        uses: dict[str, Callable[[], object]] = {
            "reset": engine.reset,
            "rewind": lambda: engine.rewind(0),
            "logits": lambda: engine.logits([1]),
            "checkpoint": engine.checkpoint,
            "set": lambda: engine.set(ubatch=8),
            "set_context": lambda: engine.set_context(ctx=8),
            "generate": lambda: next(engine.generate([1])),
        }
        with handled(lambda: refused.update(refusals(uses)), lambda: engine._in_call):
            found = engine.logits(prompt, rows="last")
        assert set(refused) == set(uses)
        assert all("the handler of a signal" in why for why in refused.values())
        assert np.array_equal(found, want), "the call goes on as if nothing had been"
        assert engine.position() == COUNT
        assert engine.settings["ubatch"] == COUNT
        engine.reset()


@pytest.mark.parametrize("ubatch", [4, COUNT])
def test_the_handler_of_a_signal_closes_the_engine(tmp_path: Path, ubatch: int) -> None:
    """The usual way to end a service. It waited for ever for the call that it had interrupted."""
    model = tiny_model(tmp_path / "m.gguf", n_ctx=COUNT, vocabulary=False)
    engine = dyno.Engine(model, device="cpu", profile=None, ctx=COUNT, ubatch=ubatch, threads=1)
    closed: list[str] = []

    def close() -> None:
        engine.close()
        closed.append(repr(engine))

    closes = handled(close, lambda: engine._in_call)
    with closes, pytest.raises(dyno.ClosedError, match="a signal handler closed"):
        engine.logits(np.ones(COUNT, np.int32), rows="none")
    assert closed == [repr(engine)]
    assert closed[0].endswith("closed)")
    with pytest.raises(dyno.ClosedError):
        engine.logits([1])
    engine.close()


def test_the_handler_of_a_signal_closes_the_engine_and_ends_the_process(tmp_path: Path) -> None:
    """Its own error ends the call then."""
    model = tiny_model(tmp_path / "m.gguf", n_ctx=COUNT, vocabulary=False)
    engine = dyno.Engine(model, device="cpu", profile=None, ctx=COUNT, ubatch=COUNT, threads=1)

    def end() -> None:
        engine.close()
        sys.exit(3)

    with handled(end, lambda: engine._in_call), pytest.raises(SystemExit):
        engine.logits(np.ones(COUNT, np.int32), rows="none")
    with pytest.raises(dyno.ClosedError):
        engine.position()


@pytest.mark.parametrize(("devices", "ubatch"), [(0, 64), (0, COUNT // 2), (1, 64)])
def test_the_handler_of_a_signal_cannot_change_the_session(tmp_path: Path, devices: int, ubatch: int) -> None:
    """The rest of the prompt was written behind what the handler had left, or behind a smaller cache."""
    model = tiny_model(tmp_path / "m.gguf", n_ctx=COUNT, vocabulary=False)
    on: dict[str, Any] = {"virtual_devices": devices, "placement": ["blk.1.*=cpu"]} if devices else {}
    refused: dict[str, str] = {}
    with dyno.Engine(
        model, device=f"cpu:{devices}" if devices else "cpu",
        profile=None, ctx=COUNT, ubatch=ubatch, threads=1, **on,
    ) as engine:  # fmt: skip
        assert engine._session is not None
        session, prompt = engine._session, np.ones(COUNT, np.int32)
        want = engine.logits(prompt, rows="last")
        session.reset(0)
        positions: list[int] = []
        uses: dict[str, Callable[[], object]] = {
            "reset": lambda: session.reset(0),
            "reset all": session.reset,
            "rewind": lambda: session.rewind(0),
            "trim": lambda: session.trim(0),
            "set": lambda: session.set({"ubatch": 8}),
            "set_context": lambda: session.set_context({"ctx": 64}),
        }

        def handler() -> None:
            positions.append(session.position(0))
            refused.update(refusals(uses))

        with handled(handler):
            found = session.decode([(0, prompt)], "last")[0]
        assert found is not None
        assert 0 <= positions[0] < COUNT, "the signal came too late"
        assert set(refused) == set(uses)
        assert np.array_equal(found, want)
        assert session.position(0) == COUNT
