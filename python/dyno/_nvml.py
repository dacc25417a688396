"""Facts about a GPU from the management library of the driver (NVML). Reading them changes neither memory nor
clocks.

A value is None if the driver, the card or the virtual machine does not report it.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

__all__ = ["bus_id", "facts", "hold", "state", "why_not"]


@contextmanager
def _session() -> Iterator[Any]:
    """The initialised library; None if it is missing (see `why_not`)."""
    try:
        import pynvml
    except ImportError:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def hold() -> AbstractContextManager[Any]:
    """Keep the library initialised, so that each `state` within the block takes microseconds."""
    return _session()


def why_not() -> str:
    """The reason why NVML gives no facts; empty if it works."""
    try:
        import pynvml
    except ImportError:
        return "the package nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return f"NVML: {error}"
    pynvml.nvmlShutdown()
    return ""


def _ask(nvml: Any, question: Callable[..., Any], *arguments: Any) -> Any:
    try:
        answer = question(*arguments)
    except nvml.NVMLError:
        return None  # some cards and virtual machines do not support every query
    return answer.decode() if isinstance(answer, bytes) else answer


def bus_id(number: int) -> str | None:
    """The PCI bus id of a GPU, numbered as in nvidia-smi; None if it is unknown."""
    with _session() as nvml:
        handle = None if nvml is None else _ask(nvml, nvml.nvmlDeviceGetHandleByIndex, number)
        info = None if handle is None else _ask(nvml, nvml.nvmlDeviceGetPciInfo, handle)
        if info is None:
            return None
        found = info.busId
        return found.decode() if isinstance(found, bytes) else str(found)


def facts(pci_bus_id: str) -> dict[str, Any]:
    """Facts that do not change while a process runs.

    Args:
        pci_bus_id: As `dyno._core.devices()` gives it.

    Returns:
        `driver`, `power_limit_w` (enforced), `power_limit_default_w`, `pcie_generation` and `pcie_lanes` (the
        maximum of card and slot), `max_sm_mhz`, `max_memory_mhz`; empty without NVML or for an unknown card.
    """
    with _session() as nvml:
        handle = None if nvml is None else _ask(nvml, nvml.nvmlDeviceGetHandleByPciBusId, pci_bus_id)
        if handle is None:
            return {}
        enforced = _ask(nvml, nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
        default = _ask(nvml, nvml.nvmlDeviceGetPowerManagementDefaultLimit, handle)
        return {
            "driver": _ask(nvml, nvml.nvmlSystemGetDriverVersion),
            "power_limit_w": None if enforced is None else round(enforced / 1000, 1),
            "power_limit_default_w": None if default is None else round(default / 1000, 1),
            "pcie_generation": _ask(nvml, nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
            "pcie_lanes": _ask(nvml, nvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
            "max_sm_mhz": _ask(nvml, nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM),
            "max_memory_mhz": _ask(nvml, nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_MEM),
        }


FULL = 0.97
"""Share of a GPU's memory above which it counts as full. Drivers reserve a little."""


def is_full(memory: Any) -> bool:
    """Whether a GPU's memory is full. Some drivers then put further allocations into host memory."""
    return bool(memory.total) and memory.used >= FULL * memory.total


def _link(nvml: Any, handle: Any) -> float | None:
    """MB/s over PCIe, summed over both directions. Each query takes the driver 20 ms."""
    kinds = (nvml.NVML_PCIE_UTIL_RX_BYTES, nvml.NVML_PCIE_UTIL_TX_BYTES)
    told = [_ask(nvml, nvml.nvmlDeviceGetPcieThroughput, handle, kind) for kind in kinds]
    return None if None in told else sum(told) / 1000


def state(pci_bus_id: str) -> dict[str, Any]:
    """Readings that change over time.

    Returns:
        `temperature_c`, `sm_mhz`, `memory_mhz`, `power_w`, `power_limit_w` (enforced),
        `throttle_reasons` (a bit mask, 0: none), `memory_used_bytes`, `memory_total_bytes`, `processes` (ids
        of processes that compute on the GPU), `link_mb_s` (both directions over PCIe, in the last 20 ms;
        None unless the memory is full); empty without NVML.
    """
    with _session() as nvml:
        handle = None if nvml is None else _ask(nvml, nvml.nvmlDeviceGetHandleByPciBusId, pci_bus_id)
        if handle is None:
            return {}
        power = _ask(nvml, nvml.nvmlDeviceGetPowerUsage, handle)
        memory = _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
        processes = _ask(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle)
        limit = _ask(nvml, nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
        return {
            "power_limit_w": None if limit is None else round(limit / 1000, 1),
            "temperature_c": _ask(nvml, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            "sm_mhz": _ask(nvml, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            "memory_mhz": _ask(nvml, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
            "power_w": None if power is None else round(power / 1000, 1),
            "throttle_reasons": _ask(nvml, nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle),
            "memory_used_bytes": None if memory is None else int(memory.used),
            "memory_total_bytes": None if memory is None else int(memory.total),
            "link_mb_s": _link(nvml, handle) if memory is not None and is_full(memory) else None,
            "processes": None if processes is None else sorted(int(p.pid) for p in processes),
        }
