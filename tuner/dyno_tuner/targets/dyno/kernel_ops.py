"""Facts about single ops for the stage that chooses their kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dyno import _core

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ...core.protocol import KernelOp

_KNOWN = (
    "kind", "name", "memory_bytes", "isa", "features", "cores", "l1d_bytes", "l2_bytes", "l3_bytes",
    "compute_capability", "sm_count", "shared_per_block_bytes", "pci_bus_id",
)  # fmt: skip


def plain_device(device: Mapping[str, Any]) -> dict[str, Any]:
    """The properties that the engine's selection knows."""
    return {key: device[key] for key in _KNOWN if key in device}


def op_seconds(op: KernelOp, kind: str) -> float:
    """Seconds of an op in a pass, and for a prompt of a token of it, on a typical device of a kind: to order
    ops by."""
    family, desc = _core.ops.parse_key(op.key, op.m)
    moved, flops = _core.ops.cost(family, desc)
    memory, compute = (20e9, 200e9) if kind == "cpu" else (4e12, 4e14)
    seconds = max(float(moved) / memory, float(flops) / compute) * op.count
    return seconds / op.m if op.metric == "pp" else seconds
