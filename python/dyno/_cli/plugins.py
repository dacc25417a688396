"""Commands that another package brings: the entry points of the group `dyno.commands`.

The runtime does not import the tuner. The distribution names there the functions of the tuner that
`dyno tune` and `dyno profiles export` call. A source tree has no distribution, so its pyproject.toml is read
instead.
"""

from __future__ import annotations

import tomllib
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

GROUP = "dyno.commands"
_PROJECT = "gguf-dyno"


def load(name: str) -> Any:
    """The object that the entry point `name` stands for.

    Raises:
        ImportError: The group has no such name.
    """
    found = _of_source_tree() or {point.name: point for point in entry_points(group=GROUP)}
    if name not in found:
        raise ImportError(
            f"no package brings {name!r} (entry point group {GROUP}): pip install {_PROJECT} has it"
        )
    return found[name].load()


def _of_source_tree() -> dict[str, EntryPoint]:
    """The entry points of the source tree that this file belongs to; empty where it is installed."""
    page = Path(__file__).resolve().parents[3] / "pyproject.toml"
    if not page.is_file():
        return {}
    project = tomllib.loads(page.read_text(encoding="utf-8")).get("project", {})
    if project.get("name") != _PROJECT:
        return {}
    table = project.get("entry-points", {}).get(GROUP, {})
    return {name: EntryPoint(name, value, GROUP) for name, value in table.items()}
