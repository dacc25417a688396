"""Upper bounds on the rates that a machine can reach, to reject impossible results of a benchmark.

Each bound is generous by a factor of at least two, because a result that is wrongly rejected is lost. Facts
about a GPU come from the driver. An unknown fact is taken to be larger than that of any GPU.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dyno import _core

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_CYCLES = 6e9  # cycles of a core in a second
_CPU_OPERATIONS = 4096  # per core and cycle: twice the rate of the widest int8 matrix unit
_CORE_BYTES, _CPU_BYTES = 1e11, 4e12  # read per second, by one core and by a machine
_CPU_CACHES = 4e9  # bytes of all caches of a machine
# Operations of a multiprocessor in a cycle, from a compute capability on: twice the rate of its tensor cores
# for the narrowest type, or of its int8 units.
_SM_OPERATIONS = ((10.0, 65536), (9.0, 16384), (7.5, 8192), (0.0, 4096))
# Above the bytes and operations per second of all GPUs today.
_MOST_BYTES, _MOST_OPERATIONS = 2e13, 2e16
_HEADROOM = 2.0  # factor on the memory rate that the driver reports
# CUdevice_attribute of cuda.h
_CLOCK_KHZ, _SM_COUNT, _MEMORY_KHZ, _BUS_BITS, _L2_BYTES, _MAJOR, _MINOR = 13, 16, 36, 37, 38, 75, 76


@dataclass(frozen=True, slots=True)
class Limits:
    """The rate limits of a device, per second."""

    operations: float
    bytes: float
    cached: float = 0.0  # bytes that caches can hold from token to token

    def __add__(self, other: Limits) -> Limits:
        return Limits(
            self.operations + other.operations, self.bytes + other.bytes, self.cached + other.cached
        )


@dataclass(frozen=True, slots=True)
class Work:
    """The minimum work of a model for each token."""

    multiplied: float  # weights
    read: float  # bytes of weights


def cpu_limits(info: Mapping[str, Any]) -> Limits:
    """The rates that a CPU cannot exceed.

    Args: `info`: result of `_core.cpu_info`; each core may have its own caches."""
    # A quota does not bound a short window, and OMP_NUM_THREADS does not bound an engine with its own number
    # of threads.
    cores = max(int(_core.cpu_limits()["affinity"]), int(info.get("cores") or 1))
    caches = cores * sum(float(info.get(name) or 0) for name in ("l2_bytes", "l3_bytes"))
    return Limits(
        cores * _CYCLES * _CPU_OPERATIONS, min(_CPU_BYTES, cores * _CORE_BYTES), min(_CPU_CACHES, caches)
    )


def gpu_limits(number: int, library: str = "libcuda.so.1") -> Limits:
    """The rates that a GPU cannot exceed, from facts of the driver. An unknown fact is taken to be larger
    than that of any GPU. `number` is that of nvidia-smi."""
    told = _attributes(number, library)
    operations, moved = _MOST_OPERATIONS, _MOST_BYTES
    capability = told.get(_MAJOR, 0) + told.get(_MINOR, 0) / 10
    if told.get(_SM_COUNT) and told.get(_CLOCK_KHZ) and capability:
        each = next(n for least, n in _SM_OPERATIONS if capability >= least)
        operations = told[_SM_COUNT] * told[_CLOCK_KHZ] * 1e3 * each
    if told.get(_MEMORY_KHZ) and told.get(_BUS_BITS):
        # Memory transfers data on both edges of its clock.
        moved = _HEADROOM * 2 * told[_MEMORY_KHZ] * 1e3 * told[_BUS_BITS] / 8
    return Limits(operations, moved, float(told.get(_L2_BYTES, 0)))


def _attributes(number: int, library: str) -> dict[int, int]:
    """Attributes of a GPU; empty without a driver or such a GPU, which other code reports."""
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        return {}
    handle, found = ctypes.c_int(), {}
    if driver.cuInit(0) != 0 or driver.cuDeviceGet(ctypes.byref(handle), number) != 0:
        return {}
    for attribute in (_CLOCK_KHZ, _SM_COUNT, _MEMORY_KHZ, _BUS_BITS, _L2_BYTES, _MAJOR, _MINOR):
        value = ctypes.c_int()
        if driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, handle) == 0 and value.value > 0:
            found[attribute] = value.value
    return found


def work_of(path: str, experts: int, used: int) -> Work:
    """The work of the model in a file. Embedding and head are left out, because not every token needs
    them."""
    share = used / experts if experts and used else 1.0
    return _work(_core.Gguf(path).tensors(), share)


def _work(tensors: Iterable[Mapping[str, Any]], share: float) -> Work:
    multiplied = read = 0.0
    for tensor in tensors:
        name = str(tensor["name"])
        if len(tensor["shape"]) < 2 or "embd" in name or name == "output.weight" or ".nextn." in name:
            continue
        part = share if "_exps" in name else 1.0
        multiplied += part * math.prod(int(n) for n in tensor["shape"])
        read += part * float(tensor["nbytes"])
    return Work(multiplied, read)


def bounds(work: Work, devices: Sequence[Limits]) -> dict[str, float]:
    """The maximum tokens/s by kind of metric. Each token multiplies all weights that it uses. In generation,
    each token also reads them from memory, except the part that caches hold."""
    if work.multiplied <= 0 or not devices:
        return {}
    all_ = sum(devices[1:], devices[0])
    most = all_.operations / (2 * work.multiplied)
    read = work.read - all_.cached
    return {"pp": most, "tg": min(most, all_.bytes / read) if read > 0 else most}
