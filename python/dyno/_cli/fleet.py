"""`dyno profiles match` and `drift`: the profile that a node would use, and whether its speed still holds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from dyno._cli import options, state
from dyno._shell import escaped

if TYPE_CHECKING:
    from dyno.fleet import Node, Want
    from dyno.profiles import Layer

_SUFFIXES = (".json", ".yaml", ".yml", ".xml", ".txt", ".labels")


def match(
    model_files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="MODEL", help="GGUF files; the same as --model."),
    ] = None,
    labels: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|-",
            help="Description of a node: its labels (kubectl get node -o json, or key=value lines), "
            "`nvidia-smi -q -x`, or `dyno info --json`; - reads standard input. Default: this machine.",
        ),
    ] = None,
    all_: Annotated[
        Path | None,
        typer.Option(
            "--all",
            metavar="DIR",
            help="Folder of such descriptions. Prints a table of all nodes and the tunes to run next.",
        ),
    ] = None,
    models: Annotated[
        list[Path] | None,
        typer.Option(
            "--model",
            "-m",
            metavar="FILE",
            help="GGUF file. Can be repeated. Default: all models that have a profile.",
        ),
    ] = None,
    folders: Annotated[
        list[Path] | None,
        typer.Option(
            "--profiles",
            metavar="DIR",
            help="Folder of profiles. Can be repeated. Default: the folders that dyno searches.",
        ),
    ] = None,
    json_: options.Json = False,
    verbose: state.Verbose = 0,
) -> None:
    """Show which profile this machine would use, or a node that a file describes, and why.

    The description of a node suffices; its GPU is not needed.

    Exit codes, for example for an init container: 0 exact match, 3 near match, 4 no match. With several
    models, the best match determines the code. With --all, the worst match does."""
    state.verbosity(verbose)
    from dyno import _core, profiles
    from dyno.errors import ProfileError
    from dyno.fleet import match as run
    from dyno.fleet.render import single, table

    if labels is not None and all_ is not None:
        raise typer.BadParameter("--labels describes one node and --all a folder of nodes; give one of them")
    if labels is not None and Path(labels).is_dir():
        raise typer.BadParameter(f"--labels {labels} is a folder; --all takes a folder of descriptions")
    nodes = _folder(all_) if all_ is not None else _one(labels) if labels is not None else _here()
    layers = [profiles.Layer(str(f), f) for f in folders] if folders else profiles.default_layers()
    absent = [f for f in folders or [] if not f.is_dir()]
    if absent:
        raise ProfileError(f"[fleet] --profiles {absent[0]} is not a folder")
    engine = profiles.engine_from_build(_core.build_info())
    wants = _wants(list(dict.fromkeys([*(model_files or []), *(models or [])])), layers)
    if not wants:
        raise ProfileError(
            "[fleet] no profile was found, so there is no model to match; give one with --model"
        )
    fleet = run(nodes, wants, engine, layers)
    for line in fleet.warnings:
        print(f"warning: {escaped(line)}", file=sys.stderr)
    code = fleet.best if all_ is None else fleet.worst
    if json_:
        rows = {"nodes": [row.to_dict() for row in fleet.rows], "exit_code": code}
        print(json.dumps({**rows, "tune_next": [t.to_dict() for t in fleet.to_tune()]}, indent=2))
    else:
        print(single(fleet, verbose=verbose > 0) if all_ is None else table(fleet))
    if code:
        raise typer.Exit(code)


def drift(
    metrics: Annotated[
        str,
        typer.Option(help="URL of a running server, such as http://host:8080. Its /metrics page is read."),
    ],
    profile: Annotated[
        Path | None,
        typer.Option(help="Profile with the promised speed. Default: the promise that `dyno serve` reports."),
    ] = None,
    within: Annotated[
        float, typer.Option(help="Fraction by which the speed may fall below the promise.", min=0.0, max=0.99)
    ] = 0.1,
    json_: options.Json = False,
    verbose: state.Verbose = 0,
) -> None:
    """Compare the speed that a server reports with the speed that its profile promised.

    Exit codes: 0 the promise holds, 3 the server is slower, 4 there is nothing to compare yet, or the server
    is slower than a profile of another device or model."""
    state.verbosity(verbose)
    from dyno.fleet.drift import fetch, report
    from dyno.profiles import load_profile

    promise = load_profile(profile) if profile is not None else None
    found = report(fetch(metrics), promise)
    code = found.code(within)
    if json_:
        rows = [row.to_dict() for row in found.rows]
        content = {"metrics": rows, "profile": dict(found.profile), "exit_code": code}
        print(json.dumps({**content, **({"note": found.note} if found.note else {})}, indent=2))
    else:
        told = " ".join(f"{k}={v}" for k, v in sorted(found.profile.items()) if v)
        if told:
            print(escaped(f"profile of the server: {told}"))
        if found.note:
            print(f"note: {found.note}")
        for row in found.rows:
            promised = "unknown" if row.promised is None else f"{row.promised:,.1f} t/s"
            now = "nothing measured" if row.measured is None else f"{row.measured:,.1f} t/s"
            ratio = "" if row.ratio is None else f", {row.ratio:.3f} of the promise"
            print(f"{row.metric}: promised {promised}, {now}{ratio}")
    if code:
        raise typer.Exit(code)


def _here() -> list[Node]:
    """The GPUs of this machine, or its CPU if there is no GPU."""
    from dyno import info
    from dyno.fleet import read_nodes

    return read_nodes(json.dumps(info.collect()), "this machine")


def _one(place: str) -> list[Node]:
    from dyno.fleet import read_nodes

    if place == "-":
        return read_nodes(_utf8(sys.stdin.buffer, "standard input"), "standard input")
    return read_nodes(_text(Path(place)), place)


def _text(path: Path) -> str:
    with path.open("rb") as file:
        return _utf8(file, str(path))


def _utf8(file: BinaryIO, name: str) -> str:
    from dyno.errors import ProfileError
    from dyno.fleet.nodes import MAX_CHARS

    data = file.read(MAX_CHARS + 1)
    if len(data) > MAX_CHARS:
        raise ProfileError(
            f"[fleet] {name} has more than {MAX_CHARS} bytes, which is no description of nodes"
        )
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ProfileError(f"[fleet] {name} is not UTF-8 text") from error


def _folder(folder: Path) -> list[Node]:
    from dyno.errors import ProfileError
    from dyno.fleet import read_nodes

    if not folder.is_dir():
        raise ProfileError(f"[fleet] --all {folder} is not a folder")
    files = sorted(p for p in folder.iterdir() if p.suffix in _SUFFIXES and not p.name.startswith("."))
    if not files:
        raise ProfileError(
            f"[fleet] --all {folder}: the folder has no file that ends in {', '.join(_SUFFIXES)}"
        )
    return [node for path in files for node in read_nodes(_text(path), path.stem)]


def _wants(models: list[Path], layers: list[Layer]) -> list[Want]:
    from dyno import _core, profiles
    from dyno.fleet import Want
    from dyno.fleet.matching import known_models

    if not models:
        return known_models(layers, profiles.engine_from_build(_core.build_info()), lambda _: None)
    found = []
    for path in models:
        file = _core.Gguf(str(path))
        kind = profiles.weights_kind({"general.name": file.get("general.name")})
        identity = profiles.model_from_description(_core.describe_model(str(path)), weights=kind)
        found.append(Want(path.name, identity))
    return found
