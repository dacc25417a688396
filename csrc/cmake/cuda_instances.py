"""Decides which CUDA kernels a build leaves out; writes them for csrc/ops/instances.h.

Usage: cuda_instances.py --select all|minimal [--profile FILE] [--architectures LIST]
                         --csrc FOLDER --output FOLDER

`left_out.inc` lists instances: `all` leaves nothing out, `minimal` every DYNO_OPTIONAL instance of the
GPU variants. A build for 90a alone leaves these out in any case, and the variants that only older chips
need. With a profile those stay that one of its kernels names, for the weight types that it names them
for. `left_out_variants.inc` lists the variants of which no instance is left. `built_types.inc` lists the
weight types that have kernels. With a profile these are the types of its model, as a GPU reads them.
`built_groups.inc` lists the groups of kernels, with a profile those that its model needs
(cuda_groups.py). Prints how much is left out.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent))
from cuda_groups import groups_of_model, read_groups

if TYPE_CHECKING:
    from collections.abc import Mapping

ENTRY = re.compile(r"^DYNO_(VARIANT|INSTANCE|OPTIONAL)\(([^)]*)\)", re.MULTILINE)
WEIGHT_TYPE = re.compile(r"^DYNO_(FLOAT|QUANT|GPU|CODED|VALUES|INTERLEAVED)_TYPE\(([^)]*)\)", re.MULTILINE)
PAIR = re.compile(r"^DYNO_(?:GPU_FORM|MIXED)\((\w+), (\w+)\)", re.MULTILINE)
ALWAYS = {"f32"}  # routers, and what is computed from other weights at load
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


@dataclass
class Types:
    """The lists of weight types: those with kernels for a GPU, by kind, and what others are read as."""

    kernels: dict[str, str] = field(default_factory=dict)  # name: FLOAT, QUANT or GPU
    read_as: dict[str, str] = field(default_factory=dict)
    mixed: list[tuple[str, str]] = field(default_factory=list)  # pairs that one launch multiplies with

    def on_gpu(self, name: str) -> str | None:
        """The type whose kernels read weights of type `name`; None for a name that is no weight type."""
        name = self.read_as.get(name, name)  # of an interleaved type: its plain one
        name = self.read_as.get(name, name)
        return name if name in self.kernels else None


def read_types(csrc: Path) -> Types:
    types = Types()
    for kind, inside in WEIGHT_TYPE.findall((csrc / "core/weight_types.def").read_text(encoding="utf-8")):
        name, *rest = (part.strip() for part in inside.split(","))
        if kind in ("FLOAT", "QUANT", "GPU"):
            types.kernels[name] = kind
        elif kind == "INTERLEAVED":
            types.read_as[name] = rest[4]
    types.read_as |= PAIR.findall((csrc / "gguf/gpu_forms.def").read_text(encoding="utf-8"))
    types.mixed = PAIR.findall((csrc / "ops/matmul/cuda/mixed_types.def").read_text(encoding="utf-8"))
    return types


def types_of_model(profile: Mapping[str, Any], types: Types) -> set[str] | None:
    """Types with kernels that the profile's model needs; None if the profile names no model."""
    model = profile["match"].get("model")
    shares = model.get("types") if isinstance(model, dict) else None
    if not isinstance(shares, dict) or not shares:
        return None
    needed = set()
    for name in shares:
        on_gpu = types.on_gpu(str(name).lower())
        if on_gpu is None:
            known = {known.upper() for known in (*types.kernels, *types.read_as)}
            raise ProfileMismatchError(f"match.model.types: no weight type {name}{nearest(str(name), known)}")
        needed.add(on_gpu)
    return needed


def nearest(name: str, known: set[str]) -> str:
    found = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; nearest: {found[0]}" if found else ""


def load_profile(path: Path) -> dict[str, Any]:
    """A profile that was made for a GPU."""
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
    return profile


