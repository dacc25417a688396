"""The command to run after a tune that wrote a profile."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from dyno import profiles

if TYPE_CHECKING:
    from pathlib import Path


def next_step(path: Path, model: str, *, foreign: bool) -> str:
    """How to use a profile that a tune wrote; "" if another file was kept, because no command searches
    `NAME.yaml.new`.

    Args:
        path: The profile.
        model: The model as the user wrote it.
        foreign: Whether it is a profile of the binaries of another engine.
    """
    if path.suffix not in (".yaml", ".yml"):
        return ""
    file = shlex.quote(str(path))
    if foreign:
        return f"dyno profiles export {file} --bin DIR prints the command line of its server"
    folder = path.absolute().parent
    if any(layer.folder.absolute() == folder for layer in profiles.default_layers()):
        return f"dyno run and dyno serve find this profile; dyno profiles show {file} prints it"
    return f"dyno serve {shlex.quote(model)} --profile {file}; dyno does not search the folder of this file"
