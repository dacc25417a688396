"""Temporary folders that are removed even if their process was killed.

A killed tune, or an actor that Ray ends, cannot clean up, and the logits of the exact path take up to half a
gigabyte. So the owner of such a folder holds a lock on a file in it, which the kernel releases however the
owner ends. The next owner removes the folders whose lock is free.
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
    """A folder that is removed after the block, or, if this process is killed, when the next one with this
    prefix is made.

    Raises:
        OSError: The folder cannot be created.
    """
    _sweep(Path(tempfile.gettempdir()), prefix)
    with tempfile.TemporaryDirectory(prefix=prefix) as folder:
        held = _hold(Path(folder))
        try:
            yield folder
        finally:
            os.close(held)


def _hold(folder: Path) -> int:
    """Lock a folder. The lock file gets its name only after it is locked, so that nobody finds it unlocked in
    between."""
    descriptor = os.open(folder / f"{_LOCK}.new", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.rename(folder / f"{_LOCK}.new", folder / _LOCK)
    return descriptor


def _sweep(where: Path, prefix: str) -> None:
    """Remove folders without an owner. A folder without a lock file belongs to something else, or is about to
    be locked."""
    for lock in where.glob(f"{prefix}*/{_LOCK}"):
        with contextlib.suppress(OSError):  # another user's, or already removed
            descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(descriptor)
