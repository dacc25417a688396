"""Runs the device link and reports its cost: seconds, peak memory of the linker, bytes of machine code.

Usage: device_link.py --output FILE --report FILE -- COMMAND…
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    started = time.monotonic()
    status = subprocess.run(command, check=False).returncode
    if status != 0:
        return status
    report = {
        "seconds": round(time.monotonic() - started, 1),
        "peak_process_mib": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024,
        "bytes": args.output.stat().st_size,
    }
    args.report.write_text(json.dumps(report) + "\n", encoding="utf-8")
    print(
        f"device link: {report['seconds']} s, largest process {report['peak_process_mib']} MiB, "
        f"{report['bytes'] / 2**20:.1f} MiB"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
