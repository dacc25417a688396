"""The type stubs of the compiled module say what the module has."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STUBS = ROOT / "python" / "dyno"
NAMES = ("_core.pyi", "_core_ops.pyi")


def check(folder: Path) -> subprocess.CompletedProcess[str]:
    script = ROOT / "csrc" / "bindings" / "stubs.py"
    command = [sys.executable, str(script), "--check", "--folder", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_stubs_are_those_of_the_module() -> None:
    result = check(STUBS)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("_core.pyi", "def draws_on_device(self) -> bool:", "def draws_on_device(self) -> int:"),
        ("_core_ops.pyi", "def bucket_name(tokens: int)", "def bucket_name(token: int)"),
    ],
)
def test_a_stub_that_differs_is_found(tmp_path: Path, name: str, old: str, new: str) -> None:
    for each in NAMES:
        text = (STUBS / each).read_text(encoding="utf-8")
        assert each != name or old in text
        (tmp_path / each).write_text(text.replace(old, new) if each == name else text, encoding="utf-8")
    result = check(tmp_path)
    assert result.returncode == 1
    assert f"-{new}" in re.sub(r"^([-+]) +", r"\1", result.stdout, flags=re.MULTILINE)
    assert "python csrc/bindings/stubs.py" in result.stderr


@pytest.mark.parametrize("name", NAMES)
def test_stubs_leave_no_type_open(name: str) -> None:
    """Each function has types of its parameters and its result, and generic types have their parameters."""
    tree = ast.parse((STUBS / name).read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert functions
    for function in functions:
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        notes = [a.annotation for a in arguments if a.arg != "self"] + [function.returns]
        assert all(notes), function.name
        for note in notes:
            text = ast.unparse(note) if note is not None else ""
            assert not re.search(r"(?<![\w.])(dict|list|tuple|ndarray)(?![\w\[(])", text), (
                function.name,
                text,
            )
            assert text != "Any", function.name
