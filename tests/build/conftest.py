"""`configure`: CMake run with switches, for tests that read the commands it would build with."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    Configure = Callable[..., "Configured"]

ROOT = Path(__file__).resolve().parents[2]
# Those of the test extra stand beside the interpreter, which need not be on the PATH.
SEARCH = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
CMAKE = shutil.which("cmake", path=SEARCH)
NINJA = shutil.which("ninja", path=SEARCH)
COMPILER = next((c for c in (os.environ.get("CXX"), "c++", "g++", "clang++") if c and shutil.which(c)), None)
NO_TOOLKIT = {"DYNO_NVCC": "", "DYNO_NVIDIA_SMI": ""}


@dataclass(frozen=True)
class Configured:
    """What a run of CMake left behind."""

    ok: bool
    output: str
    folder: Path
    commands: dict[str, list[str]]  # object file: its compile command

    def of(self, part: str) -> list[list[str]]:
        """Commands of the objects whose path contains `part`."""
        found = [command for name, command in self.commands.items() if part in name]
        assert found, f"no object of {part} is compiled"
        return found

    def link_commands(self) -> str:
        """Every command of the build, links and generated sources included."""
        done = subprocess.run(
            [str(NINJA), "-C", str(self.folder), "-t", "commands"], capture_output=True, text=True, check=True
        )
        return done.stdout

    @property
    def kernel_libraries(self) -> set[str]:
        return {m[1] for name in self.commands if (m := re.search(r"dyno_kernels_(\w+)\.dir", name))}


@pytest.fixture(scope="session")
def compiler() -> str:
    """A C++ compiler of this machine."""
    if COMPILER is None:
        pytest.skip("needs a C++ compiler")
    return COMPILER


@pytest.fixture(scope="session")
def configure(tmp_path_factory: pytest.TempPathFactory) -> Configure:
    """configure(SWITCH=value, …): CMake run in a fresh folder; the same switches are configured once."""
    if not (CMAKE and NINJA and COMPILER):
        pytest.skip("configuring needs cmake and ninja (both in the test extra) and a C++ compiler")
    known: dict[tuple[tuple[str, str], ...], Configured] = {}
    compilers: dict[str, dict[str, Path]] = {}  # by toolkit

    def run(**switches: str) -> Configured:
        given = {**NO_TOOLKIT, "DYNO_BUILD_PYTHON": "OFF", **switches}
        key = tuple(sorted(given.items()))
        if key not in known:
            folder = tmp_path_factory.mktemp("configured")
            found = compilers.setdefault(given["DYNO_NVCC"], {})
            usual = not any("COMPILER" in name or "TOOLCHAIN" in name for name in given)
            if usual:
                _hand_on(found, folder)
            known[key] = _configure(folder, given)
            if usual and known[key].ok:
                for path in folder.glob("CMakeFiles/*/CMake*Compiler.cmake"):
                    found.setdefault(path.name, path)
        return known[key]

    return run


def _hand_on(compilers: dict[str, Path], folder: Path) -> None:
    """Tells CMake the compilers that it has found before, as it tells itself when it runs again in a folder.

    To compile what identifies them takes most of the time of a run."""
    for path in compilers.values():
        copy = folder / path.relative_to(path.parents[2])
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
        shutil.copyfile(path.parent / "CMakeSystem.cmake", copy.parent / "CMakeSystem.cmake")
        # Without a cache CMake takes the files beside it for remains. It keeps the format of programs there.
        known = re.findall(
            r"^CMAKE_(?:PLATFORM_INFO_INITIALIZED|EXECUTABLE_FORMAT):INTERNAL=.*\n",
            (path.parents[2] / "CMakeCache.txt").read_text(),
            re.MULTILINE,
        )
        (folder / "CMakeCache.txt").write_text("".join(known))


def _configure(folder: Path, switches: dict[str, str]) -> Configured:
    hidden = {"CUDAARCHS", "CUDACXX", "CXXFLAGS", "CFLAGS", "LDFLAGS", "CMAKE_GENERATOR"}
    done = subprocess.run(
        [str(CMAKE), "-S", str(ROOT), "-B", str(folder), "-GNinja", f"-DCMAKE_MAKE_PROGRAM={NINJA}"]
        + [f"-D{name}={value}" for name, value in switches.items()],
        env={k: v for k, v in os.environ.items() if k not in hidden},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    listed = folder / "compile_commands.json"
    entries = json.loads(listed.read_text()) if done.returncode == 0 else []
    commands = {}
    for entry in entries:
        words = entry["command"].split()
        commands[words[words.index("-o") + 1]] = words
    # CMake wraps its messages; a test should not depend on where.
    return Configured(done.returncode == 0, " ".join((done.stdout + done.stderr).split()), folder, commands)
