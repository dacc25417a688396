"""Sources of a small program as one unit: a compiler reads the headers that they share only once."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


def one_unit(folder: Path, sources: Iterable[Path]) -> list[str]:
    """The words of a compiler for a unit in `folder` that includes all sources.

    gcc takes each source for a header, whose classes must hold nothing of an unnamed namespace."""
    unit = folder / "unit.cpp"
    unit.write_text("".join(f'#include "{source}"\n' for source in sources), encoding="utf-8")
    return ["-Wno-subobject-linkage", "-Wno-unknown-warning-option", str(unit)]
