"""The site of the pages: every page is in its navigation, and a strict build has no broken link."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def pages(nav: Any) -> list[str]:
    """The pages of a navigation, in order."""
    if isinstance(nav, str):
        return [nav]
    entries = nav.values() if isinstance(nav, dict) else nav
    return [page for entry in entries for page in pages(entry)]


def test_every_page_is_in_the_navigation() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    listed = pages(site["nav"])
    assert len(listed) == len(set(listed))
    assert set(listed) == {p.relative_to(DOCS).as_posix() for p in DOCS.rglob("*.md")}


def test_a_strict_build_finds_nothing_wrong(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = {
        **os.environ,
        "NO_MKDOCS_2_WARNING": "1",
        "DYNO_REPOSITORY_URL": "https://example.org/dyno",
    }
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    home = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "https://example.org/dyno/benchmarks/REPORT.md" in home
