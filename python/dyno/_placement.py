"""Where the weights of a model lie, as arguments of `Engine`."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dyno import _rates
from dyno._virtual_devices import VirtualDevice, read_virtual_devices
from dyno.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dyno._virtual_devices import VirtualDevices
    from dyno.devices import Device

__all__ = ["Placement"]

_log = logging.getLogger("dyno")


@dataclass(frozen=True)
class Placement:
    """Checked arguments; their limits and the names of tensors and devices are checked by the plan."""

    rules: tuple[str, ...] = ()
    virtual_devices: tuple[VirtualDevice, ...] = ()
    n_gpu_layers: int | None = None
    cpu_moe: bool = False
    n_cpu_moe: int = 0
    automatic: bool = False
    """Whether the plan places what does not fit the main device."""

    @classmethod
    def of(
        cls,
        placement: Sequence[str] | str,
        virtual_devices: VirtualDevices,
        n_gpu_layers: int | None,
        cpu_moe: bool,
        n_cpu_moe: int,
    ) -> Placement:
        """The arguments of `Engine`.

        Raises:
            PlanError: A value of another type, or a virtual device that cannot be.
        """
        automatic = placement == "auto" and n_gpu_layers is None and not cpu_moe and n_cpu_moe == 0
        if placement == "auto":
            placement = ()
        rules = (placement,) if isinstance(placement, str) else tuple(placement)
        wrong = next((rule for rule in rules if not isinstance(rule, str)), None)
        if wrong is not None:
            raise PlanError(f"[placement] {wrong!r} is not a rule; a rule is a string REGEX=DEVICE")
        for name, value in (("n_gpu_layers", n_gpu_layers), ("n_cpu_moe", n_cpu_moe)):
            number = isinstance(value, int) and not isinstance(value, bool)
            if not number and not (name == "n_gpu_layers" and value is None):
                raise PlanError(f"[placement] {name} is {value!r}; expected a whole number")
        if not isinstance(cpu_moe, bool):
            raise PlanError(f"[placement] cpu_moe is {cpu_moe!r}; expected True or False")
        return cls(rules, read_virtual_devices(virtual_devices), n_gpu_layers, cpu_moe, n_cpu_moe, automatic)

    def for_session(self, device: str, rates: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
        """The same for `_core.Session` with that main device, and rates of devices by name."""
        given: dict[str, Any] = {
            "rules": list(self.rules),
            "virtual_devices": [one.to_dict() for one in self.virtual_devices],
            "cpu_moe": self.cpu_moe,
            "n_cpu_moe": self.n_cpu_moe,
            "automatic": self.automatic,
            "rates": {name: dict(one) for name, one in rates.items()},
        }
        if self.n_gpu_layers is not None and device != "cpu":
            given["n_gpu_layers"] = self.n_gpu_layers
        return given

    def rates(self, main: Device) -> dict[str, dict[str, float]]:
        """The rates that were measured of the main device and of the CPU, by name."""
        from dyno import _core

        found = {"cpu": _rates.remembered(_core.cpu_info())}
        if main.kind != "cpu":
            found[main.name] = _rates.remembered(main.info)
        return {name: rates for name, rates in found.items() if rates}

    def warn(self, device: str) -> None:
        """Say which argument does nothing with that main device."""
        if self.n_gpu_layers is not None and device == "cpu":
            _log.warning(
                "n_gpu_layers=%d does nothing with device cpu: all layers lie on the CPU", self.n_gpu_layers
            )
