"""Changes of a session for which the system has no memory, half-way and on the way back."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fresh_process import spoilt_by_sanitizer
from random_models import SHAPES, random_model

FAILING_MAPS = Path(__file__).with_name("failing_maps.cpp")
COMPILER = next((c for c in (os.environ.get("CXX"), "c++", "g++", "clang++") if c and shutil.which(c)), None)
# The layers 0 and 2 have windows. A failed buffer is the first that a device needs: its cache.
PROGRAM = """
import ctypes, json, sys
import numpy as np
from dyno import _core
from dyno.errors import DynoError

maps = ctypes.CDLL(None)
context = {"ctx": 4096, "kv_type_k": "f32", "kv_type_v": "f32", "window_cache": "window", "sequences": 2}
s = _core.Session(
    sys.argv[1],
    load={"device": "cpu", "numerics": "exact"},
    context=context,
    session={"threads": 1, "ubatch": 256},
    placement={"virtual_devices": [{}, {}], "rules": ["^blk.1.=cpu:1", "^blk.2.=cpu:2"]},
)
text = np.arange(3000, dtype=np.int32) % 90

def logits():
    s.reset()
    return s.decode([(1, text[:40])], "last")[0]

def error_of(call):
    try:
        call()
    except DynoError as error:
        return f"{type(error).__name__}: {error}"

want = logits()
for part in np.split(text, 3):
    s.decode([(0, part)], "none")
kept = s.checkpoint(0)
before = maps.given_back_outside()  # pages of the file, read by then
maps.fail_maps(int(sys.argv[2]))
found = {"error": error_of(lambda: s.set_context({**context, "ctx": 512}))}
maps.fail_maps(0)
found["positions"] = [s.position(0), s.position(1)]
found["refused"] = [
    error_of(call)
    for call in (lambda: s.decode([(0, text[:3])]), lambda: s.checkpoint(0), lambda: s.copy(0, 1))
]
found["checkpoint"] = error_of(lambda: s.restore(kept))
s.set({"threads": 1, "ubatch": 256})
found["same"] = bool(np.array_equal(logits(), want))
found["ctx"] = s.plan["settings"]["ctx"]
found["outside"] = maps.given_back_outside() - before
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def preloaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that makes buffers fail."""
    if reason := spoilt_by_sanitizer():
        pytest.skip(reason)
    if COMPILER is None or sys.platform != "linux":
        pytest.skip("needs a C++ compiler and Linux")
    library = tmp_path_factory.mktemp("maps") / "failing_maps.so"
    command = [COMPILER, "-std=c++20", "-O1", "-shared", "-fPIC", str(FAILING_MAPS), "-o", str(library)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return library


def changed(library: Path, folder: Path, *failing: int) -> dict[str, Any]:
    """A smaller context for a long text, of whose buffers these fail, counted from 0."""
    shape = next(s for s in SHAPES if s.architecture == "gpt-oss" and s.n_layers == 3)
    model = random_model(
        folder / "m.gguf", replace(shape, metadata={**shape.metadata, "context_length": 4096})
    )
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model), str(sum(1 << number for number in failing))],
        env={
            **os.environ,
            "LD_PRELOAD": str(library),
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_a_change_that_fails_gives_back_no_memory_of_others(preloaded: Path, tmp_path: Path) -> None:
    found = changed(preloaded, tmp_path, 1)
    assert "cannot allocate" in found["error"]
    assert found["outside"] == 0
    assert found["positions"] == [0, 0]
    assert found["ctx"] == 4096
    assert found["same"]


def test_the_first_of_two_errors_is_told(preloaded: Path, tmp_path: Path) -> None:
    """The caches of two devices are small, and then the way back to the large ones fails, too."""
    found = changed(preloaded, tmp_path, 1, 2)
    assert found["error"].startswith("OutOfMemoryError: [memory] cannot allocate")
    assert found["positions"] == [0, 0]
    assert found["outside"] == 0
    for refused in (*found["refused"], found["checkpoint"]):
        assert found["error"].split(": ", 1)[1] in refused
        assert "call set() again when memory is free" in refused
    assert found["ctx"] == 4096
    assert found["same"]
