"""Finds libnvvm, which the device link of GGML_CUDA_LTO=ON needs, in a package that pip installed.

Usage: find_nvvm.py [--requirement] RELEASE        (13.0, or 13.0.88)

Prints the library's path. The package has to be of the toolkit's release, because the library reads what the
compiler of that release wrote. If there is none, the exit status is 1, and the error names the line that
installs it. With --requirement it prints what pip is to install, and looks for nothing.

A build under pip hides the packages of the environment that it builds for; `python -E` shows them again. The
folders of an activated environment are searched, too, since other front ends build in one of their own.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import sys
from pathlib import Path

PACKED_APART = 13  # from this major release on the library has a package of its own


def package_of(release: str) -> str:
    """The package of a toolkit's release, e.g. "13.0", that holds libnvvm."""
    major = int(release.split(".")[0])
    return "nvidia-nvvm" if major >= PACKED_APART else f"nvidia-cuda-nvcc-cu{major}"


def requirement(release: str) -> str:
    """What pip is to install, e.g. "nvidia-nvvm==13.0.*"."""
    return f"{package_of(release)}=={release}.*"


def folders() -> list[str]:
    """Where packages lie: those of this interpreter, then those of an activated environment."""
    found = list(sys.path)
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        if os.environ.get(name):
            found += map(str, sorted(Path(os.environ[name]).glob("lib/python3*/site-packages")))
    return found


def search(release: str, where: list[str]) -> tuple[Path | None, str]:
    """The library, or None and the reason."""
    package = package_of(release)
    reason = f"the package {package} is not installed"
    for installed in importlib.metadata.distributions(name=package, path=where):
        if installed.version.split(".")[:2] != release.split("."):
            reason = f"{package} {installed.version} is of another release"
            continue
        for file in installed.files or ():
            path = Path(str(installed.locate_file(file))).resolve()
            if file.name.startswith("libnvvm.so") and path.is_file():
                return path, ""
        reason = f"{package} {installed.version} holds no libnvvm.so"
    return None, reason


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requirement", action="store_true", help="only print what pip is to install")
    parser.add_argument("release", help="of the CUDA toolkit, e.g. 13.0")
    arguments = parser.parse_args()
    match = re.match(r"\d+\.\d+", arguments.release)
    if match is None:
        parser.error(f"'{arguments.release}' is not a release of CUDA; give one such as 13.0")
    release = match[0]
    if arguments.requirement:
        print(requirement(release))
        return
    library, reason = search(release, folders())
    if library is None:
        sys.exit(f"{reason}. This installs it:\n  pip install {requirement(release)}")
    print(library)


if __name__ == "__main__":
    main()
