"""The command `tune`. Exit codes: 0 done; 1 an error (one line on stderr), nothing was judged, or nothing was
proven on the slice of `--layers` (the last lines say why); 2 wrong usage; 130 interrupted (proven entries are
written)."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import signal
import sys
import time
import traceback
from pathlib import Path
from types import FrameType  # noqa: TC003
from typing import TYPE_CHECKING, Annotated, Any

import typer
from dyno import _output
from dyno._cli import help
from dyno._shell import escaped
from dyno.errors import DynoError
from rich.console import Console

from .. import __version__
from ..core.errors import Interrupted, TuneError
from ..core.model_file import check_model
from ..core.options import ENERGY, MEMORY, OBJECTIVES, SPEED
from ..core.protocol import Workload
from ..search.proposers import SAMPLERS
from . import options as o
from .ab_command import ab
from .arguments import (
    check_choice,
    check_energy,
    command_line,
    declaration_of,
    device_names,
    devices_of,
    engine_options,
    held_settings,
    memory_limit,
    parse_duration,
    placement_of,
    teller,
    text_of_load,
    usage,
    workload_of,
)
from .bare_model import WithModel
from .build_command import build
from .command_group import STATE, Commands
from .doctor_command import doctor
from .messages import EARLY
from .power_limits import best, check_options, lines, parse_limits, tune_at_limits
from .probe_command import probe
from .record_commands import diff, history, report
from .replay_command import replay
from .share_command import import_, share
from .verify_command import verify

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..ab.run import Run
    from ..execution.ray_workers import Cluster
    from ..run.session import Request, Result


app = typer.Typer(
    name="tune",
    cls=Commands,
    subcommand_metavar="[MODEL | COMMAND [ARGS]...]",
    context_settings=help.CONTEXT,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Find the fastest settings for a model on this machine, prove them, and write them into a profile.",
    epilog=help.examples(
        "tune model.gguf",
        "tune model.gguf --gpu 0 --budget 10m",
        "tune model.gguf --workload pp=2048,tg=256,depth=4096 --out profile.yaml",
        "tune verify profile.yaml --model model.gguf",
    ),
)


app.command(
    name="ab",
    cls=help.Command,
    epilog=help.examples(
        "tune ab old.yaml new.yaml --model model.gguf",
        "tune ab v0.1.0 HEAD --model model.gguf -D GGML_CUDA=ON --gpu 0",
        "tune ab old/bin new/bin --model model.gguf --gpu 0 -- -ngl 99",
    ),
)(ab)
app.command(
    name="build",
    cls=WithModel,
    epilog=help.examples(
        "tune build --model model.gguf --device cpu --budget 30m",
        "tune build --model model.gguf --switch GGML_NATIVE --switch GGML_LTO",
    ),
)(build)
app.command(
    name="doctor",
    cls=help.Command,
    context_settings={"allow_interspersed_args": False},
    epilog=help.examples(
        "tune doctor -- llama-server -m model.gguf -ngl 99 -ub 4096",
        "tune doctor --model model.gguf --vram 24GiB -- llama-server -ot exps=CPU",
    ),
)(doctor)
app.command(
    name="verify",
    cls=WithModel,
    epilog=help.examples("tune verify profile.yaml --model model.gguf --budget 5m"),
)(verify)
app.command(name="probe", cls=help.Command, epilog=help.examples("tune probe", "tune probe --gpu 0"))(probe)
app.command(name="share", cls=help.Command, epilog=help.examples("tune share profile.yaml --out row.json"))(
    share
)
app.command(
    name="import", cls=WithModel, epilog=help.examples("tune import row.json --model model.gguf --budget 5m")
)(import_)
app.command(
    name="replay",
    cls=help.Command,
    epilog=help.examples("tune replay sweep.jsonl --seeds 100 --metric tg128"),
)(replay)
app.command(name="diff", cls=help.Command, epilog=help.examples("tune diff old.yaml new.yaml"))(diff)
app.command(name="report", cls=help.Command, epilog=help.examples("tune report profile.yaml.journal.jsonl"))(
    report
)
app.command(name="history", cls=help.Command, epilog=help.examples("tune history"))(history)


NAMES = ("tune", "dyno-tune", "dyno tune")  # help and shell completion use the name that the user typed


def _version(wanted: bool) -> None:
    if wanted:
        print(f"tune {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def tune(
    context: typer.Context,
    model: o.Model = None,
    device: o.Device = "auto",
    gpu: o.Gpu = None,
    out: o.Out = None,
    budget: o.Budget = "3m",
    workload: o.WhatWorkload = None,
    text: o.Text = None,
    ctx: o.Ctx = None,
    resume: o.Resume = False,
    force: o.Force = False,
    allow_approx: o.AllowApprox = None,
    hold: o.Held = None,
    seed: o.Seed = 0,
    as_json: o.Json = False,
    quiet: o.Quiet = False,
    vram: o.Vram = None,
    ram: o.Ram = None,
    virtual_device: o.VirtualDevices = None,
    layers: o.Layers = None,
    objective: o.Objective = "speed",
    pareto: o.Pareto = False,
    power_limits: o.PowerLimits = None,
    engine: o.Engine = "dyno",
    binaries: Annotated[
        Path | None,
        typer.Option(
            "--bin",
            metavar="DIR",
            rich_help_panel=o.OTHERS,
            help="Folder with the binaries of llama.cpp or ik_llama.cpp.",
        ),
    ] = None,
    storage: o.Storage = None,
    study: o.StudyName = None,
    ray: o.Ray = None,
    workers: o.Workers = None,
    sampler: o.Sampler = "guided",
    kernels: o.Kernels = True,
    verbose: o.Verbose = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Tune a model: search settings, prove their gains, and write a profile that dyno finds automatically."""
    STATE["verbose"] = verbose
    if context.invoked_subcommand is not None:
        _nothing_before(context)
        return
    if model is None and "command_line" in context.meta:
        raise typer.BadParameter(
            "a command line after -- needs --engine llama.cpp|ik_llama.cpp, --bin and --model. To explain a "
            "command line, run `tune doctor -- …`"
        )
    if model is None:
        if _given(context):
            raise typer.BadParameter(
                "no model was given; give the GGUF file as --model FILE, or as FILE alone",
                param_hint="--model",
            )
        print(context.get_help())
        raise typer.Exit(2)
    from ..run.cluster import tune_on
    from ..run.session import run
    from ..run.slice import run_on_slice

    check_choice("sampler", sampler, SAMPLERS)
    check_choice("objective", objective, OBJECTIVES)
    if study is not None and storage is None:
        raise typer.BadParameter("--study names a study in --storage; give --storage, too")
    if workers is not None and ray is None:
        raise typer.BadParameter("--workers needs --ray; for several GPUs of this machine, give --gpu 0,1")
    target = declaration_of(engine)
    if ray is not None and (target.foreign or gpu is not None or device.startswith("cuda:")):
        raise typer.BadParameter(
            "--ray works only with dyno and chooses the GPUs itself; omit --engine, --gpu and cuda:N"
        )
    workload, text = text_of_load(workload, text, foreign=target.foreign)
    of_engine = engine_options(engine, binaries, text, device, gpu, context.meta.get("command_line", []))
    plan_only = (
        ("--vram", vram is not None), ("--ram", ram is not None), ("--pareto", pareto),
        ("--virtual-device", virtual_device is not None), ("--objective memory", objective == MEMORY),
    )  # fmt: skip
    for option, wanted in plan_only:
        if wanted and not target.memory_plan:
            raise typer.BadParameter(
                f"{option} needs the memory plan of dyno, which --engine {engine} does not have"
            )
    if objective == ENERGY and target.foreign:
        raise typer.BadParameter(
            f"--objective energy works only with dyno; --engine {engine} starts processes, and the energy of "
            "loading them would count, too"
        )
    if objective != SPEED and (workload or "").startswith("serve"):
        raise typer.BadParameter(
            f"--objective {objective} does not support --workload serve:…; give prompts and generation"
        )
    watts = parse_limits(power_limits) if power_limits is not None else []
    others = (target.foreign, ray is not None, resume, layers is not None, "," in (gpu or ""))
    if watts and (any(others) or objective == MEMORY):
        raise typer.BadParameter(
            "--power-limits tunes dyno several times on one GPU; it cannot be combined with --engine, --ray, "
            "--resume, --layers, several GPUs or --objective memory"
        )
    apart = {
        f"--engine {engine}": target.foreign, "--ray": ray is not None, "--pareto": pareto,
        "--objective memory": objective == MEMORY, "--resume": resume, "--storage": storage is not None,
        "several GPUs": "," in (gpu or ""),
    }  # fmt: skip
    if layers is not None and (named := [option for option, given in apart.items() if given]):
        raise typer.BadParameter(
            f"--layers tunes dyno twice on one device; it cannot be combined with {' and '.join(named)}"
        )
    pareto = pareto or objective == MEMORY
    # All options are checked before anything starts, because starting a cluster takes half a minute.
    seconds, held = parse_duration(budget), held_settings(hold or [], engine)
    if watts:
        check_options(watts, seconds, {
            "--vram": vram is not None, "--ram": ram is not None, "--text": text is not None,
            "--virtual-device": bool(virtual_device), "--storage": storage is not None,
            "--workload serve:…": (workload or "").startswith("serve"),
        })  # fmt: skip
    limit = memory_limit("--vram", vram)
    host_limit = memory_limit("--ram", ram)
    if workload is not None:
        usage(Workload.parse, workload)
    device_names(device, gpu)
    placed = any("=cpu:" in str(rule) for rule in held.get("placement", ()))
    if virtual_device and not device.startswith("cpu:") and not placed:
        raise typer.BadParameter("--virtual-device has no effect unless --device names it, such as cpu:1")
    check_model(model)
    with contextlib.ExitStack() as stack:
        cluster = _cluster(ray, stack) if ray is not None else None
        if cluster is not None:
            devices = [cluster.device(device_names(device, None)[0])]
        else:
            virtual = placement_of(virtual_device or [], None, None, "").get("virtual_devices", 0)
            devices = ["cpu"] if target.foreign else devices_of(device, gpu, virtual)
        request = _request(
            model, devices, engine, of_engine, workload, ctx,
            budget=seconds, seed=seed, sampler=sampler, approx_limit=allow_approx,
            kernels=kernels and target.kernels and objective != MEMORY, pareto=pareto, objective=objective,
        )  # fmt: skip
        if request.options.workload.served is not None:
            # A kernel is timed in a graph of its own, which says little about steps of many sizes.
            request.options = dataclasses.replace(request.options, kernels=False)
        request.out, request.resume, request.quiet = out, resume, quiet
        request.storage, request.study = storage, study
        request.force = force
        request.held, request.memory_limit = held, limit
        if not target.foreign:
            request.placement = placement_of(virtual_device or [], limit, host_limit, devices[0])
        request.text = None if text is None or target.foreign else str(text.absolute())
        if watts:
            _check_limits(request)
        if objective == ENERGY and cluster is None and not virtual_device:  # others check it there
            check_energy(devices)
        STATE["measuring"] = not watts  # a series of tunes has no --resume
        if watts:
            _at_limits(request, watts, as_json=as_json)
            return
        if layers is not None:
            result = run_on_slice(request, layers)
        else:
            result = run(request) if cluster is None else tune_on(cluster, request, workers)
    _print_result(result, request, as_json)
    if result.outcome.status == "interrupted":
        raise typer.Exit(130)
    if result.proves_nothing:
        raise typer.Exit(1)


