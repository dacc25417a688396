"""The last words on standard output. Python writes them when it ends, and reports errors there by itself."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["FULL", "discard", "flush", "flushed", "leave"]

FULL = "no space is left on the device that the output goes to"
"""The message for an error ENOSPC without a file name."""


def discard() -> None:
    """Send text that is still buffered to nowhere, because Python would report the same error again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def flush() -> None:
    """Write the buffered text.

    Raises:
        OSError: It cannot be written, and was discarded.
    """
    if sys.stdout is None or sys.stdout.closed:
        return
    try:
        sys.stdout.flush()
    except OSError:
        discard()
        raise


def leave(code: int) -> NoReturn:
    """End the process after its error was printed. The user sees no second error about the output."""
    with contextlib.suppress(OSError):
        flush()
    sys.exit(code)


@contextlib.contextmanager
def flushed() -> Iterator[None]:
    """Write the buffered text before the process ends by `sys.exit`. An error replaces that exit."""
    try:
        yield
    except SystemExit:
        flush()
        raise
