"""The parts of `tune build`: switches and reasons, sections of real objects, memory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from dyno_tuner.build import switches
from dyno_tuner.build.builder import groups_left, types_left
from dyno_tuner.build.memory import available_mib, jobs, too_large
from dyno_tuner.build.sections import code_of, differing, sections
from dyno_tuner.build.switches import Place, catalogue, named
from dyno_tuner.core.errors import TuneError
from dyno_tuner.doctor.switches import BUILD

CPU = Place("cpu", title="a CPU")
H200 = Place("cuda", "9.0", "an H200", "/p.yaml")
TURING = Place("cuda", "7.5", "a T4")


# ---- weight types of a build for a profile ----


@pytest.mark.parametrize(
    ("model", "types"),
    [
        ({"types": {"Q4_K": 0.9, "Q6_K": 0.1}}, ["f32", "q4_k", "q6_k"]),
        ({"architecture": "llama", "types": {"Q4_K": 1.0}, "experts": 0}, ["f32", "q4_k"]),
        (None, []),
    ],
    ids=["with types", "with an architecture", "without a model"],
)
def test_the_types_and_groups_of_a_build_are_those_that_its_kernels_have(
    tmp_path: Path, model: dict[str, object] | None, types: list[str]
) -> None:
    """As the build's own script writes them: a profile without types leaves none out."""
    profile = tmp_path / "p.yaml"
    match = {"device": {"kind": "cuda"}, **({"model": model} if model else {})}
    profile.write_text(json.dumps({"schema": 1, "match": match, "kernels": {}}))
    csrc = Path(__file__).parents[3] / "csrc"
    words = [
        sys.executable,
        str(csrc / "cmake" / "cuda_instances.py"),
        "--select",
        "all",
        "--csrc",
        str(csrc),
    ]
    output = tmp_path / "generated" / "ops"
    subprocess.run(
        [*words, "--profile", str(profile), "--output", str(output)], check=True, capture_output=True
    )
    assert sorted(types_left(tmp_path)) == types
    assert types_left(tmp_path / "a build for the CPU") == []
    heads = [f"heads_{size}" for size in (64, 128, 192, 256, 512)]
    assert groups_left(tmp_path) == (heads if model and "architecture" in model else [])
    assert groups_left(tmp_path / "a build for the CPU") == []


# ---- switches ----


def test_a_cpu_has_no_switch_of_gpus_unless_it_is_named() -> None:
    assert not any(row.cuda for row in catalogue("dyno", CPU, {}))
    (row,) = named(["GGML_CUDA_LTO"], "dyno", CPU, {})
    assert "only code for GPUs" in row.inert


def test_switches_that_a_gpu_cannot_profit_from_have_a_reason() -> None:
    h200 = {row.name: row for row in catalogue("dyno", H200, {})}
    assert "add f16 numbers no faster" in h200["GGML_CUDA_F16"].pointless
    assert "at run time, which" in h200["GGML_CUDA_USE_GRAPHS"].pointless
    assert "not the code" in h200["GGML_CUDA_COMPRESSION_MODE"].pointless
    assert h200["GGML_CUDA_PROFILE"].value == "/p.yaml"
    assert h200["GGML_CUDA_LTO"].link_mib > 1000
    turing = {row.name: row for row in catalogue("dyno", TURING, {})}
    assert "needs compute capability 8.0, and this GPU has 7.5" in turing["GGML_CUDA_FORCE_BF16"].refused
    assert not turing["GGML_CUDA_F16"].pointless
    assert "write one with `tune` first" in turing["GGML_CUDA_PROFILE"].refused


def test_switches_of_others_follow_their_tables() -> None:
    (dead,) = named(["GGML_CUDA_FORCE_DMMV=ON"], "ik_llama.cpp", H200, {})
    assert "before this path is reached" in dead.inert
    (gone,) = named(["GGML_CUDA_F16=ON"], "llama.cpp", H200, {})
    assert "llama.cpp no longer has it" in gone.refused
    (never,) = named(["GGML_CUDA_LTO=ON"], "ik_llama.cpp", H200, {})
    assert "never merged" in never.refused
    (mmq,) = named(["GGML_CUDA_FORCE_MMQ"], "llama.cpp", H200, {})
    assert "without it" in mmq.pointless
    (large,) = named(["CMAKE_INTERPROCEDURAL_OPTIMIZATION=ON"], "llama.cpp", H200, {})
    assert large.link_mib > 20_000


