"""Single ops for the kernel stage: the ops with several kernels, and the times of their single launches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dyno import _core

from ...core.protocol import KernelOp

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ...core.protocol import Value, Workload

_KNOWN = (
    "kind", "name", "memory_bytes", "isa", "features", "cores", "l1d_bytes", "l2_bytes", "l3_bytes",
    "compute_capability", "sm_count", "shared_per_block_bytes", "pci_bus_id",
)  # fmt: skip


def plain_device(device: Mapping[str, Any]) -> dict[str, Any]:
    """The properties of a device that the kernel selection uses."""
    return {key: device[key] for key in _KNOWN if key in device}


def op_seconds(op: KernelOp, kind: str) -> float:
    """Approximate seconds of an op on a typical device (per pass; for prompts per token), for sorting ops."""
    family, desc = _core.ops.parse_key(op.key, op.m)
    moved, flops = _core.ops.cost(family, desc)
    memory, compute = (20e9, 200e9) if kind == "cpu" else (4e12, 4e14)
    seconds = max(float(moved) / memory, float(flops) / compute) * op.count
    return seconds / op.m if op.metric == "pp" else seconds


def depth_of(workload: Workload, metric: str) -> int:
    """The positions before the tokens of a metric: the mean of its parts, by their weights."""
    parts = [part for part in workload.parts if part.kind == metric]
    weight = sum(part.weight for part in parts)
    return round(sum(part.depth * part.weight for part in parts) / weight) if weight else workload.depth


def ops_with_choice(
    session: Any, device: Mapping[str, Any], kind: str, model: Mapping[str, Any], workload: Workload,
    ubatch: int,
) -> list[KernelOp]:  # fmt: skip
    """All ops of the model with several kernels, at the numbers of tokens in the workload."""
    wanted = {"tg": 1} if workload.tg else {}
    if workload.pp > 1:
        wanted["pp"] = min(ubatch, workload.pp)
    found: dict[tuple[str, str], KernelOp] = {}
    for metric, tokens in wanted.items():
        for op in session.ops(tokens, sequences=1):
            rows = int(op["rows"])
            family, desc = _core.ops.parse_key(op["key"], rows)
            if (op["device"] == "cpu") != (kind == "cpu") and kind == "cuda":
                continue  # its part on the CPU has other candidates
            if op["config"]["variant"] == "adaptive":
                continue  # each launch chooses; one choice would also serve depths that the workload lacks
            if op["path"] != "any":
                # The settings choose the path, and kernels of another path are rejected.
                desc["path"] = op["path"]
            known = plain_device(device)
            candidates = tuple(dict(c) for c in _core.ops.candidates(family, desc, known))
            if op["tiles"]:
                # Timed alone, an op reads and writes rows, so a kernel without f16 tiles would not show the
                # launch that tiles save.
                tiled = {**desc, **op["tiles"]}
                candidates = tuple(c for c in candidates if _core.ops.supports(family, tiled, c, known)[0])
            place = (str(op["key"]), str(op["tokens"]))
            if metric == "pp" and op["list"] == "draw":
                continue  # no token is drawn from a prompt of one token
            if metric == "pp" and family == "matmul" and desc.get("n") == model["n_vocab"]:
                continue  # the head only runs for the last row
            if len(candidates) > 1 and place not in found:
                depth = depth_of(workload, metric) if family == "attention" else 0
                found[place] = KernelOp(
                    place[0], place[1], rows, int(op["count"]), dict(op["config"]), candidates, metric, depth
                )
    # The most expensive ops come first, because the budget may end before the list.
    return sorted(found.values(), key=lambda o: -op_seconds(o, kind))


def op_times(
    key: str, m: int, configs: Sequence[Mapping[str, Value]], device: Mapping[str, Any], name: str,
    weights: int, *, threads: int, seconds: float, depth: int = 0,
) -> list[list[float]]:  # fmt: skip
    """The single-launch times of an op with each configuration, in seconds.

    Args:
        device, name: The device and its name.
        weights: Bytes of the model file.
        seconds: Least seconds of work for each configuration.
        depth: Positions in the cache before the tokens, for attention.
    """
    family, desc = _core.ops.parse_key(key, m)
    # Between two uses of a weight, the rest of the model passes through the caches. For a large model, 256
    # MiB are enough to leave no cache warm.
    cold = 2 * int(device.get("l2_bytes") or 1 << 20)
    rotate = cold if name != "cpu" else max(cold, weights)
    times = _core.ops.time_configs(
        family, desc, [dict(c) for c in configs], threads=threads, min_seconds=seconds,
        rotate_bytes=min(rotate, 1 << 28), device=name, depth=depth,
    )  # fmt: skip
    return [[float(t) for t in samples] for samples in times]
