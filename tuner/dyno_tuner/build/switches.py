"""Build switches: the values to try, and the reason if this device cannot profit from one."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..core.errors import TuneError
from ..doctor.switches import find_build

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
RELEASE = "-O3 -DNDEBUG"
"""Flags of a release build by CMake with gcc and clang."""


@dataclass(frozen=True)
class Switch:
    """A build switch, with the value to compare with its default."""

    name: str
    default: str
    value: str
    cuda: bool = False
    """Whether it changes only device code."""
    knobs: tuple[str, ...] = ()
    """Runtime knobs whose best value may differ in the two builds."""
    link_mib: int = 0
    """MiB of the largest link process, if it was measured before; 0: not known to be large."""
    refused: str = ""
    """The reason why the build is not possible here."""
    inert: str = ""
    """The reason why it changes nothing here."""
    pointless: str = ""
    """The reason why this device cannot profit from it."""

    @property
    def profile(self) -> str:
        """The profile that builds with this switch are limited to; "" if they serve all profiles."""
        return self.value if self.name == "GGML_CUDA_PROFILE" else ""

    @property
    def define(self) -> str:
        return f"{self.name}={self.value}"

    @property
    def turned(self) -> str:
        """The verdict if it wins: `off` for a switch that is on by default, else `on`."""
        return "off" if self.value.upper() in _OFF else "on"


@dataclass(frozen=True)
class Place:
    """The device that builds are for."""

    kind: str  # cpu | cuda
    capability: str = ""  # "9.0"
    title: str = ""
    profile: str | None = None  # a profile of this device and model, for GGML_CUDA_PROFILE

    @property
    def number(self) -> int:
        """90 for 9.0; 0 for a CPU."""
        major, _, minor = self.capability.partition(".")
        return 10 * int(major) + int(minor or 0) if major else 0


_ONE_GPU = "it matters only for several GPUs, and builds are measured on one"
_AT_RUN_TIME = "it sets the default of a run-time setting, which `tune` measures"
_CACHE_TYPES = "it adds kernels for more pairs of cache types, and changes none that run by default"
_DATA_CENTRE = frozenset({70, 80, 90, 100, 103})
_DYNO: tuple[Switch, ...] = (
    Switch("GGML_NATIVE", "OFF", "ON", knobs=("ubatch",)),
    Switch("GGML_LTO", "OFF", "ON", knobs=("ubatch",)),
    Switch("CMAKE_CXX_FLAGS_RELEASE", RELEASE, "-O2 -DNDEBUG", knobs=("ubatch",)),
    Switch("CMAKE_CXX_COMPILER", "", "", knobs=("ubatch",)),
    Switch("GGML_CUDA_LTO", "OFF", "ON", cuda=True, knobs=("ubatch",), link_mib=3800),
    Switch("GGML_CUDA_FAST_MATH", "OFF", "ON", cuda=True, knobs=("ubatch",)),
    Switch("GGML_CUDA_FORCE_MMQ", "OFF", "ON", cuda=True, knobs=("ubatch",)),
    Switch("GGML_CUDA_FORCE_CUBLAS", "OFF", "ON", cuda=True, knobs=("ubatch",)),
    Switch("GGML_CUDA_F16", "OFF", "ON", cuda=True, knobs=("ubatch",)),
    Switch("GGML_CUDA_FORCE_BF16", "OFF", "ON", cuda=True),
    Switch("GGML_CUDA_USE_GRAPHS", "ON", "OFF", cuda=True),
    Switch("GGML_CUDA_COMPRESSION_MODE", "size", "balance", cuda=True),
    Switch("GGML_CUDA_INSTANCES", "all", "minimal", cuda=True),
    Switch("GGML_CUDA_PROFILE", "", "", cuda=True),
)
_GGML: tuple[Switch, ...] = (
    Switch("GGML_NATIVE", "ON", "OFF", knobs=("ubatch",)),
    Switch("GGML_LTO", "OFF", "ON", knobs=("ubatch",)),
    Switch("CMAKE_CXX_FLAGS_RELEASE", RELEASE, "-O2 -DNDEBUG", knobs=("ubatch",)),
    Switch("GGML_CUDA_FORCE_MMQ", "OFF", "ON", cuda=True, knobs=("ubatch",)),
    Switch("GGML_CUDA_FORCE_CUBLAS", "OFF", "ON", cuda=True, knobs=("ubatch",)),
    Switch("GGML_CUDA_COMPRESSION_MODE", "size", "none", cuda=True),
    Switch("GGML_CUDA_NO_VMM", "OFF", "ON", cuda=True),
    Switch("GGML_CUDA_NO_PEER_COPY", "OFF", "ON", cuda=True, pointless=_ONE_GPU),
)
_IK: tuple[Switch, ...] = (
    Switch("GGML_CUDA_F16", "OFF", "ON", cuda=True, knobs=("ubatch",)),
    Switch("GGML_CUDA_IQK_FORCE_BF16", "OFF", "ON", cuda=True),
    Switch("GGML_CUDA_USE_GRAPHS", "ON", "OFF", cuda=True),
    Switch("GGML_CUDA_FUSION", "1", "0", cuda=True, pointless=_AT_RUN_TIME),
    Switch("GGML_CUDA_MIN_BATCH_OFFLOAD", "32", "128", cuda=True, pointless=_AT_RUN_TIME),
    Switch("GGML_CUDA_FA_ALL_QUANTS", "OFF", "ON", cuda=True, pointless=_CACHE_TYPES),
    Switch("GGML_NCCL", "ON", "OFF", cuda=True, pointless=_ONE_GPU),
    Switch("GGML_SCHED_MAX_COPIES", "1", "4", cuda=True, pointless=_ONE_GPU),
    Switch("GGML_EXPERT_CHUNKING", "ON", "OFF"),
    Switch("GGML_IQK_MUL_MAT", "ON", "OFF", knobs=("ubatch",)),
    Switch("GGML_IQK_FLASH_ATTENTION", "ON", "OFF"),
    Switch("GGML_IQK_FA_ALL_QUANTS", "ON", "OFF", pointless=_CACHE_TYPES),
    Switch("GGML_OPENMP", "ON", "OFF"),
)
_LLAMA: tuple[Switch, ...] = (
    Switch("GGML_CUDA_GRAPHS", "ON", "OFF", cuda=True),
    Switch("GGML_CUDA_FA", "ON", "OFF", cuda=True, knobs=("ubatch",)),
    Switch(
        "GGML_CUDA_FA_QUANTS",
        "q4_0-q4_0;q8_0-q8_0;f16-f16;bf16-bf16",
        "all",
        cuda=True,
        pointless=_CACHE_TYPES,
    ),
    Switch("GGML_CUDA_NCCL", "ON", "OFF", cuda=True, pointless=_ONE_GPU),
    Switch("GGML_SCHED_MAX_COPIES", "4", "1", cuda=True, pointless=_ONE_GPU),
    Switch("GGML_CPU_REPACK", "ON", "OFF"),
    Switch("GGML_LLAMAFILE", "ON", "OFF"),
    Switch("GGML_OPENMP", "ON", "OFF"),
)
_OF_ENGINE = {"dyno": _DYNO, "llama.cpp": _GGML + _LLAMA, "ik_llama.cpp": _GGML + _IK}
# Variables of CMake itself, which all projects have.
_LARGE_LINKS = {"CMAKE_INTERPROCEDURAL_OPTIMIZATION": 20_480, "CMAKE_CUDA_SEPARABLE_COMPILATION": 20_480}


def catalogue(engine: str, place: Place, given: Mapping[str, str]) -> list[Switch]:
    """The switches to try if none is named: all switches of the engine that affect this kind of device.

    Args:
        given: defines of every build. Who gives a value has decided, so its switch is not tried.
    """
    rows = [row for row in _OF_ENGINE[engine] if row.name not in given]
    return [
        judged(_valued(row, place), engine, place) for row in rows if place.kind == "cuda" or not row.cuda
    ]


def named(words: Sequence[str], engine: str, place: Place, given: Mapping[str, str]) -> list[Switch]:
    """The switches of `--switch NAME` or `--switch NAME=VALUE`, each once.

    Args:
        given: defines of every build. A switch of the same name is tried against the value there.

    Raises:
        TuneError: A name is no name, or has no value and is in no table.
    """
    known = {row.name: row for row in _OF_ENGINE[engine]}
    found: dict[str, Switch] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not _NAME.fullmatch(name) or "\n" in value or len(value) > 1000:
            raise TuneError(
                f"--switch {word!r}: write NAME or NAME=VALUE, such as GGML_CUDA_LTO or GGML_NATIVE=ON"
            )
        row = known.get(name)
        if row is None and not equals:
            raise TuneError(
                f"--switch {name}: there is no usual value to try for it; write {name}=VALUE. "
                f"Known are {', '.join(known)}"
            )
        cuda = name.startswith(("GGML_CUDA_", "CMAKE_CUDA_"))
        made = row or Switch(name, "", value, cuda, ("ubatch",), _LARGE_LINKS.get(name, 0))
        made = replace(made, default=given.get(name, made.default))
        made = replace(made, value=value) if equals else _valued(made, place)
        same = _same(made.value, made.default)
        if same and name in given:
            made = replace(made, inert=f"--define gives {made.value or 'empty'} to every build already")
        elif same and equals and row is not None:
            made = replace(made, inert=f"{made.value or 'empty'} is the default")
        found[name] = judged(made, engine, place)
    return list(found.values())


_OFF, _ON = frozenset({"OFF", "0", "FALSE", "NO"}), frozenset({"ON", "1", "TRUE", "YES"})


def _same(value: str, default: str) -> bool:
    """Whether CMake reads both values as the same."""
    both = {value.upper(), default.upper()}
    return len(both) == 1 or both <= _OFF or both <= _ON


def _valued(row: Switch, place: Place) -> Switch:
    """The row with its value for this machine."""
    if row.name == "CMAKE_CXX_COMPILER":
        used = row.default or os.environ.get("CXX") or "c++"
        here = os.path.realpath(shutil.which(used) or used)
        other = next(
            (c for c in ("clang++", "g++") if (p := shutil.which(c)) and os.path.realpath(p) != here), ""
        )
        if not other:
            return replace(row, refused=f"there is no other C++ compiler here than {os.path.basename(here)}")
        return replace(row, default=used, value=shutil.which(other) or other)
    if row.name == "GGML_CUDA_PROFILE":
        if place.profile is None:
            return replace(
                row, refused="no profile of this GPU and model was found; write one with `tune` first"
            )
        return replace(row, value=place.profile)
    return row


def judged(row: Switch, engine: str, place: Place) -> Switch:
    """The row with the reason why it is not worth a build, if there is one."""
    if row.refused or row.inert or row.pointless:
        return row
    if row.cuda and place.kind != "cuda":
        return replace(
            row, inert=f"it changes only code for GPUs, and the device is {place.title or 'a CPU'}"
        )
    if engine != "dyno":
        table = find_build(row.name, engine)
        if table is not None and table.dead:
            return replace(row, inert=table.dead)
        if table is not None and table.gone:
            return replace(row, refused=table.gone)
    number = place.number
    bf16 = row.name in ("GGML_CUDA_FORCE_BF16", "GGML_CUDA_IQK_FORCE_BF16")
    if bf16 and 0 < number < 80:
        return replace(
            row, refused=f"bfloat16 needs compute capability 8.0, and this GPU has {place.capability}"
        )
    if bf16 and engine == "dyno":
        return replace(row, pointless="it changes only attention over q8_0 caches, where it is slower")
    if row.name == "GGML_CUDA_F16" and engine == "dyno" and number in _DATA_CENTRE:
        return replace(
            row,
            pointless=f"GPUs of compute capability {place.capability} add f16 numbers no faster than f32",
        )
    if row.name in ("GGML_CUDA_USE_GRAPHS", "GGML_CUDA_GRAPHS") and row.turned == "off":
        return replace(row, pointless="CUDA graphs can also be turned off at run time, which `tune` measures")
    if row.name == "GGML_CUDA_COMPRESSION_MODE":
        return replace(
            row, pointless="it changes the size of the module and the time to load it, not the code"
        )
    if row.name == "GGML_CUDA_FORCE_MMQ" and engine != "dyno" and number >= 75:
        return replace(row, pointless=f"quantised kernels are taken on {place.capability} without it")
    return row


@dataclass(frozen=True)
class Variant:
    """A build: the defines in addition to the fixed ones."""

    name: str
    defines: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(switches: Sequence[Switch]) -> Variant:
        title = " ".join(s.define for s in switches) or "default"
        return Variant(title, {s.name: s.value for s in switches})

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "defines": dict(self.defines)}