def test_the_cmake_line_of_a_thread_can_be_given_whole() -> None:
    """Switches of a user of ik_llama.cpp, with values that are the default among them."""
    words = (
        "GGML_CUDA_F16=ON GGML_CUDA_USE_GRAPHS=OFF GGML_CUDA_IQK_FORCE_BF16=1 GGML_SCHED_MAX_COPIES=1 "
        "GGML_CUDA_FA_ALL_QUANTS=ON GGML_CUDA_FUSION=1"
    )
    found = {row.name: row for row in named(words.split(), "ik_llama.cpp", H200, {})}
    assert found["GGML_SCHED_MAX_COPIES"].inert == "1 is the default"
    assert found["GGML_CUDA_FUSION"].inert == "1 is the default"
    assert "at run time" in found["GGML_CUDA_USE_GRAPHS"].pointless
    assert "pairs of cache types" in found["GGML_CUDA_FA_ALL_QUANTS"].pointless
    assert not found["GGML_CUDA_F16"].pointless
    assert not found["GGML_CUDA_IQK_FORCE_BF16"].refused
    turing = {row.name: row for row in named(words.split(), "ik_llama.cpp", TURING, {})}
    assert "needs compute capability 8.0" in turing["GGML_CUDA_IQK_FORCE_BF16"].refused
    (same,) = named(["GGML_NATIVE=0"], "dyno", CPU, {})
    assert same.inert == "0 is the default"


def test_a_switch_is_tried_against_the_value_of_every_build() -> None:
    """`-D` moves the default of `--switch` of the same name, and takes the name out of the catalogue."""
    (flags,) = named(["CMAKE_CXX_FLAGS_RELEASE"], "dyno", CPU, {"CMAKE_CXX_FLAGS_RELEASE": "-O1"})
    assert (flags.default, flags.value, flags.inert) == ("-O1", "-O2 -DNDEBUG", "")
    (back,) = named(["GGML_NATIVE=OFF"], "dyno", CPU, {"GGML_NATIVE": "ON"})
    assert (back.default, back.value, back.inert) == ("ON", "OFF", "")
    (same,) = named(["GGML_NATIVE"], "dyno", CPU, {"GGML_NATIVE": "1"})
    assert same.inert == "--define gives ON to every build already"
    (own,) = named(["OWN=3"], "dyno", CPU, {"OWN": "3", "OTHER": "4"})
    assert own.inert == "--define gives 3 to every build already"
    (other,) = named(["OWN=4"], "dyno", CPU, {"OWN": "3"})
    assert (other.default, other.value, other.inert) == ("3", "4", "")
    names = [row.name for row in catalogue("dyno", CPU, {})]
    without = [row.name for row in catalogue("dyno", CPU, {"GGML_NATIVE": "OFF", "OWN": "3"})]
    assert without == [name for name in names if name != "GGML_NATIVE"]
    assert len(without) == len(names) - 1


