"""Python is started with -P everywhere: no module of the current folder, where a downloaded model may have
company, nor of a script's own folder is taken for one that is installed."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def starts_python(node: ast.AST) -> bool:
    """A list whose first item is an interpreter: sys.executable, or a variable that holds one."""
    if not isinstance(node, ast.List) or len(node.elts) < 2:
        return False
    first = ast.unparse(node.elts[0])
    return first in ("sys.executable", "python")


def test_every_python_is_started_with_a_safe_path() -> None:
    found = 0
    for folder in ("python", "tuner", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if starts_python(node):
                    assert isinstance(node, ast.List)
                    assert ast.unparse(node.elts[1]) == "'-P'", f"{path}:{node.lineno}"
                    found += 1
    assert found >= 5
