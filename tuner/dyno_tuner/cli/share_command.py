"""The commands `tune share` and `tune import`."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from dyno import _core, profiles
from dyno.devices import resolve_device

from ..core.errors import TuneError
from ..core.model_file import check_model
from ..output.emit import comments_of
from ..run.adopt import Adopted, adopt
from ..run.session import check_place
from ..run.share import MOST_BYTES, profile_of, read_row, row_of
from ..run.verify import KEEP, Verdict, verify
from . import options as o  # noqa: TC001  (typer reads annotations when the command runs)
from .arguments import command_line, declaration_of, devices_of, parse_duration

PASSES = 2  # number of passes in the default time limit


def share(
    profile: Annotated[Path, typer.Argument(help="Profile that `tune` wrote.")],
    out: Annotated[
        Path | None, typer.Option(help="File to write the row to. Default: standard output.")
    ] = None,
) -> None:
    """Print a profile as one anonymous row of JSON that you can share.

    The row has properties, shapes, gains with intervals, and versions. It has no paths, no names of files,
    machines or persons, and no free text. A SHA-256 detects changes. The command sends nothing anywhere."""
    row = json.dumps(row_of(profiles.load_profile(profile)), sort_keys=True)
    if out is None:
        print(row)
    else:
        out.write_text(row + "\n", encoding="utf-8")


def import_(
    row: Annotated[Path, typer.Argument(help="File with a row of `tune share`. -: standard input.")],
    model: Annotated[str, typer.Option("--model", "-m", help="GGUF file to measure with.")],
    out: Annotated[
        Path | None, typer.Option(help="Profile file to write. Default: a new file in your profile folder.")
    ] = None,
    gpu: Annotated[
        int | None, typer.Option(help="Number of the GPU, if the row is for a GPU.", min=0, max=999)
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="Time limit of the whole import, such as 90s or 5m. Default: 4m.")
    ] = None,
    seed: o.Seed = 0,
    quiet: o.Quiet = False,
    as_json: o.Json = False,
) -> None:
    """Measure a row of `tune share` on this machine, and write a profile of the entries that gain here.

    The gains in the row are not trusted. The exit code is 0 if an entry gains here, and otherwise 1."""
    seconds = parse_duration(budget) if budget is not None else None
    check_model(model)
    claimed = profile_of(read_row(_text_of(row)))
    engine = declaration_of(claimed.match.engine.name)
    if engine.foreign:
        raise TuneError(
            f"this row is for {claimed.match.engine.name}; `tune import` supports only rows of dyno"
        )
    name = devices_of("auto", str(gpu))[0] if gpu is not None else claimed.match.device.kind
    info = resolve_device(name).info
    kind = profiles.weights_kind({"general.name": _core.Gguf(model).get("general.name")})
    here = profiles.Match(
        device=profiles.device_from_info(info),
        model=profiles.model_from_description(_core.describe_model(model), weights=kind),
        engine=profiles.engine_from_build(_core.build_info()),
    )
    place = out if out is not None else profiles.default_path(here.device, here.model, here.engine)
    if place.exists():
        raise TuneError(
            f"{place} already exists; give another file with --out, and compare both with `tune diff`"
        )
    check_place(place)
    with tempfile.TemporaryDirectory(prefix="dyno-import-") as folder:
        result = adopt(
            claimed, Path(folder) / "row.yaml", here, command_line(),
            lambda path, left: verify(
                path, os.path.abspath(model), budget=left, seed=seed, quiet=quiet, device=name
            ),
            PASSES * engine.verify_seconds if seconds is None else seconds,
        )  # fmt: skip
    if result.profile is not None:
        kept = len(dict(result.profile.entries()))
        said = f"{kept} of {len(result.verdicts)} entries of a shared row gain on this machine."
        profiles.save_profile(result.profile, place, comments_of(result.profile, said))
    if as_json:
        told = {
            "entries": [v.to_dict() for v in result.verdicts],
            "gain": {m: g.to_dict() for m, g in result.gain.items()},
            "profile": str(place) if result.profile is not None else None,
        }
        print(json.dumps(told))
    else:
        for v in result.verdicts:
            print(_line(v))
        print(_told(result, place))
    if result.profile is None:
        raise typer.Exit(1)


def _line(verdict: Verdict) -> str:
    """An entry of a row with its verdict, both ratios and the reason, as far as they are known."""
    parts = []
    if verdict.measured:
        parts.append(f"{verdict.measured.ratio:.3f} × on this machine")
    if verdict.recorded is not None:
        parts.append(f"{verdict.recorded:.3f} × in the row")
    known = "; ".join(filter(None, (", ".join(parts), verdict.reason)))
    return f"{verdict.verdict:<11} {verdict.entry}: {known}"


def _text_of(row: Path) -> str:
    """The text of a row, from a file or from standard input.

    Raises:
        TuneError: It is too long for a row, or not text.
    """
    if str(row) == "-":
        name, data = "standard input", sys.stdin.buffer.read(MOST_BYTES + 1)
    else:
        with row.open("rb") as file:
            name, data = str(row), file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise TuneError(f"{name} is not a row: a row has at most {MOST_BYTES} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise TuneError(f"{name} is not a row: {error}") from error


def _told(result: Adopted, place: Path) -> str:
    """The last line of an import."""
    if result.profile is not None:
        kept = len(dict(result.profile.entries()))
        return f"profile: {place} ({kept} of {len(result.verdicts)} entries)"
    if result.unmeasured:
        why = f"the import could not measure the remaining entries together ({result.unmeasured})"
        remedy = "give a longer --budget" if result.short else "import again"
        return f"no profile was written: {why}; {remedy}"
    if any(v.verdict == KEEP for v in result.verdicts):
        return "no profile was written: the rounds proved no entry on this machine; give a longer --budget"
    return "no profile was written: no entry gains on this machine"
