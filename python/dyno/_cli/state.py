"""Functions shared by all commands: verbosity, messages on stderr, and the lines about device and profile."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from dyno._shell import escaped, shell_word

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dyno.engine import Engine

Verbose = Annotated[
    int,
    typer.Option(
        "--verbose",
        "-v",
        count=True,
        show_default=False,
        help="Print more messages, and tracebacks of errors.",
    ),
]

_verbosity = 0


def verbosity(level: int = 0) -> int:
    """Raise the verbosity to `level` and return it; -v counts before and after the name of a command."""
    global _verbosity
    _verbosity = max(_verbosity, level)
    return _verbosity


class _Lines(logging.Formatter):
    """A log formatter that writes `warning: text`, in the form of errors."""

    def format(self, record: logging.LogRecord) -> str:
        return f"{record.levelname.lower()}: {record.getMessage()}"


def configure_logging() -> None:
    """Print the package's warnings as lines on stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Lines())
    logger = logging.getLogger("dyno")
    logger.handlers[:] = [handler]
    logger.propagate = False
    # The commands print the device and the active profile themselves.
    logging.getLogger("dyno.device").setLevel(logging.ERROR)
    logging.getLogger("dyno.profiles.match").setLevel(logging.ERROR)


def print_choices(engine: Engine) -> None:
    """Print one line about the device, if there was a choice, and one about the profile. With -v, also print
    every step of the search for a profile."""
    from dyno.devices import built_for_cuda

    if built_for_cuda():
        print(engine.device_headline, file=sys.stderr)
    if note := engine.plan["placement"]["note"]:
        print(f"placement: {escaped(note)}", file=sys.stderr)
    match = engine.match
    advice = ""
    if match.profile is None and not match.switched_off:
        words = ["tune", "--model", engine.path, *engine._placement.words(engine.device)]
        advice = f"; run: {' '.join(map(shell_word, words))}"
    print(f"{escaped(match.headline)}{advice}", file=sys.stderr)
    if verbosity():
        for line in match.chain:
            print(f"  {escaped(line)}", file=sys.stderr)


def print_expert_choices(choices: Mapping[str, int], where: str = "") -> None:
    """Print the hit rate of the expert cache, if there is one."""
    if not choices.get("chosen"):
        return
    line = f"expert cache{f' ({where})' if where else ''}: "
    hits = 100 * choices["cached"] / choices["chosen"]
    line += f"{hits:.1f} % hits in {choices['chosen']} choices of experts"
    if choices.get("swapped"):
        line += f"; {choices['swapped']} expert{'s' if choices['swapped'] != 1 else ''} swapped"
    print(line, file=sys.stderr)


def print_choices_once() -> Callable[[Engine], None]:
    """A function that calls `print_choices`, but prints equal lines of several engines only once."""
    shown: list[str] = []

    def show(engine: Engine) -> None:
        if engine.match.headline not in shown:
            shown.append(engine.match.headline)
            print_choices(engine)

    return show
