"""A part of an op family that is missing is a compile error: a header, a launch, a field of a struct."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"
COMPILER = shutil.which("c++")
Compile = Callable[..., subprocess.CompletedProcess[str]]

LAUNCH = """#include "ops/launch.h"
template void dyno::ops::launch_op(const Config&, const GluDesc&, const GluArgs&, CpuContext&);
"""


def families() -> list[str]:
    text = (CSRC / "ops" / "families.def").read_text(encoding="utf-8")
    return re.findall(r"^DYNO_OP_FAMILY\((\w+),", text, re.MULTILINE)


@pytest.fixture
def compile_with(tmp_path: Path) -> Compile:
    """Compiles a source with edited copies of headers: (pattern, text) for each, which must be there."""
    if COMPILER is None:
        pytest.skip("no C++ compiler")

    def run(
        source: str, edits: dict[str, tuple[str, str]] | None = None, without: str = ""
    ) -> subprocess.CompletedProcess[str]:
        (tmp_path / "ops").mkdir(exist_ok=True)
        for header, of in (("all_families", "{0}"), ("all_fields", "fields")):  # as csrc/ops/CMakeLists.txt
            names = [name for name in families() if name != without]
            includes = [f'#include "ops/{name}/{of.format(name)}.h"' for name in names]
            text = "\n".join(["#pragma once", *includes, ""])
            (tmp_path / "ops" / f"{header}.h").write_text(text, encoding="utf-8")
        for name, (pattern, text) in (edits or {}).items():
            edited, count = re.subn(pattern, text, (CSRC / name).read_text(encoding="utf-8"), count=1)
            assert count == 1, f"{name} has no {pattern}"
            copy = tmp_path / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(edited, encoding="utf-8")
        main = tmp_path / "main.cpp"
        main.write_text(source, encoding="utf-8")
        command = [COMPILER, "-std=c++20", "-fsyntax-only", "-I", str(tmp_path), "-I", str(CSRC), str(main)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    return run


REGISTRY = (CSRC / "ops" / "registry.cpp").read_text(encoding="utf-8")


def test_the_list_as_it_is_compiles(compile_with: Compile) -> None:
    for source in (REGISTRY, LAUNCH):
        done = compile_with(source)
        assert done.returncode == 0, done.stderr


def test_a_family_whose_header_is_not_included_does_not_launch(compile_with: Compile) -> None:
    done = compile_with(LAUNCH, without="glu")
    assert done.returncode != 0
    assert "launch" in done.stderr


def test_a_launch_must_be_where_the_list_says(compile_with: Compile) -> None:
    for here, there in (
        ("glu, Glu, everywhere", "glu, Glu, on_cuda"),
        ("qkv, Qkv, on_cuda", "qkv, Qkv, everywhere"),
    ):
        done = compile_with(REGISTRY, {"ops/families.def": (re.escape(here), there)})
        assert done.returncode != 0
        assert f"ops/families.def: {here.split(',')[0]} launches" in done.stderr


def test_a_field_of_a_desc_that_no_key_shows_does_not_compile(compile_with: Compile) -> None:
    done = compile_with(
        '#include "ops/fields.h"\n',
        {"ops/op.h": (r"struct GluDesc \{", "struct GluDesc {\n  bool forgotten = false;")},
    )
    assert done.returncode != 0
    assert "ops/glu/fields.h lists every field of GluDesc once" in done.stderr


def test_a_node_without_an_operand_that_its_family_needs_does_not_compile(compile_with: Compile) -> None:
    node = """#include "plan/operands.h"
const dyno::plan::Operand value{.value = 0};
const dyno::plan::GluOperands node{%s};
"""
    for fields, missing in (
        (".gate = value, .up = value, .y = value", False),
        (".gate = value, .y = value", True),
    ):
        done = compile_with(node % fields)
        assert (done.returncode != 0) == missing, done.stderr


def test_an_operand_that_is_in_no_list_does_not_compile(compile_with: Compile) -> None:
    done = compile_with(
        '#include "plan/operands.h"\n',
        {"ops/glu/fields.h": (r"struct GluOperands \{", "struct GluOperands {\n  MayRead forgotten{};")},
    )
    assert done.returncode != 0
    assert "DYNO_FIELDS(GluOperands) names every member once" in done.stderr


# The answers that launch_node.h asks of a device, without one.
NODE_LAUNCH = """#include "runtime/launch_node.h"
struct Env {
  const dyno::model::ModelDesc& model;
  const dyno::plan::Plan& plan;
  std::byte* at(const dyno::plan::Operand&) const;
  const std::byte* weight(dyno::model::WeightId) const;
  size_t weight_bytes(dyno::model::WeightId) const;
};
template dyno::ops::GluArgs dyno::runtime::args_of<dyno::ops::GluArgs>(const plan::GluOperands&, const Env&);
"""


@pytest.mark.parametrize(
    ("header", "pattern", "text", "message"),
    [
        ("ops/glu/fields.h", r"GluArgs, gate,", "GluArgs,", "DYNO_FIELDS(GluArgs) names every member once"),
        (
            "ops/glu/fields.h",
            r"Reads gate, up;([^}]*\{\}[^}]*\{\}[^}]*\{\}[^}]*)\};\nDYNO_FIELDS\(GluOperands, gate, up,",
            r"Reads gate;\1};\nDYNO_FIELDS(GluOperands, gate,",
            "every argument is filled",
        ),
        (
            "ops/glu/fields.h",
            r"Reads gate, up;([^}]*\{\}[^}]*\{\}[^}]*\{\}[^}]*)\};\nDYNO_FIELDS\(GluOperands, gate, up,",
            r"Reads gate, up, more;\1};\nDYNO_FIELDS(GluOperands, gate, up, more,",
            "every operand has an argument of its name",
        ),
    ],
    ids=["unlisted", "unfilled", "untaken"],
)
def test_operands_and_arguments_that_do_not_meet_do_not_compile(
    compile_with: Compile, header: str, pattern: str, text: str, message: str
) -> None:
    assert compile_with(NODE_LAUNCH).returncode == 0
    done = compile_with(NODE_LAUNCH, {header: (pattern, text)})
    assert done.returncode != 0
    assert message in done.stderr


def test_parameters_of_a_configuration_have_names(compile_with: Compile) -> None:
    """Those of variants.def, in every family: one that the variant does not have does not compile."""
    for path in (CSRC / "ops").rglob("*"):
        if path.suffix in (".h", ".cpp", ".cu", ".cuh") and path.parent != CSRC / "ops":
            assert not re.search(r"params\[\d\]|Config\{k_\w+, \{", path.read_text(encoding="utf-8")), path
    source = (CSRC / "ops" / "glu" / "glu.cpp").read_text(encoding="utf-8")
    assert compile_with(source).returncode == 0
    for right, wrong in ((".grain = 4", ".grains = 4"), ("of(config).grain", "of(config).threads")):
        assert source.count(right) == 1
        done = compile_with(source.replace(right, wrong))
        assert done.returncode != 0
        assert wrong.removeprefix(".").removeprefix("of(config).").split(" ")[0] in done.stderr
