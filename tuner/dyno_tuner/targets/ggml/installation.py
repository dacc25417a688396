"""A folder with the binaries of llama.cpp or ik_llama.cpp, and the abilities of this build."""

from __future__ import annotations

import functools
import mmap
import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.errors import TargetFailure, TargetUnusable
from .help import Flag, Help, Version, engine_of_help, parse_help, parse_version
from .process import Finished, bench_rows, execute, judge

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_COMMON = ("llama-server", "llama-cli", "llama-perplexity", "llama-sweep-bench")
_HELP_DEADLINE = 60.0
_ASKED_IDS = 160  # above the number of ops of all known versions
# Flags that some help texts omit: those for GPUs in a build without a GPU, others in mid-2025. Each has the
# value for a trial; "" for a switch.
_UNLISTED = {
    ("-ngl", "--gpu-layers", "--n-gpu-layers"): "1", ("-sm", "--split-mode"): "layer",
    ("-ts", "--tensor-split"): "1", ("-mg", "--main-gpu"): "0", ("-op", "--offload-policy"): "0,1",
    ("-rtr", "--run-time-repack"): "", ("-ot", "--override-tensor"): "x=CPU", ("-cmoe", "--cpu-moe"): "",
    ("-ncmoe", "--n-cpu-moe"): "1",
}  # fmt: skip
_POLICY = re.compile(r"offload policy for op\s+(\S+)\s+to\s+(?:ON|OFF)", re.IGNORECASE)


class Installation:
    """The binaries in a folder.

    Args:
        folder: folder of `llama-bench`, or the build tree above its `bin/`.
        engine: "llama.cpp" or "ik_llama.cpp", as the user gave it.

    Raises:
        TargetUnusable: there is no llama-bench, or it belongs to the other engine.
    """

    def __init__(self, folder: str, engine: str) -> None:
        self.engine = engine
        self._helps: dict[str, Help] = {}
        self.folder = self.find(Path(folder))
        self.bench = str(self.folder / "llama-bench")
        found, marks = engine_of_help(self.bench_help)
        if not found:
            raise TargetUnusable(f"{self.bench}: its --help lists none of the flags of {engine}")
        if found != engine:
            raise TargetUnusable(
                f"{self.bench} belongs to {found} (it has {marks}), not to {engine}; give its binaries, or "
                f"use --engine {found} in a tune"
            )

    @staticmethod
    def find(folder: Path) -> Path:
        """The folder of llama-bench as an absolute path, because tools start in other folders. Raises
        TargetUnusable."""
        folder = folder.absolute()
        for place in (folder, folder / "bin", folder / "build" / "bin"):
            if os.access(place / "llama-bench", os.X_OK) and (place / "llama-bench").is_file():
                return place
        raise TargetUnusable(
            f"no executable llama-bench in {folder}, {folder}/bin or {folder}/build/bin; give --bin the "
            "folder of the engine's binaries"
        )

    def tool(self, name: str) -> str | None:
        """Path of a binary; None if the folder does not have it."""
        path = self.folder / name
        return str(path) if path.is_file() and os.access(path, os.X_OK) else None

    @functools.cached_property
    def bench_help(self) -> Help:
        return read_help(self.bench)

    @functools.cached_property
    def common(self) -> tuple[str, Help] | None:
        """The first tool with the common flags, and its help; the server comes first."""
        for name in _COMMON:
            found = self.help_of(name)
            if found is not None:
                return name, found
        return None

    def help_of(self, name: str) -> Help | None:
        """The flags of a tool, also those that its help omits; None if the folder does not have the tool."""
        path = self.tool(name)
        if path is None:
            return None
        if name not in self._helps:
            found = self._listed(name, path)
            if self.engine == "ik_llama.cpp" and name in _COMMON:
                found = Help({**found.flags, **self._unlisted(path, found)})
            self._helps[name] = found
        return self._helps[name]

    def _listed(self, name: str, path: str) -> Help:
        """The help of a tool. Older versions of llama-sweep-bench print no flags; then the help of another
        tool with the same parser is taken."""
        try:
            return read_help(path)
        except TargetUnusable:
            others = [p for n in _COMMON if n != name and (p := self.tool(n)) is not None]
            if name not in _COMMON or self.engine != "ik_llama.cpp" or not others:
                raise
            return read_help(others[0])

    @staticmethod
    def _unlisted(path: str, found: Help) -> dict[str, Flag]:
        """Flags that a tool accepts although its help omits them."""
        flags: dict[str, Flag] = {}
        for names, value in _UNLISTED.items():
            if found.has(names[0]):
                continue
            if _takes(path, [names[0], value] if value else [names[0]]):
                flags |= dict.fromkeys(names, Flag(names, value))
        return flags

    def takes(self, name: str, words: Sequence[str]) -> bool:
        """Whether a tool accepts flags, also those that its help omits.

        Args:
            name: name of a tool with the common flags.
            words: flags with their values.

        Raises:
            TargetUnusable: The tool does not end.
        """
        path = self.tool(name)
        return path is not None and _takes(path, words)

    def version(self, model: str) -> Version:
        """The version, from `--version` of a common tool or from the results of llama-bench."""
        for name in _COMMON:
            path = self.tool(name)
            if path is None:
                continue
            try:
                done = _ask([path, "--version"])
            except TargetUnusable:
                continue  # the next tool or llama-bench gives it as well
            found = parse_version(done.stderr + "\n" + done.stdout)
            if found is not None:
                return found
        command = [self.bench, "-m", os.path.abspath(model), "-p", "1", "-n", "0", "-r", "1", "-o", "json"]
        done = _ask(command, f"llama-bench does not run {model}", 600.0)
        try:
            judge(done)
            row = bench_rows(done.stdout)[0]
        except TargetFailure as failure:
            raise TargetUnusable(f"llama-bench does not run {model}: {failure.message}") from failure
        return Version(str(row.get("build_number", "unknown")), str(row.get("build_commit", "")))

    def reads_variable(self, name: str) -> bool:
        """Whether the name of an environment variable occurs in the files of this build. No help lists these
        names."""
        needle = name.encode() + b"\0"
        return any(_contains(path, needle) for path in self._files())

    def _files(self) -> Iterator[Path]:
        yield Path(self.bench)
        for place in (self.folder, self.folder.parent / "lib", self.folder.parent / "src"):
            yield from sorted(place.glob("libggml*")) if place.is_dir() else ()

    def op_ids(self, model: str) -> dict[str, int]:
        """Op ids by name in this binary (ik_llama.cpp).

        A dry run with `-op 0,1,1,1,…` prints the name of each op in the order of the ids. It sets the default
        policy again, which changes nothing. The list ends at the line about all ops.

        Raises:
            TargetUnusable: no tool takes `-op`, or its answer cannot be read. Ids are never guessed, because
            they have been renumbered five times.
        """
        for name in reversed(_COMMON):  # a server might keep running
            path, flags = self.tool(name), self.help_of(name)
            if path is None or flags is None or not flags.has("-op"):
                continue
            pairs = ",".join(f"{i},1" for i in range(_ASKED_IDS))
            # The benchmark continues after the dry run, so its work is kept minimal. Older versions have no
            # dry run and load the model.
            command = [path, "-m", os.path.abspath(model), "-c", "32", "-b", "32", "-ub", "32", "-n", "1"]
            command += ["-op", pairs]
            command += ["-dr"] if flags.has("-dr") else []
            done = _ask(command, f"{path}: ids of ops", 600.0)
            return parse_op_ids(done.stdout + "\n" + done.stderr, path)
        raise TargetUnusable(
            f"{self.folder}: no tool that takes -op, so the ids of ops cannot be found by name"
        )


