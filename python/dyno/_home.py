"""Where the user's own files are."""

from __future__ import annotations

import os
import pwd
from pathlib import Path
from typing import Literal


def home() -> Path:
    """The user's home folder: HOME, or that of the password database if HOME is not set, empty or relative.

    `Path.home()` takes an empty HOME for the root of the file system, and a relative one for a folder here.

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
    """The user's folder `dyno` for a kind of files, below `$XDG_<kind>_HOME` or by default below the home.

    Raises:
        RuntimeError: No home folder is known.
    """
    given = os.environ.get(f"XDG_{kind}_HOME", "")
    # The specification says to ignore relative ones.
    return (Path(given) if os.path.isabs(given) else home() / _USUAL[kind]) / "dyno"
