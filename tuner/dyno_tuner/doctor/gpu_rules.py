"""Rules for tokens and the GPU: its compute capability, the architectures of a build, and the number of GPUs.

`LIMITS` are statements about one switch or flag on some GPUs. The functions below are rules for combinations.
A rule applies only if the line and the facts show its premise.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .line import IK, MAIN, MAIN_SOURCE, OFF, Line, Status, inert, is_on


@dataclass(frozen=True)
class Limit:
    """The effect of a switch on GPUs with `low` <= compute capability < `high`. `on`: it applies only if the
    switch is on."""

    kind: str
    name: str
    engine: str
    low: float
    high: float
    status: Status
    text: str
    on: bool = True
    value: str | None = None


_NO_BF16 = "this GPU has no bf16 tensor cores, so bf16 is emulated and slow; use it from 8.0 on"
_NO_GRAPHS_IK = "CUDA graphs are off at run time below compute capability 8.0, with or without this"
_NO_GRAPHS_MAIN = "CUDA graphs are off at run time below compute capability 7.0, with or without this"
_MMQ = "no effect from compute capability 7.5 on: MMQ is chosen before the macro is read"
_INF = 99.0
LIMITS: tuple[Limit, ...] = (
    Limit("cmake", "GGML_CUDA_IQK_FORCE_BF16", IK, 0, 8.0, Status.WRONG_GPU, _NO_BF16),
    Limit("env", "GGML_CUDA_CUBLAS_COMPUTE_TYPE", MAIN, 0, 8.0, Status.WRONG_GPU, _NO_BF16, value="bf16"),
    Limit("cmake", "GGML_CUDA_F16", IK, 0, 6.0, Status.WRONG_GPU, "GPUs below 6.0 do not support it"),
    Limit("cmake", "GGML_CUDA_F16", IK, 6.1, 6.2, Status.WRONG_GPU, "on 6.1, f16 runs at 1/64 of the rate"),
    Limit("cmake", "GGML_CUDA_FORCE_MMQ", IK, 7.5, _INF, Status.INERT, _MMQ),
    Limit("cmake", "GGML_CUDA_FORCE_MMQ", MAIN, 7.5, _INF, Status.INERT,
          _MMQ + " (except on Turing GPUs without tensor cores, built for the architectures "
              "61-virtual;80-virtual)"),
    Limit("cmake", "GGML_CUDA_FORCE_MMQ", IK, 6.1, 7.0, Status.INERT, "MMQ is always used here"),
    Limit("cmake", "GGML_CUDA_FORCE_MMQ", MAIN, 6.1, 7.0, Status.INERT, "MMQ is always used here"),
    Limit("cmake", "GGML_CUDA_FORCE_MMQ", IK, 0, 6.1, Status.INERT, "there is no MMQ below 6.1"),
    Limit("cmake", "GGML_CUDA_FORCE_MMQ", MAIN, 0, 6.1, Status.INERT, "below 6.1 the macro is not read"),
    Limit("cmake", "GGML_CUDA_USE_GRAPHS", IK, 0, 8.0, Status.INERT, _NO_GRAPHS_IK, on=False),
    Limit("cmake", "GGML_CUDA_GRAPHS", MAIN, 0, 7.0, Status.INERT, _NO_GRAPHS_MAIN, on=False),
    Limit("env", "GGML_CUDA_DISABLE_GRAPHS", IK, 0, 8.0, Status.INERT, _NO_GRAPHS_IK, on=False),
    Limit("env", "GGML_CUDA_DISABLE_GRAPHS", MAIN, 0, 7.0, Status.INERT, _NO_GRAPHS_MAIN, on=False),
    Limit("cuda", "graphs", IK, 0, 8.0, Status.INERT, _NO_GRAPHS_IK, on=False),
    Limit("env", "GGML_CUDA_GRAPH_OPT", MAIN, 0, 7.0, Status.INERT, "it needs CUDA graphs, which are off "
        "below 7.0"),
    Limit("env", "GGML_CUDA_MMQ_PREC", MAIN, 0, 10.0, Status.INERT, "only for the FP4 kernels of Blackwell",
        on=False),
    Limit("env", "GGML_CUDA_PDL", MAIN, 0, 9.0, Status.INERT, "it has an effect only on Hopper (9.0) and "
        "later",
        on=False),
)  # fmt: skip


def gpu_limits(line: Line) -> None:
    cc = line.facts.cc
    if cc is None:
        return
    for limit in LIMITS:
        if limit.engine != line.engine or not limit.low <= cc < limit.high:
            continue
        if limit.engine == MAIN and limit.name == "GGML_CUDA_FORCE_MMQ" and _without_mma(line):
            continue  # code for an older architecture is used, for which the macro matters
        for item in line.all(limit.kind, limit.name):
            right = limit.value is None or (item.value or "").lower() == limit.value
            if right and (not limit.on or is_on(item.value)):
                item.say(limit.status, f"at {cc:g}: {limit.text}", line.source)


def _compiled(line: Line) -> list[float] | None:
    """Architectures of the line that run on its GPU; None if either is unknown."""
    item, cc = line.last("cmake", "CMAKE_CUDA_ARCHITECTURES"), line.facts.cc
    if item is None or cc is None or not item.value:
        return None
    parts = [_ARCHITECTURE.fullmatch(p) for p in item.value.split(";")]
    if not all(parts):
        return None
    usable = (
        _capability(p[1], p[2] or _own_suffix(line, p[1]), p[3], round(10 * cc))
        for p in parts
        if p is not None
    )
    return [number for number in usable if number is not None]


_ARCHITECTURE = re.compile(r"([0-9]{2,3})([af]?)(-real|-virtual)?", re.ASCII)
_NAMED_ARCHITECTURES = frozenset({"native", "all", "all-major"})


def _own_suffix(line: Line, number: str) -> str:
    """The suffix that the build adds to an architecture without one."""
    return "a" if line.engine == MAIN and number.startswith("12") and len(number) == 3 else ""


def _misspelt(value: str) -> str:
    """The first architecture of a list that CMake does not know; empty if it knows all, or if the list
    contains a shell variable."""
    if value in _NAMED_ARCHITECTURES or value.lower() in OFF or "$" in value:
        return ""
    return next((p for p in value.split(";") if p and not _ARCHITECTURE.fullmatch(p)), "")


def _capability(number: str, suffix: str, kind: str | None, cc: int) -> float | None:
    """Compute capability of an architecture; None if its code does not run on the GPU.

    Machine code runs on GPUs of the same major version, and PTX on all later GPUs. Code with the suffix `a`
    runs only on this capability, and with `f` only on its family.

    Args:
        cc: Compute capability of the GPU, times ten.
    """
    made = int(number)
    same = made // 10 == cc // 10
    runs = made == cc if suffix == "a" else made <= cc and (same or (not suffix and kind != "-real"))
    return made / 10 if runs else None


def _without_mma(line: Line) -> bool:
    """Whether a GPU from Turing on gets only code for older architectures, so that it runs their kernels."""
    usable = _compiled(line)
    return bool(usable) and max(usable or [0]) < 7.5 <= (line.facts.cc or 0)


def architectures(line: Line) -> None:
    item, usable = line.last("cmake", "CMAKE_CUDA_ARCHITECTURES"), _compiled(line)
    cc = line.facts.cc or 0.0
    if item is not None and (wrong := _misspelt(item.value or "")):
        item.say(
            Status.INVALID,
            f"CMake knows no architecture {wrong!r}; give numbers separated by `;`, such as '75;86'",
        )
        return
    if item is None or usable is None:
        return
    forced = line.last("cmake", "GGML_CUDA_FORCE_MMQ")
    if not usable:
        own = any(_own_suffix(line, p) == "a" for p in re.findall(r"\b12[0-9]\b(?![af])", item.value or ""))
        why = "; llama.cpp turns 12X into 12Xa, which runs only on that compute capability" if own else ""
        item.say(Status.WRONG_GPU, f"no architecture of the list can run on {cc:g}{why}")
    elif not _without_mma(line):
        return
    elif line.engine == MAIN and cc == 7.5 and forced is not None and is_on(forced.value):
        for part in (item, forced):
            part.say(
                Status.NEEDS,
                f"code for {max(usable):g} with GGML_CUDA_FORCE_MMQ suits only Turing GPUs without tensor "
                f"cores (GTX 16xx, MX450, MX550); other {cc:g} GPUs need 75 in the list, and not this macro",
                f"{MAIN_SOURCE}, cuda/ggml-cuda.cu",
            )
    else:
        why = (
            f"a {cc:g} GPU would run the code for {max(usable):g}, without tensor-core kernels; add "
            f"{cc * 10:g}"
        )
        item.say(Status.WRONG_GPU, why)


_SEVERAL_GPUS = (
    ("flag", "-sm"), ("flag", "-ts"), ("flag", "-mg"), ("flag", "--max-gpu"), ("flag", "-smgs"),
    ("flag", "-sas"), ("flag", "-grt"), ("cmake", "GGML_SCHED_MAX_COPIES"), ("cmake", "GGML_NCCL"),
    ("cmake", "GGML_CUDA_NCCL"), ("cmake", "GGML_CUDA_NO_PEER_COPY"), ("cuda", "enable-p2p"),
    ("env", "GGML_CUDA_P2P"), ("env", "GGML_CUDA_ALLREDUCE"),
)  # fmt: skip


def single_gpu(line: Line) -> None:
    if line.facts.gpus != 1:
        return
    items = [item for kind, name in _SEVERAL_GPUS for item in line.all(kind, name)]
    inert((i for i in items if i.name != "-mg" or i.value == "0"), "changes nothing with one GPU")
