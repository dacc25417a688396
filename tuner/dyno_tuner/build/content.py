"""The key of a build, from its sources, switches, compilers and Python. Equal keys mean the same build.

The sources are first copied into the cache. So edits during a build have no effect, and all variants have the
same path in their objects.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import TuneError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_NO_SOURCE = ("tests/data/", "benchmarks/", "models/", ".git/")
_NO_FOLDER = frozenset({".git", ".venv", "__pycache__", "node_modules"})
MOST_FILES = 100_000
VARIABLES = (
    "CC",
    "CXX",
    "CFLAGS",
    "CXXFLAGS",
    "LDFLAGS",
    "CUDACXX",
    "CUDAARCHS",
    "CUDAFLAGS",
    "NVCC_APPEND_FLAGS",
)
"""Environment variables that change a build by CMake."""


def source_files(source: Path) -> list[str]:
    """The files of a source tree, sorted and relative to it, without build folders. In a git repository, git
    lists them.

    Raises:
        TuneError: It is not a CMake source tree, or has too many files.
    """
    if not source.is_dir():
        raise TuneError(f"{source}: the folder does not exist; give a source tree with --source")
    if not (source / "CMakeLists.txt").is_file():
        raise TuneError(
            f"{source} is not a source tree, because it has no CMakeLists.txt; give one with --source"
        )
    done = None
    if (source / ".git").exists() and shutil.which("git"):
        command = ["git", "-C", str(source), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        done = subprocess.run(command, capture_output=True, check=False)
    if done is not None and done.returncode == 0:
        names = [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]
    else:
        names = list(_walked(source))
    kept = sorted({n for n in names if not n.startswith(_NO_SOURCE) and (source / n).is_file()})
    if len(kept) > MOST_FILES:
        raise TuneError(f"{source} has {len(kept)} files; at most {MOST_FILES} are copied for a build")
    return kept


def _walked(source: Path) -> Iterator[str]:
    for folder, folders, files in os.walk(source):
        folders[:] = [
            f
            for f in folders
            if f not in _NO_FOLDER and not os.path.exists(os.path.join(folder, f, "CMakeCache.txt"))
        ]
        for name in files:
            if not name.endswith((".o", ".so", ".pyc")):
                yield os.path.relpath(os.path.join(folder, name), source)


def digest(source: Path, names: Sequence[str]) -> str:
    """SHA-256 over the names, modes and contents of files."""
    whole = hashlib.sha256()
    for name in names:
        path = source / name
        mode = b"x" if os.access(path, os.X_OK) else b"-"
        content = os.readlink(path).encode() if path.is_symlink() else path.read_bytes()
        whole.update(b"%s\0%s\0%d\0" % (os.fsencode(name), mode, len(content)))
        whole.update(content)
    return whole.hexdigest()


def snapshot(source: Path, cache: Path) -> tuple[Path, str]:
    """Copy a source tree into the cache, and return the copy and its digest. An incomplete copy is made
    again.

    Raises:
        TuneError: It is not a source tree, or the cache cannot be written.
    """
    names = source_files(source)
    key = digest(source, names)
    copy = cache / "sources" / key[:16]
    if copy.is_dir():
        return copy, key
    partial = copy.with_name(f".{copy.name}.{os.getpid()}")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        for name in names:
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, partial / name, follow_symlinks=False)
        try:
            partial.rename(copy)
        except OSError:  # another run has meanwhile made the same copy
            if not copy.is_dir():
                raise
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise TuneError(f"{copy}: the sources cannot be copied: {error.strerror or error}") from error
    return copy, key


def compiler_of(defines: Mapping[str, str], environment: Mapping[str, str]) -> str:
    """The first line of `--version` of each compiler that these defines name."""
    cxx = defines.get("CMAKE_CXX_COMPILER") or environment.get("CXX") or "c++"
    told = [_version(cxx)]
    if defines.get("GGML_CUDA", "OFF").upper() not in ("OFF", "0", "FALSE", "NO"):
        told.append(_version(defines.get("CMAKE_CUDA_COMPILER") or environment.get("CUDACXX") or "nvcc"))
    return "\n".join(told)


def _version(program: str) -> str:
    found = shutil.which(program)
    if found is None:
        raise TuneError(f"there is no compiler {program} here; install one, or name another")
    done = subprocess.run([found, "--version"], capture_output=True, text=True, errors="replace", check=False)
    return f"{os.path.realpath(found)}: {done.stdout.strip()}"


def build_key(
    sources: str, defines: Mapping[str, str], compilers: str, environment: Mapping[str, str]
) -> str:
    """The key of a build: 16 hexadecimal digits."""
    parts = [
        sources, compilers, sys.version, sys.executable,
        *(f"{name}={value}" for name, value in sorted(defines.items())),
        *(f"{name}:{environment[name]}" for name in VARIABLES if environment.get(name)),
    ]  # fmt: skip
    for name, value in sorted(defines.items()):
        if name == "GGML_CUDA_PROFILE" and value and Path(value).is_file():
            parts.append(hashlib.sha256(Path(value).read_bytes()).hexdigest())
    return hashlib.sha256("\0".join(parts).encode(errors="surrogateescape")).hexdigest()[:16]
