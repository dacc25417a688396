"""`benchmarks/REPORT.md` and its plots are what `benchmarks/results` gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    script = str(ROOT / "benchmarks" / "report.py")
    return subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, check=False)


def test_the_report_is_what_the_results_give() -> None:
    done = run("--check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_result_is_named_in_the_report() -> None:
    page = (ROOT / "benchmarks" / "REPORT.md").read_text(encoding="utf-8")
    results = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    assert len(results) > 30
    assert [p.name for p in results if f"(results/{p.name})" not in page] == []
