"""A check before a profile of another engine is verified: flags that its binary no longer has.

New versions sometimes drop flags, and a server that gets such a flag exits at once. So such flags are
reported before anything is measured, from the `--help` of the actual binary.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ..doctor.gone import find_gone
from ..doctor.line import BENCH, COMMON, IK, nearest
from ..doctor.parse import program_of
from ..targets.ggml.installation import Installation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..targets.ggml.help import Help

_PLAIN = re.compile(r"[A-Za-z0-9_.,:=-]{1,100}")
_FLAG = re.compile(r"-{1,2}[A-Za-z][A-Za-z0-9_-]*")


def lost_flags(words: Sequence[str], help_: Help, engine: str, tool: str) -> dict[str, str]:
    """Flags of a command line that a binary does not have, with the reason or the nearest name.

    Args:
        words: The command line without its program.
        help_: The help of the binary that would get it.
        engine: "llama.cpp" or "ik_llama.cpp".
        tool: The kind of tool in the tables of removed flags, `line.COMMON` or `line.BENCH`.
    """
    found: dict[str, str] = {}
    for word in words:
        name = word.partition("=")[0] if word.startswith("--") else word
        if not _FLAG.fullmatch(name):
            continue
        flag = help_.get(name)
        if flag is not None:
            if flag.removed:
                found[name] = f"the --help of this binary says that the flag was removed: {flag.removed}"
            continue
        row = find_gone(name, engine, tool)
        near = nearest(name, help_.flags, 0.7)
        hint = f": {row.text}" if row is not None else f"; the most similar flag is {near}" if near else ""
        found[name] = f"the --help of this binary does not list the flag{hint}"
    return found


def lost_in(binaries: str, engine: str, command: Sequence[str]) -> dict[str, str]:
    """`lost_flags` for the binary that a recorded command line names, else for llama-server.

    Args:
        binaries: Folder of the engine's binaries.
        command: The words after `--` of the tune, including the program if it was given.

    Raises:
        TargetUnusable: The folder has no binaries of this engine, or one does not answer `--help`.
    """
    install = Installation(binaries, engine)
    program = program_of(command[0]) if command and not command[0].startswith("-") else ""
    bench = program == "llama-bench"
    help_ = install.bench_help if bench else install.help_of(program or "llama-server")
    if help_ is None:
        common = install.common
        if common is None:
            return {}
        help_ = common[1]
    found = lost_flags(command, help_, engine, BENCH if bench else COMMON)
    if engine != IK or bench:
        return found
    return {name: why for name, why in found.items() if not _taken(install, program, command, name)}


def _taken(install: Installation, program: str, command: Sequence[str], name: str) -> bool:
    """Whether a tool of ik_llama.cpp accepts a flag that its help does not list, which is true of some older
    flags. A value that is not a plain word is not passed to the tool, and its flag counts as accepted."""
    place = next(n for n, word in enumerate(command) if word.partition("=")[0] == name or word == name)
    rest = command[place + 1 : place + 2]
    value = [] if not rest or rest[0].startswith("-") else list(rest)
    if value and not _PLAIN.fullmatch(value[0]):
        return True
    return install.takes(program or "llama-server", [command[place], *value])
