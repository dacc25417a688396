"""`dyno info`: what was built, and what it runs on."""

from __future__ import annotations

import json

from dyno._cli import options, state


def info(json_: options.Json = False, verbose: state.Verbose = 0) -> None:
    """Version, build switches, compiler, instruction sets and devices."""
    state.verbosity(verbose)
    from dyno import info as facts

    found = facts.collect()
    print(json.dumps(found, indent=2) if json_ else facts.text(found))
