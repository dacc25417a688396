"""Targets: the engines that the tuner measures through the protocol `core.protocol.Target`.

`dyno` is the engine of this project, `replay` is a recorded sweep, and `simulated` is an engine with known
truth. `llama_cpp` and `ik_llama_cpp` run the binaries of those engines through the package `ggml`. A new
target is a folder with a target and a `declaration`, and a line in `MODULES`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ..core.errors import TuneError

if TYPE_CHECKING:
    from .declaration import Declaration

MODULES = {
    "dyno": "dyno_tuner.targets.dyno.target",
    "replay": "dyno_tuner.targets.replay.target",
    "simulated": "dyno_tuner.targets.simulated.target",
    "llama_cpp": "dyno_tuner.targets.ggml.llama_cpp",
    "ik_llama_cpp": "dyno_tuner.targets.ggml.ik_llama_cpp",
}
"""The module of each target, whose `from_options` makes the target in a worker."""


def declared(engine: str) -> Declaration:
    """The declaration of an engine, from the module `declaration` in the folder of its target.

    Raises:
        TuneError: The target does not exist.
    """
    name = engine.replace(".", "_")
    if name not in MODULES:
        raise TuneError(f"no target {engine!r}; choose from {', '.join(MODULES)}")
    package = MODULES[name].rpartition(".")[0]
    found: Declaration = importlib.import_module(f"{package}.declaration").declaration(engine)
    return found
