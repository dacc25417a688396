"""What this build is and what it runs on."""

from __future__ import annotations

import platform
from typing import Any


def collect() -> dict[str, Any]:
    """Build (version, switches, compiler, instruction sets), Python and devices, as plain values."""
    from dyno import _core

    return {
        "build": _core.build_info(),
        "python": {"version": platform.python_version(), "platform": platform.platform()},
        "devices": [_core.cpu_info()],
    }


def text(facts: dict[str, Any]) -> str:
    """The same for people."""
    build = facts["build"]
    lines = [
        f"dyno {build['version']} (ops revision {build['ops_revision']})",
        f"compiler          {build['compiler']}, {build['build_type']}",
        f"instruction sets  {', '.join(build['isas'])}",
        f"python            {facts['python']['version']}, {facts['python']['platform']}",
        "switches",
    ]
    width = max((len(name) for name in build["switches"]), default=0)
    lines += [f"  {name:{width}}  {_switch(value)}" for name, value in sorted(build["switches"].items())]
    lines.append("devices")
    for device in facts["devices"]:
        lines += _device(device)
    return "\n".join(lines)


def _switch(value: object) -> str:
    if isinstance(value, bool):
        return "ON" if value else "OFF"
    return str(value) if value != "" else "(empty)"


def _device(device: dict[str, Any]) -> list[str]:
    caches = ", ".join(
        f"{name} {device[key] // 1024} KiB"
        for name, key in (("L1d", "l1d_bytes"), ("L2", "l2_bytes"), ("L3", "l3_bytes"))
        if device.get(key)
    )
    return [
        f"  {device['kind']}: {device['name']}",
        f"    kernels {device['isa']}, {device['cores']} cores, {caches}",
        f"    memory {device['memory_bytes'] / 2**30:.1f} GiB",
        f"    features {' '.join(device['features'])}",
    ]
