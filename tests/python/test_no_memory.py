"""A host that gives no more memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TINY = Path(__file__).resolve().parent.parent / "data" / "tiny" / "qwen3moe-tiny.gguf"

PROGRAM = """
import resource, sys
import dyno
import numpy as np

with dyno.Engine(sys.argv[1], device="cpu", profile=None, ctx=4096, threads=1) as engine:
    want = engine.logits([1, 2, 3], rows="last")
    tokens = np.ones(4000, np.int32)
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), -1))
    try:
        engine.logits(tokens, rows="all")
    except dyno.OutOfMemoryError as error:
        said = str(error)
    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
    assert np.array_equal(engine.logits([1, 2, 3], rows="last"), want)
    print(said)
"""


def test_memory_that_the_host_does_not_give_is_an_error_of_its_own() -> None:
    """It was a bare MemoryError that said "std::bad_alloc"; the engine goes on afterwards."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM, str(TINY)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "no more memory of the host; lower ctx" in done.stdout
