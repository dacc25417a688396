"""`dyno explain`: print a stage of loading, from the file to the kernels."""

from __future__ import annotations

import json
import logging
from enum import StrEnum
from typing import Annotated, Any

import typer

from dyno._cli import foreign_flags, groups, options, state
from dyno._shell import escaped


class Stage(StrEnum):
    """The stages that `dyno explain` can print."""

    gguf = "gguf"
    model = "model"
    plan = "plan"
    ops = "ops"


_MEANING = {
    Stage.gguf: "the file and its tensors",
    Stage.model: "the architecture and its layers",
    Stage.plan: "memory, placement of the weights, and effective settings",
    Stage.ops: "the kernel of each op, and the reason for the choice",
}


class Command(foreign_flags.Command):
    """The command `dyno explain`, whose error lists the valid stages."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and not args[0].startswith("-") and args[0] not in set(Stage):
            stages = ", ".join(f"{stage} ({meaning})" for stage, meaning in _MEANING.items())
            raise typer.BadParameter(
                f"{args[0]!r} is not a stage; write, for example, `dyno explain plan FILE`. Stages: {stages}",
                param_hint="STAGE",
            )
        return super().parse_args(ctx, args)


@groups.grouped
def explain(
    stage: Annotated[
        Stage,
        typer.Argument(metavar="STAGE", help="; ".join(f"{name}: {text}" for name, text in _MEANING.items())),
    ],
    model_file: options.ModelFile = None,
    model: options.Model = None,
    tokens: Annotated[int | None, typer.Option(help="For `ops`: number of tokens in the u-batch.")] = None,
    nodes: Annotated[
        bool, typer.Option("--nodes", help="For `plan`: also print each op with its operands.")
    ] = False,
    json_: options.Json = False,
    ctx: options.Ctx = None,
    sequences: Annotated[
        int | None,
        typer.Option(
            "--sequences",
            "--parallel",
            "-np",
            rich_help_panel=options.SPEED,
            help="Number of sequences that run in parallel. Default: the value of the profile, or 1. "
            "`dyno serve` has 4 by default.",
            min=1,
        ),
    ] = None,
    *,
    session: groups.SessionOptions,
    opening: groups.EngineOptions,
    verbose: state.Verbose = 0,
) -> None:
    """Show how dyno runs a model: its file, its layers, the memory plan, or the kernel of each op."""
    state.verbosity(verbose)
    from dyno import explain as stages

    file = options.model_argument(model_file, model)
    arguments = opening.arguments(sequences=sequences, ctx=options.ctx_argument(ctx, file), **session.given())
    if stage is Stage.gguf:
        result, text = stages.gguf(str(file))
    elif stage is Stage.model:
        result, text = stages.model(str(file))
    else:
        from dyno.engine import Engine

        with Engine(file, opening.device_name, plan_only=True, **arguments) as engine:
            state.print_choices(engine)
            if stage is Stage.plan:
                result, text = stages.plan(engine, nodes=nodes)
                for line in stages.shortages(engine.plan):
                    logging.getLogger("dyno.cli").warning("%s", line)
            else:
                result, text = stages.ops(engine, tokens)
    # Names in a file may hold control codes of a terminal.
    print(json.dumps(result, indent=2) if json_ else "\n".join(map(escaped, text.split("\n"))))
