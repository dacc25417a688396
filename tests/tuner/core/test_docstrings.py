"""Docstrings of the tuner begin with what the thing is."""

from __future__ import annotations

import ast
from pathlib import Path

import dyno_tuner

FOLDER = Path(dyno_tuner.__file__).parent
KINDS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


# A docstring begins with a noun or a verb: neither with its arguments nor with a relative clause.
NEVER = ("Args:", "Raises:", "Returns:", "What ", "Whatever ")


def test_docstrings_begin_with_what_the_thing_is() -> None:
    wrong = []
    for path in sorted(FOLDER.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = ast.get_docstring(node) if isinstance(node, KINDS) else None
            if text and text.startswith(NEVER):
                wrong.append(f"{path.relative_to(FOLDER)}: {getattr(node, 'name', '')}")
    assert wrong == []
