"""The command `tune verify`."""

from __future__ import annotations

import datetime
import json
import time
from pathlib import Path  # noqa: TC003  (typer reads annotations when the command runs)
from typing import TYPE_CHECKING, Annotated

import typer
from dyno import profiles
from dyno.errors import DynoError

from ..core.errors import TuneError
from ..run.junit import Suite, write_junit
from ..targets import declared
from ..targets.ggml.export import binaries_folder, tuned_with
from . import options as o  # noqa: TC001  (typer reads annotations when the command runs)
from .arguments import check_writable, devices_of, parse_duration

if TYPE_CHECKING:
    from ..core.intervals import Estimate
    from ..run.verify import Verdict


def verify(
    profile: Annotated[Path, typer.Argument(help="Profile to verify.")],
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="GGUF file. Default: the file that the profile names.")
    ] = None,
    gpu: Annotated[
        int | None, typer.Option(help="Number of the GPU, if the profile is for a GPU.", min=0, max=999)
    ] = None,
    binaries: Annotated[
        Path | None,
        typer.Option(
            "--bin",
            metavar="DIR",
            help="Folder with the binaries, if the profile is for llama.cpp or ik_llama.cpp.",
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Time limit, such as 90s, 3m or 1h. Default: 2m, or 10m for llama.cpp and ik_llama.cpp."
        ),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="DAY",
            help="Skip the profile if it was measured on or after this date (YYYY-MM-DD).",
        ),
    ] = None,
    junit: Annotated[
        Path | None, typer.Option(help="Also write the verdicts to this file as JUnit XML.")
    ] = None,
    seed: o.Seed = 0,
    quiet: o.Quiet = False,
    as_json: o.Json = False,
) -> None:
    """Measure whether each entry of a profile still gains.

    The exit code is 0 if all entries still hold. It is 1 otherwise, also if an entry is unclear because of
    noise, or if nothing could be measured."""
    from ..run.verify import KEEP, USUAL

    seconds = parse_duration(budget) if budget is not None else USUAL
    day = _day(since) if since is not None else None
    if junit is not None and not junit.parent.is_dir():
        raise typer.BadParameter(f"--junit {junit}: the folder {junit.parent} does not exist")
    if junit is not None:
        check_writable("--junit", junit)
    begun = time.monotonic()
    try:
        newer = "" if day is None else _newer(profile, day)
        folder = str(binaries.absolute()) if binaries is not None else None
        device = None if gpu is None else devices_of("auto", str(gpu))[0]
        verdicts, gain = ([], {}) if newer else _run(profile, model, device, folder, seconds, seed, quiet)
    except (TuneError, DynoError) as error:
        if junit is not None:
            said = " ".join(str(error).split())
            write_junit(junit, Suite(str(profile), time.monotonic() - begun, error=said))
        raise
    if junit is not None:
        write_junit(junit, Suite(str(profile), time.monotonic() - begun, verdicts, gain, newer))
    if as_json:
        told = {"entries": [v.to_dict() for v in verdicts], "gain": {m: g.to_dict() for m, g in gain.items()}}
        print(json.dumps({**told, **({"skipped": newer} if newer else {})}))
    elif newer:
        print(f"skipped: {newer}")
    else:
        _print(verdicts, gain)
    if any(v.verdict != KEEP for v in verdicts):
        raise typer.Exit(1)


def _run(
    path: Path, model: str | None, device: str | None, binaries: str | None, seconds: float, seed: int,
    quiet: bool,
) -> tuple[list[Verdict], dict[str, Estimate]]:  # fmt: skip
    """Measure the verdicts. If the binary lacks flags of the profile, report only these flags."""
    from ..run.verify import UNSUPPORTED, Verdict
    from ..run.verify import verify as run
    from .preflight import lost_in

    profile, _ = profiles.load_readable(path)
    engine = profile.match.engine.name
    if declared(engine).foreign:
        binaries = binaries_folder(path, profile, binaries)
        lost = lost_in(binaries, engine, tuned_with(profile)[2])
        if lost:
            return [Verdict(f"flag {name}", UNSUPPORTED, why) for name, why in lost.items()], {}
    return run(path, model, budget=seconds, seed=seed, quiet=quiet, device=device, binaries=binaries)


def _day(text: str) -> datetime.date:
    try:
        return datetime.date.fromisoformat(text)
    except ValueError as error:
        raise typer.BadParameter(f"--since {text!r} is not a date; write, for example, 2026-11-24") from error


def _newer(path: Path, day: datetime.date) -> str:
    """The reason why a profile need not be measured; "" if it is older than that day, or has no date."""
    profile, _ = profiles.load_readable(path)
    date = profile.provenance.date if profile.provenance else None
    try:
        measured = datetime.date.fromisoformat((date or "")[:10])
    except ValueError:
        return ""
    return f"the profile was measured on {measured}, which is not before {day}" if measured >= day else ""


def _print(verdicts: list[Verdict], gain: dict[str, Estimate]) -> None:
    for v in verdicts:
        now = f" {v.measured}" if v.measured else ""
        then = f" (recorded {v.recorded:.3f} ×)" if v.recorded is not None else ""
        print(f"{v.verdict:<11} {v.entry}:{now}{then} {v.reason}")
    for metric, g in gain.items():
        print(f"whole profile, {metric}: {g.ratio:.3f} × the default [{g.low:.3f}, {g.high:.3f}]")
    if not verdicts:
        print("all entries of the profile are defaults, so there is nothing to verify")
