"""Names of test modules: pytest imports them without their folders and cannot collect two of one name."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def test_no_two_modules_share_a_name() -> None:
    names = Counter(
        path.name for path in TESTS.rglob("*.py") if path.name not in ("conftest.py", "__init__.py")
    )
    assert [name for name, count in names.items() if count > 1] == []
