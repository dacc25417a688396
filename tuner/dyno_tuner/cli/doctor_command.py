"""`tune doctor`: explains a command line of llama.cpp or ik_llama.cpp without running it."""

from __future__ import annotations

import json
from pathlib import Path  # noqa: TC003  (typer reads annotations when the command runs)
from typing import Annotated

import typer
from dyno.errors import DynoError
from rich.console import Console

from ..core.errors import TuneError
from . import options as o  # noqa: TC001  (typer reads annotations when the command runs)


def doctor(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- COMMAND LINE",
            help="Command line of llama-server, llama-bench, cmake and similar programs.",
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="Engine: llama.cpp or ik_llama.cpp. Default: the one that the command line fits."),
    ] = None,
    version: Annotated[
        str | None,
        typer.Option(
            help="Commit or date (YYYY-MM-DD) of the engine. Default: the commit that the tables describe."
        ),
    ] = None,
    gpu_arch: Annotated[
        str | None, typer.Option(help="Compute capability of the GPU, such as 8.6 or 9.0.")
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="Number of GPUs.", min=0, max=1024)] = None,
    moe: Annotated[
        bool | None, typer.Option("--moe/--dense", help="Whether the model is a mixture of experts.")
    ] = None,
    experts: Annotated[
        int | None, typer.Option(help="Number of experts per layer.", min=1, max=100_000)
    ] = None,
    experts_used: Annotated[
        int | None, typer.Option(help="Number of experts per token.", min=1, max=100_000)
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="GGUF file of the model; -ot, -ncmoe and -ngl are checked against it."),
    ] = None,
    vram: Annotated[str | None, typer.Option(help="Memory of each GPU, such as 16GiB.")] = None,
    as_json: o.Json = False,
) -> None:
    """Explain each word of a llama.cpp or ik_llama.cpp command line without running it.

    The exit code is 1 if something is wrong or a flag is unknown, and otherwise 0."""
    from ..doctor import diagnose
    from ..doctor.facts import gather
    from ..doctor.render import print_line, to_dict

    if words and len(words) > 1 and " -" in words[0]:  # else the whole line would be a program's name
        raise typer.BadParameter(
            f"{' '.join(words[1:])} follows a command line that is quoted as a whole; put options of `tune "
            "doctor` before the command line, and flags of the engine inside the quotes",
            param_hint="-- COMMAND LINE",
        )
    try:
        facts = gather(gpu_arch, gpus, moe, experts, experts_used, model, vram)
        line = diagnose(words or [], engine=engine, version=version, facts=facts)
    except (TuneError, DynoError) as error:
        raise typer.BadParameter(" ".join(str(error).split())) from error
    if as_json:
        print(json.dumps(to_dict(line)))
    else:
        print_line(line, Console(highlight=False))
    if line.wrong or line.unlisted:
        raise typer.Exit(1)
