"""`dyno info`: the build and the devices of this machine."""

from __future__ import annotations

import json
from typing import Any

from dyno._cli import help, options, state


class Command(help.Command):
    """A command that takes no model. If there is one, the error names the command that describes it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except help.USAGE_ERROR as error:
            if "unexpected extra argument" in error.message:
                error.message += "; `dyno explain model FILE` describes a model"
            raise


def info(
    json_: options.Json = False,
    device: options.Device = "all",
    gpu: options.Gpu = None,
    verbose: state.Verbose = 0,
) -> None:
    """Print the version, build options, compiler, instruction sets and devices.

    --device or --gpu limits the list of devices to one."""
    state.verbosity(verbose)
    from dyno import info as facts

    found = facts.collect(
        options.device_argument("auto" if device == "all" and gpu is not None else device, gpu)
    )
    print(json.dumps(found, indent=2) if json_ else facts.text(found))
