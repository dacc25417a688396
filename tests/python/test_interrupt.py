"""Ctrl-C while the engine computes."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING

import dyno
import numpy as np
import pytest
from dyno.testing import tiny_model

if TYPE_CHECKING:
    from pathlib import Path


def test_an_interrupt_ends_a_decode_between_two_ubatches(tmp_path: Path) -> None:
    """Until the whole prompt was computed, it had no effect: the sequence was as long as the prompt then."""
    count = 16_384  # more than a second of work
    model = tiny_model(tmp_path / "m.gguf", n_ctx=count, vocabulary=False)
    with dyno.Engine(model, device="cpu", profile=None, ctx=count, ubatch=4, threads=1) as engine:
        want = engine.logits([1, 2, 3])
        begun = threading.Event()

        def interrupt() -> None:
            begun.wait()
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - the event belongs to the call
            begun.set()
            engine.logits(np.ones(count - 3, np.int32), reset=False, rows="none")
        thread.join()
        assert engine.position() == 3
        assert np.array_equal(engine.logits([1, 2, 3]), want)
