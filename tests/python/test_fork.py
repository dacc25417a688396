"""A forked child that uses the engine of its parent gets an error and never waits."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = """
import gc, os, signal, sys, threading
import numpy as np
import dyno
from dyno.errors import DeviceError

model, how = sys.argv[1:]
engine = dyno.Engine(model, device="cpu", profile=None, ctx=64, threads=2)
engine.logits([1, 2, 3])  # its threads run
session = engine._session
generation = engine.generate([1, 2], max_tokens=4)
next(generation)
if how == "locked":  # by a thread that the child does not have
    begun = threading.Event()
    def decode():
        begun.set()
        while True:
            session.reset()
            session.decode([(0, np.arange(60, dtype=np.int32))])
    threading.Thread(target=decode, daemon=True).start()
    begun.wait()
    engine._own_lock.acquire()
sys.stdout.flush()
child = os.fork()
if child == 0:
    signal.alarm(300)  # ends a child that waits for ever
    uses = {
        "logits": lambda: engine.logits([1]),
        "generate": lambda: engine.generate([1]),
        "next": lambda: next(generation),
        "position": engine.position,
        "plan": lambda: engine.plan,
        "reset": engine.reset,
        "set": lambda: engine.set(ubatch=8),
        "session.plan": lambda: session.plan,
        "session.position": lambda: session.position(0),
        "session.decode": lambda: session.decode([(0, np.array([1], np.int32))]),
    }
    for name, use in uses.items():
        try:
            use()
        except DeviceError as error:
            assert f"in process {os.getppid()}" in str(error), error
            assert "open it again in this one" in str(error), error
        else:
            raise AssertionError(name)
    engine.close()
    session.close()
    del generation, uses, use
    engine = session = None
    gc.collect()
    with dyno.Engine(model, device="cpu", profile=None, ctx=64, threads=2) as own:
        assert own.logits([1, 2]).shape[0] == 2
    print("child", flush=True)
    os._exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
if how == "quiet":
    assert len(list(generation)) <= 4
    engine.close()
print("parent", flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("how", ["quiet", "locked"])
def test_a_forked_child_gets_an_error_and_never_waits(tiny_dir: Path, how: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tiny_dir / "qwen3moe-tiny.gguf"), how],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.stdout.split() == ["child", "parent"], done.stderr[-3000:]


ENCODES = """
import os, signal, sys, threading
from dyno.tokenizer import Tokenizer

tokenizer = Tokenizer.from_gguf(sys.argv[1])
text = "def f(x): return x + 1\\n"
want = tokenizer.encode(text), tokenizer.encode("<|endoftext|>", parse_special=True)
held = threading.Event()
def encode():  # up to where the library goes to work
    with tokenizer._lock:
        held.set()
        threading.Event().wait()
threading.Thread(target=encode, daemon=True).start()
held.wait()
child = os.fork()
if child == 0:
    signal.alarm(300)  # ends a child that waits for ever
    assert (tokenizer.encode(text), tokenizer.encode("<|endoftext|>", parse_special=True)) == want
    assert tokenizer.decode(want[0]) == text
    os._exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
os._exit(0)
"""


LONG = """
import os, signal, sys
from dyno.tokenizer import Tokenizer

tokenizer = Tokenizer.from_gguf(sys.argv[1])
text = "def f(x): return x + 1\\n" * 1000
want = tokenizer.encode(text)  # the library's threads run
child = os.fork()
if child == 0:
    signal.alarm(300)  # ends a child that waits for ever
    assert tokenizer.encode(text) == want
    os._exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
assert tokenizer.encode(text) == want
os._exit(0)
"""


@pytest.mark.parametrize("parallel", [None, "true", "false"])
def test_a_child_encodes_long_texts_without_its_parents_threads(
    trained_model: Path, parallel: str | None
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    if parallel is not None:
        environment["TOKENIZERS_PARALLELISM"] = parallel
    command = [sys.executable, "-c", LONG, str(trained_model)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900, env=environment)
    assert run.returncode == 0, run.stderr


def test_a_child_encodes_while_a_thread_of_its_parent_does(trained_model: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", ENCODES, str(trained_model)],
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert run.returncode == 0, run.stderr
