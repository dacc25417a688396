"""The installed command `tune`. While it loads, Ctrl-C ends it with one line and without a traceback."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

from .cli.messages import EARLY

if TYPE_CHECKING:
    from types import FrameType


def _end(number: int, frame: FrameType | None) -> None:
    """End at once. An exception would be lost in modules that suppress errors while they load."""
    os.write(2, f"{EARLY}\n".encode())
    os._exit(130)


def main() -> None:
    """The entry point of the command."""
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
