"""A session that several threads share, also while one of them closes it."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

HAMMER = """
import sys, threading
import numpy as np
from dyno import _core
from dyno.errors import DynoError

def uses(s):
    tokens = np.array([1, 2, 3], np.int32)
    yield lambda: s.model
    yield lambda: s.plan
    yield lambda: s.describe_plan()
    yield lambda: s.ops()
    yield lambda: s.kernel_report()
    yield lambda: s.captures()
    yield lambda: s.draws_on_device
    yield lambda: s.generation(3)
    yield lambda: s.generation(tokens)
    yield lambda: s.set({"ubatch": 16})
    yield lambda: s.check_memory(1 << 40)
    yield lambda: (s.reset(), s.decode([(0, tokens)]))
    yield lambda: (s.reset(), s.time_ops([(0, tokens)]))

def until_closed(use, begun, ends):
    try:
        while True:
            use()
            begun.release()
    except DynoError as error:
        ends.append(str(error))

for _ in range(int(sys.argv[2])):
    session = _core.Session(sys.argv[1], context={"ctx": 64}, session={"threads": 1})
    begun, ends = threading.Semaphore(0), []
    threads = [threading.Thread(target=until_closed, args=(use, begun, ends)) for use in uses(session)]
    for thread in threads:
        thread.start()
    for _ in threads:
        begun.acquire()
    session.close()
    for thread in threads:
        thread.join()
    assert len(ends) == len(threads), ends
    assert all("the session is closed" in end for end in ends), ends
print("closed")
"""


def test_every_method_ends_with_an_error_when_another_thread_closes_the_session(tiny_dir: Path) -> None:
    """In a process of its own: memory that is used after its end can kill the process."""
    model = tiny_dir / "qwen3moe-tiny.gguf"
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", HAMMER, str(model), "12"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "closed"), done.stderr[-3000:]
