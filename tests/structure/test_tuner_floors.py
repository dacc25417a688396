"""Imports of the tuner point one way, from package to package and from module to module; and the runtime
does not import the tuner. Imports for type checkers and imports inside functions count as well."""

from __future__ import annotations

import ast
import functools
import tomllib
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TUNER = ROOT / "tuner" / "dyno_tuner"

# Each package may import the ones above it, and nothing below.
FLOORS = (
    "core", "space", "measure", "record", "targets", "execution", "search", "decide", "kernels", "output",
    "run", "ab", "doctor", "build", "cli",
)  # fmt: skip
# Pairs that are in order and still do not belong together.
FORBIDDEN = {
    ("doctor", "measure"), ("doctor", "run"), ("doctor", "decide"), ("doctor", "targets"),
    ("ab", "run"), ("ab", "decide"), ("ab", "search"), ("ab", "kernels"),
    ("targets", "record"), ("output", "execution"), ("decide", "targets"), ("search", "targets"),
    ("kernels", "targets"),
}  # fmt: skip
TOP = {"__init__", "__main__", "entry"}  # modules beside the packages; `entry` sees the command alone


def modules() -> dict[str, Path]:
    """By dotted name below the package; a package goes by its own name."""
    found = {}
    for path in sorted(TUNER.rglob("*.py")):
        parts = path.relative_to(TUNER).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(name: str, path: Path) -> set[str]:
    """The modules of the tuner that a module imports anywhere."""
    here = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    here = [part for part in here if part]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        targets: list[str] = []
        if isinstance(node, ast.Import):
            targets = [
                a.name.removeprefix("dyno_tuner.") for a in node.names if a.name.startswith("dyno_tuner.")
            ]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = here[: len(here) - node.level + 1] + (node.module.split(".") if node.module else [])
            elif node.module and node.module.split(".")[0] == "dyno_tuner":
                base = node.module.split(".")[1:]
            else:
                continue
            whole = ".".join(base)
            targets = [
                inner if (inner := f"{whole}.{a.name}".strip(".")) in MODULES else whole for a in node.names
            ]
        found |= {target for target in targets if target}
    return found


@functools.cache
def imported() -> dict[str, set[str]]:
    """By module. Every worker collects this file, and only those that run its tests read the tuner."""
    return {name: imports(name, path) for name, path in MODULES.items()}


def package(name: str) -> str:
    return name.split(".")[0]


def test_every_package_has_a_floor_and_a_docstring() -> None:
    packages = {p.name for p in TUNER.iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert packages == set(FLOORS)
    beside = {p.stem for p in TUNER.glob("*.py")}
    assert beside == TOP
    for path in TUNER.rglob("__init__.py"):
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), path


@pytest.mark.parametrize("floor", FLOORS)
def test_packages_import_one_way(floor: str) -> None:
    wrong = [
        f"{name} imports {target}"
        for name, targets in imported().items()
        for target in sorted(targets)
        if package(name) == floor != package(target)
        and (
            package(target) not in FLOORS
            or FLOORS.index(package(target)) > FLOORS.index(floor)
            or (floor, package(target)) in FORBIDDEN
        )
    ]
    assert not wrong, "\n".join(wrong)


def test_modules_do_not_import_in_circles() -> None:
    graph = {
        name: targets - {name} for name, targets in imported().items() if MODULES[name].name != "__init__.py"
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_the_rule_reads_real_files() -> None:
    assert len(MODULES) > 80
    assert {"core.protocol", "record.recorder"} <= imported()["run.tune"] | imported()["run.session"]
    assert "cli.messages" in imported()["entry"]
    assert {package(name) for targets in imported().values() for name in targets} >= {
        "core",
        "space",
        "run",
    }


def test_every_test_of_the_tuner_lies_in_the_folder_of_a_package() -> None:
    folder = ROOT / "tests" / "tuner"
    assert [p.name for p in folder.glob("test_*.py")] == []
    assert {p.parent.name for p in folder.rglob("test_*.py")} <= set(FLOORS)


def test_the_runtime_does_not_import_the_tuner() -> None:
    wrong = []
    for path in sorted((ROOT / "python").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [a.name for a in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names = [node.value]
            wrong += [f"{path}:{node.lineno}" for n in names if "dyno_tuner" in n]
    assert not wrong


def test_the_entry_points_that_the_runtime_calls_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for group in (project["scripts"], project["entry-points"]["dyno.commands"]):
        for name, value in group.items():
            assert callable(EntryPoint(name, value, "").load()), name
