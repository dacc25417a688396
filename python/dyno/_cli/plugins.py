"""Commands from other packages: the entry points of the group `dyno.commands`.

The runtime does not import the tuner. Instead, entry points name the tuner's functions for `dyno tune` and
`dyno profiles export`. A source tree has no installed entry points, so its pyproject.toml is read.
"""

from __future__ import annotations

import tomllib
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

GROUP = "dyno.commands"
_PROJECT = "gguf-dyno"


def load(name: str) -> Any:
    """Load the object of the entry point `name`.

    Raises:
        ImportError: The group has no such entry point.
    """
    found = _of_source_tree() or {point.name: point for point in entry_points(group=GROUP)}
    if name not in found:
        raise ImportError(
            f"no package brings {name!r} (entry point group {GROUP}): pip install {_PROJECT} has it"
        )
    return found[name].load()


def _of_source_tree() -> dict[str, EntryPoint]:
    """The entry points of the source tree with this file; empty for an installed package."""
    page = Path(__file__).resolve().parents[3] / "pyproject.toml"
    if not page.is_file():
        return {}
    project = tomllib.loads(page.read_text(encoding="utf-8")).get("project", {})
    if project.get("name") != _PROJECT:
        return {}
    table = project.get("entry-points", {}).get(GROUP, {})
    return {name: EntryPoint(name, value, GROUP) for name, value in table.items()}