def named_by_profile(
    profile: Mapping[str, Any], families: Mapping[str, Family], types: Types
) -> set[tuple[str, tuple[int, ...], str]]:
    """(variant, parameters, weight type or "") of every kernel that the profile names."""
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
        if weight_type and weight_type not in types.kernels:
            hint = nearest(weight_type, set(types.kernels))
            raise ProfileMismatchError(f"kernels: '{key}': no kernels for type {weight_type}{hint}")
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


PRODUCTS = frozenset({"matmul", "matmul_id", "up_gate", "moe_up_gate"})
BEFORE_HOPPER = {"mma": PRODUCTS, "half_mma": PRODUCTS, "flash": frozenset({"attention"})}
"""Variants that no default takes on a chip with warpgroup products, with their families. Variants with such
products run all of their shapes (csrc/ops/matmul/cuda/choice.cpp, csrc/ops/attention/attention.cpp)."""

FASTEST_ONCE = ("bf16", "f16")
"""Types for which a tune on Hopper can choose `mma`. It was the fastest for two of 82 products, both of f16
(benchmarks/results/ops_cuda_products_h200.json)."""


def instances_of(families: Mapping[str, Family], variant: str) -> list[tuple[str, tuple[int, ...]]]:
    """The instances of a variant of BEFORE_HOPPER."""
    named = [families[name] for name in sorted(BEFORE_HOPPER[variant]) if name in families]
    return sorted({instance for family in named for instance in family.instances if instance[0] == variant})


def plain_tiles(families: Mapping[str, Family], variant: str) -> list[tuple[str, tuple[int, ...]]]:
    """Its instances that other builds never leave out."""
    optional = {instance for family in families.values() for instance in family.optional}
    return [instance for instance in instances_of(families, variant) if instance not in optional]


def make_optional(families: Mapping[str, Family], variants: set[str]) -> None:
    """Makes all instances of variants of BEFORE_HOPPER optional."""
    for variant in sorted(variants):
        for name in sorted(BEFORE_HOPPER[variant] & families.keys()):
            family = families[name]
            made = [i for i in sorted(family.instances) if i[0] == variant and i not in family.optional]
            family.optional += made


def left_out_variants(
    families: Mapping[str, Family], rows: list[tuple[str, tuple[int, ...], list[str]]]
) -> list[tuple[str, list[str]]]:
    """Variants of BEFORE_HOPPER whose instances are all left out, but for the weight types beside them."""
    kept = {(variant, params): types for variant, params, types in rows}
    found = []
    for variant in BEFORE_HOPPER:
        instances = instances_of(families, variant)
        if instances and all(instance in kept for instance in instances):
            found.append((variant, sorted({name for instance in instances for name in kept[instance]})))
    return found


def write(path: Path, lines: list[str]) -> None:
    text = "\n".join(["// Generated by csrc/cmake/cuda_instances.py.", *lines]) + "\n"
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")  # written only on a change: everything includes it


def bits_of(kept: list[str]) -> str:
    return " | ".join(f"type_bit(DType::{name})" if name else "kNoTypeBit" for name in kept) or "0"


def instance_lines(rows: list[tuple[str, tuple[int, ...], list[str]]]) -> list[str]:
    lines = ["// Variant, parameters, weight types that keep it."]
    for variant, params, kept in rows:
        lines.append(f'{{"{variant}", {{{", ".join(map(str, params))}}}, {bits_of(kept)}}},')
    return lines


def variant_lines(rows: list[tuple[str, list[str]]]) -> list[str]:
    lines = ["// Variant without instances, weight types that keep some."]
    return lines + [f'{{"{variant}", {bits_of(kept)}}},' for variant, kept in rows]


