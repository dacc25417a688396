"""How fast devices are: measured by `tune probe`, kept for plans, and read again by `Engine`."""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import tempfile
from typing import TYPE_CHECKING, Any, Final

from dyno._home import own_folder

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["RATES", "fingerprint", "kept", "measure", "remember", "remembered"]

RATES: Final = {
    "memory_gbps": "GB/s of the device's memory, read and written",
    "gflops_one": "1e9 operations a second of products with one row",
    "gflops_many": "1e9 operations a second of products with many rows",
    "launch_us": "microseconds of an op that does next to nothing",
    "link_gbps": "GB/s between the device and the memory of the machine",
    "latency_us": "microseconds of a transfer beside its bytes",
}
"""Rates of a device by name, as a plan's costs use them."""
_MOST_BYTES: Final = 1 << 20


def measure(device: str, threads: int = 0, seconds: float = 0.2) -> dict[str, float]:
    """Rates of a device, in about a second.

    Args:
        device: `cpu` or `cuda:N`.
        threads: Of the CPU; 0: all cores.
        seconds: Of each measurement.

    Raises:
        DeviceError, OutOfMemoryError: The device can't be measured.
    """
    from dyno import _core
    from dyno._effective import usable_cores

    if device.startswith("cuda"):
        found = _core.measure_rates(device)
        many = found.get("f16_tflops", 0.0) * 1e3 or 50 * found["memory_gbps"]
        link = min(found["host_to_device_gbps"], found["device_to_host_gbps"])
        # Products of one row are bound by memory on every GPU: a tenth of the peak never decides.
        rates = (found["memory_gbps"], many / 10, many, 3.0, link, 10.0)
        return {name: round(value, 3) for name, value in zip(RATES, rates, strict=True)}
    cores = threads or usable_cores()

    def launch(family: str, desc: Mapping[str, Any], rotate: int = 0) -> float:
        samples = _core.ops.time(family, dict(desc), threads=cores, min_seconds=seconds, rotate_bytes=rotate)
        return statistics.median(samples)

    def product(rows: int) -> float:
        layout = "x16" if _core.ops.layout_supported("q8_0", "x16") else "plain"
        family, desc = _core.ops.parse_key(f"matmul q8_0 n=1024 k=1024 layout={layout} act=q8", rows)
        return float(_core.ops.cost(family, desc)[1]) / launch(family, desc) / 1e9

    memory = cpu_memory(cores, seconds)
    small = launch("transfer", {"m": 1, "row": 64, "fixed": 0}) * 1e6
    own = (memory, product(1), product(512), small)
    return {name: round(value, 4) for name, value in zip(RATES, own, strict=False)}


def cpu_memory(threads: int = 0, seconds: float = 0.2) -> float:
    """GB/s of the machine's memory, read and written: copies of 32 MiB by all threads together, from other
    memory each time.

    Args:
        threads: 0: all cores that this process may use.
        seconds: Of the measurement.
    """
    from dyno import _core
    from dyno._effective import usable_cores

    block = {"m": 32, "row": 1 << 20, "fixed": 0}
    samples = _core.ops.time(
        "transfer", block, threads=threads or usable_cores(), min_seconds=seconds, rotate_bytes=256 << 20
    )
    return 2 * block["m"] * block["row"] / statistics.median(samples) / 1e9


def fingerprint(info: Mapping[str, Any]) -> str:
    """The device that rates belong to, by the properties that the engine reports."""
    names = ("kind", "name", "isa", "cores", "compute_capability", "sm_count", "memory_bytes")
    return " ".join(str(info[name]) for name in names if name in info)


def kept() -> Path | None:
    """`$XDG_CACHE_HOME/dyno/rates.json`, by default `~/.cache/dyno/rates.json`; None where no home is
    known."""
    try:
        return own_folder("CACHE") / "rates.json"
    except RuntimeError:
        return None


def remembered(info: Mapping[str, Any], file: Path | None = None) -> dict[str, float]:
    """The rates that were measured of a device; empty where there are none that can be used.

    Args:
        info: Properties of the device, as the engine reports them.
        file: Default: `kept()`.
    """
    found = _read(file or kept()).get(fingerprint(info))
    return dict(found) if isinstance(found, dict) and _usable(found) else {}


def remember(info: Mapping[str, Any], rates: Mapping[str, float], file: Path | None = None) -> Path | None:
    """Keep rates for later plans.

    Returns:
        The file; None where no home is known.

    Raises:
        OSError: The file can't be written.
    """
    where = file or kept()
    if where is None:
        return None
    every = {**_read(where), fingerprint(info): dict(rates)}
    where.parent.mkdir(parents=True, exist_ok=True)
    descriptor, partial = tempfile.mkstemp(".new", "rates-", where.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            json.dump(every, stream, indent=1, sort_keys=True)
        os.replace(partial, where)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise
    return where


def _read(file: Path | None) -> dict[str, Any]:
    """All kept rates; a file of another form counts as empty."""
    try:
        if file is None or file.stat().st_size > _MOST_BYTES:
            return {}
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _usable(rates: Mapping[str, Any]) -> bool:
    needed = {"memory_gbps", "gflops_one", "gflops_many"}
    numbers = all(
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and math.isfinite(value)
        and value >= 0
        for value in rates.values()
    )
    return numbers and set(rates) <= set(RATES) and all(rates.get(name, 0) > 0 for name in needed)