def _check_limits(request: Request) -> None:
    """Raises typer.BadParameter for a request that cannot run at several power limits."""
    workload = request.options.workload
    if not request.device.startswith("cuda:"):
        raise typer.BadParameter(f"--power-limits needs a GPU, but the device is {request.device}")
    if request.options.objective == ENERGY and any(workload.part(m).depth for m in workload.metrics):
        raise typer.BadParameter(
            "--power-limits with --objective energy cannot measure a workload with depth; give a "
            "--workload without depth"
        )


def _at_limits(request: Request, watts: list[float], *, as_json: bool) -> None:
    """Tune at each power limit, and restore the original limit at the end."""
    from dyno.devices import resolve_device

    from ..ab.dyno_side import DynoSide
    from ..ab.run import watched
    from ..measure.machine_monitor import Careful, Machine, patience_of
    from ..measure.power_limit import PowerLimit
    from ..run.session import run

    objective = request.options.objective
    number = int(request.device.removeprefix("cuda:"))
    bus = str(resolve_device(request.device).info["pci_bus_id"])
    limit = PowerLimit(bus)
    limit.check(watts)

    say = teller(quiet=request.quiet)
    settings = request.held if request.ctx is None else {**request.held, "ctx": request.ctx}
    patience = None if request.force else patience_of(request.options.budget)
    # The plan of a profile may keep weights in host memory.
    with limit, Machine(bus, host_weights=True) as watch:
        careful = Careful(
            watch, lambda kind, **data: say(str(data["message"])), lambda seen: None, time.sleep, patience
        )

        def side(at: float, result: Result) -> Callable[[Workload], Run]:
            one = DynoSide(
                f"{at:g} W", request.model, profile=result.path, settings=settings, gpu=number, force=True
            )
            return lambda workload: watched(f"{at:g} W", one, workload, careful)

        say(f"the power limit of {request.device} is {limit.before:g} W and will be restored at the end")
        found = tune_at_limits(request, watts, limit, run, side, say)
    if as_json:
        told = {
            "best_w": best(found).watts, "limits": [one.to_dict(objective) for one in found],
            "machine": careful.conditions.to_dict(),
        }  # fmt: skip
        print(json.dumps(told))
        return
    print("\n".join(lines(found, objective, bus)))


