"""A linker launcher: `python link_meter.py LOG COMMAND…` runs the link and adds its cost to LOG.

CMake starts it through CMAKE_<LANG>_LINKER_LAUNCHER. Each line of the log is a JSON object with seconds, the
largest process of the link in MiB, the output and its bytes. It runs inside builds, so it imports nothing of
this project.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import subprocess
import sys
import time


def main() -> int:
    log, command = sys.argv[1], sys.argv[2:]
    begun = time.monotonic()
    status = subprocess.run(command, check=False).returncode
    output = next((name for flag, name in itertools.pairwise(command) if flag == "-o"), "")
    row = {
        "seconds": round(time.monotonic() - begun, 2),
        "peak_mib": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024,
        "output": os.path.basename(output),
        "bytes": os.path.getsize(output) if status == 0 and output and os.path.exists(output) else 0,
    }
    line = json.dumps(row) + "\n"
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(descriptor, line.encode())  # one write, because links run in parallel
    finally:
        os.close(descriptor)
    return status


if __name__ == "__main__":
    sys.exit(main())
