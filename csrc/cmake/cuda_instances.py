"""Decides which optional kernel instances a build leaves out; writes them for csrc/ops/instances.h.

Usage: cuda_instances.py --select all|minimal [--profile FILE] --types LIST --output FILE VARIANTS.def…

`all` leaves nothing out, `minimal` every DYNO_OPTIONAL instance of the GPU variants. With a profile
those stay that one of its kernels names, for the weight types that it names them for. Prints how many
of how many are left out.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

ENTRY = re.compile(r"^DYNO_(VARIANT|INSTANCE|OPTIONAL)\(([^)]*)\)", re.MULTILINE)
NOT_A_PARAMETER = {"variant", "ratio", "ci95", "n", "group", "note", "moves"}


class ProfileMismatchError(Exception):
    """The profile cannot be built for; the message says which entry, and what would be valid."""


@dataclass
class Family:
    """One variants.def: parameter names of the GPU variants, and their instances."""

    name: str
    params: dict[str, tuple[str, ...]] = field(default_factory=dict)
    instances: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)
    optional: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    others: set[str] = field(default_factory=set)  # variants of other devices


def read_family(path: Path) -> Family:
    family = Family(path.parent.name)
    for kind, inside in ENTRY.findall(path.read_text(encoding="utf-8")):
        name, *rest = (part.strip() for part in inside.split(","))
        if kind == "VARIANT":
            if rest[0] == "cuda":
                family.params[name] = tuple(rest[2:])
            else:
                family.others.add(name)
        elif name in family.params:
            instance = (name, tuple(int(part) for part in rest))
            family.instances.add(instance)
            if kind == "OPTIONAL":
                family.optional.append(instance)
        elif kind == "OPTIONAL":
            raise SystemExit(
                f"{path}: DYNO_OPTIONAL({inside}): only instances of cuda variants can be left out"
            )
    return family


def nearest(name: str, known: set[str]) -> str:
    found = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; nearest: {found[0]}" if found else ""


def named_by_profile(
    path: Path, families: Mapping[str, Family], types: set[str]
) -> set[tuple[str, tuple[int, ...], str]]:
    """(variant, parameters, weight type or "") of every kernel that the profile names."""
    try:
        import yaml
    except ImportError:
        raise ProfileMismatchError("reading a profile needs PyYAML for the Python of the build") from None
    try:
        profile = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ProfileMismatchError(f"cannot be read: {error}") from None
    if not isinstance(profile, dict) or profile.get("schema") != 1:
        raise ProfileMismatchError("is not a profile: a mapping with schema: 1 is expected")
    match = profile.get("match")
    device = match.get("device") if isinstance(match, dict) else None
    kind = device.get("kind") if isinstance(device, dict) else None
    if kind != "cuda":
        raise ProfileMismatchError(
            f"was made for a device of kind {kind}; a CUDA build needs one of kind cuda"
        )
    kernels = profile.get("kernels") or {}
    if not isinstance(kernels, dict):
        raise ProfileMismatchError(f"kernels: a mapping is expected, not {type(kernels).__name__}")
    named = set()
    for key, ranges in kernels.items():
        if key == "default":
            continue  # a list of kernels that stay as they are: in every build
        family_name, *words = str(key).split() or [""]
        if family_name not in families:
            raise ProfileMismatchError(
                f"kernels: '{key}': no op family '{family_name}'" + nearest(family_name, set(families))
            )
        if not isinstance(ranges, dict):
            continue  # `default`: in every build
        weight_type = words[0] if words and "=" not in words[0] else ""
        if weight_type and weight_type not in types:
            raise ProfileMismatchError(
                f"kernels: '{key}': no kernels for type {weight_type}{nearest(weight_type, types)}"
            )
        for tokens, entry in ranges.items():
            if isinstance(entry, dict):
                where = f"kernels: '{key}': {tokens}"
                variant, params = read_entry(where, entry, families[family_name])
                named.add((variant, params, weight_type))
    return named


def read_entry(where: str, entry: Mapping[str, Any], family: Family) -> tuple[str, tuple[int, ...]]:
    variant = str(entry.get("variant"))
    if variant not in family.params:
        hint = (
            " runs on another device"
            if variant in family.others
            else f" does not exist{nearest(variant, set(family.params))}"
        )
        raise ProfileMismatchError(f"{where}: variant {variant} of {family.name}{hint}")
    given = {key: value for key, value in entry.items() if key not in NOT_A_PARAMETER}
    if given.keys() != set(family.params[variant]):
        expected = ", ".join(family.params[variant]) or "none"
        raise ProfileMismatchError(
            f"{where}: parameters of {variant} are {expected}, not {', '.join(given) or 'none'}"
        )
    params = tuple(given[name] for name in family.params[variant])
    if (variant, params) not in family.instances:
        table = f"{family.name}/variants.def"
        raise ProfileMismatchError(f"{where}: {variant} {given} is not an instance of {table}")
    return variant, params


def left_out(
    families: Mapping[str, Family], named: set[tuple[str, tuple[int, ...], str]]
) -> list[tuple[str, tuple[int, ...], list[str]]]:
    """Optional instances with the weight types that keep them. Variants of one name share kernels."""
    rows: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    always = {
        instance for family in families.values() for instance in family.instances - set(family.optional)
    }
    for family in families.values():
        for instance in family.optional:
            if instance not in always:
                rows[instance] = sorted({kept for *what, kept in named if tuple(what) == instance})
    return [(variant, params, kept) for (variant, params), kept in rows.items()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--select", choices=("all", "minimal"), required=True)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--types", required=True, help="weight types that have kernels, with commas")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("variants", nargs="+", type=Path)
    args = parser.parse_args()
    families = {family.name: family for family in map(read_family, args.variants)}
    rows = []
    if args.profile is not None or args.select == "minimal":
        try:
            named = (
                named_by_profile(args.profile, families, set(args.types.split(",")))
                if args.profile is not None
                else set()
            )
        except ProfileMismatchError as error:
            print(f"{args.profile} {error}", file=sys.stderr)
            return 1
        rows = left_out(families, named)
    lines = ["// Generated by csrc/cmake/cuda_instances.py: variant, parameters, weight types that keep it."]
    for variant, params, kept in rows:
        bits = " | ".join(f"type_bit(DType::{name})" if name else "kNoTypeBit" for name in kept) or "0"
        lines.append(f'{{"{variant}", {{{", ".join(map(str, params))}}}, {bits}}},')
    text = "\n".join(lines) + "\n"
    if not args.output.exists() or args.output.read_text(encoding="utf-8") != text:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(text, encoding="utf-8")  # written only on a change: everything includes it
    total = len({instance for family in families.values() for instance in family.optional})
    print(f"{sum(1 for row in rows if not row[2])} of {total} optional kernel instances left out")
    return 0


if __name__ == "__main__":
    sys.exit(main())
