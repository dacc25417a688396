"""The placement of weights on devices, from the arguments of `Engine`."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from dyno import _rates
from dyno._memory_size import check_unit, parse_bytes
from dyno._virtual_devices import VirtualDevice, read_virtual_devices
from dyno.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dyno._virtual_devices import VirtualDevices
    from dyno.devices import Device

__all__ = ["NOWHERE_ELSE", "Placement", "is_placed"]

_log = logging.getLogger("dyno")

NOWHERE_ELSE: Final[Mapping[str, Any]] = {
    "placement": [],
    "cpu_moe": False,
    "n_cpu_moe": 0,
    "n_gpu_layers": -1,
}
"""The load settings that place weights, with the values that keep all weights on the main device."""


def is_placed(values: Mapping[str, Any]) -> bool:
    """Whether load settings place weights on another device than the main one."""
    return any(values.get(name, usual) != usual for name, usual in NOWHERE_ELSE.items())


@dataclass(frozen=True)
class Placement:
    """The placement arguments of `Engine`, checked. The plan checks their limits, and names of tensors and
    devices."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Values of the settings in `NOWHERE_ELSE` by name; empty if the caller gave none. If the caller gave one
    of them, the others take their defaults, so that no profile changes the caller's placement."""
    virtual_devices: tuple[VirtualDevice, ...] = ()
    vram: int = 0
    """The most bytes on the main device; 0: all its memory."""
    ram: int = 0
    """The most bytes on the CPU; 0: all its memory."""
    split_layers: bool = False
    shares: tuple[float, ...] = ()

    @classmethod
    def of(
        cls,
        placement: Sequence[str] | str,
        virtual_devices: VirtualDevices,
        n_gpu_layers: int | None,
        cpu_moe: bool | None,
        n_cpu_moe: int | None,
        limits: Mapping[str, int | str | None] | None = None,
        split: str = "none",
        tensor_split: Sequence[float] = (),
    ) -> Placement:
        """Check the placement arguments of `Engine`.

        Raises:
            PlanError: A value has the wrong type, or a virtual device is impossible.
        """
        given: dict[str, Any] = {}
        if placement != "auto":
            if not isinstance(placement, Iterable):
                raise PlanError(
                    f"[placement] placement is {placement!r}; expected 'auto', or a list of rules"
                )
            rules = [placement] if isinstance(placement, str) else list(placement)
            wrong = next((rule for rule in rules if not isinstance(rule, str)), None)
            if wrong is not None:
                raise PlanError(f"[placement] {wrong!r} is not a rule; a rule is a string REGEX=DEVICE")
            given["placement"] = rules
        for name, value in (("n_gpu_layers", n_gpu_layers), ("n_cpu_moe", n_cpu_moe)):
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise PlanError(f"[placement] {name} is {value!r}; expected a whole number")
            given[name] = value
        if cpu_moe is not None:
            if not isinstance(cpu_moe, bool):
                raise PlanError(f"[placement] cpu_moe is {cpu_moe!r}; expected True or False")
            given["cpu_moe"] = cpu_moe
        if split not in ("none", "layer"):
            raise PlanError(f"[placement] split is {split!r}; expected none or layer")
        return cls(
            {**NOWHERE_ELSE, **given} if given or split == "layer" else {},
            read_virtual_devices(virtual_devices),
            **{name: _bytes(name, value) for name, value in (limits or {}).items() if value is not None},
            split_layers=split == "layer",
            shares=_shares(tensor_split),
        )

    def for_session(
        self,
        values: Mapping[str, Any],
        rates: Mapping[str, Mapping[str, float]],
        *,
        choose_cache: bool = False,
    ) -> dict[str, Any]:
        """The argument `placement` of `_core.Session`, which complements its load settings.

        Args:
            values: Load settings in force.
            rates: Rates of devices by name.
            choose_cache: Whether a plan that chooses the placement may also choose `expert_cache_mib`.
        """
        return {
            "virtual_devices": [one.to_dict() for one in self.virtual_devices],
            # The plan chooses a placement if neither the caller nor a profile does.
            "automatic": not self.settings and not is_placed(values),
            "choose_cache": choose_cache,
            "rates": {name: dict(one) for name, one in rates.items()},
            "main_memory": self.vram,
            "host_memory": self.ram,
            "split_layers": self.split_layers,
            "shares": list(self.shares),
        }

    def load(self, values: Mapping[str, Any], device: str) -> dict[str, Any]:
        """The load settings for `_core.Session` on a main device. On the CPU, n_gpu_layers has no effect."""
        return {**values, "n_gpu_layers": -1} if device == "cpu" else dict(values)

    def rates(self, main: Device, threads: int, *, measure_missing: bool) -> dict[str, dict[str, float]]:
        """The rates of the main device and of the CPU, by name, as `_rates.known` gives them."""
        from dyno import _core

        devices = {"cpu": dict(_core.cpu_info())}
        if main.kind != "cpu":
            devices[main.name] = dict(main.info)
        return _rates.known(devices, threads, measure_missing=measure_missing)

    def limit_of(self, device: str) -> int:
        """The memory limit of a GPU or virtual device as main device, in bytes; 0: no limit, or the device is
        the CPU."""
        kind, _, number = device.partition(":")
        own = self.virtual_devices[int(number) - 1].memory_mib << 20 if kind == "cpu" and number else 0
        limits = [limit for limit in (own, self.vram) if limit]
        return min(limits, default=0) if number else 0

    def warn(self, device: str) -> None:
        """Warn of arguments that have no effect on this main device."""
        layers = self.settings.get("n_gpu_layers", -1)
        if layers >= 0 and device == "cpu":
            _log.warning("n_gpu_layers=%d has no effect with device cpu: all layers are on the CPU", layers)

    def warn_of_idle_devices(self, device: str, rules: Sequence[str]) -> None:
        """Warn if no virtual device takes part.

        Args:
            device: The main device.
            rules: The setting `placement` in force.
        """
        idle = bool(self.virtual_devices) and not self.split_layers and not device.startswith("cpu:")
        if idle and not any("=cpu:" in rule.lower() for rule in rules):
            _log.warning(
                "virtual devices have no effect: they hold no weights; choose one as the device "
                "(--device cpu:1), or place weights there (-ot REGEX=cpu:1, -sm layer)"
            )

    def words(self, device: str) -> list[str]:
        """The options of `tune` for this main device and these limits."""
        kind, _, number = device.partition(":")
        found = ["--gpu", number] if kind == "cuda" else ["--device", device] if number else []
        for n, one in enumerate(self.virtual_devices, 1):
            if number and kind == "cpu":
                limits = [f"{name}={float(value):g}" for name, value in one.to_dict().items()]
                found += ["--virtual-device", ",".join([f"cpu:{n}", *limits])]
        for name, size in (("--vram", self.vram), ("--ram", self.ram)):
            found += [name, f"{size >> 20}MiB"] if size else []
        return found


def _bytes(name: str, value: int | str) -> int:
    if not isinstance(value, str) and (not isinstance(value, int) or isinstance(value, bool) or value <= 0):
        raise PlanError(f"[placement] {name} is {value!r}; expected bytes, or a text such as '16GiB'")
    try:
        size = parse_bytes(value) if isinstance(value, str) else value
        check_unit(value, size)
    except ValueError as error:
        raise PlanError(f"[placement] {name}: {error}") from error
    return size


def _shares(given: Sequence[float]) -> tuple[float, ...]:
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        raise PlanError(f"[placement] tensor_split is {given!r:.60}; expected numbers, such as [3, 1]")
    given = tuple(given)
    wrong = [one for one in given if not isinstance(one, (int, float)) or isinstance(one, bool)]
    if wrong:
        raise PlanError(f"[placement] tensor_split holds {wrong[0]!r}; expected numbers, such as [3, 1]")
    return tuple(float(one) for one in given)
