"""Wheel, engine and tuner have one version, and the changelog names it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import dyno
import dyno_tuner

ROOT = Path(__file__).resolve().parents[2]


def test_every_place_holds_the_version_of_the_wheel() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    version = project["project"]["version"]
    options = (ROOT / "csrc" / "cmake" / "Options.cmake").read_text(encoding="utf-8")
    found = re.search(r'set\(DYNO_VERSION "([^"]+)"', options)
    assert found
    assert found[1] == version
    assert project["tool"]["scikit-build"]["cmake"]["define"]["DYNO_VERSION"] == version
    # Both are read from what is installed, which may be older than the sources.
    assert dyno.__version__ == dyno_tuner.__version__


def test_the_changelog_names_the_version_and_keeps_room_above_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert re.fullmatch(rf"{re.escape(project['project']['version'])} — \d{{4}}-\d\d-\d\d", headings[1])
