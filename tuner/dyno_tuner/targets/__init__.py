"""Targets: the engines that the tuner measures through the protocol `core.protocol.Target`.

`dyno` is the engine of this project, `replay` a recorded sweep, `simulated` an engine with known truth.
`llama_cpp` and `ik_llama_cpp` drive the binaries of those engines through the package `ggml`. A new target is
a folder here and a line in `MODULES`.
"""

from __future__ import annotations

MODULES = {
    "dyno": "dyno_tuner.targets.dyno.target",
    "replay": "dyno_tuner.targets.replay.target",
    "simulated": "dyno_tuner.targets.simulated.target",
    "llama_cpp": "dyno_tuner.targets.ggml.llama_cpp",
    "ik_llama_cpp": "dyno_tuner.targets.ggml.ik_llama_cpp",
}
"""The module of each target, whose `from_options` makes the target in a worker."""
