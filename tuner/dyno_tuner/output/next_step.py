"""The command to run after a tune that wrote a profile."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from dyno import profiles
from dyno._placement import Placement
from dyno._shell import shell_word
from dyno._virtual_devices import read_virtual_devices
from dyno.devices import resolve_device

from ..core.recorded_command import held_pairs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


def next_step(path: Path, model: str, *, foreign: bool, options: Sequence[str] = ()) -> str:
    """How to use a profile that a tune wrote; "" if another file was kept, because no command searches
    `NAME.yaml.new`.

    Args:
        path: The profile.
        model: The model as the user wrote it.
        foreign: Whether it is a profile of the binaries of another engine.
        options: Words that `dyno serve` needs to run as in the tune, as `same_options` returns them.
    """
    if path.suffix not in (".yaml", ".yml"):
        return ""
    file = shell_word(str(path))
    if foreign:
        return f"dyno profiles export {file} --bin DIR prints the command line of its server"
    same = "".join(f" {shell_word(word)}" for word in options)
    folder = path.absolute().parent
    if any(layer.folder.absolute() == folder for layer in profiles.default_layers()):
        given = f" with{same}" if same else ""
        return f"dyno run and dyno serve find this profile{given}; dyno profiles show {file} prints it"
    command = f"dyno serve {shell_word(model)} --profile {file}{same}"
    return f"{command}; dyno does not search the folder of this file"


def same_options(profile: profiles.Profile, device: str, given: Mapping[str, Any]) -> list[str]:
    """The options of `dyno serve` for the device, the memory limits and the fixed settings of a tune.

    Args:
        profile: The profile that the tune wrote.
        device: Name of the device.
        given: `virtual_devices`, `vram` and `ram`, as far as they were given.
    """
    found: list[str] = []
    if re.fullmatch(r"cpu|(cpu|cuda):\d+", device):
        virtual = read_virtual_devices(given.get("virtual_devices", 0))
        limits = Placement({}, virtual, vram=given.get("vram", 0), ram=given.get("ram", 0)).words(device)
        if device.startswith("cuda"):
            limits = limits[2:]  # dyno serve has no --gpu
        named = device if device != resolve_device("auto").name else ""
        found = [*(["--device", named] if named and "--device" not in limits else []), *limits]
    return found + [word for pair in held_pairs(profile) for word in ("--set", pair)]
