"""The command `tune probe`: the rates of this machine."""

from __future__ import annotations

import json
import re
import sys
from typing import Annotated, Any

import typer
from dyno import _core, _rates
from dyno._shell import escaped
from dyno.devices import resolve_device
from dyno.errors import DeviceError

from ..measure.cpu_monitor import CpuWatch
from . import options as o  # noqa: TC001  (typer reads annotations when the command runs)

_VIRTUAL = re.compile(r"cpu:\d+")


def probe(
    device: Annotated[
        str, typer.Option(help="cpu, cuda:N, or auto (the first usable GPU, or the CPU if there is none).")
    ] = "auto",
    gpu: o.OneGpu = None,
    keep: Annotated[
        bool | None,
        typer.Option(
            "--keep/--no-keep",
            help="Store the rates for placements and expected times. Default: yes, but rates that other "
            "programs disturbed do not replace others.",
        ),
    ] = None,
    threads: Annotated[
        int, typer.Option("--threads", "-t", min=0, help="Number of CPU threads. 0: one per core.")
    ] = 0,
    as_json: o.Json = False,
) -> None:
    """Measure the memory bandwidth and compute speed of the CPU, and of a GPU with its link.

    This takes a few seconds. dyno uses the rates to place models and to compute expected times."""
    if _VIRTUAL.fullmatch(device):
        raise DeviceError(
            f"[device] {device!r} is a virtual device: it has the rates of the CPU and the link of its "
            "limits; use --device cpu"
        )
    found = resolve_device(device if gpu is None else f"cuda:{gpu}")
    devices: dict[str, dict[str, Any]] = {"cpu": dict(_core.cpu_info())}
    if found.kind != "cpu":
        devices[found.name] = found.info
    with CpuWatch(threads or None).window() as load:
        rates = {name: _rates.measure(name, threads) for name in devices}
    where = None
    old = [
        name for name, info in devices.items() if load.disturbed and _rates.remembered(info, threads=threads)
    ]
    for name, info in devices.items():
        if keep or (keep is None and name not in old):
            where = _rates.remember(info, rates[name], threads=threads)
    if load.disturbed:
        kept = f"; the stored rates of {', '.join(old)} stay" if old and keep is None else ""
        print(
            f"warning: {escaped(load.disturbed)}, so these rates may be too low{kept}; run tune probe again "
            "when no other program runs",
            file=sys.stderr,
        )
    if as_json:
        print(json.dumps(rates))
    else:
        for name, own in rates.items():
            print(f"{name}: {escaped(str(devices[name].get('name') or 'unknown'))}")
            for rate, value in own.items():
                print(f"  {rate:<12} {value:>12,.2f}  {_rates.RATES[rate]}")
    if where is not None:
        print(f"rates stored in {escaped(str(where))}", file=sys.stderr)
