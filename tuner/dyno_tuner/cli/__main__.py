"""`python -m dyno_tuner.cli` is the command `tune`."""

from __future__ import annotations

from .commands import main

if __name__ == "__main__":
    main()
