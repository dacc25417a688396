"""The groups of GPU kernels (csrc/ops/kernel_groups.def) that the model of a profile needs.

A group is left out only if the profile proves that its model does not need it: by the architecture
(csrc/model/architectures.def), the number of experts, and the heads in the names of its kernels.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

GROUP = re.compile(r"^DYNO_KERNEL_GROUP\((\w+),", re.MULTILINE)
ARCHITECTURE = re.compile(r'^DYNO_ARCHITECTURE\("([^"]+)", \w+, \w+([^)]*)\)', re.MULTILINE)
HEADS = re.compile(r"\bdk=(\d+) dv=(\d+)\b")
ATTENTION = ("attention", "rope_attention", "qkv_rope_store")
OF_FAMILIES = {
    **dict.fromkeys(
        ("matmul_id", "moe_up_gate", "moe_route", "moe_sum", "moe_down_sum", "moe_split", "norm_route"),
        "experts",
    ),
    **{
        "mla_expand": "latent",
        "index_select": "latent",
        "linear_attention": "linear_attention",
        "short_conv": "short_conv",
    },
}


@dataclass(frozen=True)
class Heads:
    """The heads of an attention op."""

    dk: int
    dv: int
    latent: bool

    @property
    def groups(self) -> set[str]:
        """As attention_groups() of csrc/ops/kernel_groups.h."""
        widest = max(self.dk, self.dv)
        found = {"latent"} if self.latent else set()
        if widest > 512:
            return found if self.latent or self.dv <= 256 else {"heads_512"}
        flash = 192 if 128 < self.dk <= 192 and self.dv <= 128 else padded(widest)
        return found | {f"heads_{flash}", f"heads_{padded(widest)}"}


def padded(widest: int) -> int:
    return next(size for size in (64, 128, 256, 512) if widest <= size)


def read_groups(csrc: Path) -> list[str]:
    return GROUP.findall((csrc / "ops/kernel_groups.def").read_text(encoding="utf-8"))


def read_architectures(csrc: Path) -> dict[str, set[str]]:
    """Groups besides heads that models of each architecture may need, and `several_heads`."""
    text = (csrc / "model/architectures.def").read_text(encoding="utf-8")
    return {name: set(re.findall(r"\w+", groups)) for name, groups in ARCHITECTURE.findall(text)}


def keys_of(profile: Mapping[str, Any]) -> Iterator[str]:
    """The names of kernels in a profile, without numbers of tokens."""
    for key, ranges in (profile.get("kernels") or {}).items():
        if key != "default":
            yield str(key)
        elif isinstance(ranges, list):
            yield from (str(item).partition(" ")[2] for item in ranges)


def groups_of_model(profile: Mapping[str, Any], csrc: Path) -> list[str]:
    """The groups that a build for the profile keeps, in the order of their list."""
    every = read_groups(csrc)
    model = profile["match"].get("model")
    needed = read_architectures(csrc).get(str(model.get("architecture"))) if isinstance(model, dict) else None
    if needed is None:
        return every
    if model.get("experts") == 0:
        needed = needed - {"experts"}
    heads = set()
    for key in keys_of(profile):
        family, *words = key.split() or [""]
        if family in OF_FAMILIES:
            needed = needed | {OF_FAMILIES[family]}
        if family in ATTENTION and (size := HEADS.search(key)):
            latent = bool({"latent", "v_in_k"} & set(words))
            heads.add(Heads(int(size[1]), int(size[2]), latent))
    # A model with latents has keys of two sizes: latents, and heads that are computed from these for prompts.
    kinds = {True, False} if "latent" in needed else {False}
    if "several_heads" in needed or {head.latent for head in heads} != kinds:
        needed = needed | {group for group in every if group.startswith("heads_")}
    for head in heads:
        needed = needed | head.groups
    return [group for group in every if group in needed]
