"""The binaries of ik_llama.cpp as a target; see `ggml_bench`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import ggml_bench

if TYPE_CHECKING:
    from collections.abc import Mapping


def from_options(options: Mapping[str, Any]) -> ggml_bench.GgmlTarget:
    """Builds the target in a worker from plain values."""
    return ggml_bench.from_options("ik_llama.cpp", options)
