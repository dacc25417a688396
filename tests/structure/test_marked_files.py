"""`make` names the files of tests that run alone, instead of collecting every test to find them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("marker", ["alone", "builds", "cluster"])
def test_the_makefile_finds_every_file_with_the_marker(marker: str) -> None:
    (command,) = re.findall(r"^marked = (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    told = subprocess.run(
        ["sh", "-c", command.replace("$(1)", marker)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    users = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("*.py")
        if re.search(rf"\bmark\.{marker}\b", path.read_text(encoding="utf-8"))
    }
    assert users
    assert set(told.stdout.split()) == users
