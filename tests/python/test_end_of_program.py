"""Programs that end while something still computes: they exit as any other program does."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from own_process import HANGS

if TYPE_CHECKING:
    from pathlib import Path

BEGIN = """
import sys, threading
import dyno

model = sys.argv[1]
begun = threading.Event()

def in_background(work):
    threading.Thread(target=work, daemon=True).start()
    assert begun.wait(200)
"""
PROGRAMS = {
    "a daemon thread generates": """
engine = dyno.Engine(model, profile=None, ctx=2048)

def work():
    while True:
        for piece in engine.generate("def main", max_tokens=1000):
            begun.set()

in_background(work)
""",
    "a daemon thread opens engines": """
def work():
    while True:
        dyno.Engine(model, profile=None, ctx=64).close()
        begun.set()

in_background(work)
""",
    "a scheduler is open": """
engine = dyno.Engine(model, profile=None, ctx=2048, sequences=2)
scheduler = dyno.Scheduler(engine)
text = engine.generate("def main", max_tokens=1000)
next(text)
""",
    "a text has not ended": """
engine = dyno.Engine(model, profile=None, ctx=256)
text = engine.generate("def main", max_tokens=100)
next(text)
sys.kept = text
""",
    "sys.exit() in a text": """
with dyno.Engine(model, profile=None, ctx=256) as engine:
    for piece in engine.generate("def main", max_tokens=100):
        print("end")
        sys.exit()
""",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_ends_in_the_middle(name: str, trained_model: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", BEGIN + PROGRAMS[name] + "print('end')", str(trained_model)],
            capture_output=True, text=True, timeout=HANGS, env=environment, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", ""), done
