"""Every switch of csrc/cmake shows what it changed: the project is configured, and the commands are read.

Nothing is compiled beyond CMake's own checks of the compiler. The CUDA cases hand CMake a toolkit that is not
there (an empty path) or a program that is no compiler, so that they say the same on machines with and without
one.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    Configure = Callable[..., Any]

ROOT = Path(__file__).resolve().parents[2]
NO_GPU = {"DYNO_NVCC": shutil.which("true") or "/bin/true", "DYNO_NVIDIA_SMI": ""}
ISAS = {"portable", "avx2", "avx512_vnni"}


def machine() -> str:
    return os.uname().machine


x86 = pytest.mark.skipif(machine() != "x86_64", reason="instruction sets are chosen on x86-64 alone")


# ---- host switches ----


def test_defaults(configure: Configure) -> None:
    built = configure()
    assert built.ok, built.output
    everything = [word for command in built.commands.values() for word in command]
    assert "-O3" in everything
    for absent in ("-march=native", "-Werror", "-g"):
        assert absent not in everything
    assert not any(word.startswith(("-flto", "-fsanitize")) for word in everything)


@x86
def test_one_build_holds_every_instruction_set(configure: Configure) -> None:
    built = configure()
    assert built.kernel_libraries == ISAS
    for command in built.of("dyno_kernels_portable.dir"):
        assert not any(word.startswith("-mavx") for word in command)
    for command in built.of("dyno_kernels_avx2.dir"):
        assert "-mavx2" in command
        assert not any(word.startswith("-mavx512") for word in command)
    for command in built.of("dyno_kernels_avx512_vnni.dir"):
        assert "-mavx512vnni" in command
    # Kernel flags on a unit of the host would make it crash on older machines.
    for command in built.of("dyno_host.dir"):
        assert not any(word.startswith(("-mavx", "-march")) for word in command)


@x86
def test_native_compiles_kernels_for_this_machine_alone(configure: Configure) -> None:
    built = configure(GGML_NATIVE="ON")
    assert built.ok, built.output
    assert len(built.kernel_libraries) == 1
    (isa,) = built.kernel_libraries
    assert isa in ISAS
    for command in built.of(f"dyno_kernels_{isa}.dir"):
        assert "-march=native" in command
    for command in built.of("dyno_host.dir"):
        assert f"-DDYNO_HAVE_ISA_{isa}=1" in command
        assert not any(f"-DDYNO_HAVE_ISA_{other}=1" in command for other in ISAS - {isa})
        assert "-march=native" not in command


@x86
def test_one_instruction_set_for_machines_of_one_kind(configure: Configure) -> None:
    """Its flags are those of a build for all machines, so it runs wherever the instruction set does."""
    every = configure()
    for kernels, expected in (("avx2", {"avx2"}), ("portable;avx2", {"portable", "avx2"})):
        built = configure(DYNO_CPU_KERNELS=kernels)
        assert built.ok, built.output
        assert built.kernel_libraries == expected
        for command in built.of("dyno_host.dir"):
            assert not any(f"-DDYNO_HAVE_ISA_{other}=1" in command for other in ISAS - expected)
    name = "ops/norm/norm_rows.cpp"
    (one,) = configure(DYNO_CPU_KERNELS="avx2").of(name)
    assert one in every.of(name)
    best = configure(DYNO_CPU_KERNELS="best").kernel_libraries
    assert best == configure(GGML_NATIVE="ON").kernel_libraries
    assert len(best) == 1


@pytest.mark.parametrize("value", ["avx1024", "all;avx2", "best;best", ""])
def test_an_unknown_instruction_set_is_refused(configure: Configure, value: str) -> None:
    built = configure(DYNO_CPU_KERNELS=value)
    assert not built.ok
    assert "expected all, best, or a list of portable" in built.output


@x86
def test_native_contradicts_another_instruction_set(configure: Configure) -> None:
    (best,) = configure(GGML_NATIVE="ON").kernel_libraries
    (other, *_) = sorted(ISAS - {best})
    built = configure(GGML_NATIVE="ON", DYNO_CPU_KERNELS=other)
    assert not built.ok
    assert f"contradicts DYNO_CPU_KERNELS={other}" in built.output
    assert configure(GGML_NATIVE="ON", DYNO_CPU_KERNELS=best).kernel_libraries == {best}


def test_several_files_as_one_unit(configure: Configure) -> None:
    """Kernels and op families stay units of their own, and so does what records the build."""
    pytest.importorskip("nanobind", reason="configuring the module needs nanobind (in the test extra)")
    module = {"DYNO_BUILD_PYTHON": "ON", "Python_EXECUTABLE": sys.executable}
    apart, built = (
        configure(**module),
        configure(**module, CMAKE_UNITY_BUILD="ON", CMAKE_UNITY_BUILD_BATCH_SIZE="0"),
    )
    assert built.ok, built.output
    assert len(built.commands) < 0.7 * len(apart.commands)
    # The size that was asked for does not matter.
    for folder, files in {"core_0": 8, "plan_passes_1": 8, "bindings_0": 4}.items():
        (unit,) = built.of(f"unity_{folder}_cxx")
        assert Path(unit[-1]).read_text().count("#include") == files
    for part in (
        "ops/norm/norm_rows.cpp",
        "ops/norm/norm.cpp",
        "bindings/CMakeFiles/_core.dir/bind_info.cpp",
    ):
        assert len(built.of(part)) == len(apart.of(part))
    assert not any("dyno_kernels" in name and "Unity" in name for name in built.commands)


def test_common_headers_are_compiled_once_for_units(configure: Configure) -> None:
    """If each file is a unit, the build shows the headers that a file lacks."""
    apart, built = configure(), configure(CMAKE_UNITY_BUILD="ON")
    assert not any("cmake_pch" in word for command in apart.commands.values() for word in command)
    assert built.of("dyno_host.dir/cmake_pch.hxx")
    for part, headers in (("ops/norm/norm.cpp", True), ("gguf/dequantize.cpp", False)):
        (command,) = built.of(part)
        assert any("cmake_pch" in word for word in command) == headers


def test_lto(configure: Configure) -> None:
    built = configure(GGML_LTO="ON")
    if not built.ok:
        assert "GGML_LTO=ON, but this compiler cannot" in built.output
        pytest.skip("this compiler has no link-time optimisation")
    compiler = next(
        word for command in built.commands.values() for word in command if "++" in Path(word).name
    )
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    gcc_12 = "Free Software Foundation" in version and re.search(r"^.*\) 12\.\d", version) is not None
    for command in built.commands.values():
        assert any(word.startswith("-flto") for word in command)
        # GCC 12 miscompiles a move assignment of vectors otherwise.
        assert ("-fno-ipa-modref" in command) == gcc_12


@pytest.mark.parametrize("sanitizers", ["address", "undefined", "address+undefined", "thread"])
def test_sanitizers(configure: Configure, sanitizers: str) -> None:
    built = configure(DYNO_SANITIZE=sanitizers)
    assert built.ok, built.output
    for command in built.commands.values():
        assert f"-fsanitize={sanitizers.replace('+', ',')}" in command
        assert "-fno-sanitize-recover=all" in command
    called = "asan-instrumentation-with-call-threshold=0"
    for name, command in built.commands.items():
        kernel = "dyno_kernels" in name and "address" in sanitizers
        assert any(called in word for word in command) == kernel
    # Only kernels are spared what their compiler cannot finish. The last option about a check holds.
    if "undefined" in sanitizers:
        for command in built.of("dyno_kernels_portable.dir"):
            given = [word for word in command if re.match(r"-f(no-)?sanitize=", word)]
            assert given[-1].startswith("-fno-sanitize=null,object-size,pointer-overflow"), given
    for command in built.of("dyno_host.dir"):
        assert not any(word.startswith("-fno-sanitize=") for word in command)


def test_only_bindings_are_not_optimised_for_sanitizers(configure: Configure) -> None:
    pytest.importorskip("nanobind", reason="configuring the module needs nanobind (in the test extra)")
    module = {"DYNO_BUILD_PYTHON": "ON", "Python_EXECUTABLE": sys.executable}
    for sanitizer, wanted in (("undefined", True), ("off", False)):
        built = configure(**module, DYNO_SANITIZE=sanitizer)
        for part, optimised in (("_core.dir/bind_session", not wanted), ("dyno_host.dir/plan/cost", True)):
            (command,) = built.of(part)
            assert ([word for word in command if word.startswith("-O")][-1] != "-O0") == optimised


@pytest.mark.parametrize("value", ["memory", "adress", "address,undefined", ""])
def test_an_unknown_sanitizer_is_refused(configure: Configure, value: str) -> None:
    built = configure(DYNO_SANITIZE=value)
    assert not built.ok
    assert (
        f"DYNO_SANITIZE={value}: expected off, address, undefined, address+undefined or thread"
        in built.output
    )


def test_warnings_are_errors(configure: Configure) -> None:
    built = configure(DYNO_WERROR="ON")
    assert built.ok, built.output
    for command in built.commands.values():
        assert "-Werror" in command


def test_faults_are_compiled_only_on_request(configure: Configure) -> None:
    for command in configure().of("ops/matmul/matmul.cpp"):
        assert "-DDYNO_TEST_FAULTS=1" not in command
    for command in configure(DYNO_TEST_FAULTS="ON").of("ops/matmul/matmul.cpp"):
        assert "-DDYNO_TEST_FAULTS=1" in command


def test_build_type(configure: Configure) -> None:
    built = configure(CMAKE_BUILD_TYPE="RelWithDebInfo")
    assert built.ok, built.output
    for command in built.commands.values():
        assert "-g" in command


def test_fuzz_targets(configure: Configure) -> None:
    assert not any("gguf_target" in name for name in configure().commands)
    built = configure(DYNO_BUILD_FUZZ="ON")
    assert built.ok, built.output
    assert built.of("gguf_target")
    assert "session_fuzz needs DYNO_SANITIZE=address+undefined" in built.output
    assert not any("session_target" in name for name in built.commands)


def test_the_session_target_runs_an_instrumented_engine(configure: Configure) -> None:
    built = configure(DYNO_BUILD_FUZZ="ON", DYNO_SANITIZE="address+undefined")
    assert built.ok, built.output
    for part in ("session_target", "gguf_target", "runtime/session.cpp", "ops/norm/norm_rows.cpp"):
        for command in built.of(part):
            assert any(word.startswith("-fsanitize=address") for word in command)
    driver = any("mutation_driver" in name for name in built.commands)
    assert driver == ("no libFuzzer in" in built.output)


def test_sessions_in_threads(configure: Configure) -> None:
    """ThreadSanitizer excludes the sanitizers of the fuzz targets."""
    built = configure(DYNO_BUILD_FUZZ="ON", DYNO_SANITIZE="thread")
    assert built.ok, built.output
    assert built.of("session_threads")
    assert not any("_target" in name for name in built.commands)


def test_the_module_records_its_switches(configure: Configure) -> None:
    """`dyno info` prints what the build wrote down; without DYNO_BUILD_PYTHON there is no module."""
    pytest.importorskip("nanobind", reason="configuring the module needs nanobind (in the test extra)")
    assert not any("_core.dir" in name for name in configure().commands)
    switches = {"GGML_LTO": "ON", "DYNO_SANITIZE": "undefined", "DYNO_WERROR": "ON"}
    built = configure(
        **switches, DYNO_BUILD_PYTHON="ON", Python_EXECUTABLE=sys.executable, DYNO_VERSION="7.8.9"
    )
    assert built.ok, built.output
    assert built.of("_core.dir")
    header = (built.folder / "csrc" / "bindings" / "build_info.h").read_text()
    for name, value in {
        **switches,
        "GGML_NATIVE": "OFF",
        "DYNO_CPU_KERNELS": "all",
        "GGML_CUDA": "OFF",
    }.items():
        assert f'{{"{name}", "{value}"}}' in header
    assert '"7.8.9"' in header


def test_every_host_switch_is_tried() -> None:
    options = (ROOT / "csrc" / "cmake" / "Options.cmake").read_text()
    switches = set(
        re.findall(r"^(?:option|set)\((\w+) .*?(?:ON|OFF|CACHE STRING.*)\)$", options, re.MULTILINE)
    )
    assert {"GGML_NATIVE", "GGML_LTO", "DYNO_SANITIZE", "DYNO_WERROR", "DYNO_BUILD_PYTHON"} <= switches
    text = Path(__file__).read_text()
    assert [name for name in sorted(switches) if f"{name}=" not in text and f'"{name}"' not in text] == []


# ---- CUDA: on, off and why ----


def test_auto_without_a_toolkit_says_why(configure: Configure) -> None:
    built = configure()
    assert "GGML_CUDA: OFF (no CUDA toolkit was found)" in built.output
    assert not any(name.endswith(".cu.o") for name in built.commands)


def test_auto_without_a_gpu_says_why(configure: Configure) -> None:
    built = configure(**NO_GPU)
    assert built.ok, built.output
    assert "GGML_CUDA: OFF (a CUDA toolkit was found, but no GPU" in built.output
    assert "-DGGML_CUDA=ON" in built.output


def test_off_is_off_with_a_toolkit(configure: Configure) -> None:
    built = configure(**NO_GPU, GGML_CUDA="OFF")
    assert built.ok, built.output
    assert "GGML_CUDA: OFF (it was asked for)" in built.output


def test_on_without_a_toolkit_is_an_error(configure: Configure) -> None:
    built = configure(GGML_CUDA="ON")
    assert not built.ok
    assert "needs a CUDA toolkit, and none was found (it was asked for)" in built.output
    assert "-DCMAKE_CUDA_COMPILER" in built.output
    assert "-DGGML_CUDA=OFF" in built.output


@pytest.mark.parametrize(
    "switch", ["GGML_CUDA_F16", "GGML_CUDA_LTO", "GGML_CUDA_FORCE_MMQ", "CMAKE_CUDA_ARCHITECTURES"]
)
def test_a_cuda_switch_asks_for_cuda(configure: Configure, switch: str) -> None:
    """AUTO never leaves out in silence what somebody has configured."""
    built = configure(**{switch: "80" if switch.endswith("ARCHITECTURES") else "ON"})
    assert not built.ok
    assert f"none was found ({switch} was given)" in built.output


def test_off_contradicts_a_cuda_switch(configure: Configure) -> None:
    built = configure(GGML_CUDA="OFF", GGML_CUDA_F16="ON")
    assert not built.ok
    assert "GGML_CUDA=OFF contradicts GGML_CUDA_F16" in built.output


@pytest.mark.parametrize(
    ("switches", "message"),
    [
        ({"GGML_CUDA": "maybe"}, "GGML_CUDA=maybe: expected AUTO, ON or OFF"),
        ({"CMAKE_CUDA_ARCHITECTURES": "60"}, "the oldest chips with kernels here are 7.5"),
        ({"CMAKE_CUDA_ARCHITECTURES": "hopper"}, "'hopper' is neither 'native' nor a number"),
        (
            {"CMAKE_CUDA_ARCHITECTURES": "75", "GGML_CUDA_FORCE_BF16": "ON"},
            "cannot be built for architecture 75",
        ),
        (
            {"CMAKE_CUDA_ARCHITECTURES": "75", "GGML_CUDA_IQK_FORCE_BF16": "ON"},
            "cannot be built for architecture 75",
        ),
        (
            {"GGML_CUDA_FORCE_MMQ": "ON", "GGML_CUDA_FORCE_CUBLAS": "ON"},
            "GGML_CUDA_FORCE_MMQ=ON contradicts GGML_CUDA_FORCE_CUBLAS=ON",
        ),
        ({"GGML_CUDA_COMPRESSION_MODE": "tiny"}, "expected none, speed, balance or size"),
        ({"GGML_CUDA_INSTANCES": "some"}, "expected all or minimal"),
        (
            {"CMAKE_CUDA_ARCHITECTURES": "80-virtual", "GGML_CUDA_LTO": "ON"},
            "GGML_CUDA_LTO=ON cannot be built for 80-virtual",
        ),
    ],
)
def test_impossible_cuda_switches(configure: Configure, switches: dict[str, str], message: str) -> None:
    built = configure(**NO_GPU, **switches)
    assert not built.ok
    assert message in built.output


def test_the_configure_step_ends_with_what_is_built(configure: Configure) -> None:
    built = configure(GGML_CUDA="OFF")
    assert built.ok, built.output
    (line,) = [line for line in built.output.splitlines() if "dyno is built for: " in line]
    assert "CPU alone (it was asked for); with CUDA: -C cmake.define.GGML_CUDA=ON" in line
