"""The expected bytes and times of a plan, by device and layer, as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dyno.engine import Engine

__all__ = ["expected", "lines"]


def expected(engine: Engine) -> dict[str, Any]:
    """Bytes and seconds by device and layer, for one token and for a whole u-batch.

    Returns:
        `rates`: names of the devices whose rates were measured; other devices have assumed rates. `loads`:
        for each number of tokens the `parts` of `Diagnostics.expected_cost`, and the total `seconds` of
        `Diagnostics.expected_seconds`.
    """
    loads = []
    for tokens in dict.fromkeys((1, int(engine.settings["ubatch"]))):
        parts = engine.diagnostics.expected_cost(tokens)
        seconds = engine.diagnostics.expected_seconds(tokens)
        loads.append({"tokens": tokens, "seconds": seconds, "parts": parts})
    return {"rates": engine._rates or {}, "loads": loads}


def lines(found: dict[str, Any]) -> list[str]:
    """The table as lines of text. Consecutive layers with equal costs share a line."""
    rates = found["rates"]
    source = f"measured rates of {', '.join(rates)}" if rates else "assumed rates; `tune probe` measures them"
    loads = found["loads"]
    header = ["device", "layers", "weights", *(_tokens(load["tokens"]) for load in loads), "transfers"]
    rows = [header]
    for group in _groups(loads):
        first = group[0][0]
        rows.append(
            [
                str(first["device"]),
                _layers([parts[0]["layer"] for parts in group]),
                f"{sum(parts[0]['weights_bytes'] for parts in group) / (1 << 20):.1f} MiB",
                *(_us(sum(parts[i]["seconds"] for parts in group)) for i in range(len(loads))),
                " / ".join(
                    _us(sum(parts[i]["transfer_seconds"] for parts in group)) for i in range(len(loads))
                ),
            ]
        )
    rows.append(["total", "", "", *(_us(load["seconds"]) for load in loads), _overlap(loads)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    table = ["  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [f"expected time ({source})", *table]


def _overlap(loads: list[dict[str, Any]]) -> str:
    """A remark if the total is not the sum of the lines."""
    sums = [sum(p["seconds"] + p["transfer_seconds"] for p in load["parts"]) for load in loads]
    beside = any(load["seconds"] < 0.999 * all_ for load, all_ in zip(loads, sums, strict=True))
    return "less than the sum, because parts run in parallel" if beside else "included"


def _groups(loads: list[dict[str, Any]]) -> list[list[list[dict[str, Any]]]]:
    """The lines of the table: for each a list of layers, and for each layer the parts of all loads."""
    every: dict[tuple[str, int | None], list[dict[str, Any]]] = {}
    for load in loads:
        for part in load["parts"]:
            every.setdefault((part["device"], part["layer"]), []).append(part)
    groups: list[list[list[dict[str, Any]]]] = []
    devices = dict.fromkeys(device for device, _ in every)
    for device in devices:
        for (owner, _), parts in every.items():
            if owner != device or len(parts) != len(loads):
                continue
            if groups and _alike(groups[-1][-1], parts):
                groups[-1].append(parts)
            else:
                groups.append([parts])
    return groups


def _alike(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    first, second = one[0], other[0]
    if first["device"] != second["device"] or first["layer"] is None or second["layer"] != first["layer"] + 1:
        return False
    return all(
        a["launches"] == b["launches"] and abs(a["seconds"] - b["seconds"]) <= 0.05 * b["seconds"]
        for a, b in zip(one, other, strict=True)
    )


def _layers(numbers: list[int | None]) -> str:
    if numbers[0] is None:
        return "rest"
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us"
