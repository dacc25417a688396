"""Ctrl-C while the engine computes."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from typing import TYPE_CHECKING

import dyno
import numpy as np
import pytest
from dyno.testing import tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextlib.contextmanager
def interrupted() -> Iterator[None]:
    """What runs within is interrupted soon after it began."""
    begun = threading.Event()

    def interrupt() -> None:
        begun.wait()
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - the event belongs to the call
        begun.set()
        yield
    thread.join()


def test_an_interrupt_ends_a_decode_between_two_ubatches(tmp_path: Path) -> None:
    """Until the whole prompt was computed, it had no effect: the sequence was as long as the prompt then."""
    count = 16_384  # more than a second of work
    model = tiny_model(tmp_path / "m.gguf", n_ctx=count, vocabulary=False)
    with dyno.Engine(model, device="cpu", profile=None, ctx=count, ubatch=4, threads=1) as engine:
        want = engine.logits([1, 2, 3])
        with interrupted():
            engine.logits(np.ones(count - 3, np.int32), reset=False, rows="none")
        assert engine.position() == 3
        assert np.array_equal(engine.logits([1, 2, 3]), want)


def test_an_interrupt_ends_a_decode_within_one_ubatch(tmp_path: Path) -> None:
    """Until the whole u-batch was computed, it had no effect: seconds, if it is long and the CPU slow."""
    count = 16_384  # more than a second of attention
    model = tiny_model(tmp_path / "m.gguf", n_ctx=count, vocabulary=False)
    with dyno.Engine(model, device="cpu", profile=None, ctx=count, ubatch=count, threads=1) as engine:
        want = engine.logits([1, 2, 3])
        with interrupted():
            engine.logits(np.ones(count - 3, np.int32), reset=False, rows="none")
        assert engine.position() == 3
        assert np.array_equal(engine.logits([1, 2, 3]), want)


def test_the_handler_of_a_signal_cannot_use_the_session_that_computes(tmp_path: Path) -> None:
    """Its decode would take the memory of the u-batch in whose middle it runs."""
    count = 16_384  # more than a second of attention
    model = tiny_model(tmp_path / "m.gguf", n_ctx=count, vocabulary=False)
    refused: list[str] = []
    with (
        dyno.Engine(model, device="cpu", profile=None, ctx=count, ubatch=count, threads=1) as engine,
        dyno.Engine(model, device="cpu", profile=None, ctx=16) as other,
    ):
        prompt, session = np.ones(count, np.int32), engine._session
        want = engine.logits(prompt, rows="last")

        def handler(*_: object) -> None:
            token = np.ones(1, np.int32)
            for use in (lambda: session.decode([(0, token)], "last"), lambda: session.set_kernels([])):
                try:
                    use()
                except dyno.PlanError as error:
                    refused.append(str(error))
            other.logits([1, 2])

        before = signal.signal(signal.SIGUSR1, handler)
        try:
            timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1))
            timer.start()
            found = engine.logits(prompt, rows="last")
            timer.join()
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert len(refused) == 2
        assert all("the handler of a signal" in why for why in refused)
        assert np.array_equal(found, want), "the decode goes on as if nothing had been"
        session.set_kernels([])


def test_an_interrupt_ends_the_prompt_of_a_generation(tmp_path: Path) -> None:
    """Until the whole prompt was computed, it had no effect; the same generation goes on afterwards."""
    count = 16_384
    model = tiny_model(tmp_path / "m.gguf", n_ctx=count, vocabulary=False)
    with dyno.Engine(model, device="cpu", profile=None, ctx=count, ubatch=4, threads=1) as engine:
        session = engine._session
        long = session.generation(np.ones(count - 3, np.int32))
        long.queue(np.full(1, 0.5, np.float32))
        with interrupted():
            long.next()
        assert session.position(0) == 0
        short = session.generation(np.arange(1, 40, dtype=np.int32))
        short.queue(np.full(2, 0.5, np.float32))
        first = short.next()
        assert first == int(np.argmax(engine.logits(list(range(1, 40)), rows="last")))
        assert long.queued == 1  # its draw is still to be made