def type_lines(types: Types, built: set[str], profile: str) -> list[str]:
    """Calls of macros of which the includer defines some."""
    macros = [f"DYNO_BUILT_{name}" for name in ("FLOAT", "QUANT", "GPU", "MIXED", "FOR")]
    lines = ["// Weight types with kernels, pairs that share a launch, the profile that left out others."]
    for macro in macros:
        lines += [f"#ifndef {macro}", f"#define {macro}(...)", "#endif"]
    lines += [f"DYNO_BUILT_{kind}({name})" for name, kind in types.kernels.items() if name in built]
    lines += [f"DYNO_BUILT_MIXED({a}, {b})" for a, b in types.mixed if {a, b} <= built]
    lines.append(f"DYNO_BUILT_FOR({json.dumps(profile, ensure_ascii=False)})")
    return lines + [f"#undef {macro}" for macro in macros]


def group_lines(groups: list[str], profile: str) -> list[str]:
    """Calls of macros of which the includer defines one."""
    macros = ("DYNO_BUILT_GROUP", "DYNO_GROUPS_FOR")
    lines = ["// Groups with kernels, and the profile that left out others."]
    for macro in macros:
        lines += [f"#ifndef {macro}", f"#define {macro}(...)", "#endif"]
    lines += [f"DYNO_BUILT_GROUP({name})" for name in groups]
    lines.append(f"DYNO_GROUPS_FOR({json.dumps(profile, ensure_ascii=False)})")
    return lines + [f"#undef {macro}" for macro in macros]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--select", choices=("all", "minimal"), required=True)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--architectures", default="", help="as CMAKE_CUDA_ARCHITECTURES: 75;90a")
    parser.add_argument(
        "--csrc", type=Path, required=True, help="folder with the lists of types and variants"
    )
    parser.add_argument("--output", type=Path, required=True, help="folder of the files")
    args = parser.parse_args()
    variants = sorted(args.csrc.glob("ops/*/variants.def"))
    families = {family.name: family for family in map(read_family, variants)}
    types = read_types(args.csrc)
    built = set(types.kernels)
    every_group = groups = read_groups(args.csrc)
    hopper_alone = bool(args.architectures) and all(
        re.fullmatch(r"90a(-real|-virtual)?", arch) for arch in args.architectures.split(";")
    )
    rows = []
    if args.profile is not None or args.select == "minimal" or hopper_alone:
        try:
            named = set()
            if args.profile is not None:
                profile = load_profile(args.profile)
                named = named_by_profile(profile, families, types)
                groups = groups_of_model(profile, args.csrc)
                if needed := types_of_model(profile, types):
                    built = ALWAYS | needed | {kept for *_, kept in named if kept}
        except ProfileMismatchError as error:
            print(f"{args.profile} {error}", file=sys.stderr)
            return 1
        if hopper_alone:
            kept = set(FASTEST_ONCE) if args.select == "all" and args.profile is None else set()
            if any(variant == "half_mma" for variant, *_ in named):
                kept.add("f16")  # half_mma multiplies with kernels of mma for f16
            named |= {(*tile, name) for tile in plain_tiles(families, "mma") for name in kept}
            make_optional(families, set(BEFORE_HOPPER) - ({"half_mma"} if kept else set()))
        rows = left_out(families, named)
    write(args.output / "left_out.inc", instance_lines(rows))
    write(args.output / "left_out_variants.inc", variant_lines(left_out_variants(families, rows)))
    name = args.profile.name.encode("utf-8", "replace").decode() if args.profile else ""
    pruned = name if built < set(types.kernels) else ""
    write(args.output / "built_types.inc", type_lines(types, built, pruned))
    write(args.output / "built_groups.inc", group_lines(groups, name if groups != every_group else ""))
    total = len({instance for family in families.values() for instance in family.optional})
    print(f"{sum(1 for row in rows if not row[2])} of {total} optional kernel instances left out")
    if pruned:
        print(
            f"kernels for weights of type {', '.join(name for name in types.kernels if name in built)} alone"
        )
    if left := [group for group in every_group if group not in groups]:
        print(f"no kernels for {', '.join(left)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
