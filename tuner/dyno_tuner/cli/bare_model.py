"""Model files without an option name, as in `tune model.gguf`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import typer
from dyno._cli import help

if TYPE_CHECKING:
    from collections.abc import Iterable


class WithModel(help.Command):
    """A command that takes a bare model in addition to other words."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, with_model(self.params, args, subcommands=False))


def with_model(parameters: Iterable[Any], args: list[str], *, subcommands: bool = True) -> list[str]:
    """`args` with `--model` before a bare model, even if the model follows options. No subcommand has such a
    name.

    Args:
        parameters: The options of the command.
        args: The words after its name.
        subcommands: Whether another word is a subcommand, which parses its own words.

    Raises:
        typer.BadParameter: There are two models.
    """
    own = {name: p for p in parameters for name in p.opts}
    bare: list[int] = []
    given: list[str] = []
    at = 0
    while at < len(args) and args[at] != "--":
        option = own.get(args[at])
        if option is not None and not getattr(option, "is_flag", False):
            given += args[at + 1 : at + 2] if option.name == "model" else []
            at += 1
        elif joined := re.fullmatch(r"(?:--model=|-m(?!=))(.+)", args[at], re.DOTALL):
            given.append(joined[1])
        elif args[at].endswith(".gguf") and not args[at].startswith("-"):
            bare.append(at)
            given.append(args[at])
        elif subcommands and not args[at].startswith("-"):
            break
        at += 1
    if len(given) > 1:
        raise typer.BadParameter(
            f"two models were given, {given[0]} and {given[1]}; give only one", param_hint="--model"
        )
    for index in bare:
        args = [*args[:index], "--model", *args[index:]]
    return args
