"""`dyno explain`: any stage from the file to the kernels, printed."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path  # noqa: TC003 - typer reads annotations at run time
from typing import Annotated

import typer

from dyno._cli import options, state
from dyno._shell import escaped


class Stage(StrEnum):
    """The subjects that can be explained."""

    gguf = "gguf"
    model = "model"
    plan = "plan"
    ops = "ops"


def explain(
    stage: Annotated[Stage, typer.Argument(help="Which stage.")],
    file: Annotated[Path, typer.Argument(help="GGUF file.")],
    tokens: Annotated[int | None, typer.Option(help="For `ops`: size of the batch.")] = None,
    nodes: Annotated[
        bool, typer.Option("--nodes", help="For `plan`: also every launch with its operands.")
    ] = False,
    json_: options.Json = False,
    device: options.Device = "auto",
    gpu: options.Gpu = None,
    override_tensor: options.OverrideTensor = None,
    n_gpu_layers: options.GpuLayers = None,
    cpu_moe: options.CpuMoe = None,
    n_cpu_moe: options.NCpuMoe = None,
    virtual_devices: options.VirtualDevices = None,
    vram: options.Vram = None,
    ram: options.Ram = None,
    split_mode: options.SplitMode = None,
    tensor_split: options.TensorSplit = None,
    profile: options.ProfileFile = None,
    no_profile: options.NoProfile = False,
    require_profile: options.RequireProfile = False,
    force_profile: options.ForceProfile = False,
    set_: options.Set = None,
    verbose: state.Verbose = 0,
) -> None:
    """Print a stage: the file, the model in it, the plan of its memory, or every op, its kernel and why."""
    state.verbosity(verbose)
    from dyno import explain as stages

    chosen = options.profile_argument(profile, no_profile, require_profile, force_profile)
    chosen |= options.placement_arguments(
        override_tensor,
        n_gpu_layers,
        cpu_moe,
        n_cpu_moe,
        virtual_devices,
        vram,
        ram,
        split_mode,
        tensor_split,
    )
    arguments = options.settings(set_)
    if stage is Stage.gguf:
        result, text = stages.gguf(str(file))
    elif stage is Stage.model:
        result, text = stages.model(str(file))
    else:
        from dyno.engine import Engine

        with Engine(
            file, options.device_argument(device, gpu), plan_only=True, **options.once(chosen, arguments)
        ) as engine:
            state.print_choices(engine)
            if stage is Stage.plan:
                result, text = stages.plan(engine, nodes=nodes)
            else:
                result, text = stages.ops(engine, tokens)
    # Names in a file may hold codes that a terminal obeys.
    print(json.dumps(result, indent=2) if json_ else "\n".join(map(escaped, text.split("\n"))))
