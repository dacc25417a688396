"""Includes point one way: core <- gguf <- model <- plan <- runtime <- bindings; ops sees core, gguf traits;
device sees itself. A violation is an arrow in the wrong direction, which no compiler complains about."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)

# The folders that each folder may include besides itself.
ALLOWED: dict[str, set[str]] = {
    "core": set(),
    "device": set(),
    "gguf": {"core"},
    "ops": {"core", "gguf", "device"},
    "model": {"core", "gguf", "ops"},
    "profile": {"core", "ops"},
    "plan": {"core", "gguf", "model", "ops", "profile"},
    "runtime": {"core", "gguf", "model", "ops", "profile", "plan", "device"},
    "bindings": {"core", "gguf", "model", "ops", "profile", "plan", "runtime"},
}
# Of gguf, kernels and selection see how blocks are laid out, never the file.
GGUF_TRAITS = {"gguf/decode.h", "gguf/dequantize.h", "gguf/quant_blocks.h", "gguf/weight_format.h"}
# Of ops, a model's table of facts names activations, gating and layouts: the contract, never a kernel.
OPS_CONTRACT = {"ops/op.h"}


def sources(folder: str) -> list[Path]:
    return sorted(
        p for p in (CSRC / folder).rglob("*") if p.suffix in {".h", ".cpp", ".cu", ".cuh", ".inc", ".def"}
    )


def test_one_place_reads_control_groups() -> None:
    found = [p.name for folder in ALLOWED for p in sources(folder) if "sys/fs/cgroup" in p.read_text()]
    assert found == ["control_groups.cpp"]


def includes(path: Path) -> list[str]:
    return [i for i in INCLUDE.findall(path.read_text()) if "/" in i]


def test_every_folder_has_a_rule() -> None:
    folders = {p.name for p in CSRC.iterdir() if p.is_dir()} - {"cmake"}
    assert folders <= ALLOWED.keys()


@pytest.mark.parametrize("folder", sorted(ALLOWED))
def test_includes_point_one_way(folder: str) -> None:
    wrong = []
    for path in sources(folder):
        for include in includes(path):
            target = include.split("/")[0]
            if target != folder and target not in ALLOWED[folder]:
                wrong.append(f"{path.relative_to(CSRC)} includes {include}")
            if folder == "ops" and target == "gguf" and include not in GGUF_TRAITS:
                wrong.append(f"{path.relative_to(CSRC)} includes {include}, which is not a trait")
            if folder == "model" and target == "ops" and include not in OPS_CONTRACT:
                wrong.append(f"{path.relative_to(CSRC)} includes {include}, which is not the contract")
    assert not wrong, "\n".join(wrong)


def test_the_rule_reads_real_files() -> None:
    assert len(includes(CSRC / "runtime" / "session.h")) >= 3
    assert sum(len(sources(folder)) for folder in ALLOWED) > 50


@pytest.mark.parametrize("folder", sorted(ALLOWED))
def test_headers_are_guarded(folder: str) -> None:
    unguarded = [
        str(p.relative_to(CSRC))
        for p in sources(folder)
        if p.suffix in {".h", ".cuh"} and "#pragma once" not in p.read_text()
    ]
    assert not unguarded
