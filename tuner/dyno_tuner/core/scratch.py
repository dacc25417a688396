"""Folders for scratch files that do not outlive a process that was killed.

A tune that is killed, or an actor that Ray ends, cannot tidy up, and the exact path's logits take up to half
a gigabyte. Who has such a folder holds a lock on a file in it, which the kernel gives back however the holder
ends; whoever makes the next one removes those whose lock is free.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_LOCK = "held"


@contextlib.contextmanager
def scratch_folder(prefix: str) -> Iterator[str]:
    """A folder that is gone after the block, or, if this process is killed, when the next of this prefix is
    made.

    Raises:
        OSError: there is no room for it.
    """
    _sweep(Path(tempfile.gettempdir()), prefix)
    with tempfile.TemporaryDirectory(prefix=prefix) as folder:
        held = _hold(Path(folder))
        try:
            yield folder
        finally:
            os.close(held)


def _hold(folder: Path) -> int:
    """The lock has its name only once it is held, so that nobody finds it free in between."""
    descriptor = os.open(folder / f"{_LOCK}.new", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.rename(folder / f"{_LOCK}.new", folder / _LOCK)
    return descriptor


def _sweep(where: Path, prefix: str) -> None:
    """Removes folders that nobody holds. A folder without a lock is somebody else's, or about to be held."""
    for lock in where.glob(f"{prefix}*/{_LOCK}"):
        with contextlib.suppress(OSError):  # another user's, or just removed by another process
            descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(descriptor)