def _ask(command: list[str], what: str = "", deadline: float = _HELP_DEADLINE) -> Finished:
    """Run a tool in a temporary folder, because tools of ik_llama.cpp leave a log file there.

    Args:
        what: beginning of the message of a failure; default: the command.

    Raises:
        TargetUnusable: The tool does not end.
    """
    with tempfile.TemporaryDirectory(prefix="dyno-ask-") as folder:
        try:
            return execute(command, deadline=deadline, folder=folder)
        except TargetFailure as failure:
            raise TargetUnusable(f"{what or ' '.join(command)}: {failure.message}") from failure


def _takes(path: str, words: Sequence[str]) -> bool:
    """Whether a tool accepts flags, which it reads before it answers `--version`."""
    done = _ask([path, *words, "--version"])
    return parse_version(done.stderr + "\n" + done.stdout) is not None


def read_help(path: str) -> Help:
    """The flags of a binary. Raises TargetUnusable if it lists none."""
    done = _ask([path, "--help"])
    parsed = parse_help(done.stdout + "\n" + done.stderr)
    if not parsed.flags:
        raise TargetUnusable(f"{path} --help lists no flags (exit code {done.code}): {done.last_line()}")
    return parsed


def engine_in(folder: Path) -> str | None:
    """The engine of the llama-bench in a folder; None without llama-bench, or if its engine is unknown."""
    try:
        bench = Installation.find(folder) / "llama-bench"
    except TargetUnusable:
        return None
    return engine_of_help(read_help(str(bench)))[0] or None


def parse_op_ids(text: str, source: str) -> dict[str, int]:
    """Op names in the order of their ids. Raises TargetUnusable if the order is not certain."""
    ids: dict[str, int] = {}
    for number, found in enumerate(_POLICY.finditer(text)):
        if found[1].lower() == "all":
            break
        if found[1] in ids:
            raise TargetUnusable(f"{source}: op {found[1]} appears twice, so the order does not give the ids")
        ids[found[1]] = number
    if list(ids)[:1] != ["NONE"] or "MUL_MAT" not in ids or "MUL_MAT_ID" not in ids:
        raise TargetUnusable(
            f"{source}: the dry run does not list the ops from NONE on, so no name can be turned into an id"
        )
    return ids


def _contains(path: Path, needle: bytes) -> bool:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return data.find(needle) >= 0 or data.find(needle[:-1]) >= 0
    except (OSError, ValueError):  # unreadable or empty: no match
        return False
