"""The command group of `tune`: the parsing of its words, and the end by an interrupt."""

from __future__ import annotations

import difflib
import os
import sys
from typing import Any

import typer
from dyno._cli import help

from .bare_model import with_model
from .messages import EARLY

STATE = {"verbose": False, "measuring": False}
"""Facts about the running command for its last message, because errors and interrupts can come anywhere."""

LATER = "tune: interrupted; run the same command with --resume to continue after the last measurement"


class Commands(help.Group):
    """A command group in which words after `--` are not subcommands if they are the command line of an
    engine. If they look like one but `--engine` is missing, the error says so."""

    first = (
        "verify",
        "history",
        "diff",
        "report",
        "ab",
        "doctor",
        "build",
        "share",
        "import",
        "probe",
        "replay",
    )

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        before = args[: args.index("--")] if "--" in args else []
        behind = args[len(before) + 1 :] if "--" in args else []
        named = any(a == "--engine" or a.startswith("--engine=") for a in before)
        forgotten = bool(behind) and behind[0] not in self.commands
        if (named or forgotten) and not any(a in self.commands for a in before):
            ctx.meta["command_line"] = behind
            args = before
        if not any(a in self.commands for a in args):
            _refuse_flags_of_run(args)
        return super().parse_args(ctx, with_model(self.params, args))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The subcommand. The error for `tune show` names the command of dyno that shows profiles."""
        if args[0] not in self.commands:
            from dyno._cli import profiles

            if args[0] in getattr(typer.main.get_command(profiles.app), "commands", ()):
                raise help.USAGE_ERROR(f"tune has no command {args[0]!r}; use `dyno profiles {args[0]}`", ctx)
            if os.path.isdir(args[0]):
                text = f"{args[0]} is a folder; give the path of a .gguf file in it"
                raise help.USAGE_ERROR(text, ctx)
            if os.path.exists(args[0]):
                text = f"{args[0]} is neither a command nor a .gguf file; to tune it, give --model {args[0]}"
                raise help.USAGE_ERROR(text, ctx)
            if not difflib.get_close_matches(args[0], self.commands):
                text = f"{args[0]} is neither a command nor a file; give the path of a .gguf file"
                text += ", because tune does not download models" if "/" in args[0] else ""
                raise help.USAGE_ERROR(text, ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        """Run the command, and print a message after an interrupt. Typer itself would end without one."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            print(LATER if STATE["measuring"] else EARLY, file=sys.stderr)
            raise typer.Exit(130) from None


_SETTING_OF = {
    "-ngl": "n_gpu_layers", "--n-gpu-layers": "n_gpu_layers", "-ncmoe": "n_cpu_moe",
    "--n-cpu-moe": "n_cpu_moe", "-ub": "ubatch", "--ubatch-size": "ubatch", "-t": "threads",
    "--threads": "threads", "-tb": "threads_batch", "-ctk": "kv_type_k", "-ctv": "kv_type_v",
    "-ot": "placement", "--override-tensor": "placement", "-fa": "flash_attention", "-np": "sequences",
}  # fmt: skip


_ELSEWHERE = {
    **dict.fromkeys(("-c", "--ctx-size"), "write --ctx N for a tune"),
    **dict.fromkeys(
        ("-p", "-n", "-d", "-pg", "--n-prompt", "--n-gen", "--n-depth"),
        "a tune takes lengths as a workload, such as --workload pp=512,tg=128,depth=0",
    ),
    "--profile": "a tune writes a profile: --out FILE names it, and `tune verify FILE` measures an old one",
}
"""Options of other commands, and the way to the same thing in a tune."""


def _refuse_flags_of_run(args: list[str]) -> None:
    """Refuse options of `dyno run`, and name the way to fix such a setting.

    Raises:
        typer.BadParameter: There is such an option.
    """
    for word in args:
        if word in _ELSEWHERE:
            raise typer.BadParameter(_ELSEWHERE[word], param_hint=word)
        if (name := _SETTING_OF.get(word)) is not None:
            raise typer.BadParameter(
                f"a tune searches this setting itself; to fix it, give --set {name}=VALUE. "
                "Flags of llama.cpp or ik_llama.cpp belong after -- (with --engine)",
                param_hint=word,
            )
