"""The folders for the user's files."""

from __future__ import annotations

import os
import pwd
from pathlib import Path
from typing import Literal


def home() -> Path:
    """The user's home folder: HOME, or the entry of the password database if HOME is unset, empty or
    relative.

    `Path.home()` would take an empty HOME as the root folder, and a relative one as a subfolder of the
    current folder.

    Raises:
        RuntimeError: No home folder is known.
    """
    given = os.environ.get("HOME", "")
    if os.path.isabs(given):
        return Path(given)
    try:
        found = pwd.getpwuid(os.getuid()).pw_dir
    except KeyError as error:
        raise RuntimeError("no home folder is known") from error
    if not os.path.isabs(found):
        raise RuntimeError("no home folder is known")
    return Path(found)


_USUAL = {"CONFIG": ".config", "CACHE": ".cache", "STATE": ".local/state"}


def own_folder(kind: Literal["CONFIG", "CACHE", "STATE"]) -> Path:
    """The user's folder `dyno` for files of one kind (such as CACHE), in `$XDG_<kind>_HOME` or by default in
    the home folder.

    Raises:
        RuntimeError: No home folder is known.
    """
    given = os.environ.get(f"XDG_{kind}_HOME", "")
    # The XDG specification says that relative paths are ignored.
    return (Path(given) if os.path.isabs(given) else home() / _USUAL[kind]) / "dyno"
