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
        includes = [f'#include "ops/{name}/{name}.h"' for name in families() if name != without]
        header = tmp_path / "ops" / "all_families.h"  # as csrc/ops/CMakeLists.txt writes it
        header.parent.mkdir(exist_ok=True)
        header.write_text("\n".join(["#pragma once", *includes, ""]), encoding="utf-8")
        for name, (pattern, text) in (edits or {}).items():
            edited, count = re.subn(pattern, text, (CSRC / name).read_text(encoding="utf-8"), count=1)
            assert count == 1, f"{name} has no {pattern}"
            copy = tmp_path / name
            copy.parent.mkdir(exist_ok=True)
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
    assert "ops/fields.h lists every field of GluDesc once" in done.stderr
