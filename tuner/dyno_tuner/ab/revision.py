"""Building a commit of dyno in a cache folder, so that `tune ab` can compare it."""

from __future__ import annotations

import hashlib
import io
import shutil
import subprocess
import sys
import tarfile
from typing import TYPE_CHECKING, Any

from dyno._home import own_folder

from ..core.errors import TuneError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

_DONE = "built"  # written last, so that an incomplete build starts again


def cache_folder() -> Path:
    try:
        return own_folder("CACHE") / "builds"
    except RuntimeError as error:
        raise TuneError("there is no folder to keep builds in; set HOME or XDG_CACHE_HOME") from error


def commit_of(text: str, repository: Path) -> str | None:
    """The full hash of the commit that a word names in a repository; None if there is no such commit or
    repository."""
    if text.startswith("-"):
        return None
    done = subprocess.run(
        ["git", "-C", str(repository), "rev-parse", "--verify", "--quiet", f"{text}^{{commit}}"],
        capture_output=True, text=True, check=False,
    ) if shutil.which("git") else None  # fmt: skip
    found = done.stdout.strip() if done is not None and done.returncode == 0 else ""
    return found or None


def build(commit: str, repository: Path, defines: Sequence[str], say: Callable[[str], None]) -> Path:
    """Build a commit, and return the folder to import its `dyno` from.

    Args:
        defines: CMake definitions, such as `GGML_CUDA=ON`.

    Raises:
        TuneError: The commit can't be unpacked, configured or compiled. The message has the last output of
            the compiler.
    """
    key = hashlib.sha256("\n".join([commit, sys.executable, *sorted(defines)]).encode()).hexdigest()[:8]
    folder = cache_folder() / f"{commit[:12]}-{key}"
    source, package = folder / "source", folder / "source" / "python"
    if (folder / _DONE).exists():
        return package
    say(f"building {commit[:12]} in {folder} (kept for the next time)")
    shutil.rmtree(folder, ignore_errors=True)
    source.mkdir(parents=True)
    archive = subprocess.run(
        ["git", "-C", str(repository), "archive", commit], capture_output=True, check=False
    )  # fmt: skip
    if archive.returncode != 0:
        raise TuneError(f"{commit}: {archive.stderr.decode(errors='replace').strip()[-300:]}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        # Python has extraction filters from 3.11.4 on. Without one, the names are safe because git has
        # checked them.
        checked: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        tar.extractall(source, **checked)
    if not (source / "CMakeLists.txt").is_file() or not (package / "dyno").is_dir():
        raise TuneError(
            f"{commit} of {repository} is not a commit of dyno: it lacks CMakeLists.txt or the package dyno"
        )
    tree = folder / "tree"
    generator = ["-GNinja"] if shutil.which("ninja") else []
    _step(["cmake", "-S", str(source), "-B", str(tree), *generator, "-DCMAKE_BUILD_TYPE=Release",
           f"-DPython_EXECUTABLE={sys.executable}", *(f"-D{d}" for d in defines)], commit)  # fmt: skip
    _step(["cmake", "--build", str(tree), "--parallel"], commit)
    modules = sorted((tree / "csrc" / "bindings").glob("_core*"))
    compiled = [m for m in modules if m.suffix in (".so", ".pyd", ".dylib")]
    if not compiled:
        raise TuneError(f"{commit}: the build made no dyno._core in {tree}/csrc/bindings")
    shutil.copy2(compiled[0], package / "dyno")
    (folder / _DONE).write_text(commit + "\n", encoding="utf-8")
    return package


def _step(command: list[str], commit: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise TuneError(f"{commit}: {command[0]} cannot be started: {error.strerror or error}") from error
    if done.returncode != 0:
        said = "\n".join((done.stderr.strip() or done.stdout.strip()).splitlines()[-5:])
        raise TuneError(f"{commit}: {' '.join(command[:3])} failed ({done.returncode}): {said[-800:]}")
