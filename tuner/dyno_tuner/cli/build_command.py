"""The command `tune build`."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from dyno import _core, profiles
from dyno.devices import built_for_cuda, resolve_device

from ..ab.dyno_side import gpu_bus
from ..ab.revision import cache_folder
from ..build.builder import Builder
from ..build.content import snapshot
from ..build.measure import RealBench
from ..build.memory import COMPILER_MIB
from ..build.record import Record, run_key
from ..build.render import command_of, markdown, page, to_dict
from ..build.search import Clock, search
from ..build.switches import Place, catalogue, named
from ..core.errors import TuneError
from ..core.model_file import check_model
from ..output.html_report import check_plotly
from ..space.memory_limits import parse_bytes
from ..targets.ggml.device import cuda_device
from . import options as o  # noqa: TC001  (typer reads annotations when the command runs)
from .arguments import (
    check_writable,
    command_line,
    declaration_of,
    device_names,
    gpu_number,
    held_settings,
    parse_duration,
    teller,
    usage,
    workload_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..core.protocol import Workload

UBATCHES = (128, 256, 512, 1024, 2048, 4096)


def build(
    model: Annotated[str, typer.Option("--model", "-m", help="GGUF file.")] = ...,  # type: ignore[assignment]
    device: o.Device = "auto",
    gpu: o.OneGpu = None,
    switches: Annotated[
        list[str] | None,
        typer.Option(
            "--switch",
            metavar="NAME[=VALUE]",
            help="Build switch to try. Can be repeated. Default: all switches without --define.",
        ),
    ] = None,
    defines: Annotated[
        list[str] | None,
        typer.Option(
            "--define",
            "-D",
            metavar="NAME=VALUE",
            help="CMake definition for all builds, including the default build; --switch can try another "
            "value of the same name. Can be repeated.",
        ),
    ] = None,
    engine: Annotated[
        str, typer.Option(help="Engine to build: dyno, or llama.cpp or ik_llama.cpp with --source.")
    ] = "dyno",
    source: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Source tree to build. Default: the source tree of this dyno."),
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder to cache builds in. Default: dyno/builds in your cache folder."
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(help="Time limit for builds and measurements, such as 30m or 2h. Default: no limit."),
    ] = None,
    workload: o.MeasuredWorkload = None,
    rounds: o.Rounds = 6,
    least: o.Least = 0.01,
    memory: Annotated[
        str | None,
        typer.Option(help="Maximum memory for builds, such as 16GiB. Default: all free memory."),
    ] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Measure even while other programs use the CPUs, and mark the result."),
    ] = False,
    hold: o.HeldInAll = None,
    retune: Annotated[
        bool,
        typer.Option(
            "--retune/--no-retune",
            help="In both builds, search again the settings that interact with a switch.",
        ),
    ] = True,
    deadline: o.Deadline = 600.0,
    seed: Annotated[int, typer.Option(help="Random seed of the confidence intervals.", min=0)] = 0,
    report: Annotated[
        Path | None,
        typer.Option("--report", help="Also write an HTML page to this file. Needs gguf-dyno[report]."),
    ] = None,
    out: o.TableOut = None,
    as_json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Build variants of the engine, and measure which build switches make this model faster on this machine.

    Each variant is built in a cache folder; the installed dyno does not change. Exit codes: 0 done, even if
    the budget or a busy machine left switches untried; 1 an error, such as a default build that fails; 2
    wrong usage; 130 interrupted (the same command continues)."""

    say = teller(quiet=quiet)
    seconds = parse_duration(budget) if budget else None
    limit = usage(parse_bytes, memory) if memory is not None else None
    if limit is not None and limit < COMPILER_MIB << 20:
        raise typer.BadParameter(
            f"{memory!r} is {limit:,} bytes, but one compiler alone needs {COMPILER_MIB} MiB; write, for "
            "example, 8GiB",
            param_hint="--memory",
        )
    foreign = declaration_of(engine).foreign
    held = held_settings(hold or [], engine)
    given = _defines(defines or [])
    device_names(device, None if gpu is None else str(gpu))
    if report is not None:
        check_plotly()
    for option, path in (("--out", out), ("--report", report)):
        if path is not None:
            check_writable(option, path)
    if foreign and source is None:
        raise typer.BadParameter(f"--engine {engine} needs its source tree; give --source DIR")
    check_model(model)
    number = gpu_number(device, gpu, foreign=foreign)
    parsed = workload_of(workload, "cpu" if number is None else f"cuda:{number}")
    place = _place(number, model, foreign=foreign)
    if switches:
        chosen = usage(lambda: named(switches, engine, place, given))
    else:
        chosen = catalogue(engine, place, given)
    where = cache.absolute() if cache is not None else cache_folder()
    wanted = (source or _own_source()).absolute()
    if not foreign and (wanted / "CMakeLists.txt").is_file() and not _is_own(wanted):
        raise TuneError(
            f"{wanted} is not a source tree of dyno; give its engine with --engine llama.cpp or ik_llama.cpp"
        )
    tree, sources = snapshot(wanted, where)
    fixed = {**_fixed(engine, place), **given}
    builder = Builder(tree, sources, engine, where, fixed, None if limit is None else limit >> 20, say)
    facts: dict[str, Any] = {
        "engine": engine, "sources": sources, "model": os.path.basename(model), "device": place.title,
        "workload": str(parsed), "fixed": fixed,
    }  # fmt: skip
    whole = {**facts, "switches": [s.define for s in chosen], "file": _identity(model), "held": held,
             "rounds": rounds, "least": least, "seed": seed, "retune": retune,
             "force": force}  # fmt: skip
    record = Record(where / "runs" / f"{run_key(whole)}.jsonl")
    if record.size:
        say(f"continuing a run that has {record.size} results")
    with contextlib.ExitStack() as stack:
        log = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dyno-build-"))) / "stderr.log"
        bench = RealBench(
            engine, os.path.abspath(model), parsed, number, held, rounds, least, deadline, seed, log,
            gpu_bus(number), say, force,
        )  # fmt: skip
        knobs = {"ubatch": _ubatches(parsed)} if retune and "ubatch" not in held else {}
        result = search(builder, bench, chosen, Clock(seconds), record, say, knob_values=knobs)
    record.done()
    facts["line"] = command_line()
    command = command_of(engine, fixed if place.kind == "cuda" else given, result)
    shown = markdown(result, command, facts)
    print(json.dumps(to_dict(result, command, facts)) if as_json else shown, flush=True)
    for path, written in ((out, shown + "\n"), (report, page(result, command, facts) if report else "")):
        if path is not None:
            _write(path, written)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise TuneError(f"{path} cannot be written: {error.strerror or error}") from error


