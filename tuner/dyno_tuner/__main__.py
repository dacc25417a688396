"""`python -m dyno_tuner` is the command `tune`."""

from __future__ import annotations

from .entry import main

if __name__ == "__main__":
    main()
