"""`tune ab`: two binaries, builds, commits or profiles against each other, in ABBA rounds of processes."""

from .compare import Compared, Options, compare
from .run import Run, Side

__all__ = ["Compared", "Options", "Run", "Side", "compare"]
