"""Virtual devices: additional CPU devices in this process, each with its own memory and its own link."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from dyno._setting import suggestion
from dyno.errors import PlanError

__all__ = ["VirtualDevice", "VirtualDevices", "parse_virtual_devices", "read_virtual_devices"]

MOST = 16
"""Maximum number of virtual devices."""
VirtualDevices = int | Mapping[str, Mapping[str, float]]
"""A number of devices without limits, or properties by name: `{"cpu:1": {"link_gbps": 8}}`."""


@dataclass(frozen=True)
class VirtualDevice:
    """The properties of a virtual device; 0 means no limit."""

    link_gbps: float = 0
    """Bandwidth between its memory and the main memory, in GB/s."""
    latency_us: float = 0
    """Fixed latency of each transfer, in microseconds."""
    memory_mib: int = 0
    """Memory for weights, cache and arena, in MiB."""
    streams: bool = False
    """Whether it gets copies of weights on the CPU for prompts, as a GPU does, if it is the main device."""

    def to_dict(self) -> dict[str, float]:
        """The properties other than 0, by name."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name))}

    def describe(self) -> str:
        """The limits as text, in the syntax of the command line; empty if the device has no limits."""
        return " ".join(f"{name}={float(value):g}" for name, value in self.to_dict().items())


_PROPERTIES = tuple(f.name for f in fields(VirtualDevice))


def read_virtual_devices(given: VirtualDevices) -> tuple[VirtualDevice, ...]:
    """The devices `cpu:1`, `cpu:2`, … of an argument of `Engine`.

    Raises:
        PlanError: The argument has the wrong type, or a name, a property or a value is not valid.
    """
    if isinstance(given, int) and not isinstance(given, bool):
        if not 0 <= given <= MOST:
            raise PlanError(f"[placement] virtual_devices is {given}; expected 0 to {MOST}")
        return (VirtualDevice(),) * given
    if not isinstance(given, Mapping):
        raise PlanError(
            f"[placement] virtual_devices is {given!r}; expected a whole number, or properties by name, "
            'such as {"cpu:1": {"link_gbps": 8}}'
        )
    found: dict[int, VirtualDevice] = {}
    for name, properties in given.items():
        matched = re.fullmatch(r"cpu:([1-9][0-9]?)", name) if isinstance(name, str) else None
        if matched is None or int(matched[1]) > MOST:
            raise PlanError(
                f"[placement] {name!r} is not a virtual device; their names are cpu:1 to cpu:{MOST}"
            )
        if not isinstance(properties, Mapping):
            raise PlanError(f"[placement] the properties of {name} are {properties!r}; expected a mapping")
        found[int(matched[1])] = VirtualDevice(
            **{str(key): _checked(name, key, value) for key, value in properties.items()}
        )
    return tuple(found.get(n, VirtualDevice()) for n in range(1, max(found, default=0) + 1))


def _checked(device: str, key: object, value: object) -> Any:
    if key not in _PROPERTIES:
        raise PlanError(f"[placement] {device} has no property {key!r}; {suggestion(str(key), _PROPERTIES)}")
    if key == "streams":
        if value not in (True, False):
            raise PlanError(f"[placement] streams of {device} is {value!r}; expected 0 or 1")
        return bool(value)
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not _possible(str(key), float(value)):  # type: ignore[arg-type]
        expected = {
            "link_gbps": "GB/s above 0",
            "latency_us": "microseconds, 0 or more",
            "memory_mib": "a whole number of MiB, 1 or more",
        }[str(key)]
        raise PlanError(f"[placement] {key} of {device} is {value!r}; expected {expected}")
    return value


def _possible(key: str, value: float) -> bool:
    if key == "memory_mib":
        return value >= 1 and value == int(value)
    return value > 0 if key == "link_gbps" else value >= 0


def parse_virtual_devices(texts: list[str]) -> VirtualDevices:
    """Parse the virtual devices of a command line.

    Args:
        texts: Each a number of devices, or one device with its properties, such as
        `cpu:1,link_gbps=8,latency_us=10,memory_mib=4096`.

    Raises:
        ValueError: A text is neither, or a device is given twice.
    """
    if len(texts) == 1 and texts[0].isdecimal():
        return int(texts[0])
    devices: dict[str, dict[str, float]] = {}
    for text in texts:
        name, *pairs = text.split(",")
        if name.isdecimal():
            raise ValueError(
                f"{text!r}: a number of devices has to be the only value; name each device instead: cpu:1,…"
            )
        if name in devices:
            raise ValueError(f"{name} is given twice")
        devices[name] = {}
        for pair in pairs:
            key, equals, value = pair.partition("=")
            try:
                devices[name][key] = int(value) if value.isdecimal() else float(value)
            except ValueError as error:
                raise ValueError(
                    f"{pair!r} is not NAME=NUMBER; an example: cpu:1,link_gbps=8,latency_us=10"
                ) from error
            if not equals:
                raise ValueError(f"{pair!r} is not NAME=NUMBER")
    return devices
