"""A tune on the workers of a Ray cluster."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING

from .session import run, target_of

if TYPE_CHECKING:
    from ..execution.ray_workers import Cluster
    from .session import Request, Result


def tune_on(cluster: Cluster, request: Request, workers: int | None = None) -> Result:
    """A tune on this number of workers of the cluster; None: one per GPU, or per node for the CPU engine."""
    if workers is None:
        workers = max(1, cluster.gpus if request.device.startswith("cuda") else len(cluster.nodes))
    device = "cuda:0" if request.device.startswith("cuda") else "cpu"  # the only one that Ray makes visible
    name, options = target_of(request, device, None)
    with contextlib.ExitStack() as stack:
        stack.callback(cluster.release)
        placed = cluster.workers(workers, name, options, cluster.needs(device))
        for executor in placed:
            stack.callback(executor.close)
        names = [executor.name for executor in placed]
        request = dataclasses.replace(request, device=names[0], others=tuple(names[1:]))
        return run(request, placed[0], others=placed[1:])
