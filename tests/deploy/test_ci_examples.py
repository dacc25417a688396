"""The CI examples of deploy/ci: their scripts are run by a shell, with this distribution's commands."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CI = ROOT / "deploy" / "ci"


def script_of(name: str) -> tuple[list[str], dict[str, str]]:
    """The steps of a job that run commands, and its variables."""
    text: Any = yaml.safe_load((CI / name).read_text(encoding="utf-8"))
    if name.startswith("github"):
        job = text["jobs"]["verify"]
        return [step["run"] for step in job["steps"] if "run" in step], job["env"]
    job = text["verify-profiles"]
    return job["script"], job["variables"]


def commands(folder: Path) -> None:
    """`dyno` and `tune` of this environment, whatever the PATH has."""
    folder.mkdir()
    for name, module in (("dyno", "dyno"), ("tune", "dyno_tuner.cli")):
        (folder / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {module} "$@"\n')
        (folder / name).chmod(0o755)


@pytest.mark.parametrize("name", sorted(path.name for path in CI.glob("*.yml")))
@pytest.mark.parametrize("day", ["2026-01-01", "2099-01-01"])
def test_the_scripts_do_what_they_say(name: str, day: str, tmp_path: Path) -> None:
    """Newer profiles are skipped and pass; older ones are measured, and without their model the job fails."""
    commands(tmp_path / "bin")
    (tmp_path / "profiles").mkdir()
    shipped = next(iter(sorted((ROOT / "profiles").glob("xeon*.yaml"))))
    (tmp_path / "profiles" / "p.yaml").write_text(shipped.read_text(encoding="utf-8"))
    steps, variables = script_of(name)
    env = {**os.environ, **variables, "CHANGED": day, "MODELS": str(tmp_path / "models")}
    env["PATH"] = f"{tmp_path / 'bin'}{os.pathsep}{env['PATH']}"
    script = "set -e\n" + "\n".join(steps)
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    root = ElementTree.parse(tmp_path / "junit" / "p.xml").getroot()
    skipped = day < "2026-11-20"  # the profile was measured on that day
    assert done.returncode == (0 if skipped else 1), done.stdout + done.stderr
    assert (root.get("skipped"), root.get("errors")) == (("1", "0") if skipped else ("0", "1"))
