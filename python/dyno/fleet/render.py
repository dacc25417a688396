"""The rows of a fleet as text: a few lines for one node, a table for a fleet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dyno._shell import escaped
from dyno.fleet.matching import EXACT_CODE, NEAR_CODE, Fleet, Row

if TYPE_CHECKING:
    from collections.abc import Sequence

_WORD = {EXACT_CODE: "exact", NEAR_CODE: "near"}


def single(fleet: Fleet, *, verbose: bool = False) -> str:
    """The answer for one node: the profile for each model, and the reasons; with `verbose`, each step of the
    search."""
    lines = []
    for row in fleet.rows:
        node = f"{row.node.count} × {row.node.title}" if row.node.count > 1 else row.node.title
        lines.append(f"{_word(row):5}  {row.want.title} on {node}: {_answer(row)}")
        lines += [f"       {line}" for line in _reasons(row, verbose=verbose)]
        lines += [f"       assumed: {a}" for a in row.node.assumed]
    return "\n".join(escaped(line) for line in lines)


def _answer(row: Row) -> str:
    """The profile with its folder and its level, or the defaults."""
    result = row.result
    if result is None or result.profile is None:
        return "the engine's defaults"
    level = "" if row.code == EXACT_CODE else f"; {result.level.describe(result.kind)}"
    return f"{_profile(row)} ({result.layer}{level})"


def _reasons(row: Row, *, verbose: bool) -> Sequence[str]:
    result = row.result
    if result is None:
        return [row.node.problem]
    if verbose:
        return result.chain
    if result.profile is not None:
        return [f"differs: {'; '.join(result.reasons)}"] if row.code != EXACT_CODE else []
    return [line for line in result.chain[:-1] if not line.endswith(": none")]


def table(fleet: Fleet) -> str:
    """The table of a fleet, and the tunes to run next, ordered by the number of devices that profit."""
    head = ("node", "devices", "model", "match", "profile", "differs")
    rows = [
        (
            row.node.name,
            f"{row.node.count} × {row.node.title}",
            row.want.title,
            _word(row),
            _profile(row),
            "; ".join(row.result.reasons) if row.result is not None else row.node.problem,
        )
        for row in fleet.rows
    ]
    lines = _aligned([head, *rows])
    exact = sum(row.code == EXACT_CODE for row in fleet.rows)
    near = sum(row.code == NEAR_CODE for row in fleet.rows)
    lines += ["", f"{exact} exact, {near} near, {len(fleet.rows) - exact - near} without a profile"]
    pending = fleet.to_tune()
    if pending:
        lines += ["", "tunes to run next, most devices first:"]
    for number, item in enumerate(pending, 1):
        now = "uses the profile of a similar device" if item.near else "runs with defaults"
        size = f"{_many(item.devices, 'device')} on {_many(item.nodes, 'node')}"
        lines.append(f"{number}. {item.want.title} on {item.title}: {size}; {now}")
    return "\n".join(escaped(line) for line in lines)


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _word(row: Row) -> str:
    return _WORD.get(row.code, "none")


def _profile(row: Row) -> str:
    if row.result is None or row.result.profile is None:
        return "-"
    return (row.result.path or row.result.profile.label).rpartition("/")[2]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
