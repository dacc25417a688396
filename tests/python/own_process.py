"""Tests whose subject ruins the process that it happens in: a script in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

HANGS = 300  # seconds; what takes as long will not end


def found_by(script: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """The JSON object in the last line that `script` prints, and all that it writes to stderr.

    Skips the test if the object has a reason under "skip", which is a driver without a compiler. Raises
    AssertionError if the script fails, subprocess.TimeoutExpired if it hangs.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        capture_output=True, text=True, timeout=HANGS, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if "skip" in found:
        pytest.skip(f"this driver cannot compile the kernel that faults: {found['skip']}")
    return found, done.stderr
