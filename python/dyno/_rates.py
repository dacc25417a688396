"""The rates of devices: measured by `tune probe`, stored for plans, and read again by `Engine`."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import statistics
import tempfile
from typing import TYPE_CHECKING, Any, Final

from dyno._home import own_folder
from dyno.errors import DeviceError, OutOfMemoryError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["RATES", "fingerprint", "kept", "known", "measure", "remember", "remembered"]

_log = logging.getLogger("dyno")

RATES: Final = {
    "memory_gbps": "GB/s of the device's memory, read and written",
    "weights_gbps": "GB/s of Q4_0 weights that matrix-vector products read from memory",
    "core_gbps": "GB/s that one CPU thread reads from and writes to memory",
    "gflops_one": "1e9 operations per second of matrix-vector products with weights in a cache",
    "gflops_many": "1e9 operations per second of matrix products with many rows",
    "launch_us": "microseconds of an op with almost no work",
    "spread_us": "additional microseconds of a product, until all threads or blocks have finished",
    "experts_us": "additional microseconds of an expert product on a GPU, until it knows the chosen experts",
    "link_gbps": "GB/s between the device and main memory",
    "latency_us": "fixed microseconds of a transfer, without its bytes",
}
"""Meaning and unit of each rate, by name. The cost model of a plan uses these rates."""
_OF_CPU: Final = tuple(RATES)[:7]
_NEEDED: Final = frozenset({"memory_gbps", "weights_gbps", "gflops_one", "gflops_many"})
_MOST_BYTES: Final = 1 << 20
_COLD: Final = 512 << 20
"""Least number of bytes of weights in a measurement, so that no cache holds them."""


def measure(device: str, threads: int = 0, seconds: float = 0.2) -> dict[str, float]:
    """Measure the rates of a device, which takes about three seconds.

    Args:
        device: `cpu` or `cuda:N`.
        threads: Number of CPU threads; 0: one per core.
        seconds: Duration of each measurement.

    Raises:
        DeviceError, OutOfMemoryError: The device can't be measured.
    """
    rates = _of_gpu(device, seconds) if device.startswith("cuda") else _of_cpu(threads, seconds)
    return {name: round(value, 4) for name, value in rates.items()}


def _of_gpu(device: str, seconds: float) -> dict[str, float]:
    from dyno import _core

    def launch(key: str, rows: int, rotate: int = 0) -> tuple[float, float, float]:
        """Seconds, bytes and operations."""
        family, desc = _core.ops.parse_key(key, rows)
        samples = _core.ops.time(family, desc, min_seconds=seconds / 4, rotate_bytes=rotate, device=device)
        return (statistics.median(samples), *_core.ops.cost(family, desc))

    found = _core.measure_rates(device)
    small, _, _ = launch("norm n=2048", 1)
    # Two sizes separate the time per byte from the fixed time until all blocks run.
    less, less_read, _ = launch("matmul q4_0 n=2048 k=2048 layout=gpu", 1, rotate=256 << 20)
    more, more_read, _ = launch("matmul q4_0 n=16384 k=4096 layout=gpu", 1, rotate=256 << 20)
    weights = (more_read - less_read) / max(more - less, 0.1 * more)
    # The chosen experts are known only when the previous launch has ended. So their weights cannot be read in
    # advance, unlike other weights.
    key = "moe_up_gate q4_0 n=768 k=2048 experts=128 used=8 activation=silu layout=gpu"
    routed, routed_read, _ = launch(key, 1, rotate=256 << 20)
    spread = max(0.0, less - small - less_read / weights)
    warm, _, operations = launch("matmul q4_0 n=4096 k=4096 layout=gpu", 512)
    many = operations / max(warm - small, 0.1 * warm)
    return {
        "memory_gbps": found["memory_gbps"],
        "weights_gbps": weights / 1e9,
        # Memory bounds products of one row on every GPU. So their arithmetic rate, which is assumed to be a
        # tenth of the other one, never decides.
        "gflops_one": many / 10 / 1e9,
        "gflops_many": many / 1e9,
        "launch_us": small * 1e6,
        "spread_us": spread * 1e6,
        "experts_us": max(0.0, routed - small - spread - routed_read / weights) * 1e6,
        "link_gbps": min(found["host_to_device_gbps"], found["device_to_host_gbps"]),
        "latency_us": found["transfer_us"],
    }


def _of_cpu(threads: int, seconds: float) -> dict[str, float]:
    from dyno import _core
    from dyno._effective import usable_cores

    cores = threads or usable_cores()
    layout = "x16" if _core.ops.layout_supported("q4_0", "x16") else "plain"

    def launch(family: str, desc: Mapping[str, Any], rotate: int = 0) -> float:
        samples = _core.ops.time(family, dict(desc), threads=cores, min_seconds=seconds, rotate_bytes=rotate)
        return statistics.median(samples)

    def product(n: int, rows: int, rotate: int = 0) -> tuple[float, float, float]:
        """Seconds, bytes and operations."""
        family, desc = _core.ops.parse_key(f"matmul q4_0 n={n} k=1024 layout={layout} act=q8", rows)
        return (launch(family, desc, rotate), *_core.ops.cost(family, desc))

    # Two sizes separate the time of the operations from the time in which the threads start and end.
    few, _, few_operations = product(1024, 1)
    more, _, more_operations = product(8192, 1)
    one = (more_operations - few_operations) / max(more - few, 0.1 * more)
    spread = max(0.0, few - few_operations / one)
    # Current Xeons have caches of 260 MiB and more.
    walked = max(_COLD, 3 * int(_core.cpu_info()["l3_bytes"]))
    cold, read, _ = product(16384, 1, rotate=min(walked, int(_core.cpu_limits()["memory_bytes"]) // 8))
    many, _, many_operations = product(2048, 512)
    # One thread adds the rows of eight experts. They are in the caches of other cores, or in no cache.
    family, rows = _core.ops.parse_key("moe_sum n=2048 used=8", 1)
    added = launch(family, rows, rotate=256 << 20)
    return dict(
        zip(
            _OF_CPU,
            (
                cpu_memory(cores, seconds),
                read / max(cold - spread, 0.1 * cold) / 1e9,
                _core.ops.cost(family, rows)[0] / added / 1e9,
                one / 1e9,
                many_operations / max(many - spread, 0.1 * many) / 1e9,
                launch("transfer", {"m": 1, "row": 64, "fixed": 0}) * 1e6,
                spread * 1e6,
            ),
            strict=True,
        )
    )


def cpu_memory(threads: int = 0, seconds: float = 0.2) -> float:
    """GB/s of the main memory, read and written. All threads together copy 32 MiB, from a different place
    each time.

    Args:
        threads: Number of threads; 0: all cores that this process may use.
        seconds: Duration of the measurement.
    """
    from dyno import _core
    from dyno._effective import usable_cores

    block = {"m": 32, "row": 1 << 20, "fixed": 0}
    samples = _core.ops.time(
        "transfer", block, threads=threads or usable_cores(), min_seconds=seconds, rotate_bytes=256 << 20
    )
    return 2 * block["m"] * block["row"] / statistics.median(samples) / 1e9


def fingerprint(info: Mapping[str, Any]) -> str:
    """A key for the device that rates belong to, made from the properties that the engine reports."""
    names = ("kind", "name", "isa", "cores", "compute_capability", "sm_count", "memory_bytes")
    return " ".join(str(info[name]) for name in names if name in info)


def kept() -> Path | None:
    """`$XDG_CACHE_HOME/dyno/rates.json`, by default `~/.cache/dyno/rates.json`; None where no home is
    known."""
    try:
        return own_folder("CACHE") / "rates.json"
    except RuntimeError:
        return None


def _key(info: Mapping[str, Any], threads: int) -> str:
    from dyno._effective import usable_cores

    own = info.get("kind") == "cpu" and threads not in (0, usable_cores())
    return f"{fingerprint(info)} threads={threads}" if own else fingerprint(info)


def remembered(info: Mapping[str, Any], file: Path | None = None, threads: int = 0) -> dict[str, float]:
    """The stored rates of a device; empty if there are no usable ones.

    Args:
        info: Properties of the device, as the engine reports them.
        file: Default: `kept()`.
        threads: Of the CPU, that it was measured with; 0: all cores.
    """
    found = _read(file or kept()).get(_key(info, threads))
    return dict(found) if isinstance(found, dict) and _usable(found) else {}


def remember(
    info: Mapping[str, Any], rates: Mapping[str, float], file: Path | None = None, threads: int = 0
) -> Path | None:
    """Keep rates for later plans.

    Args:
        info: Properties of the device, as the engine reports them.
        rates: By name.
        file: Default: `kept()`.
        threads: Of the CPU, that it was measured with; 0: all cores.

    Returns:
        The file; None if no home folder is known.

    Raises:
        OSError: The file can't be written.
    """
    where = file or kept()
    if where is None:
        return None
    every = {**_read(where), _key(info, threads): dict(rates)}
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


def known(
    devices: Mapping[str, Mapping[str, Any]], threads: int, *, measure_missing: bool
) -> dict[str, dict[str, float]]:
    """Rates by device, as far as they are stored or can be measured.

    Args:
        devices: Properties of devices by name.
        threads: Number of CPU threads.
        measure_missing: Measure and store missing rates, which takes about three seconds once.

    Returns:
        The rates of the CPU with this number of threads, or else with all cores.
    """
    found: dict[str, dict[str, float]] = {}
    for name, info in devices.items():
        rates = remembered(info, threads=threads)
        if not rates and measure_missing:
            _log.info("measuring the speed of %s once, to place the weights", name)
            try:
                rates = measure(name, threads, seconds=0.05)
            except (DeviceError, OutOfMemoryError) as error:
                _log.warning(
                    "using assumed rates for %s, because they could not be measured: %s", name, error
                )
            else:
                _keep(name, info, rates, threads)
        if rates := rates or remembered(info):
            found[name] = rates
    return found


def _keep(name: str, info: Mapping[str, Any], rates: Mapping[str, float], threads: int) -> None:
    try:
        remember(info, rates, threads=threads)
    except OSError as error:
        _log.warning(
            "the rates of %s could not be stored, so they will be measured again next time: %s", name, error
        )


def _read(file: Path | None) -> dict[str, Any]:
    """All stored rates. A file of another format counts as empty."""
    try:
        if file is None or file.stat().st_size > _MOST_BYTES:
            return {}
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _usable(rates: Mapping[str, Any]) -> bool:
    numbers = all(
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and math.isfinite(value)
        and value >= 0
        for value in rates.values()
    )
    return numbers and set(rates) <= set(RATES) and all(rates.get(name, 0) > 0 for name in _NEEDED)