def _nothing_before(context: typer.Context) -> None:
    """Refuse options of a tune before a subcommand, which would be ignored. Only -v is valid for both."""
    if given := _given(context):
        raise typer.BadParameter(
            f"{given[0]} is an option of `tune` and has no effect on "
            f"`tune {context.invoked_subcommand}`; put the options of a subcommand after its name"
        )


def _given(context: typer.Context) -> list[str]:
    """The options of `tune` on the command line, except -v."""
    found = []
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name != "verbose" and source is not None and source.name == "COMMANDLINE":
            found.append(parameter.opts[0])
    return found


def _cluster(address: str, stack: contextlib.ExitStack) -> Cluster:
    from ..execution.ray_workers import Cluster

    cluster = Cluster(address)
    stack.callback(cluster.close)
    return cluster


def _request(
    model: str, devices: list[str], engine: str, of_engine: dict[str, Any], workload: str | None,
    ctx: int | None, **options: Any,
) -> Request:  # fmt: skip
    """The request for these devices, with their defaults."""
    from ..run.session import Request
    from ..run.tune import Options

    parsed = workload_of(workload, devices[0], options.get("budget"), model)
    # Commands that later start binaries of another engine (`export`, `verify`) may run in any folder.
    target = declaration_of(engine)
    paths = ("--bin", "--model", "-m") if target.foreign else ()
    return Request(
        model, Options(parsed, **options), devices[0], tuple(devices[1:]),
        ctx=ctx, command=command_line(paths),
        deadline_floor=target.least_deadline(devices[0], model), engine=engine, engine_options=of_engine,
    )  # fmt: skip


