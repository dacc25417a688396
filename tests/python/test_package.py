"""What `import dyno` offers, and that it stays light."""

from __future__ import annotations

import inspect
import subprocess
import sys

import dyno
import pytest
from dyno.diagnostics import Diagnostics


@pytest.mark.parametrize("name", dyno.__all__)
def test_public_names_exist(name: str) -> None:
    assert getattr(dyno, name) is not None
    assert name in dir(dyno)


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="Enjine"):
        _ = dyno.Enjine  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", [n for n in dyno.__all__ if not n.startswith("_")])
def test_public_names_are_documented(name: str) -> None:
    assert getattr(dyno, name).__doc__


@pytest.mark.parametrize(
    ("statement", "heavy"),
    [
        ("import dyno", ["numpy", "pydantic", "tokenizers", "dyno._core", "optuna"]),
        ("import dyno.cli", ["numpy", "pydantic", "tokenizers", "dyno._core", "optuna", "rich"]),
    ],
)
def test_imports_stay_light(statement: str, heavy: list[str]) -> None:
    """Nothing heavy and no device behind an import; `dyno --help` would pay for it."""
    code = f"import sys; {statement}; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_hooks_are_apart_from_the_methods_of_people() -> None:
    hooks = {"logits_with_routing", "draws_on_device", "greedy_after", "time_ops", "captures"}
    assert not hooks & set(dir(dyno.Engine))
    assert hooks <= set(dir(Diagnostics))
    assert "pinned_routing" not in inspect.signature(dyno.Engine.logits).parameters
