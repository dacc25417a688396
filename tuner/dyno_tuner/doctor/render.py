"""A diagnosis as a table and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from .line import Item, Line, Status
from .versions import REFERENCE

if TYPE_CHECKING:
    from rich.console import Console

_STYLES = {Status.DOES: "green", Status.INERT: "dim", Status.NEEDS: "yellow", Status.UNKNOWN: "yellow"}


def to_dict(line: Line) -> dict[str, Any]:
    """The diagnosis as plain data. The exit code follows from `wrong` and `unknown_flags`."""
    return {
        "engine": line.engine,
        "engine_reason": line.engine_reason,
        "version": line.version.text,
        "version_is_reference": line.version.is_reference,
        "program": line.tool,
        "wrong": line.wrong,
        "unknown_flags": [i.name for i in line.unlisted],
        "tokens": [_item(i) for i in line.items],
    }


def _item(item: Item) -> dict[str, Any]:
    row: dict[str, Any] = {
        "token": item.text,
        "kind": item.kind,
        "name": item.name,
        "value": item.value,
        "status": str(item.status),
        "wrong": item.wrong,
        "notes": [
            {"status": str(n.status), "wrong": n.wrong, "text": n.text, "source": n.source}
            for n in item.notes
        ],
    }
    if item.nearest is not None:
        row["nearest"] = item.nearest
    if item.ops:
        row |= {"ops": item.ops, "by_name": item.by_name, "rewritten": item.rewritten}
    return row


def summary(line: Line) -> str:
    """The counts of the statuses in one line."""
    count = {s: sum(i.status == s for i in line.items) for s in Status}
    return ", ".join(f"{n} {s}" for s, n in count.items() if n)


def print_line(line: Line, console: Console) -> None:
    """Print the table with one row per token."""
    console.print(f"engine: {line.engine} ({line.engine_reason})", markup=False)
    about = "the commit that dyno's tables describe"
    if line.version.later:
        about = f"later than {REFERENCE[line.engine]}, which dyno's tables describe"
    elif not line.version.is_reference:
        about = f"changes with a known date are applied; the rest is as in {REFERENCE[line.engine]}"
    console.print(f"version: {line.version.text} ({about})", markup=False)
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("token", overflow="fold", ratio=2)
    table.add_column("status", no_wrap=True)
    table.add_column("effect", overflow="fold", ratio=6)
    for item in line.items:
        said = Text()
        for note in item.notes:
            said.append(("\n" if said else "") + note.text, style="red" if note.wrong else "")
        table.add_row(
            Text(f"  {item.text}" if item.kind == "cuda" else item.text),
            Text(str(item.status), style=_STYLES.get(item.status, "bold red")),
            said,
        )
    console.print(table)
    verdict = "something is wrong" if line.wrong else "nothing is wrong"
    if line.unlisted:
        verdict += f", and dyno's tables do not list {', '.join(i.name for i in line.unlisted)}"
    console.print(f"{summary(line)}; {verdict}", markup=False)