def test_the_other_compiler_is_another_one_than_every_build_has(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = {"clang++": "/bin/clang++", "g++": "/bin/g++", "c++": "/bin/g++"}
    monkeypatch.setattr(switches.shutil, "which", programs.get)
    monkeypatch.setattr(switches.os.path, "realpath", lambda path: path)
    monkeypatch.delenv("CXX", raising=False)
    (usual,) = named(["CMAKE_CXX_COMPILER"], "dyno", CPU, {})
    assert (usual.default, usual.value) == ("c++", "/bin/clang++")
    (turned,) = named(["CMAKE_CXX_COMPILER"], "dyno", CPU, {"CMAKE_CXX_COMPILER": "clang++"})
    assert (turned.default, turned.value) == ("clang++", "/bin/g++")


@pytest.mark.parametrize("engine", ["llama.cpp", "ik_llama.cpp"])
def test_every_live_switch_of_the_doctor_is_tried_or_has_a_reason(engine: str) -> None:
    """What `tune doctor` knows as a switch of this engine, `tune build` knows, too."""
    told = {row.name for row in catalogue(engine, H200, {})}
    live = {
        row.name for row in BUILD if row.engine == engine and not row.gone and not row.dead
    }  # fmt: skip
    fixed = {
        "GGML_CUDA", "CMAKE_BUILD_TYPE", "CMAKE_CUDA_ARCHITECTURES", "GGML_MAX_CONTEXTS",
        "GGML_CPU_ALL_VARIANTS", "GGML_BACKEND_DL", "CMAKE_INTERPROCEDURAL_OPTIMIZATION",
        "CMAKE_CUDA_SEPARABLE_COMPILATION",
    }  # fmt: skip
    assert live - told - fixed <= {"GGML_CUDA_FA_ALL_QUANTS", "GGML_LLAMAFILE"}


@pytest.mark.parametrize("word", ["", "=ON", "A B=1", "X" * 101 + "=1", "NAME=a\nb"])
def test_names_are_checked(word: str) -> None:
    with pytest.raises(TuneError, match="NAME=VALUE"):
        named([word], "dyno", CPU, {})


# ---- sections ----


def compiled(folder: Path, name: str, text: str, *flags: str) -> Path:
    source, made = folder / f"{name}.cpp", folder / f"{name}.o"
    source.write_text(text)
    subprocess.run(["c++", "-c", str(source), "-o", str(made), *flags], check=True, cwd=folder)
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    return tmp_path


def test_sections_tell_code_from_what_changes_nothing(folder: Path) -> None:
    text = "int f(int x) { return x * 3; }\n"
    plain = code_of(compiled(folder, "a", text, "-O2"))
    defined = code_of(compiled(folder, "a", text, "-O2", "-DUNUSED=1", "-Wall"))
    debug = code_of(compiled(folder, "a", text, "-O2", "-g"))
    other = code_of(compiled(folder, "a", text.replace("3", "5"), "-O2"))
    called = code_of(compiled(folder, "a", "int g(int); int f(int x) { return g(x); }\n", "-O2"))
    renamed = code_of(compiled(folder, "a", "int h(int); int f(int x) { return h(x); }\n", "-O2"))
    assert plain == defined
    assert plain != other
    assert called != renamed, "the same instructions that call another function are other code"
    assert differing({"a": plain}, {"a": debug, "b": debug}) in (["a", "b"], ["b"])
    assert differing({"a": plain}, {"a": defined}) == []


def test_device_code_is_told_without_the_names_that_a_compiler_invents(tmp_path: Path) -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    text = "__global__ void k(float* x) { x[0] = SCALE; }\nvoid f(float* x) { k<<<1, 1>>>(x); }\n"
    (tmp_path / "k.cu").write_text(text)

    def made(name: str, *flags: str) -> Path:
        path = tmp_path / f"{name}.o"
        command = ["nvcc", "-arch=sm_80", "-c", str(tmp_path / "k.cu"), "-o", str(path), *flags]
        subprocess.run(command, check=True)
        return path

    one, same = code_of(made("one", "-DSCALE=2")), code_of(made("same", "-DSCALE=2", "-DUNUSED"))
    other = code_of(made("other", "-DSCALE=3"))
    assert one.device
    assert one.device_bytes > 0
    assert one == same
    assert one.device != other.device


@pytest.mark.parametrize("cut", [0, 10, 63, 64, 200, -1])
def test_a_file_that_is_no_object_is_an_error(folder: Path, cut: int) -> None:
    data = compiled(folder, "a", "int f() { return 1; }\n").read_bytes()
    bad = folder / "bad.o"
    bad.write_bytes(data[:cut] if cut >= 0 else b"\x7fELF\x02\x01" + b"\xff" * 200)
    with pytest.raises(TuneError, match=r"bad\.o"):
        sections(bad)


# ---- memory ----


def test_memory_bounds_compilers_and_links() -> None:
    assert available_mib() > 100
    assert jobs(8192, 2048, cores=16) == 4
    assert jobs(100, 2048, cores=16) == 1
    assert jobs(1 << 20, 1024, cores=3) == 3
    assert too_large(0, 10) == ""
    assert too_large(1000, 2000) == ""
    assert "1,150 MiB (the last one took 1,000), and 1,100 MiB" in too_large(1000, 1100)
