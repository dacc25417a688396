"""`dyno profiles`: list, check, show, match and export profile files."""

from __future__ import annotations

import json
from pathlib import Path  # noqa: TC003 - typer reads annotations at run time
from typing import Annotated

import typer

from dyno._cli import fleet, help, options, plugins, state


class _Profiles(help.Group):
    """The commands of `dyno profiles`, the usual ones first."""

    first = ("list", "show", "check")


app = typer.Typer(
    cls=_Profiles,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="List, check, show, match and export profiles.",
)
app.command(
    cls=help.Command,
    epilog=help.examples(
        "dyno profiles match model.gguf",
        "kubectl get node gpu-7 -o json | dyno profiles match model.gguf --labels -",
        "dyno profiles match model.gguf --profiles profiles --all nodes",
    ),
)(fleet.match)
app.command(cls=help.Command, epilog=help.examples("dyno profiles drift --metrics http://127.0.0.1:8080"))(
    fleet.drift
)


@app.command("list", cls=help.Command, epilog=help.examples("dyno profiles list"))
def list_(json_: options.Json = False, verbose: state.Verbose = 0) -> None:
    """List all profiles that dyno searches: shipped, site and user profiles."""
    state.verbosity(verbose)
    from dyno.profiles import list_profiles

    found = list_profiles()
    if json_:
        rows = [
            {
                "path": item.path,
                "layer": item.layer,
                "label": None if item.profile is None else item.profile.label,
                "problem": item.problem,
            }
            for item in found
        ]
        print(json.dumps(rows, indent=2))
        return
    if not found:
        print("no profiles found")
    for item in found:
        problem = (item.problem or "").removeprefix("[profile] ").removeprefix(item.path)
        label = problem if problem.startswith(":") else f": {problem}"
        print(f"{item.layer:8} {item.path}{label if item.profile is None else f': {item.profile.label}'}")


@app.command(cls=help.Command, epilog=help.examples("dyno profiles check profiles/*.yaml"))
def check(
    files: Annotated[list[Path], typer.Argument(help="Profile files.")],
    json_: options.Json = False,
    verbose: state.Verbose = 0,
) -> None:
    """Check profiles for errors. The exit code is 1 if a file has any."""
    state.verbosity(verbose)
    from dyno.profiles import check_file, has_errors

    failed = False
    report = []
    for file in files:
        problems = check_file(file)
        bad = has_errors(problems)
        failed = failed or bad
        report.append({"path": str(file), "ok": not bad, "problems": [str(p) for p in problems]})
        if not json_:
            for problem in problems:
                print(problem)
            print(f"{file}: {'has errors' if bad else 'ok'}")
    if json_:
        print(json.dumps(report, indent=2))
    if failed:
        raise typer.Exit(1)


@app.command(cls=help.Command, epilog=help.examples("dyno profiles show profile.yaml"))
def show(
    file: Annotated[Path, typer.Argument(help="Profile file.")],
    json_: options.Json = False,
    verbose: state.Verbose = 0,
) -> None:
    """Print a profile: the machine it was measured on, its settings and their gains."""
    state.verbosity(verbose)
    from dyno import profiles
    from dyno.profiles.io import to_dict

    profile = profiles.load_profile(file)
    if json_:
        print(json.dumps(to_dict(profile), indent=2))
    else:
        print("\n".join(profiles.describe(profile)))


@app.command(
    cls=help.Command,
    epilog=help.examples(
        "dyno profiles export profile.yaml --as systemd -- --port 8080",
        "dyno profiles export llama.yaml --bin DIR --as compose",
    ),
)
def export(
    file: Annotated[Path, typer.Argument(help="Profile of dyno, llama.cpp or ik_llama.cpp.")],
    command: Annotated[
        list[str] | None,
        typer.Argument(help="After --: your own command line. Default: the one that the tune started from."),
    ] = None,
    form: Annotated[
        str | None,
        typer.Option(
            "--as",
            help="Output format: systemd, compose or helm-values. For dyno also dyno-serve, the default. For "
            "the others also llama-server, the default, env and models.ini.",
        ),
    ] = None,
    binaries: Annotated[
        str | None,
        typer.Option(
            "--bin", metavar="DIR", help="Folder with llama-server and llama-bench, whose --help are read."
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="GGUF file. Default: the one that was tuned.")
    ] = None,
    verbose: state.Verbose = 0,
) -> None:
    """Print the command line, systemd unit or container that starts a server with a profile."""
    state.verbosity(verbose)
    print(plugins.load("profiles-export")(file, command, form, binaries, model), end="")
