"""Devices by name: `cpu`, `cuda:N`, and `auto` for the best device of this build and machine.

Importing this file queries no device. Listing the GPUs allocates nothing on them.
"""

from __future__ import annotations

import logging
import math
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dyno.errors import DeviceError, DeviceLostError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dyno._virtual_devices import VirtualDevice

__all__ = ["Device", "built_for_cuda", "limited", "list_devices", "resolve_device"]

_log = logging.getLogger("dyno.device")


@dataclass(frozen=True)
class Device:
    """A device that this build can run on."""

    name: str
    """`cpu`, `cpu:N` (a virtual device) or `cuda:N`."""
    info: dict[str, Any] = field(repr=False)
    """Properties that the engine reports; for GPUs also facts from the driver (see `dyno._nvml.facts`)."""
    why: str = ""
    """The reason why `auto` chose this device; empty if the device was named."""

    @property
    def kind(self) -> str:
        """`cpu` or `cuda`."""
        return str(self.info["kind"])

    @property
    def headline(self) -> str:
        """The line that the runtime prints: `device: cuda:0, NVIDIA H200 (auto: the first GPU)`."""
        title = f"device: {self.name}, {self.info.get('name') or 'unknown'}"
        return f"{title} (auto: {self.why})" if self.why else title


def list_devices() -> list[Device]:
    """The CPU, then all GPUs. If this build has no code for a GPU, or this process has lost it,
    `info["problem"]` has the reason."""
    from dyno import _core

    found = []
    number = 0
    for info in _core.devices():
        if info["kind"] == "cpu":
            found.append(Device("cpu", dict(info)))
        else:
            found.append(Device(f"cuda:{number}", _with_driver(number, info)))
            number += 1
    return found


def resolve_device(name: str, virtual_devices: Sequence[VirtualDevice] = ()) -> Device:
    """The device with this name.

    Args:
        name: `cpu`, `cuda` (the first GPU), `cuda:N`, or `auto`: the first GPU that this build has code for,
            or else the CPU, which is logged. `cpu:N` is a virtual device.
        virtual_devices: The virtual devices cpu:1, cpu:2, …

    Raises:
        DeviceError: The name is not valid, the GPU or virtual device does not exist, or this build has no
        code for the GPU.
        DeviceLostError: This process has lost that GPU.
    """
    from dyno import _core

    if not isinstance(name, str):
        raise _unknown(name)
    if name == "auto":
        return _automatic()
    if name == "cpu":
        return Device("cpu", dict(_core.cpu_info()))
    virtual = re.fullmatch(r"cpu:([1-9][0-9]{0,3})", name)
    if virtual is not None:
        if int(virtual[1]) > len(virtual_devices):
            raise DeviceError(
                f"[device] {name!r} is a virtual device that does not exist; create it with "
                f"--virtual-devices {virtual[1]} (virtual_devices={virtual[1]})"
            )
        limits = virtual_devices[int(virtual[1]) - 1].describe()
        return Device(name, {**_core.cpu_info(), **({"virtual": limits} if limits else {})})
    matched = re.fullmatch(r"cuda(?::([0-9]{1,4}))?", name)
    if matched is None:
        raise _unknown(name)
    number = int(matched[1] or 0)
    gpus = [info for info in _core.devices() if info["kind"] == "cuda"]
    if not gpus:
        build = "" if built_for_cuda() else ", or build one: pip install . -C cmake.define.GGML_CUDA=ON"
        raise DeviceError(f"[device] {name!r}: {_core.no_cuda_reason()}; use the device cpu{build}")
    if number >= len(gpus):
        raise DeviceError(
            f"[device] {name!r} does not exist: this machine shows {len(gpus)} GPU"
            f"{'s' if len(gpus) > 1 else ''}, cuda:0 to cuda:{len(gpus) - 1}"
        )
    lost = _core.device_loss(number)
    if lost:
        raise DeviceLostError(lost)
    problem = _core.device_problem(gpus[number])
    if problem:
        raise DeviceError(f"[device] {name!r}: {problem}")
    return Device(f"cuda:{number}", _with_driver(number, gpus[number]))


def _unknown(name: object) -> DeviceError:
    """The error of a name of no device, with the nearest name."""
    text = str(name).strip().lower()
    near = {"gpu": "cuda", "cuda": "cuda", "cpu": "cpu"}.get(text)
    if near is None and re.fullmatch(r"(cuda:|gpu:)?[0-9]{1,4}", text):
        near = f"cuda:{int(text.rpartition(':')[2])}"
    hint = f"; did you mean {near!r}?" if near is not None and near != name else ""
    return DeviceError(f"[device] unknown device {name!r:.60}; known are 'auto', 'cpu' and 'cuda:N'{hint}")


def limited(device: Device, vram: int, ram: int) -> Device:
    """The device with its memory reduced to the limits, so that profiles for that memory size match.

    Args:
        vram: The most bytes on the device; 0: all its memory.
        ram: The most bytes on the CPU if the device is virtual; 0: all its memory.
    """
    info = dict(device.info)
    if device.kind == "cuda" and vram:
        info["memory_bytes"] = min(vram, int(info["memory_bytes"]))
    elif device.name not in ("cpu", "auto") and (vram or ram):
        words = dict(word.split("=") for word in str(info.get("virtual", "")).split())
        if vram:
            own = float(words.get("memory_mib", math.inf))
            words["memory_mib"] = f"{min(own, vram / 2**20):g}"
        if ram:
            words["ram_mib"] = f"{ram / 2**20:g}"
        info["virtual"] = " ".join(f"{name}={value}" for name, value in words.items())
    return replace(device, info=info)


def _automatic() -> Device:
    from dyno import _core

    problems = []
    gpus = [info for info in _core.devices() if info["kind"] == "cuda"]
    for number, info in enumerate(gpus):
        problem = _core.device_loss(number) or _core.device_problem(info)
        if not problem:
            why = "the only GPU" if len(gpus) == 1 else f"the first usable one of {len(gpus)} GPUs"
            device = Device(f"cuda:{number}", _with_driver(number, info), why)
            _log.info("%s", device.headline)
            return device
        problems.append(f"cuda:{number}: {problem}")
    device = Device("cpu", dict(_core.cpu_info()), "; ".join(problems) or str(_core.no_cuda_reason()))
    # If a build for GPUs finds none, the user should know. A build for the CPU needs no such line.
    _log.log(logging.WARNING if built_for_cuda() else logging.INFO, "%s", device.headline)
    return device


def built_for_cuda() -> bool:
    """Whether this build has the CUDA engine."""
    from dyno import _core

    return str(_core.build_info()["switches"].get("GGML_CUDA", "OFF")).upper() == "ON"


def _with_driver(number: int, info: dict[str, Any]) -> dict[str, Any]:
    from dyno import _core, _nvml

    told = _nvml.facts(str(info["pci_bus_id"]))
    problem = _core.device_loss(number) or _core.device_problem(info)
    return {**info, "problem": problem, **told}
