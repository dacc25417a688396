"""Threads without a core of their own: the bits stay the same, whoever computes a part, and calls end."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import dyno
import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

TOKENS = list(range(40, 75))


def test_far_more_threads_than_cores_give_the_same_bits(trained_model: Path) -> None:
    """Most parts are claimed by another thread than the one that they are meant for."""
    with dyno.Engine(trained_model, profile=None, threads=1) as engine:
        alone = engine.logits(TOKENS)
        token = engine.logits([7], reset=False)
    with dyno.Engine(trained_model, profile=None, threads=48, threads_batch=33) as engine:
        for _ in range(6):
            np.testing.assert_array_equal(engine.logits(TOKENS), alone)
            np.testing.assert_array_equal(engine.logits([7], reset=False), token)
        engine.set(threads=2, threads_batch=3)  # the other workers stay, and have no part
        np.testing.assert_array_equal(engine.logits(TOKENS), alone)


def test_a_busy_core_holds_up_nobody(trained_model: Path) -> None:
    """Three threads on one core, beside a process that never rests there."""
    core = min(os.sched_getaffinity(0))
    busy = subprocess.Popen(
        [sys.executable, "-c", f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"]
    )
    before = os.sched_getaffinity(0)
    try:
        with dyno.Engine(trained_model, profile=None, threads=1) as engine:
            alone = engine.logits(TOKENS)
        os.sched_setaffinity(0, {core})  # of this thread, which the pool's workers inherit
        with dyno.Engine(trained_model, profile=None, threads=3) as engine:
            for _ in range(3):
                np.testing.assert_array_equal(engine.logits(TOKENS), alone)
        assert busy.poll() is None
    finally:
        os.sched_setaffinity(0, before)
        busy.kill()
        busy.wait()
