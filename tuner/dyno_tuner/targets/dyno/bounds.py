"""Rates in tokens per second that no run can exceed, so that an impossible measurement is seen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dyno import _core

if TYPE_CHECKING:
    from collections.abc import Mapping

# Multiply-adds a cycle and core that no CPU of the class exceeds, in int8; times two for operations.
_OPS_PER_CYCLE = {"portable": 64, "avx2": 256, "avx512_vnni": 512}
_MAX_GHZ = 6.5
GPU_HEADROOM = 1.3  # over rates that were measured: a copy and one product need not reach the hardware's best


def of_gpu(
    device: Mapping[str, Any], rates: Mapping[str, float], active: float, read: float
) -> dict[str, float]:
    """By the rates that were measured: operations at twice the rate of a half product (that of int8), and,
    token by token, weights that are read from memory but for what the L2 cache can hold.

    Args:
        active: weights that a token is multiplied with.
        read: their bytes.
    """
    found = {}
    if "f16_tflops" in rates:
        found["pp"] = GPU_HEADROOM * 2 * rates["f16_tflops"] * 1e12 / (2 * active)
    read -= int(device.get("l2_bytes") or 0)
    if read > 0:
        found["tg"] = GPU_HEADROOM * rates["memory_gbps"] * 1e9 / read
    return found


def of_cpu(device: Mapping[str, Any], active: float) -> dict[str, float]:
    """The operations of a token over the peak of the cores, with a clock no CPU has. Memory bounds nothing
    here, because a small model lives in caches whose bandwidth is not known."""
    isa = str(device.get("isa", "avx512_vnni"))
    # Of all cores that the scheduler allows: a setting may exceed a quota or OMP_NUM_THREADS.
    cores = max(int(device["cores"]), int(_core.cpu_limits()["affinity"]))
    peak = cores * _OPS_PER_CYCLE.get(isa, 512) * _MAX_GHZ * 1e9
    return dict.fromkeys(("pp", "tg"), peak / (2 * active))


def active_parameters(model: Mapping[str, Any]) -> float:
    """Weights that a token is multiplied with, without embedding and head; 0 where the file does not tell."""
    if active := float(model.get("active_parameters") or 0):
        return active
    experts, used = int(model.get("experts") or 0), int(model.get("experts_used") or 0)
    embedding = float(model.get("n_vocab") or 0) * float(model.get("n_embd") or 0)
    # Without a count of active ones: at least the share of the experts, without embedding and head.
    total = float(model.get("parameters") or 0)
    return max(0.0, total - 2 * embedding) * (used / experts if experts else 1.0)
