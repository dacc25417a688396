"""Modules of the runtime import each other in no circle. Imports for type checkers alone do not count."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "python" / "dyno"


def modules() -> dict[str, Path]:
    """By dotted name; a package goes by its own name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ("dyno", *path.relative_to(PACKAGE).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def at_run_time(node: ast.AST) -> list[ast.stmt]:
    """The imports below a node, without blocks for type checkers."""
    found: list[ast.stmt] = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.Import | ast.ImportFrom):
            found.append(child)
        found += at_run_time(child)
    return found


def imports(name: str, path: Path) -> set[str]:
    """The modules of the runtime that a module imports anywhere when it runs."""
    found: set[str] = set()
    for node in at_run_time(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
                base = ".".join([*parts[: len(parts) - node.level + 1], *([base] if base else [])])
            found |= {inner if (inner := f"{base}.{a.name}") in MODULES else base for a in node.names}
    return found & MODULES.keys()


def test_modules_do_not_import_in_circles() -> None:
    graph = {
        name: {t for t in imports(name, path) if MODULES[t].name != "__init__.py"} - {name}
        for name, path in MODULES.items()
        if path.name != "__init__.py"
    }
    assert len(graph) > 40
    assert "dyno.diagnostics" in graph["dyno.engine"]
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))
