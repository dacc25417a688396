"""The guard that restores the power limit of a GPU when the run that changed it ends: `python power_guard.py
BUS MILLIWATTS`.

The run holds the other end of standard input. When the run ends, even by SIGKILL, that end closes. This
process imports nothing of this project.
"""

from __future__ import annotations

import signal
import sys

IGNORED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
)  # signals of a terminal or service to the whole group


def main() -> int:
    bus, milliwatts = sys.argv[1], int(sys.argv[2])
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByPciBusId(bus)
    print("ready", flush=True)
    sys.stdin.read()
    try:
        pynvml.nvmlDeviceSetPowerManagementLimit(handle, milliwatts)
    except pynvml.NVMLError as error:
        print(f"the power limit of {bus} could not be set back to {milliwatts} mW: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
