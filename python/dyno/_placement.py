"""Where the weights of a model lie, as arguments of `Engine`."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dyno._virtual_devices import VirtualDevice, read_virtual_devices
from dyno.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dyno._virtual_devices import VirtualDevices

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
        rules = (placement,) if isinstance(placement, str) else tuple(placement)
        wrong = next((rule for rule in rules if not isinstance(rule, str)), None)
        if wrong is not None:
            raise PlanError(f"[placement] {wrong!r} is no rule; a rule is a string REGEX=DEVICE")
        for name, value in (("n_gpu_layers", n_gpu_layers), ("n_cpu_moe", n_cpu_moe)):
            number = isinstance(value, int) and not isinstance(value, bool)
            if not number and not (name == "n_gpu_layers" and value is None):
                raise PlanError(f"[placement] {name} is {value!r}; expected a whole number")
        if not isinstance(cpu_moe, bool):
            raise PlanError(f"[placement] cpu_moe is {cpu_moe!r}; expected True or False")
        return cls(rules, read_virtual_devices(virtual_devices), n_gpu_layers, cpu_moe, n_cpu_moe)

    def for_session(self, device: str) -> dict[str, Any]:
        """The same for `_core.Session` with that main device."""
        given: dict[str, Any] = {
            "rules": list(self.rules),
            "virtual_devices": [one.to_dict() for one in self.virtual_devices],
            "cpu_moe": self.cpu_moe,
            "n_cpu_moe": self.n_cpu_moe,
        }
        if self.n_gpu_layers is not None and device != "cpu":
            given["n_gpu_layers"] = self.n_gpu_layers
        return given

    def warn(self, device: str) -> None:
        """Say which argument does nothing with that main device."""
        if self.n_gpu_layers is not None and device == "cpu":
            _log.warning(
                "n_gpu_layers=%d does nothing with device cpu: all layers lie on the CPU", self.n_gpu_layers
            )
