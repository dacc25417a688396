"""Five tunes of the real engine, each beside another real disturbance: nothing false is written.

The published run with 100 tunes of each kind is `benchmarks/results/disturbed_tunes.json`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "benchmarks" / "tunes_under_disturbance.py"
MODEL = ROOT / "models" / "pycode-moe-20m-Q4_K_M.gguf"


@pytest.mark.alone
def test_null_tunes_beside_real_disturbances_write_nothing(tmp_path: Path) -> None:
    """A tune may also stop, because the machine does not come to rest; it must not fail in another way."""
    report = tmp_path / "tunes.json"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(MODEL), "--tunes", "5", "--kinds", "null", "--budget", "14",
         "--json", str(report)],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(report.read_text())["tunes"]
    assert len(rows) == 5
    assert all(row["false"] == [] for row in rows)
    assert any("stopped" in row or row["repeated"] for row in rows), "no disturbance was seen"
