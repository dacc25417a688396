"""The binaries of llama.cpp as a target; see `targets.ggml.target`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import target as ggml_target

if TYPE_CHECKING:
    from collections.abc import Mapping


def from_options(options: Mapping[str, Any]) -> ggml_target.GgmlTarget:
    """Build the target from plain values, in a worker process."""
    return ggml_target.from_options("llama.cpp", options)
