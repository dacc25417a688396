"""docs/contribute/op.md leads to an op that works: its files, word for word, in a copy of the engine."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from one_unit import one_unit

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
PAGE = (ROOT / "docs" / "contribute" / "op.md").read_text(encoding="utf-8")
FAMILY = PAGE[PAGE.index("## A family") :]
# A paragraph that begins with a file's name, and the block that follows it.
FILES = {
    m[1]: (m[2] or "").removesuffix("```\n")
    for m in re.finditer(
        r"^`([\w/.]+)`(?:[:, ].*\n(?:.+\n)*)(?:\n```\w+\n((?:.*\n)*?```\n))?", FAMILY, re.MULTILINE
    )
}
NEW = [name for name in FILES if name.startswith("csrc/ops/clamp/")]
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")

MAIN = """
#include <iostream>
#include <map>

#include "ops/launch.h"
#include "runtime/launch_args.h"

using namespace dyno;

// Arguments that a test passes from Python.
struct Given {
  std::vector<float> x, y;
  float limit;
  void in(std::string_view, const float*& data, int64_t count) { data = x.data(), check(count); }
  void out(std::string_view, float*& data, int64_t count) { data = y.data(), check(count); }
  void number(std::string_view, float& value, float) { value = limit; }
  void check(int64_t count) const {
    if (count != static_cast<int64_t>(x.size())) throw Error("another extent");
  }
};

// A node's operands reach the arguments by name.
struct Env {
  Given& given;
  std::byte* at(const ops::Operand& operand) const {
    return reinterpret_cast<std::byte*>(operand.value == 1 ? given.x.data() : given.y.data());
  }
};

int main() {
  ops::ClampDesc desc;
  Given given;
  std::cin >> desc.m >> desc.n >> given.limit;
  given.x.resize(static_cast<size_t>(desc.m * desc.n)), given.y.resize(given.x.size());
  for (float& value : given.x) std::cin >> value;
  ops::ClampArgs args;
  arguments(desc, args, given);
  const ops::ClampArgs of_node = runtime::args_of<ops::ClampArgs>(
      ops::ClampOperands{.x = ops::Operand{.value = 1}, .limit = given.limit, .y = ops::Operand{.value = 2}},
      Env{given});
  if (of_node.x != args.x || of_node.y != args.y || of_node.limit != args.limit) return 2;
  DeviceInfo device{};
  ops::CpuContext context{};
  std::cout << ops::op_key(ops::OpDesc(desc)) << "\\n";
  for (const ops::Config& config : candidates(desc, device, ops::CandidateSet::legal)) {
    std::fill(given.y.begin(), given.y.end(), 77.0f);
    ops::launch_op(config, desc, args, context);
    for (const float value : given.y) std::cout << std::hexfloat << value << " ";
    std::cout << "\\n";
  }
}
"""


def test_a_family_touches_at_most_twelve_files() -> None:
    assert len(NEW) == 6
    edited = [name for name in FILES if name not in NEW]
    assert {"csrc/ops/families.def", "csrc/plan/passes/emit_ffn.cpp", "docs/explain/architecture.md"} < set(
        edited
    )
    for name in edited:
        assert (ROOT / name).is_file(), name
    assert len(FILES) <= 12


@pytest.fixture(scope="module")
def overlay(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the page adds to csrc/, with what the build writes of families.def; found before csrc/ itself."""
    folder = tmp_path_factory.mktemp("clamp")
    for name in NEW:
        path = folder / Path(name).relative_to("csrc")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(FILES[name], encoding="utf-8")
    text = (CSRC / "ops" / "families.def").read_text(encoding="utf-8")
    marker = "#undef DYNO_OP_FAMILY"
    assert text.count(marker) == 1
    text = text.replace(marker, FILES["csrc/ops/families.def"] + marker)
    (folder / "ops" / "families.def").write_text(text, encoding="utf-8")
    names = re.findall(r"^DYNO_OP_FAMILY\((\w+),", text, re.MULTILINE)
    assert names[-1] == "clamp"
    for header, of in (("all_families", "{0}"), ("all_fields", "fields")):
        includes = [f'#include "ops/{name}/{of.format(name)}.h"' for name in names]
        (folder / "ops" / f"{header}.h").write_text(
            "\n".join(["#pragma once", *includes, ""]), encoding="utf-8"
        )
    return folder


