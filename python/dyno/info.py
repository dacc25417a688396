"""Facts about this build and the machine that it runs on."""

from __future__ import annotations

import json
import platform
import shutil
from pathlib import Path
from typing import Any


def collect(device: str = "all") -> dict[str, Any]:
    """Build (version, switches, compiler, kernels, cost of links), Python and devices, as plain values.

    Args:
        device: `all`, or the name of a device as in `Engine`.

    Raises:
        DeviceError: The device does not exist.
    """
    from dyno import _core, _nvml
    from dyno.devices import list_devices, resolve_device

    chosen = list_devices() if device == "all" else [resolve_device(device)]
    facts: dict[str, Any] = {
        "build": {**_core.build_info(), "links": links(Path(str(_core.__file__)))},
        "python": {"version": platform.python_version(), "platform": platform.platform()},
        "devices": [{"device": d.name, **d.info} for d in chosen],
        "limits": _core.cpu_limits(),
        "cpu_distances": _core.cpu_distances(),
        "numa_nodes": _core.numa_nodes(),
    }
    gpus = [d for d in chosen if d.kind == "cuda"]
    facts["foreign_tune"] = foreign_tune()
    facts["no_cuda_reason"] = "" if gpus else _core.no_cuda_reason()
    if gpus and _nvml.why_not():
        facts["no_driver_facts"] = _nvml.why_not()
    return facts


def links(module: Path) -> dict[str, Any] | None:
    """Cost of linking a build with CUDA, from the file that the build wrote next to the module; None without
    CUDA."""
    report = module.resolve().parent / "link_report.json"
    if not report.is_file():
        return None
    facts: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return facts


def foreign_tune() -> str | None:
    """The path of a `tune` that PATH leads to and that is not dyno's, such as Ray's. Else None."""
    found = shutil.which("tune")
    if found is None:
        return None
    try:
        start = Path(found).read_bytes()[:4096]
    except OSError:
        return None  # a program that can be run but not read tells nothing
    return None if b"dyno_tuner" in start else found


def text(facts: dict[str, Any]) -> str:
    """The facts as text."""
    build = facts["build"]
    lines = [
        f"dyno {build['version']} (ops revision {build['ops_revision']})",
        f"compiler          {build['compiler']}, {build['build_type']}",
        f"instruction sets  {', '.join(build['isas'])}",
        f"built for         {_built_for(build['switches'])}",
        *_weight_types(build),
        *_links(build["links"]),
        f"python            {facts['python']['version']}, {facts['python']['platform']}",
        "switches",
    ]
    width = max((len(name) for name in build["switches"]), default=0)
    lines += [f"  {name:{width}}  {_switch(value)}" for name, value in sorted(build["switches"].items())]
    lines.append("devices")
    for device in facts["devices"]:
        lines += _gpu(device) if device["kind"] == "cuda" else _cpu(device)
        if device["kind"] == "cpu":
            lines += _limits(facts["limits"])
            lines += _distances(facts["cpu_distances"], facts["limits"]["affinity"])
            lines += _nodes(facts["numa_nodes"])
    if facts["no_cuda_reason"]:
        lines.append(f"  cuda: none, {facts['no_cuda_reason']}")
    if facts.get("no_driver_facts"):
        lines.append(f"  the driver gives no information: {facts['no_driver_facts']}")
    if facts["foreign_tune"]:
        lines.append(
            f"tune              {facts['foreign_tune']} is another program; use dyno-tune or dyno tune"
        )
    return "\n".join(lines)


def _built_for(switches: dict[str, Any]) -> str:
    if _switch(switches.get("GGML_CUDA", "OFF")) == "OFF":
        return "CPU only; with CUDA: pip install . -C cmake.define.GGML_CUDA=ON"
    archs = str(switches["CMAKE_CUDA_ARCHITECTURES"]).replace(";", ", ")
    return f"CPU and CUDA (architectures {archs}); for the CPU only: -C cmake.define.GGML_CUDA=OFF"


def _weight_types(build: dict[str, Any]) -> list[str]:
    """The weight types of the build's GPU kernels. In a build for one model, also their groups."""
    types = build["cuda_types"]
    if not types:
        return []
    profile = build["cuda_types_of"]
    pruned = f"; GGML_CUDA_PROFILE={profile} left out others" if profile else ""
    lines = [f"GPU weight types  {', '.join(types)}{pruned}"]
    if profile := build["cuda_groups_of"]:
        groups = ", ".join(build["cuda_groups"]) or "none"
        lines.append(f"GPU kernel groups {groups}; GGML_CUDA_PROFILE={profile} left out others")
    return lines


