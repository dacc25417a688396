"""`python -m dyno` is the command `dyno`."""

from __future__ import annotations

from dyno.cli import main

if __name__ == "__main__":
    main()