@pytest.fixture(scope="module")
def program(overlay: Path, compiler: str) -> Path:
    """The family alone with what all families share; code of the others is left out by the linker."""
    (overlay / "main.cpp").write_text(MAIN, encoding="utf-8")
    shared = (
        "ops/contract",
        "ops/op",
        "ops/op_key",
        "ops/registry",
        "core/allowed_cpus",
        "core/control_groups",
        "core/cpu_info",
        "core/dtype",
        "core/numa_copies",
        "core/numa_memory",
        "core/numa_topology",
        "core/text",
        "core/thread_pool",
    )
    sources = [
        overlay / "main.cpp",
        overlay / "ops" / "clamp" / "clamp.cpp",
        *(CSRC / f"{s}.cpp" for s in shared),
    ]
    program = overlay / "clamp"
    command = [
        compiler,
        "-std=c++20",
        "-O1",
        "-Wall",
        "-Wextra",
        "-ffunction-sections",
        "-fdata-sections",
        "-pthread",
        "-DDYNO_HAVE_ISA_portable=1",
    ]
    command += ["-Wl,--gc-sections", f"-I{overlay}", f"-I{CSRC}", *one_unit(overlay, sources)]
    command += ["-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    return program


def cases() -> list[Any]:
    """Those of the page, which compare with its reference."""
    from ops.cases import EXACT, F32, normal
    from ops.harness import expect_close

    class Case:
        def __init__(self, family: str, desc: dict[str, int], make: Any) -> None:
            self.family, self.desc, self.make = family, desc, make

    found: list[Any] = []
    reference: dict[str, Any] = {"np": np, "Array": np.ndarray}
    exec(FILES["tests/ops/reference.py"], reference)

    class Reference:
        clamp = staticmethod(reference["clamp"])

    def collect(name: str) -> Any:
        def take(make: Any) -> None:
            assert name == "clamp"
            found.extend(make())

        return take

    names = {"np": np, "Any": Any, "F32": F32, "EXACT": EXACT, "normal": normal, "reference": Reference}
    names |= {"Case": Case, "Iterator": "Iterator", "cases": collect, "expect_close": expect_close}
    exec("from __future__ import annotations\n" + FILES["tests/ops/cases_rows.py"], names)
    return found


def test_the_op_of_the_page_runs_on_the_cpu(program: Path) -> None:
    seen = 0
    for case in cases():
        args, out, check = case.make(np.random.default_rng(1))
        m, n = case.desc["m"], case.desc["n"]
        numbers = " ".join(float(v).__repr__() for v in args["x"].ravel())
        done = subprocess.run(
            [str(program)],
            input=f"{m} {n} {args['limit']} {numbers}",
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        key, *results = done.stdout.splitlines()
        assert key == f"clamp n={n}"
        assert len(results) == 2  # instances of the CPU
        for result in results:
            out["y"][:] = np.array([float.fromhex(v) for v in result.split()], np.float32).reshape(m, n)
            check(out)
            seen += 1
        assert np.abs(args["x"]).max() > args["limit"] or m * n == 1  # something is clamped
    assert seen == 4


@pytest.mark.skipif(NVCC is None, reason="no CUDA toolkit")
def test_the_cuda_half_of_the_page_compiles(overlay: Path) -> None:
    source = overlay / "ops" / "clamp" / "clamp_columns.cu"
    command = [str(NVCC), "-std=c++20", "-arch=sm_80", "-c", f"-I{overlay}", f"-I{CSRC}", str(source)]
    done = subprocess.run(
        [*command, "-o", str(overlay / "cu.o")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def lines_of(name: str) -> Iterator[str]:
    yield from FILES[name].splitlines()


def test_the_build_compiles_what_the_page_adds() -> None:
    named = " ".join(lines_of("csrc/ops/clamp/CMakeLists.txt"))
    for name in NEW:
        if name.endswith((".cpp", ".cu")):
            assert Path(name).name in named