def _print_result(result: Result, request: Request, as_json: bool) -> None:
    if as_json:
        from ..output.verdict import record_of

        path = None if result.path is None else str(result.path)
        said = {**record_of(result.outcome), "profile": path, "journal": str(result.journal)}
        if result.path is None:
            said["why_none"] = result.why_none
        print(json.dumps(said))
        return
    from ..output.next_step import next_step, same_options
    from ..output.report import print_outcome
    from ..run.session import stderr_log

    print_outcome(result.outcome, request.options.workload, Console(highlight=False))
    foreign = declaration_of(request.engine).foreign
    print(f"profile: {result.path or result.why_none}")
    if result.path is not None:
        options = [] if foreign else same_options(result.profile, request.device, request.placement)
        if step := next_step(result.path, request.model, foreign=foreign, options=options):
            print(f"next:    {step}")
    print(f"journal: {result.journal}")
    if foreign:
        print(f"stderr:  {stderr_log(request)}")
    if result.pareto is not None:
        print(f"pareto:  {result.pareto}")


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> None:
    """The entry point of the command."""
    signal.signal(signal.SIGTERM, _stop)  # SIGTERM writes the proven entries, like Ctrl-C
    try:
        called = Path(sys.argv[0]).name
        with _output.flushed():
            app(standalone_mode=True, prog_name=called if called in NAMES else "tune")
    except BrokenPipeError:  # the reader of stdout has gone
        _output.discard()
        sys.exit(1)
    except Interrupted as error:
        _fail(error, 130)
    except (TuneError, DynoError) as error:
        _fail(error, 1)
    except KeyboardInterrupt:
        print(EARLY, file=sys.stderr)
        sys.exit(130)
    except OSError as error:
        _fail(error, 1)


def _fail(error: BaseException, code: int) -> None:
    if STATE["verbose"]:
        traceback.print_exception(error, file=sys.stderr)
    told = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        told = f"{error.filename}: {error.strerror}"
    elif isinstance(error, OSError) and error.errno == errno.ENOSPC:
        told = _output.FULL
    print(f"tune: {escaped(' '.join(told.split()))}", file=sys.stderr)
    _output.leave(code)
