"""libnvvm for GGML_CUDA_LTO=ON: of the toolkit, of a Python package of its release, or a line to install one.

`make cuda-check` installs the package, builds a small module and names the folder in DYNO_CUDA_LTO_BUILD.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from test_cuda_switches import NVCC, cuda, works

if TYPE_CHECKING:
    from collections.abc import Callable

    Configure = Callable[..., Any]

__all__ = ["cuda"]  # the fixture
ROOT = Path(__file__).resolve().parents[2]
FINDER = ROOT / "csrc" / "cmake" / "find_nvvm.py"
LIBRARY = "nvidia/cu13/lib/libnvvm.so.4"  # where the package has it
NO_GPU = {35, 100}  # cudaErrorInsufficientDriver, cudaErrorNoDevice


def find(*arguments: str, environment: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The finder with no packages but those of an environment. As in a build, PYTHONPATH hides nothing."""
    given = {"PATH": os.environ.get("PATH", os.defpath), "PYTHONPATH": str(ROOT / "no such folder")}
    if environment is not None:
        given["VIRTUAL_ENV"] = str(environment)
    return subprocess.run(
        [sys.executable, "-S", "-E", str(FINDER), *arguments],
        env=given, capture_output=True, text=True, check=False,
    )  # fmt: skip


def install(environment: Path, package: str, version: str, *files: str) -> Path:
    """What pip would leave of such a package. Returns the folder of the packages."""
    packages = environment / "lib" / "python3.12" / "site-packages"
    info = packages / f"{package.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in files))
    for name in files:
        (packages / name).parent.mkdir(parents=True, exist_ok=True)
        (packages / name).write_bytes(b"\x7fELF")
    return packages


def test_a_package_of_the_release_is_found(tmp_path: Path) -> None:
    packages = install(tmp_path, "nvidia-nvvm", "13.0.88", "nvidia/cu13/include/nvvm.h", LIBRARY)
    found = find("13.0.96", environment=tmp_path)
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == str(packages / LIBRARY)


def test_before_cuda_13_another_package_has_it(tmp_path: Path) -> None:
    library = "nvidia/cuda_nvcc/nvvm/lib64/libnvvm.so"
    packages = install(tmp_path, "nvidia-cuda-nvcc-cu12", "12.8.93", library)
    assert find("12.8", environment=tmp_path).stdout.strip() == str(packages / library)
    assert "pip install nvidia-cuda-nvcc-cu12==12.9.*" in find("12.9", environment=tmp_path).stderr


@pytest.mark.parametrize(
    ("version", "files", "reason"),
    [
        (None, (), "the package nvidia-nvvm is not installed"),
        ("13.1.115", (LIBRARY,), "nvidia-nvvm 13.1.115 is of another release"),
        ("13.0.88", ("nvidia/cu13/include/nvvm.h",), "nvidia-nvvm 13.0.88 holds no libnvvm.so"),
    ],
)
def test_without_one_the_line_that_installs_it_is_named(
    tmp_path: Path, version: str | None, files: tuple[str, ...], reason: str
) -> None:
    if version is not None:
        install(tmp_path, "nvidia-nvvm", version, *files)
    found = find("13.0.88", environment=tmp_path)
    assert (found.returncode, found.stdout) == (1, "")
    assert reason in found.stderr
    assert "\n  pip install nvidia-nvvm==13.0.*\n" in found.stderr


def test_the_requirement_is_known_without_a_package() -> None:
    assert find("--requirement", "13.0.88").stdout == "nvidia-nvvm==13.0.*\n"
    refused = find("--requirement", "soon")
    assert refused.returncode == 2
    assert "'soon' is not a release of CUDA" in refused.stderr


# ---- the configure step ----


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An interpreter without packages, in an environment without packages."""
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    return python


def release() -> str:
    shown = subprocess.run([str(NVCC), "--version"], capture_output=True, text=True, check=True).stdout
    (found,) = re.findall(r"release (\d+\.\d+)", shown)
    return str(found)


def requirement() -> str:
    return find("--requirement", release()).stdout.strip()


def test_a_toolkit_without_it_names_the_package(cuda: Configure, bare: Path) -> None:
    built = cuda(GGML_CUDA_LTO="ON", DYNO_LIBNVVM="", Python_EXECUTABLE=str(bare))
    assert not built.ok
    assert "GGML_CUDA_LTO=ON needs libnvvm for the device link" in built.output
    assert f"pip install {requirement()} " in built.output


def test_a_toolkit_without_it_takes_the_package(
    cuda: Configure, bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = requirement().split("==")[0]
    packages = install(tmp_path / "venv", package, f"{release()}.1", LIBRARY)
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path / "venv"))
    built = works(cuda(GGML_CUDA_LTO="ON", DYNO_LIBNVVM="", Python_EXECUTABLE=str(bare)))
    toolkit = built.folder / "toolkit_with_nvvm"
    assert (toolkit / "nvvm" / "lib64" / "libnvvm.so").resolve() == packages / LIBRARY
    # Only the link, which alone opens the library, calls the compiler there; it finds all of the toolkit.
    (link,) = {line for line in built.link_commands().splitlines() if " -dlink " in line}
    assert f" {toolkit}/bin/nvcc " in link
    assert not any(str(toolkit) in word for command in built.commands.values() for word in command)
    shown = subprocess.run(
        [str(toolkit / "bin" / "nvcc"), "--dryrun", "-dlink", "-dlto", "-arch=sm_90a", "x.o", "-o", "y.o"],
        capture_output=True, text=True, check=False,
    ).stderr  # fmt: skip
    assert re.search(rf'-nvvmpath="{re.escape(str(toolkit))}/bin/\.\./nvvm"', shown), shown


# ---- a module built with it ----


@pytest.fixture(scope="module")
def build() -> Path:
    if "DYNO_CUDA_LTO_BUILD" not in os.environ:
        pytest.skip("no build with GGML_CUDA_LTO: `make cuda-check` makes one and sets DYNO_CUDA_LTO_BUILD")
    return ROOT / os.environ["DYNO_CUDA_LTO_BUILD"]


def test_the_check_took_the_package(build: Path) -> None:
    library = (build / "toolkit_with_nvvm" / "nvvm" / "lib64" / "libnvvm.so").resolve()
    assert "site-packages" in library.parts
    assert library.stat().st_size > 1_000_000


def test_the_link_optimises_across_files(build: Path) -> None:
    linked = (build / "tests" / "cuda" / "lto_parts.o").read_bytes()
    assert b".text._Z10lto_kernelPi" in linked
    assert b".text._Z10lto_triplei" not in linked, "the function of the other file is still called"


def test_the_module_loads_and_runs_where_there_is_a_gpu(build: Path) -> None:
    code = (
        "import ctypes, sys\n"
        "values = (ctypes.c_int * 4)(1, 2, 3, 4)\n"
        "print(ctypes.CDLL(sys.argv[1]).lto_launch(values, 4), *values)"
    )
    module = build / "tests" / "cuda" / "check_lto.so"
    done = subprocess.run(
        [sys.executable, "-c", code, str(module)], capture_output=True, text=True, check=True
    )
    error, *values = map(int, done.stdout.split())
    assert values == [3, 6, 9, 12] if error == 0 else error in NO_GPU
