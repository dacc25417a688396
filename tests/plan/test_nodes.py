"""Launches with their operands: by name, with lives that follow from their use, apart in the arena."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from dyno import _core

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "tests" / "data" / "tiny"
NAMES = sorted(p.name.removesuffix("-tiny.gguf") for p in TINY.glob("*-tiny.gguf"))
HOPPER = {"kind": "cuda", "compute_capability": 90, "sm_count": 132, "shared_per_block_bytes": 232_448}
AMPERE = HOPPER | {"compute_capability": 86, "shared_per_block_bytes": 101_376}

Node = dict[str, Any]


def nodes_of(name: str, device: dict[str, Any] | None = HOPPER) -> list[Node]:
    path = TINY / f"{name}-tiny.gguf"
    session = _core.Session(path, session={"cuda_graphs": False}, plan_only=True, device=device)
    return list(session.nodes())


def values_of(node: Node) -> list[dict[str, Any]]:
    return [o for o in node["operands"].values() if isinstance(o, dict) and "access" in o]


def in_lists(nodes: list[Node]) -> dict[str, list[Node]]:
    lists: dict[str, list[Node]] = {}
    for node in nodes:
        lists.setdefault(node["list"], []).append(node)
    return lists


@pytest.mark.parametrize("device", [HOPPER, None], ids=["gpu", "cpu"])
@pytest.mark.parametrize("name", NAMES)
def test_a_value_lives_from_its_first_use_to_its_last(name: str, device: dict[str, Any] | None) -> None:
    """Of every operand that any family has: one that was forgotten would share its memory with others."""
    for nodes in in_lists(nodes_of(name, device)).values():
        uses: dict[int, list[int]] = {}
        for at, node in enumerate(nodes):
            for operand in values_of(node):
                uses.setdefault(operand["value"], []).append(at)
        placed: dict[int, dict[str, Any]] = {}
        for node in nodes:
            for operand in values_of(node):
                if operand["arena_offset"] is None:
                    continue
                mine = uses[operand["value"]]
                assert (operand["first_use"], operand["last_use"]) == (mine[0], mine[-1]), operand
                placed[operand["value"]] = operand
        for one in placed.values():
            for other in placed.values():
                lives = one["first_use"] <= other["last_use"] and other["first_use"] <= one["last_use"]
                if one["value"] >= other["value"] or not lives:
                    continue
                first, second = sorted((one, other), key=lambda v: v["arena_offset"])
                assert first["arena_offset"] + first["bytes"] <= second["arena_offset"], (one, other)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_read_before_it_is_written(name: str) -> None:
    for label, nodes in in_lists(nodes_of(name)).items():
        if label == "draw":  # reads the logits of the other lists
            continue
        written = set()
        for node in nodes:
            for operand in values_of(node):
                scratch = node["operands"].get("workspace") is operand
                if operand["access"] != "write" and not scratch:
                    assert operand["value"] in written, (node["name"], operand)
            written |= {o["value"] for o in values_of(node) if o["access"] != "read"}


@cache
def struct_fields(family: str) -> list[str]:
    """Names of a family's operands, from the list in the source."""
    stem = "".join(word.capitalize() for word in family.split("_"))
    for path in (ROOT / "csrc").rglob("*.h"):
        found = re.search(rf"DYNO_FIELDS\({stem}Operands,([^)]*)\)", path.read_text(encoding="utf-8"))
        if found:
            return re.findall(r"\w+", found[1])
    raise AssertionError(f"no operands of {family}")


def test_operands_have_the_names_of_the_struct() -> None:
    seen = set()
    for name in NAMES:
        for node in nodes_of(name) + nodes_of(name, AMPERE) + nodes_of(name, None):
            family = node["key"].split(" ")[0]
            assert list(node["operands"]) == struct_fields(family)
            seen.add(family)
    assert seen == set(_core.ops.families()) - {
        *("transfer", "moe_split"),  # several devices
        "index_select",  # only of sparse attention
    }


def test_weights_and_numbers_are_shown() -> None:
    (up_gate,) = [n for n in nodes_of("llama", None) if n["name"] == "blk.0.ffn_up_gate"]
    operands = up_gate["operands"]
    assert operands["w_gate"] == "blk.0.ffn_gate.weight"
    assert operands["w_up"] == "blk.0.ffn_up.weight"
    assert operands["bias_gate"] is None
    assert operands["x"]["access"] == "read"
    assert operands["y"]["access"] == "write"
    (norm,) = [n for n in nodes_of("llama", None) if n["name"] == "blk.0.ffn_norm"]
    assert 0 < norm["operands"]["eps"] < 1e-3
