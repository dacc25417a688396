"""`dyno explain`: any stage from the file to the kernels, printed."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path  # noqa: TC003 - typer reads annotations at run time
from typing import Annotated

import typer

from dyno._cli import groups, options, state
from dyno._shell import escaped


class Stage(StrEnum):
    """The subjects that can be explained."""

    gguf = "gguf"
    model = "model"
    plan = "plan"
    ops = "ops"


@groups.grouped
def explain(
    stage: Annotated[Stage, typer.Argument(help="The stage to print.")],
    file: Annotated[Path, typer.Argument(help="GGUF file.")],
    tokens: Annotated[int | None, typer.Option(help="For `ops`: tokens of the u-batch.")] = None,
    nodes: Annotated[
        bool, typer.Option("--nodes", help="For `plan`: print every launch with its operands too.")
    ] = False,
    json_: options.Json = False,
    *,
    opening: groups.EngineOptions,
    verbose: state.Verbose = 0,
) -> None:
    """Print a stage: the file, the model in it, the plan of its memory, or the kernel of each op and why."""
    state.verbosity(verbose)
    from dyno import explain as stages

    arguments = opening.arguments()
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
            else:
                result, text = stages.ops(engine, tokens)
    # Names in a file may hold codes that a terminal obeys.
    print(json.dumps(result, indent=2) if json_ else "\n".join(map(escaped, text.split("\n"))))
