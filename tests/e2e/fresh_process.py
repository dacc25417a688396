"""Measurements of memory, each in a process of its own: a peak cannot be taken back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_STATUS = Path("/proc/self/status")


def lacks_memory_figures(name: str = "VmRSS") -> str:
    """Why memory cannot be measured here, for a skip; empty if it can.

    Args:
        name: The figure of /proc/self/status that is needed: VmRSS, or VmHWM for the peak.
    """
    if not (_STATUS.is_file() and f"{name}:" in _STATUS.read_text()):
        return f"this system reports no {name}"
    return ""


def spoilt_by_sanitizer() -> str:
    """Why freed memory does not show, for a skip; empty if it does."""
    return "AddressSanitizer takes all memory at once" if "asan" in os.environ.get("LD_PRELOAD", "") else ""


def probed(script: str, *arguments: object, timeout: float = 600) -> Any:
    """The JSON that a Python script prints, with the modules of this process and these arguments."""
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
