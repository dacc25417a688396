"""Energy counters: NVML for a GPU, and RAPL for the CPU packages and their memory.

This file imports nothing of dyno, because `tune ab` loads it into processes of other builds. If a counter
cannot be read, its reason is reported, and no estimate replaces it. All numbers include idle power.
"""

from __future__ import annotations

import os
import re
from typing import Any

POWERCAP = "/sys/class/powercap"


class Counters:
    """Energy counters in joules, by source: `cpu` (packages and memory) and `gpu`.

    Args:
        bus: PCI bus id of the GPU; None: no GPU.
        powercap: Folder of the kernel's power capping framework, which lists the RAPL domains.
    """

    def __init__(self, bus: str | None = None, powercap: str = POWERCAP) -> None:
        self.missing: dict[str, str] = {}
        """The reason by source, if a source cannot be read."""
        self._domains = self._find_domains(powercap)
        self._nvml: Any = None
        self._handle: Any = None
        if bus is not None:
            self._open_gpu(bus)

    def _find_domains(self, powercap: str) -> dict[str, float]:
        """The files of the domains to add up, each with the joules at which its counter wraps around."""
        found: dict[str, float] = {}
        try:
            names = sorted(os.listdir(powercap))
        except OSError as error:
            self.missing["cpu"] = f"{powercap}: {error.strerror}"
            return {}
        for name in names:
            # Packages and their memory. Cores are left out, because the number of the package includes them.
            if re.fullmatch(r"intel-rapl:[0-9]+(:[0-9]+)?", name):
                folder = os.path.join(powercap, name)
                try:
                    title = _text(os.path.join(folder, "name"))
                    if title.startswith("package") or title == "dram":
                        counter = os.path.join(folder, "energy_uj")
                        _text(counter)
                        found[counter] = float(_text(os.path.join(folder, "max_energy_range_uj"))) / 1e6
                except (OSError, ValueError) as error:
                    self.missing["cpu"] = f"{folder}: {getattr(error, 'strerror', None) or error}"
                    return {}
        if not found:
            self.missing["cpu"] = f"{powercap} has no RAPL domain"
        return found

    def _open_gpu(self, bus: str) -> None:
        try:
            import pynvml
        except ImportError:
            self.missing["gpu"] = "the package nvidia-ml-py is not installed"
            return
        try:
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByPciBusId(bus)
            pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        except pynvml.NVMLError as error:
            self.missing["gpu"] = f"NVML: {error}"
            return
        self._nvml = pynvml

    @property
    def sources(self) -> list[str]:
        """The sources that can be read."""
        return [*(["cpu"] if self._domains else []), *(["gpu"] if self._nvml is not None else [])]

    def unreadable(self, source: str) -> str:
        """The reason why the energy of `cpu` or `gpu` cannot be read; "" if it can."""
        if source in self.sources:
            return ""
        return f"the energy of the {source.upper()} cannot be read: {self.missing.get(source, '')}"

    def read(self) -> dict[str, float]:
        """Joules by counter; only differences have a meaning (see `spent`).

        Raises:
            OSError: A counter that could be read before cannot be read now.
            ValueError: The counter holds no number.
        """
        found = {path: float(_text(path)) / 1e6 for path in self._domains}
        if self._nvml is not None:
            try:
                found["gpu"] = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1000
            except self._nvml.NVMLError as error:
                raise OSError(f"NVML: {error}") from error
        return found

    def spent(self, before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
        """Joules by source between two readings. One wrap-around of a counter in between is corrected."""
        found: dict[str, float] = {}
        for path, most in self._domains.items():
            joules = after[path] - before[path]
            found["cpu"] = found.get("cpu", 0.0) + (joules if joules >= 0 else joules + most)
        if "gpu" in after:
            found["gpu"] = after["gpu"] - before["gpu"]
        return found


def _text(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read().strip()
