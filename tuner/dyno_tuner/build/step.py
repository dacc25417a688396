"""One step of a build: a guarded process with a deadline."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_GUARD = Path(__file__).with_name("guard.py")
_MERCY = 15.0  # seconds for the guard to end its process group


@dataclass(frozen=True)
class Step:
    """The result of a step."""

    code: int
    output: str
    peak_mib: int
    """MiB of its largest process."""
    late: bool = False


def run_step(command: Sequence[str], environment: Mapping[str, str], deadline: float) -> Step:
    """Run a step. At the deadline, it is ended with all its processes.

    Args:
        environment: The complete environment.
        deadline: Seconds.
    """
    with tempfile.TemporaryDirectory(prefix="dyno-build-") as folder:
        peak, said = Path(folder) / "peak", Path(folder) / "output"
        words = [sys.executable, "-P", str(_GUARD), str(os.getpid()), str(peak), *command]
        with said.open("wb") as out:
            child = subprocess.Popen(
                words, env=dict(environment), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            late = False
            try:
                child.wait(deadline)
            except subprocess.TimeoutExpired:
                late = True
            finally:
                if child.poll() is None:  # too late, or interrupted
                    child.send_signal(signal.SIGTERM)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        child.wait(_MERCY)
                    child.kill()
                    child.wait()
        text = said.read_text(encoding="utf-8", errors="replace")
        mib = int(peak.read_text(encoding="ascii")) if peak.is_file() else 0
        return Step(child.returncode, text, mib, late)
