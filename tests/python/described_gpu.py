"""A GPU as the engine describes it, for tests that plan for a GPU without one."""

from __future__ import annotations

from typing import Any, Final

H200: Final[dict[str, Any]] = {
    "kind": "cuda",
    "name": "NVIDIA H200",
    "memory_bytes": 150_754_820_096,
    "compute_capability": 90,
    "sm_count": 132,
    "l2_bytes": 62_914_560,
    "shared_per_block_bytes": 232_448,
    "pci_bus_id": "0000:00:07.0",
}
RATES: Final = {
    "memory_gbps": 4141.52,
    "host_to_device_gbps": 55.2,
    "device_to_host_gbps": 55.3,
    "f16_tflops": 756.4,
}
