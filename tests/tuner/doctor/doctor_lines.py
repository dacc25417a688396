"""Helpers of the doctor's tests: a token of a diagnosed line, and the text about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dyno_tuner.doctor import Line
    from dyno_tuner.doctor.line import Item


def find(line: Line, start: str) -> Item:
    """The last token of the line that begins so."""
    found = [i for i in line.items if i.text.startswith(start)]
    assert found, f"no token {start}: {[i.text for i in line.items]}"
    return found[-1]


def says(item: Item) -> str:
    """The remarks of the doctor about a token."""
    return " ".join(n.text for n in item.notes)
