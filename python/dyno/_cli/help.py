"""The layout of --help: options in sections, short names for values, and full sentences for commands."""

from __future__ import annotations

import math
import re
from typing import Any

import typer
import typer.core

WIDTH = 110
"""Maximum width in columns; a narrower terminal wraps earlier."""

CONTEXT: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": WIDTH}
"""The context settings of both programs."""


def examples(*lines: str) -> str:
    """The end of a help text: command lines to copy."""
    return "\n".join(("\b", "Examples:", *(f"  {line}" for line in lines)))


LAST = "Other"
"""The last section, for options that every command has."""

_VALUES = {"int": "N", "integer": "N", "float": "X", "str": "TEXT", "text": "TEXT", "path": "FILE"}
_VALUE = re.compile(r" <?(int|integer|float|str|text|path)(?: range)?>?(?=$| / )", re.IGNORECASE)
_NOTES = re.compile(r"  \[([^\[\]]*)\]$")
_RANGE = re.compile(r"(?:^|[<>=])x(?:[<>=]|$)")


# Typer has its own copy of click or uses the installed one; both have the class.
USAGE_ERROR: Any = typer.BadParameter.__mro__[1]

_PROBLEMS = {
    "int_parsing": "is not a whole number",
    "float_parsing": "is not a number",
    "greater_than_equal": "is too small; give {ge} or more",
    "less_than_equal": "is too large; give {le} or less",
    "not_finite": "is not a finite number",
}
"""By the kind of a validation error: the end of a sentence that begins with the value."""


class Sections:
    """A mixin for commands that prints options in one section for each `rich_help_panel`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words of the command line. An error names a value that is not a number."""
        try:
            return super().parse_args(ctx, args)  # type: ignore[misc,no-any-return]
        except USAGE_ERROR as error:
            missing: Any = getattr(error, "param", None)
            if type(error).__name__ == "MissingParameter" and missing.param_type_name == "argument":
                name = _name(missing.get_usage_pieces(ctx)[0])
                raise USAGE_ERROR(f"{name} is missing: {missing.help}", ctx) from None
            error.message = _with_value(error)
            raise

    def make_context(self, *args: Any, **extra: Any) -> Any:
        """Parse the words of the command line, with `_without_prefix` for errors."""
        try:
            return super().make_context(*args, **extra)  # type: ignore[misc]
        except typer.BadParameter as error:
            raise _without_prefix(error) from error.__cause__

    def invoke(self, ctx: Any) -> Any:
        """Run the command, with `_without_prefix` for errors."""
        try:
            return super().invoke(ctx)  # type: ignore[misc]
        except typer.BadParameter as error:
            error.ctx = error.ctx or ctx
            raise _without_prefix(error) from error.__cause__

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words of the usage line, with arguments as `FILE` or `[FILE]...`."""
        return [_usage(piece) for piece in super().collect_usage_pieces(ctx)]  # type: ignore[misc]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Print arguments, then the sections in the order of their first options."""
        command: Any = self
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in command.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
            section = getattr(parameter, "rich_help_panel", None) or usual
            if parameter.param_type_name == "argument":
                record = (_name(parameter.get_usage_pieces(ctx)[0]), record[1])
            sections.setdefault(LAST if _of_every_command(parameter) else section, []).append(_plain(*record))
        if rest := sections.pop(LAST, None):
            sections[LAST] = rest
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)


class Command(Sections, typer.core.TyperCommand):
    """A command with sections."""


class Group(Sections, typer.core.TyperGroup):
    """A group of commands; names in `first` come first."""

    first: tuple[str, ...] = ()

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of the commands in the order of the help."""
        names = super().list_commands(ctx)
        return [*(n for n in self.first if n in names), *(n for n in names if n not in self.first)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Print the commands before the options: people look for a command first."""
        self.format_commands(ctx, formatter)
        Sections.format_options(self, ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Print each command with its whole first sentence."""
        found: list[tuple[str, Any]] = [
            (name, self.get_command(ctx, name)) for name in self.list_commands(ctx)
        ]
        rows = [(name, c.get_short_help_str(1000)) for name, c in found if c is not None and not c.hidden]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)


def _without_prefix(error: Any) -> Any:
    """The error with the names of its option, and without typer's "Invalid value for", which is wrong for a
    value that is missing or for flags that exclude each other."""
    if type(error).__name__ == "MissingParameter":
        return error
    names, parameter = error.param_hint, error.param
    if names is None and parameter is not None:
        is_argument = parameter.param_type_name == "argument"
        names = _name(parameter.get_usage_pieces(error.ctx)[0]) if is_argument else parameter.opts
    if isinstance(names, (list, tuple)):
        names = " / ".join(names)
    return USAGE_ERROR(f"{names}: {error.message}" if names else error.message, error.ctx)


def _usage(piece: str) -> str:
    """An argument without the braces of a required one. A name in small letters becomes capitals, as the
    values of options are written."""
    found = re.fullmatch(r"([\[{])([^\[\]{}]+)[\]}](\.\.\.)?", piece)
    if found is None:
        return piece
    name, many = _name(piece), found[3] or ""
    return f"{name}{many}" if found[1] == "{" else f"[{name}]{many}"


def _name(piece: str) -> str:
    name = piece.strip("[]{}.")
    return name.upper() if name.islower() else name


def _of_every_command(parameter: Any) -> bool:
    return parameter.name in ("help", "verbose", "version", "install_completion", "show_completion")


def _plain(name: str, text: str) -> tuple[str, str]:
    """A row of the help with N, X, TEXT or FILE for a value. The range of a number is left out; its error
    gives it."""
    name = _VALUE.sub(lambda found: f" {_VALUES[found[1].lower()]}", name)
    if notes := _NOTES.search(text):
        kept = [note for note in notes[1].split("; ") if not _RANGE.search(note)]
        text = text[: notes.start()] + (f"  [{'; '.join(kept)}]" if kept else "")
    return name, text


def _with_value(error: Any) -> str:
    """The message of a usage error with the value, which typer's message about a number lacks."""
    problems = getattr(error.__cause__, "errors", None)
    if problems is None:
        return str(error.message)
    (first, *_) = problems()
    kind = "not_finite" if _is_nan(first["input"]) else first["type"]
    if (rest := _PROBLEMS.get(kind)) is None:
        return str(error.message)
    return f"{first['input']!r} {rest.format(**first.get('ctx', {}))}"


def _is_nan(word: Any) -> bool:
    """Whether a word is the number NaN, which is outside every range but neither too small nor too large."""
    try:
        return math.isnan(float(word))
    except (TypeError, ValueError):
        return False


def finite(value: float | None) -> float | None:
    """A callback for options. Raises typer.BadParameter if the value is infinite."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"'{value}' is not a finite number")
    return value
