"""`dyno info`: what was built, and what it runs on."""

from __future__ import annotations

import json

from dyno._cli import options, state


def info(
    json_: options.Json = False,
    device: options.Device = "all",
    gpu: options.Gpu = None,
    verbose: state.Verbose = 0,
) -> None:
    """Version, build switches, compiler, instruction sets and devices (all of them, or the one named)."""
    state.verbosity(verbose)
    from dyno import info as facts

    found = facts.collect(
        options.device_argument("auto" if device == "all" and gpu is not None else device, gpu)
    )
    print(json.dumps(found, indent=2) if json_ else facts.text(found))