def _links(report: dict[str, Any] | None) -> list[str]:
    if report is None:
        return []
    lines = [f"device code       {report['device_code_bytes'] / 2**20:.1f} MiB of the module"]
    for step in ("device_link", "module_link"):
        if cost := report.get(step):
            size = f"{cost['bytes'] / 2**20:.1f} MiB"
            memory = f"largest process {cost['peak_process_mib']} MiB"
            lines.append(f"{step.replace('_', ' '):16}  {cost['seconds']} s, {memory}, {size}")
    return lines


def _switch(value: object) -> str:
    if isinstance(value, bool):
        return "ON" if value else "OFF"
    return str(value) if value != "" else "(empty)"


def _cpu(device: dict[str, Any]) -> list[str]:
    caches = ", ".join(
        f"{name} {device[key] // 1024} KiB"
        for name, key in (("L1d", "l1d_bytes"), ("L2", "l2_bytes"), ("L3", "l3_bytes"))
        if device.get(key)
    )
    return [
        f"  {device['device']}: {device['name']}",
        f"    kernels {device['isa']}, {device['cores']} cores, {caches}",
        f"    memory {device['memory_bytes'] / 2**30:.1f} GiB",
        f"    features {' '.join(device['features'])}",
    ]


def _limits(limits: dict[str, Any]) -> list[str]:
    quota = f"quota {limits['quota']:g} CPUs ({limits['quota_from']})" if limits["quota"] else "no quota"
    memory = (
        f"memory limit {limits['memory_bytes'] / 2**30:.1f} of {limits['installed_bytes'] / 2**30:.1f} GiB "
        f"({limits['memory_from']})"
        if limits["memory_from"]
        else "no memory limit"
    )
    threads = f"OMP_NUM_THREADS {limits['omp_threads']}" if limits["omp_threads"] else "no OMP_NUM_THREADS"
    if limits["omp"] and not limits["omp_threads"]:
        threads = f"OMP_NUM_THREADS {limits['omp']!a} ignored (not a number of threads)"
    return [
        f"    {limits['online']} CPUs online, affinity {limits['affinity']}, {quota}, {threads}, {memory}"
    ]


def _distances(found: dict[str, Any], cpus: int) -> list[str]:
    """How long a cache line takes from one CPU to another and back."""
    if cpus < 2:
        return []
    if not found["pairs"]:
        return [f"    between CPUs: unknown ({found['unknown']})"]
    first, second = found["farthest"]
    farthest = f", farthest {found['farthest_ns']:.0f} ns (cpu{first}, cpu{second})"
    return [
        f"    between CPUs: {found['median_ns']:.0f} ns for a cache line, there and back"
        f"{farthest if found['pairs'] > 1 else ''}"
    ]


def _nodes(nodes: list[dict[str, Any]]) -> list[str]:
    if len(nodes) < 2:
        return []
    return [
        f"    NUMA node {n['number']}: {len(n['cpus'])} of the CPUs, {n['memory_bytes'] / 2**30:.1f} GiB"
        for n in nodes
    ]


def _gpu(device: dict[str, Any]) -> list[str]:
    capability = device["compute_capability"]
    lines = [
        f"  {device['device']}: {device['name']}",
        f"    compute capability {capability // 10}.{capability % 10}, {device['sm_count']} SMs, "
        f"L2 {device['l2_bytes'] / 2**20:.0f} MiB",
        f"    memory {device['memory_bytes'] / 2**30:.1f} GiB",
    ]
    told = [
        f"{name} {device[key]:g}{unit}" if isinstance(device[key], float) else f"{name} {device[key]}{unit}"
        for name, key, unit in (
            ("driver", "driver", ""),
            ("power limit", "power_limit_w", " W"),
            ("SM clock up to", "max_sm_mhz", " MHz"),
        )
        if device.get(key) is not None
    ]
    if device.get("pcie_generation") and device.get("pcie_lanes"):
        told.append(f"PCIe {device['pcie_generation']}.0 x{device['pcie_lanes']}")
    if told:
        lines.append(f"    {', '.join(told)}")
    if device.get("problem"):
        lines.append(f"    not usable: {device['problem']}")
    return lines
