"""The stages from a file to its kernels, each as plain values and as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dyno import _expected

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dyno.engine import Engine

_LONG_ARRAY = 8


def gguf(path: str) -> tuple[dict[str, Any], str]:
    """The file: version, metadata (long arrays cut short) and tensors.

    Raises:
        GgufError: The file is not valid GGUF.
    """
    from dyno import _core

    file = _core.Gguf(path)
    tensors = [{**t, "shape": list(t["shape"])} for t in file.tensors()]
    result = {
        "path": str(file.path),
        "version": file.version,
        "alignment": file.alignment,
        "file_bytes": file.file_bytes,
        "metadata": {key: _plain(file.get(key)) for key in file.keys()},  # noqa: SIM118 - not a dict
        "tensors": [{k: str(v) if k == "file" else v for k, v in t.items()} for t in tensors],
    }
    return result, str(file.describe())


def model(path: str) -> tuple[dict[str, Any], str]:
    """The model in the file: architecture, dimensions and the parts of each layer.

    Raises:
        GgufError, ModelError, UnsupportedError: The file does not describe a model that can be built.
    """
    from dyno import _core

    return dict(_core.describe_model(path)), str(_core.describe_model_text(path))


def plan(engine: Engine, *, nodes: bool = False) -> tuple[dict[str, Any], str]:
    """The device of each tensor, the memory budget, the expected time, and all settings with their origins.

    Args:
        engine: The engine with the plan.
        nodes: Whether to add each launch with its operands.
    """
    origins = engine.settings.origins
    settings = {k: {"value": v, "origin": origins[k]} for k, v in engine.settings.items()}
    width = max(len(name) for name in settings)
    lines = [f"  {k:{width}}  {v['value']!s:12}  {v['origin']}" for k, v in settings.items()]
    found = _expected.expected(engine)
    parts = [engine.describe_plan().rstrip(), *_expected.lines(found), "settings", *lines]
    text = "\n".join(parts)
    result = {**engine.plan, "expected": found, "settings": settings}
    if nodes:
        result["nodes"] = engine.describe_nodes()
        several = len({node["device"] for node in result["nodes"]}) > 1
        text = "\n".join([text, "launches", *(_launch(node, several) for node in result["nodes"])])
    return result, text


def shortages(plan: Mapping[str, Any]) -> list[str]:
    """A line for each device with a memory limit below the memory that the plan needs. A plan alone is no
    error, but a session of it would be."""
    lines = []
    for device in plan["devices"]:
        parts = ("weights", "kv", "state", "arena", "stream")
        needed, limit = sum(int(device[f"{part}_bytes"]) for part in parts), int(device["memory_limit"])
        if 0 < limit < needed:
            lines.append(
                f"{device['name']} needs {needed / 2**20:.1f} MiB, and its limit is {limit / 2**20:.1f} MiB: "
                "the model does not run with these options"
            )
    return lines


def _launch(node: dict[str, Any], several: bool) -> str:
    """One line: the list, the device if there are several, the launch, its key, and its operands by name."""
    shown = [f"{name}={_operand(value)}" for name, value in node["operands"].items() if value is not None]
    device = f" [{node['device']}]" if several else ""
    return f"  {node['list']}{device} {node['name']}: {node['key']} ({', '.join(shown)})"


def _operand(operand: Any) -> str:
    if not isinstance(operand, dict):
        return f"{operand:g}" if isinstance(operand, float) else str(operand)
    if "access" not in operand:  # a group, such as the norm of a product's rows
        inside = [f"{name}={_operand(value)}" for name, value in operand.items() if value is not None]
        return "[" + ", ".join(inside) + "]"
    place = operand["arena_offset"]
    return f"{operand['access']} {operand['name']}" + ("" if place is None else f" @{place}")


def ops(engine: Engine, tokens: int | None) -> tuple[dict[str, Any], str]:
    """All ops with their configurations and the reasons for them; also the state of the profile's kernels."""
    found = engine.describe_ops(tokens)
    several = len({op["device"] for op in found}) > 1
    header = ("list", "count", "op", "rows", "configuration", "why", "bytes", "flops")
    rows = [
        (
            f"{op['list']} [{op['device']}]" if several else str(op["list"]),
            str(op["count"]),
            str(op["key"]),
            str(op["tokens"]),
            " ".join(str(v) if k == "variant" else f"{k}={v}" for k, v in op["config"].items()),
            str(op["reason"]),
            _scaled(op["bytes"], "B"),
            _scaled(op["flops"], ""),
        )
        for op in found
    ]
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in (header, *rows)
    ]
    entries = engine.kernel_report()
    if entries:
        lines.append("kernels of the profile")
    lines += [f"  {row['status']:8}  {row['key']} {row['tokens']}: {row['reason']}" for row in entries]
    return {"ops": found, "kernels": entries}, "\n".join(lines)


def _plain(value: Any) -> Any:
    """A metadata value for JSON. Long arrays are shown as their length and beginning."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list):
        if len(value) > _LONG_ARRAY:
            return {"length": len(value), "first": [_plain(v) for v in value[:_LONG_ARRAY]]}
        return [_plain(v) for v in value]
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return value


def _scaled(number: float, unit: str) -> str:
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f} {prefix}{unit}"
    return f"{number:.0f} {unit}".rstrip()
