"""A guard for a build step, which ends with its run: `python guard.py PARENT PEAK COMMAND…`.

A killed build tool leaves compilers behind, which would write into the tree while the next run builds in it.
So the guard ends the step with its whole process group when the run that started it has gone. It writes the
MiB of the largest process to PEAK, and imports nothing of this project.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

LOOK = 0.2  # seconds between two checks of the parent
MERCY = 5.0  # seconds from SIGTERM to SIGKILL


def end(child: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(MERCY)
            return


def main() -> int:
    parent, peak, command = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        print(f"{command[0]} cannot be started: {error.strerror or error}", file=sys.stderr)
        return 127
    while child.poll() is None:
        if asked or os.getppid() != parent:
            end(child)
            return 143
        time.sleep(LOOK)
    peak.write_text(f"{resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024}\n", encoding="ascii")
    return child.returncode


if __name__ == "__main__":
    sys.exit(main())
