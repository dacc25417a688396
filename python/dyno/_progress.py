"""Progress bars on stderr if it is a terminal."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def progress(label: str, total: int, *, enabled: bool | None = None) -> Iterator[Callable[[int, str], None]]:
    """A progress bar; gives a function `advance(steps, note)`.

    Args:
        label: Name of the work.
        total: Total number of steps.
        enabled: Whether to show the bar; None: if stderr is a terminal.
    """
    if not (sys.stderr.isatty() if enabled is None else enabled):
        yield lambda steps, note: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total, note="")
        yield lambda steps, note: bar.update(task, advance=steps, note=note)
