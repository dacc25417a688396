"""The installed command `tune`. Loading it takes a moment, in which Ctrl-C is to end it with one line and no
trace."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

from .cli.messages import EARLY

if TYPE_CHECKING:
    from types import FrameType


def _end(number: int, frame: FrameType | None) -> None:
    """At once: an exception would be lost in modules that clear what is raised while they load."""
    os.write(2, f"{EARLY}\n".encode())
    os._exit(130)


def main() -> None:
    """Entry point of the command."""
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    try:
        if usual:
            signal.signal(signal.SIGINT, _end)
        from .cli.commands import main as run
    except KeyboardInterrupt:
        print(EARLY, file=sys.stderr)
        sys.exit(130)
    if usual:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
