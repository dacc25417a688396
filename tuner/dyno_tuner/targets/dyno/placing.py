"""The placement of the weights of a configuration, which no single setting determines."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

from dyno import _core, _rates
from dyno._placement import NOWHERE_ELSE, is_placed
from dyno._setting import split_rules
from dyno._ubatch import GPU_PROPERTIES, RESERVE_BYTES, free_bytes
from dyno._virtual_devices import read_virtual_devices
from dyno.devices import limited, resolve_device
from dyno.settings import SETTINGS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dyno._virtual_devices import VirtualDevices
    from dyno.devices import Device

    from ...core.protocol import Workload

_PARTS = ("weights_bytes", "kv_bytes", "state_bytes", "arena_bytes", "stream_bytes")


class Placing:
    """The devices of a target, their limits, and the placement that the engine would choose.

    Args:
        virtual_devices: As in `Engine`.
        vram: The most bytes on the main device; 0: all its memory.
        ram: The most bytes on the CPU in addition to it; 0: all its memory.
    """

    def __init__(self, virtual_devices: VirtualDevices, vram: int, ram: int) -> None:
        self.virtual_devices = read_virtual_devices(virtual_devices)
        self._vram = vram
        self._ram = ram
        self.free: int | None = None
        """Free bytes of the resolved device, before a session of the tune uses some."""
        self._measured: dict[str, dict[str, float]] | None = None

    def resolve(self, name: str) -> Device:
        """The device of a name, with its memory reduced to the limits."""
        device = limited(resolve_device(name, self.virtual_devices), self._vram, self._ram)
        self.free = free_bytes(device.name) if device.kind == "cuda" else None
        return device

    def argument(self, settings: Mapping[str, Any] | None = None, *, limited: bool = True) -> dict[str, Any]:
        """The `placement` of a session.

        Args:
            settings: The plan chooses a placement unless these load settings place weights; None: it never
                does.
            limited: Whether to keep the limits that simulate a smaller machine. They do not apply to the
                exact path.
        """
        devices = [one.to_dict() for one in self.virtual_devices]
        if not limited:
            devices = [{n: v for n, v in one.items() if n != "memory_mib"} for one in devices]
        given: dict[str, Any] = {"virtual_devices": devices}
        if self._vram and limited:
            given["main_memory"] = self._vram
        if self._ram and limited:
            given["host_memory"] = self._ram
        if settings is not None:
            given["automatic"] = not is_placed({n: as_list(n, v) for n, v in settings.items()})
        return given

    def usual(self, file: str, device: Device, kinds: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """The placement that the engine chooses, within the currently free memory of a GPU.

        Args:
            kinds: Settings by kind.

        Returns:
            `settings`: values of the load settings that place weights; `host_weights`: whether weights are on
            the CPU in addition to the device; `streams`: whether the device gets copies of them.

        Raises:
            OutOfMemoryError: Even the smallest part does not fit.
        """
        if device.name == "cpu":
            return {"settings": {}, "host_weights": False, "streams": False}
        gpu = device.kind == "cuda"
        load = dict(kinds["load"])
        placement = self.argument(load)
        described = {n: v for n, v in device.info.items() if n in GPU_PROPERTIES} if gpu else None
        if described is not None and self.free is not None:  # otherwise the GPU is only described
            described["memory_bytes"] = min(int(described["memory_bytes"]), self.free)
        if not gpu:
            load["device"] = device.name
        session = _core.Session(
            file, load=load, context=dict(kinds["context"]),
            session={"ubatch": kinds["session"]["ubatch"], "cuda_graphs": False},
            plan_only=True, device=described, placement=placement,
        )  # fmt: skip
        plan = session.plan
        session.close()
        placed = plan["placement"]
        layers = placed["n_gpu_layers"]
        elsewhere = any(one["name"] == "cpu" and one["weights_bytes"] for one in plan["devices"][1:])
        return {
            "settings": {
                "placement": one_word(list(placed["rules"])), "cpu_moe": bool(placed["cpu_moe"]),
                "n_cpu_moe": int(placed["n_cpu_moe"]), "n_gpu_layers": -1 if layers is None else int(layers),
            },
            "host_weights": elsewhere,
            "streams": elsewhere and (gpu or self._of(device.name).streams),
        }  # fmt: skip

    def _of(self, name: str) -> Any:
        return self.virtual_devices[int(name.partition(":")[2]) - 1]

    def limits(self, device: Device) -> dict[str, int]:
        """The limits in bytes by `device` and `host`, if any."""
        device_limit = self._vram
        if device.kind == "cuda":
            whole = int(device.info["memory_bytes"])
            device_limit = min(device_limit or whole, whole, whole if self.free is None else self.free)
        elif device.name != "cpu" and (own := int(self._of(device.name).memory_mib) << 20):
            device_limit = min(device_limit or own, own)
        return {n: v for n, v in (("device", device_limit), ("host", self._ram)) if v}

    def rates(self, device: Device) -> dict[str, dict[str, float]]:
        """The rates of the devices: stored by `tune probe`, or else measured once now."""
        if self._measured is None:
            devices = {"cpu": dict(_core.cpu_info())}
            if device.kind == "cuda":
                devices[device.name] = dict(device.info)
            self._measured = _rates.known(devices, 0, measure_missing=True)
        return self._measured

    def expected(self, session: Any, device: Device, workload: Workload, ubatch: int) -> dict[str, float]:
        """Seconds by metric that the cost model of a planned session expects."""
        rates = self.rates(device)

        def cost(tokens: int, depth: int, rows: int) -> float:
            return float(session.cost(tokens, depth, rows, rates=rates)["seconds"])

        found: dict[str, float] = {}
        for metric in workload.metrics:
            part = workload.part(metric)
            if part.kind == "tg":
                found[metric] = part.tokens * cost(1, part.depth + part.tokens // 2, 1)
                continue
            seconds = 0.0
            for done in range(0, part.tokens, ubatch):
                tokens = min(ubatch, part.tokens - done)
                seconds += cost(tokens, part.depth + done, int(done + tokens == part.tokens))
            found[metric] = seconds
        return {
            metric: seconds for metric, seconds in found.items() if math.isfinite(seconds) and seconds > 0
        }


def label(device: Device, file: str) -> str:
    """Device and model in words, with the limits of a virtual device."""
    words = [str(device.info.get("name") or device.kind.upper()), os.path.basename(file)]
    virtual = device.info.get("virtual")
    return " · ".join([*words, f"{device.name} {virtual}"] if virtual else words)


def planned_bytes(plan: Mapping[str, Any], where: str) -> int:
    """Bytes of a plan on its main device, or with `host` on the CPU."""
    main, *others = plan["devices"]
    if where == "host":
        beside = [one for one in others if one["name"] == "cpu"]
        return sum(int(one[part]) for one in beside for part in _PARTS) + int(plan["scratch_bytes"])
    if main["name"] == "cpu":
        return int(plan["total_bytes"])
    own = sum(int(main[part]) for part in _PARTS)
    return own + (int(plan["scratch_bytes"]) + RESERVE_BYTES if main["name"].startswith("cuda") else 0)


def one_word(value: Any) -> Any:
    """Placement rules as one word, as in the search: `a=cpu,b=cuda:1`."""
    return ",".join(value) if isinstance(value, list) else value


def as_list(name: str, value: Any) -> Any:
    """Placement rules as a list for the engine. Other values are not changed."""
    if SETTINGS[name].type != "rules" or not isinstance(value, str):
        return value
    return split_rules(value)


ELSEWHERE = frozenset(NOWHERE_ELSE)
"""Names of the load settings that place weights."""
