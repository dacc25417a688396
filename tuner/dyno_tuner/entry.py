"""The installed command `tune`. Loading it takes a moment, in which Ctrl-C is to end it without a trace."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the command."""
    try:
        from .cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