def _defines(pairs: Sequence[str]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise typer.BadParameter(
                f"--define {pair!r} is not of the form NAME=VALUE, such as GGML_NATIVE=ON"
            )
        found[name] = value
    return found


def _place(number: int | None, model: str, *, foreign: bool) -> Place:
    """The device, and for a GPU the profile of this model on it.

    Raises:
        TuneError: The driver knows no such GPU.
    """
    if number is None:
        return Place("cpu", title=str(_core.cpu_info()["name"]))
    if foreign or not built_for_cuda():  # a build for the CPU can also make and measure builds for GPUs
        told, name = cuda_device(number)
        return Place("cuda", str(told["compute_capability"]), name)
    info = resolve_device(f"cuda:{number}").info
    capability = int(info["compute_capability"])
    identity = profiles.model_from_description(_core.describe_model(model))
    engine = profiles.engine_from_build(_core.build_info())
    match = profiles.find_profile(profiles.device_from_info(info), identity, engine, warn=lambda _: None)
    return Place("cuda", f"{capability // 10}.{capability % 10}", str(info["name"]), match.path)


def _fixed(engine: str, place: Place) -> dict[str, str]:
    """Defines of all builds: the kind of device and, for a GPU, its architecture.

    The defines of a GPU are part of the printed command. A build without CUDA is the default of each engine.
    """
    if place.kind == "cpu":
        return {"GGML_CUDA": "OFF"}
    own = "a" if place.number >= 90 and not declaration_of(engine).foreign else ""
    return {"GGML_CUDA": "ON", "CMAKE_CUDA_ARCHITECTURES": f"{place.number}{own}-real"}


def _own_source() -> Path:
    """The source tree that this dyno is imported or installed from.

    Raises:
        TuneError: It is an installed wheel, which has no sources.
    """
    import dyno

    root = Path(str(dyno.__file__)).resolve().parents[2]
    for place in (root, Path.cwd()):
        if (place / "CMakeLists.txt").is_file() and _is_own(place):
            return place
    raise TuneError("the source tree of this dyno was not found; give a checkout of dyno with --source DIR")


def _is_own(tree: Path) -> bool:
    """Whether a source tree is one of dyno."""
    return (tree / "csrc").is_dir() and (tree / "python" / "dyno").is_dir()


def _identity(model: str) -> list[Any]:
    told = os.stat(model)
    return [os.path.abspath(model), told.st_size, told.st_mtime_ns]


def _ubatches(workload: Workload) -> tuple[int, ...]:
    """The u-batches to try: values around the usual ones, up to the longest prompt."""
    parts = [workload.part(metric) for metric in workload.metrics]
    longest = max((part.tokens for part in parts if part.kind == "pp"), default=0)
    return tuple(n for n in UBATCHES if n <= longest)[-3:]
