"""The commands of a build tree without its path. Equal commands with equal sources give the same build."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import TuneError

if TYPE_CHECKING:
    from collections.abc import Mapping

TREE = "<tree>"
IDENTITY = re.compile(r"build[-_]?info")
"""Files that record facts of a build. They differ between any two builds, and no code depends on them."""


@dataclass(frozen=True)
class Commands:
    """The commands of a configured tree."""

    compile: Mapping[str, str]
    """Commands by object file, relative to the tree."""
    link: frozenset[str] = frozenset()
    generated: Mapping[str, str] = field(default_factory=dict)
    """Contents of generated headers by path."""
    undeclared: frozenset[str] = field(default=frozenset(), compare=False)
    """Given definitions that no CMake file of the tree declares."""


def read_commands(tree: Path) -> Commands:
    """Read the commands of a tree that CMake has configured.

    Raises:
        TuneError: The tree has no compile_commands.json.
    """
    listed = tree / "compile_commands.json"
    try:
        entries = json.loads(listed.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TuneError(f"{listed}: the build lists no commands: {error}") from error
    found: dict[str, str] = {}
    for entry in entries:
        command = str(entry["command"])
        made = re.search(r"\s-o\s+(\S+)", command)
        name = made[1] if made else str(entry["file"])
        place = Path(entry.get("directory", tree)) / name
        key = str(place.relative_to(tree)) if place.is_relative_to(tree) else name
        found[key] = _plain(command, tree)
    return Commands(found, frozenset(_links(tree)), _headers(tree), _undeclared(tree))


def tool(name: str) -> str | None:
    """A build tool: the one next to this Python, which need not be on the PATH, or else the one on the
    PATH."""
    return shutil.which(name, path=search_path())


def search_path() -> str:
    return os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))


def _plain(command: str, tree: Path) -> str:
    return command.replace(str(tree), TREE)


def _links(tree: Path) -> list[str]:
    """Commands other than compilations: from ninja, or from the link.txt files of make."""
    ninja = tool("ninja")
    if (tree / "build.ninja").is_file() and ninja:
        done = subprocess.run(
            [ninja, "-C", str(tree), "-t", "commands"], capture_output=True, text=True, check=False
        )
        if done.returncode == 0:
            return [_plain(line, tree) for line in done.stdout.splitlines() if " -c " not in line]
    texts = sorted(tree.rglob("link.txt"))
    return [_plain(path.read_text(encoding="utf-8", errors="replace"), tree) for path in texts]


def _undeclared(tree: Path) -> frozenset[str]:
    """The undeclared definitions. CMake keeps them without a type."""
    cache = tree / "CMakeCache.txt"
    text = cache.read_text(encoding="utf-8", errors="replace") if cache.is_file() else ""
    return frozenset(re.findall(r"^(\w+):UNINITIALIZED=", text, re.MULTILINE))


def _headers(tree: Path) -> dict[str, str]:
    """Headers that CMake has written into the tree, except records of the build itself."""
    found = {}
    for path in sorted(tree.rglob("*")):
        wanted = path.suffix in (".h", ".hpp", ".inc", ".cuh") and not IDENTITY.search(path.name)
        if wanted and "CMakeFiles" not in path.parts and path.is_file():
            found[str(path.relative_to(tree))] = path.read_text(encoding="utf-8", errors="replace")
    return found


def identity_objects(tree: Path, commands: Commands) -> set[str]:
    """Objects with the identity of the build: by their name, or by a header that they include."""
    found = {name for name in commands.compile if IDENTITY.search(Path(name).name)}
    ninja = tool("ninja")
    if not (tree / "build.ninja").is_file() or ninja is None:
        return found
    done = subprocess.run([ninja, "-C", str(tree), "-t", "deps"], capture_output=True, text=True, check=False)
    owner = ""
    for line in done.stdout.splitlines():
        if line and not line.startswith(" "):
            owner = line.split(":")[0]
        elif IDENTITY.search(line.rpartition("/")[2]):
            found.add(owner)
    return found & set(commands.compile)
