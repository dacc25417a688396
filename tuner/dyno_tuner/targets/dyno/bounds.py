"""Upper bounds of rates in tokens per second, which reveal impossible measurements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dyno import _core

if TYPE_CHECKING:
    from collections.abc import Mapping

# Upper bounds of int8 multiply-adds per cycle and core, by class of CPU; times two for operations.
_OPS_PER_CYCLE = {"portable": 64, "avx2": 256, "avx512_vnni": 512}
_MAX_GHZ = 6.5
GPU_HEADROOM = 1.3  # over measured rates, which need not reach the peak of the hardware


def of_gpu(
    device: Mapping[str, Any], rates: Mapping[str, float], active: float, read: float
) -> dict[str, float]:
    """Bounds from measured rates: operations at twice the rate of an f16 product (the rate of int8) and, for
    single tokens, the weights that are read from memory, except what the L2 cache can hold.

    Args:
        active: Number of weights that a token is multiplied with.
        read: Bytes of these weights.
    """
    found = {}
    if "f16_tflops" in rates:
        found["pp"] = GPU_HEADROOM * 2 * rates["f16_tflops"] * 1e12 / (2 * active)
    read -= int(device.get("l2_bytes") or 0)
    if read > 0:
        found["tg"] = GPU_HEADROOM * rates["memory_gbps"] * 1e9 / read
    return found


def of_cpu(device: Mapping[str, Any], active: float) -> dict[str, float]:
    """Bounds from the operations of a token and the peak of the cores, with an impossibly high clock. Memory
    gives no bound here, because a small model fits into caches with unknown bandwidth."""
    isa = str(device.get("isa", "avx512_vnni"))
    # All cores that the scheduler allows, because a setting may exceed a quota or OMP_NUM_THREADS.
    cores = max(int(device["cores"]), int(_core.cpu_limits()["affinity"]))
    peak = cores * _OPS_PER_CYCLE.get(isa, 512) * _MAX_GHZ * 1e9
    return dict.fromkeys(("pp", "tg"), peak / (2 * active))


def active_parameters(model: Mapping[str, Any]) -> float:
    """Number of weights that a token is multiplied with, without embedding and head; 0 if the file does not
    say."""
    if active := float(model.get("active_parameters") or 0):
        return active
    experts, used = int(model.get("experts") or 0), int(model.get("experts_used") or 0)
    embedding = float(model.get("n_vocab") or 0) * float(model.get("n_embd") or 0)
    # Without a number of active weights: at least the share of the experts, without embedding and head.
    total = float(model.get("parameters") or 0)
    return max(0.0, total - 2 * embedding) * (used / experts if experts else 1.0)
