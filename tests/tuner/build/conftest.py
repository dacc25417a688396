"""A source tree in place of another engine's: few objects, and programs whose rates follow its switches."""

from __future__ import annotations

import json
import shutil
import sys
from typing import TYPE_CHECKING

import pytest
from dyno_tuner.build.commands import tool
from fake_engines import DATA

if TYPE_CHECKING:
    from pathlib import Path

CMAKE = """\
cmake_minimum_required(VERSION 3.24)
project(fake CXX)
option(GGML_LTO "faster" OFF)
option(GGML_OPENMP "slower without" ON)
option(GGML_LLAMAFILE "a definition that no code reads" ON)
option(GGML_CPU_REPACK "that nothing reads" ON)
option(GGML_NATIVE "cannot be turned off" ON)
option(GGML_WRONG "other answers" OFF)
if(NOT GGML_NATIVE)
  message(FATAL_ERROR "GGML_NATIVE=OFF is not supported here")
endif()
add_library(core STATIC core.cpp build-info.cpp)
target_compile_definitions(core PRIVATE UNUSED=$<BOOL:${GGML_LLAMAFILE}> WHO="${GGML_LLAMAFILE}")
set(rate 400000.0)
if(GGML_LTO)
  target_compile_definitions(core PRIVATE FAST=1)
  set(rate 520000.0)
endif()
if(GGML_WRONG)
  target_compile_definitions(core PRIVATE FAST=2)
  set(rate 800000.0)
endif()
if(NOT GGML_OPENMP)
  target_compile_definitions(core PRIVATE FAST=3)
  set(rate 200000.0)
endif()
target_precompile_headers(core PRIVATE <cstddef>)
add_executable(tool tool.cpp)
target_link_libraries(tool core)
file(READ fake.py text)
string(REPLACE "400000.0" "${rate}" text "${text}")
if(GGML_WRONG)
  string(REPLACE "0.000071" "0.700000" text "${text}")
endif()
foreach(name llama-bench llama-perplexity)
  file(WRITE ${CMAKE_BINARY_DIR}/bin/${name} "${text}")
  file(CHMOD ${CMAKE_BINARY_DIR}/bin/${name} PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE)
  add_custom_target(${name} DEPENDS tool)
endforeach()
file(COPY spec.json DESTINATION ${CMAKE_BINARY_DIR}/bin)
"""
CORE = "#ifndef FAST\n#define FAST 0\n#endif\nint core(int x) { return FAST ? x * FAST + 7 : x; }\n"


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources; needs cmake and a compiler, which the tests of builds skip without."""
    if not (tool("cmake") and shutil.which("c++")):
        pytest.skip("building needs cmake and a C++ compiler")
    folder = tmp_path_factory.mktemp("fake-source")
    (folder / "CMakeLists.txt").write_text(CMAKE)
    (folder / "core.cpp").write_text(CORE)
    (folder / "build-info.cpp").write_text("extern const char* who;\nconst char* who = WHO;\n")
    (folder / "tool.cpp").write_text("int core(int);\nint main() { return core(0) > 99; }\n")
    (folder / "fake.py").write_text(f"#!{sys.executable} -S\n" + (DATA / "fake.py").read_text())
    (folder / "spec.json").write_text(
        json.dumps({"data": str(DATA), "engine": "llama.cpp-0c1e570", "wrong": "never"})
    )
    return folder
