"""Facts in addition to the command line: the GPU from the user, the model from its file."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from dyno._memory_size import check_unit, parse_bytes

from ..core.errors import TuneError
from .line import Facts

if TYPE_CHECKING:
    from pathlib import Path


def parse_cc(text: str) -> float:
    """Parse a compute capability such as `7.5`, `75`, `sm_75` or `90a`. Raises TuneError."""
    found = re.fullmatch(r"(?:sm_|compute_)?([0-9]{1,2})\.?([0-9])[af]?", text.strip().lower())
    value = float(f"{found[1]}.{found[2]}") if found else 0.0
    if not 2.0 <= value <= 20.0:
        raise TuneError(
            f"--gpu-arch {text!r}: give a compute capability, such as 7.5 (Turing), 8.9 (Ada) or 9.0 (Hopper)"
        )
    return value


def gather(
    gpu_arch: str | None,
    gpus: int | None,
    moe: bool | None,
    experts: int | None,
    experts_used: int | None,
    model: Path | None,
    vram: str | None = None,
) -> Facts:
    """Collect the facts. The user's values override the ones of the file.

    Raises TuneError for contradictory facts, and dyno.errors.GgufError for an invalid file.
    """
    layers: int | None = None
    architecture: str | None = None
    tensors: tuple[tuple[str, int], ...] | None = None
    if model is not None:
        architecture, layers, in_file, used_in_file, tensors = _read(model)
        experts = experts if experts is not None else in_file
        experts_used = experts_used if experts_used is not None else used_in_file
        if moe is None:
            moe = bool(experts)
    if moe is False and experts:
        raise TuneError(f"--dense and {experts} experts contradict each other")
    if experts and experts_used and experts_used > experts:
        raise TuneError(f"--experts-used {experts_used} is more than the {experts} experts")
    if experts:
        moe = True
    try:
        limit = None if vram is None else parse_bytes(vram)
        if vram is not None and limit is not None:
            check_unit(vram, limit)
    except ValueError as error:
        raise TuneError(f"--vram: {error}") from error
    cc = parse_cc(gpu_arch) if gpu_arch is not None else None
    return Facts(cc, gpus, moe, experts, experts_used, layers, architecture, tensors, limit)


_Read = tuple[str | None, int | None, int | None, int | None, tuple[tuple[str, int], ...]]


def _read(model: Path) -> _Read:
    from dyno import _core

    if not os.path.isfile(model):
        raise TuneError(f"--model {model}: no such file")
    file = _core.Gguf(str(model))
    architecture = file.get("general.architecture")
    if not isinstance(architecture, str):
        raise TuneError(f"--model {model}: general.architecture is missing or is not text")

    def number(key: str) -> int | None:
        value = file.get(f"{architecture}.{key}")
        return int(value) if isinstance(value, int) and 0 < value < 1 << 31 else None

    tensors = tuple((str(t["name"]), int(t["nbytes"])) for t in file.tensors())
    counts = number("block_count"), number("expert_count"), number("expert_used_count")
    return architecture, *counts, tensors
