"""Cached builds: with pip for dyno, with CMake for a source tree of another engine.

Each build has its own folder, named by its key. The build tree stays there, so a killed build continues where
it was. `built.json` is written last. A folder without it counts as unfinished.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import re
import shutil
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dyno.profiles.io import write_atomically

from ..core.errors import TuneError
from ..core.protocol import counted
from . import memory
from .commands import Commands, identity_objects, read_commands, search_path, tool
from .content import build_key, compiler_of
from .sections import DEVICE, Code, code_of, sections
from .step import run_step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

TOOLS = ("llama-bench", "llama-perplexity")
"""Programs of another engine that are used for measurements."""
PRECOMPILED = (".gch", ".pch")
"""Endings of compiled headers, whose code is in the objects that include them."""
_METER = Path(__file__).with_name("link_meter.py")
LONGEST = 6 * 3600.0  # seconds that a build may take if there is no budget


@dataclass(frozen=True)
class Built:
    """A finished build, with its cost."""

    key: str
    folder: str
    """For dyno: the folder to import from. For another engine: the folder of its programs."""
    seconds: float
    link_seconds: float
    link_mib: int
    """Peak memory of the largest link process in MiB."""
    process_mib: int
    """Peak memory of the largest process of the build in MiB."""
    bytes: int
    """Size of the result: the module, or all programs and libraries."""
    device_bytes: int = 0
    compiler_cache: bool = False
    """Whether a compiler cache was in use, so that the seconds are too low."""
    code: dict[str, list[Any]] = field(default_factory=dict)
    """Digests by object file."""
    gpu_types: list[str] = field(default_factory=list)
    """Weight types with GPU kernels if GGML_CUDA_PROFILE has left out others; empty if none is left out."""

    gpu_groups: list[str] = field(default_factory=list)
    """Groups of GPU kernels if GGML_CUDA_PROFILE has left out others; empty if none is left out."""

    @property
    def runs_only(self) -> str:
        """A restriction on the models that this build runs on a GPU, in words; "" if it runs all."""
        kept = []
        if self.gpu_types:
            kept.append(f"models with weights of type {', '.join(self.gpu_types)}")
        if self.gpu_groups:
            kept.append(f"kernels of the groups {', '.join(self.gpu_groups)}")
        return f"on a GPU this build runs only {' and '.join(kept)}" if kept else ""

    @property
    def objects(self) -> dict[str, Code]:
        return {name: Code(str(h), str(d), int(n)) for name, (h, d, n) in self.code.items()}


class BuildFailed(TuneError):
    """The error of a variant that does not configure or compile. The message has the last output of the
    compiler."""


class BuildLate(BuildFailed):
    """The error of a build that reached its deadline. The next run continues it."""


@dataclass
class Builder:
    """The builder of the variants of one source tree.

    Args:
        source: The copy of the sources.
        sources: The digest of the sources.
        engine: "dyno", "llama.cpp" or "ik_llama.cpp".
        cache: Folder of all builds.
        fixed: Defines of all variants.
        limit_mib: Memory for builds in MiB; None: all free memory.
        say: Receives a line about each build.
    """

    source: Path
    sources: str
    engine: str
    cache: Path
    fixed: Mapping[str, str]
    limit_mib: int | None
    say: Callable[[str], None]
    process_mib: int = 0  # the largest process of any build so far

    def key(self, defines: Mapping[str, str]) -> str:
        """The key of a variant. Raises TuneError if its compiler is missing."""
        whole = {**self.fixed, **defines}
        return build_key(self.sources, whole, compiler_of(whole, os.environ), os.environ)

    def free_mib(self) -> int:
        free = memory.available_mib()
        return free if self.limit_mib is None else min(free, self.limit_mib)

    def known(self, defines: Mapping[str, str]) -> Built | None:
        """The variant, if the cache has a complete build of it."""
        return self._load(self.cache / self.key(defines))

    def configured(self, defines: Mapping[str, str], deadline: float = LONGEST) -> Commands:
        """The commands that would build a variant. Only the checks of CMake are compiled.

        Raises:
            BuildFailed: CMake refuses the switches.
        """
        key = self.key(defines)
        tree = self.cache / key / "configured"
        if not (tree / "compile_commands.json").is_file():
            command = self._cmake(tree, defines)
            with self._held(key):
                self._step(command, deadline, "configure")
        return read_commands(tree)

    def build(
        self, defines: Mapping[str, str], name: str, link_mib: int = 0, deadline: float = LONGEST
    ) -> Built:
        """Take a variant from the cache, or build it.

        Args:
            name: Name for messages.
            link_mib: Memory that the link took elsewhere. The last link here with one of these
                switches has priority. A link that would not fit is refused.
            deadline: Seconds after which the build is stopped. The next run continues it.

        Raises:
            BuildFailed: The variant does not configure, compile or link.
            BuildLate: The build has not ended by the deadline.
            TuneError: The link would not fit into memory.
        """
        key = self.key(defines)
        place = self.cache / key
        with self._held(key):
            found = self._load(place)
            if found is not None:
                self.say(f"{name}: in the cache ({place})")
                return found
            free = self.free_mib()
            if why := memory.too_large(self._predicted(defines, link_mib), free):
                raise TuneError(why)
            jobs = memory.jobs(free, self.process_mib or memory.COMPILER_MIB)
            self.say(f"{name}: building with {counted(jobs, 'job')} in {place} (kept for the next time)")
            place.mkdir(parents=True, exist_ok=True)
            begun, before = time.monotonic(), _spent(place)
            try:
                peak = self._make(place, defines, jobs, deadline)
            finally:
                _spend(place, before + time.monotonic() - begun)
            built = self._collect(place, key, peak)
            self._remember(defines, built.link_mib)
        self.process_mib = max(self.process_mib, built.process_mib)
        return built

    # ---- The last links ----

    def _links(self) -> dict[str, int]:
        """Largest process of the last link by switch, such as `GGML_CUDA_LTO=ON`, for any sources in this
        cache."""
        try:
            told = json.loads((self.cache / "links.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise TuneError(f"{self.cache / 'links.json'}: cannot be read ({error}); remove it") from error
        return {str(name): int(mib) for name, mib in told.items()}

    def _predicted(self, defines: Mapping[str, str], elsewhere: int) -> int:
        """Predicted MiB of the link of a variant, from the last links with its switches."""
        known = self._links()
        found = [known[f"{n}={v}"] for n, v in defines.items() if f"{n}={v}" in known]
        return max(found, default=elsewhere)

    def _remember(self, defines: Mapping[str, str], link_mib: int) -> None:
        if link_mib and defines:
            known = {**self._links(), **dict.fromkeys((f"{n}={v}" for n, v in defines.items()), link_mib)}
            write_atomically(self.cache / "links.json", json.dumps(known).encode())

    # ---- One build ----

    def _make(self, place: Path, defines: Mapping[str, str], jobs: int, deadline: float) -> int:
        """Build into `place/tree`, for dyno also `place/package`, and return the MiB of the largest
        process."""
        tree, log = place / "tree", place / "links.jsonl"
        whole = {**self.fixed, **defines}
        launcher = f"{sys.executable};-P;{_METER};{log}"
        whole |= {"CMAKE_CXX_LINKER_LAUNCHER": launcher, "CMAKE_C_LINKER_LAUNCHER": launcher}
        environment = {"CMAKE_BUILD_PARALLEL_LEVEL": str(jobs)}
        if self.engine == "dyno":
            package = place / "package"
            shutil.rmtree(package, ignore_errors=True)
            whole["CMAKE_EXPORT_COMPILE_COMMANDS"] = "ON"
            given = [word for n, v in whole.items() for word in ("-C", f"cmake.define.{n}={v}")]
            command = [
                sys.executable, "-P", "-m", "pip", "install", "--quiet", "--no-deps", "--no-cache-dir",
                "--no-input", "--disable-pip-version-check", "--target", str(package), *_isolation(),
                str(self.source), "-C", f"build-dir={tree}", *given,
            ]  # fmt: skip
            return self._step(command, deadline, "pip install", environment)
        peak = self._step(self._cmake(tree, whole), deadline, "configure", environment)
        targets = [word for tool in TOOLS for word in ("--target", tool)]
        command = [_cmake_program(), "--build", str(tree), "--parallel", str(jobs), *targets]
        try:
            return max(peak, self._step(command, deadline, "build", environment))
        except BuildFailed as error:
            if missing := next(
                (t for t in TOOLS if re.search(rf"(unknown|make) target '{t}'", str(error))), None
            ):
                raise BuildFailed(
                    f"the source tree builds no {missing}; --source names a tree of {self.engine}"
                ) from error
            raise

    def _cmake(self, tree: Path, defines: Mapping[str, str]) -> list[str]:
        ninja = tool("ninja")
        generator = ["-GNinja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []
        given = {
            "CMAKE_BUILD_TYPE": "Release",
            "CMAKE_EXPORT_COMPILE_COMMANDS": "ON",
            **self.fixed,
            **defines,
        }
        if self.engine == "dyno":
            given["Python_EXECUTABLE"] = sys.executable
        words = [f"-D{n}={v}" for n, v in given.items()]
        return [_cmake_program(), "-S", str(self.source), "-B", str(tree), *generator, *words]

    def _step(
        self, command: Sequence[str], deadline: float, what: str, extra: Mapping[str, str] | None = None
    ) -> int:
        """Run a step, and return the MiB of its largest process."""
        # Variables of another build of this project would silently change this one.
        kept = {n: v for n, v in os.environ.items() if not n.startswith(("SKBUILD", "PIP_"))}
        done = run_step(command, {**kept, "PATH": search_path(), **(extra or {})}, deadline)
        if done.late:
            raise BuildLate(
                f"{what} did not finish within {deadline:.0f} s; the next run continues from there"
            )
        if done.code != 0:
            lines = [line for line in done.output.splitlines() if line.strip()]
            first = next(
                (n for n, line in enumerate(lines) if "error" in line.lower()), max(0, len(lines) - 4)
            )
            said = " | ".join(" ".join(line.split()) for line in lines[first : first + 4])
            raise BuildFailed(f"{what} failed ({done.code}): {said[:600]}")
        return done.peak_mib

    def _collect(self, place: Path, key: str, peak: int) -> Built:
        tree = place / "tree"
        commands = read_commands(tree)
        skipped = identity_objects(tree, commands)
        objects = {
            name: code_of(tree / name).to_list()
            for name in sorted(commands.compile)
            if name not in skipped and not name.endswith(PRECOMPILED) and (tree / name).is_file()
        }
        artifacts = self._artifacts(place)
        links = _rows(place / "links.jsonl")
        # A device link has its own report.
        link_report = place / "package" / "dyno" / "link_report.json"
        if link_report.is_file():
            report = json.loads(link_report.read_text(encoding="utf-8"))
            links += [{"seconds": s["seconds"], "peak_mib": s["peak_process_mib"]}
                      for s in report.values() if isinstance(s, dict)]  # fmt: skip
        built = Built(
            key,
            str(place / "package") if self.engine == "dyno" else str(artifacts[0].parent),
            round(_spent(place), 1) or 0.1,
            round(sum(float(row["seconds"]) for row in links), 1),
            max((int(row["peak_mib"]) for row in links), default=0),
            peak,
            sum(path.stat().st_size for path in artifacts),
            sum(len(c) for p in artifacts if _is_elf(p) for n, c in sections(p) if n in DEVICE),
            any(os.environ.get(f"CMAKE_{lang}_COMPILER_LAUNCHER") for lang in ("C", "CXX", "CUDA")),
            objects,
            types_left(tree) if self.engine == "dyno" else [],
            groups_left(tree) if self.engine == "dyno" else [],
        )
        write_atomically(place / "built.json", json.dumps(asdict(built)).encode())
        return built

    def _artifacts(self, place: Path) -> list[Path]:
        """The module, or the programs and libraries of another engine; llama-bench comes first."""
        if self.engine == "dyno":
            found = sorted((place / "package" / "dyno").glob("_core*.so"))
            if not found:
                raise BuildFailed(f"the build left no dyno._core in {place / 'package' / 'dyno'}")
            return found
        for folder in (place / "tree" / "bin", place / "tree"):
            bench = folder / TOOLS[0]
            if bench.is_file():
                libraries = sorted(p for p in folder.glob("lib*.so") if p.is_file() and not p.is_symlink())
                return [bench, *libraries]
        raise BuildFailed(f"the build left no {TOOLS[0]} in {place / 'tree'}")

    def _load(self, place: Path) -> Built | None:
        try:
            told = json.loads((place / "built.json").read_text(encoding="utf-8"))
            built = Built(**told)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            raise TuneError(
                f"{place / 'built.json'}: cannot be read ({error}); remove this folder"
            ) from error
        return built if Path(built.folder).is_dir() else None

    @contextlib.contextmanager
    def _held(self, key: str) -> Iterator[None]:
        """Lock a variant, so that two runs do not build it at the same time. The kernel releases the lock
        however a run ends."""
        place = self.cache / key
        place.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(place / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def types_left(tree: Path) -> list[str]:
    """Weight types with GPU kernels in a build tree of dyno; empty unless a profile excluded others."""
    return _kept(tree, "built_types.inc", "BUILT_FOR", "FLOAT|QUANT|GPU")


def groups_left(tree: Path) -> list[str]:
    """Groups of GPU kernels in a build tree of dyno; empty unless a profile excluded others."""
    return _kept(tree, "built_groups.inc", "GROUPS_FOR", "GROUP")


def _kept(tree: Path, name: str, profile: str, kinds: str) -> list[str]:
    try:
        text = (tree / "generated" / "ops" / name).read_text(encoding="utf-8")
    except FileNotFoundError:  # without CUDA
        return []
    if re.search(rf'^DYNO_{profile}\(""\)$', text, re.MULTILINE):
        return []
    return re.findall(rf"^DYNO_BUILT_(?:{kinds})\((\w+)\)$", text, re.MULTILINE)


def _cmake_program() -> str:
    found = tool("cmake")
    if found is None:
        raise TuneError("building needs cmake, which is not installed: pip install cmake ninja")
    return found


def _isolation() -> list[str]:
    """Use the build tools of this environment if it has them. Otherwise pip fetches them."""
    here = all(importlib.util.find_spec(name) is not None for name in ("scikit_build_core", "nanobind"))
    return ["--no-build-isolation"] if here else []


def _is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def _rows(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def _spent(place: Path) -> float:
    """Seconds that runs have spent on a build so far, including killed ones."""
    try:
        return float((place / "seconds").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0.0


def _spend(place: Path, seconds: float) -> None:
    (place / "seconds").write_text(f"{seconds:.2f}\n", encoding="ascii")
