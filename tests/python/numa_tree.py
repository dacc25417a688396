"""A made-up tree of /sys and /proc with NUMA nodes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class Node(NamedTuple):
    """A node as the kernel describes it."""

    cpus: str
    mib: int = 1024
    distances: str = ""


def write_nodes(root: Path, nodes: Sequence[Node], allowed: str = "") -> Path:
    """Writes the nodes 0, 1, … and returns `root`.

    Args:
        root: the folder that stands for "/".
        nodes: in the order of their numbers.
        allowed: the list of nodes whose memory the process may use; empty: the kernel tells none.
    """
    for number, node in enumerate(nodes):
        folder = root / f"sys/devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{node.cpus}\n")
        kib = node.mib << 10
        (folder / "meminfo").write_text(
            f"Node {number} MemTotal:       {kib} kB\nNode {number} MemFree:        {kib // 2} kB\n"
        )
        if node.distances:
            (folder / "distance").write_text(f"{node.distances}\n")
    (root / "sys/devices/system/node/has_cpu").write_text("0\n")
    if allowed:
        (root / "proc/self").mkdir(parents=True)
        status = f"Name:\tx\nMems_allowed:\tff\nMems_allowed_list:\t{allowed}\n"
        (root / "proc/self/status").write_text(status)
    return root


def cores() -> str:
    """The cores of this process, as the kernel writes such a list."""
    return ",".join(str(cpu) for cpu in sorted(os.sched_getaffinity(0)))
